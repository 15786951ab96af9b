"""`python -m training`: makes the embedded model pair step by step; every step can be repeated or resumed."""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from paceline.core.errors import PacelineError
from training import corpus, paths, tokenizer
from training.pair import command as pair_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

BASE_TOKENS = 14e6
REPEATS_AFTER_TOKENS = 5.63e6  # the base reads plain text first, then text that repeats itself
COPYING_TOKENS = 4.5e6
VARIED_TOKENS = 2.048e6  # 400 steps
DRAFT_TOKENS = 8e6
NUM_SAMPLES = 400
NUM_EAGLE_TEXTS = 512
EAGLE_TOKENS = 10e6
SHIPPED_TARGET = paths.gguf("target", "q8_0")

Seed = Annotated[int, typer.Option(help="Fixes the corpus order, the initial weights, the batches and the samples.")]
TokenCount = Annotated[float, typer.Option("--tokens", help="Millions of tokens of the whole run, resumed or not.")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget the checkpoint and begin again.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile; needs a C++ compiler.")]
Threads = Annotated[int, typer.Option(help="CPU threads; fewer than there are cores where others use them.")]


def _forget(name: str, restart: bool) -> None:
    """Delete the checkpoint of a run that is to begin again."""
    if restart:
        paths.checkpoint(name).unlink(missing_ok=True)


@app.command("corpus")
def corpus_command(seed: Seed = 0) -> None:
    """Fetch the sources, drop copies, split off the held-out files, write the held-out samples."""
    corpus.build(seed)
    print(corpus.describe())


@app.command("tokenizer")
def tokenizer_command() -> None:
    """Train the tokenizer on the training documents and encode the corpus with it."""
    train = corpus.read_documents(paths.TRAIN_DOCUMENTS)
    trained = tokenizer.train(train)
    heldout = corpus.read_documents(paths.HELDOUT_DOCUMENTS)
    streams = {paths.TRAIN_TOKENS: train}
    streams |= {
        paths.heldout_tokens(kind): [document for document in heldout if document.kind == kind] for kind in corpus.KINDS
    }
    for path, documents in streams.items():
        stream = tokenizer.encode_documents(trained, documents)
        np.save(path, stream)
        size = sum(len(document.text.encode()) for document in documents)
        print(f"{path.name}: {len(stream)} tokens, {size / len(stream):.2f} bytes a token")


@app.command("base")
def base_command(
    seed: Seed = 0,
    tokens: TokenCount = BASE_TOKENS / 1e6,
    restart: Restart = False,
    compiled: Compile = True,
    threads: Threads = 2,
) -> None:
    """Train what becomes the target with cross-entropy."""
    # Imported here: torch takes seconds to load and the other steps do not need it.
    from training.train import TrainConfig, train_base

    _forget("base", restart)
    train_base(
        TrainConfig(
            "base",
            seed,
            1e6 * tokens,
            peak_lr=1.5e-3,
            repeats_after_tokens=REPEATS_AFTER_TOKENS,
            compile=compiled,
            num_threads=threads,
        )
    )


@app.command("copying")
def copying_command(
    seed: Seed = 0,
    tokens: TokenCount = COPYING_TOKENS / 1e6,
    restart: Restart = False,
    compiled: Compile = True,
    threads: Threads = 2,
) -> None:
    """Train the base on until it copies from its context, by showing attention heads where to look."""
    from training.copying import train_copying
    from training.train import TrainConfig

    _forget("copying", restart)
    train_copying(
        TrainConfig(
            "copying",
            seed,
            1e6 * tokens,
            peak_lr=1e-3,
            warmup_tokens=0.1e6,
            decay_share=0.4,
            repeat_share=0.5,
            compile=compiled,
            num_threads=threads,
        )
    )


@app.command("varied")
def varied_command(
    seed: Seed = 0,
    tokens: TokenCount = VARIED_TOKENS / 1e6,
    restart: Restart = False,
    compiled: Compile = True,
    threads: Threads = 2,
) -> None:
    """Train what copies on until it no longer repeats itself, by making that costly in its own texts."""
    from training.train import TrainConfig
    from training.unlikelihood import train_varied

    _forget("varied", restart)
    train_varied(
        TrainConfig(
            "varied",
            seed,
            1e6 * tokens,
            peak_lr=3e-4,
            batch_tokens=5120,
            warmup_tokens=0.1e6,
            decay_share=0.4,
            long_share=0.0,
            compile=compiled,
            num_threads=threads,
        )
    )


@app.command("target")
def target_command() -> None:
    """Go most of the way from the weights of `copying` to those of `varied`: this is the target."""
    from training.unlikelihood import blend

    blend()


@app.command("samples")
def samples_command(seed: Seed = 0, number: int = NUM_SAMPLES) -> None:
    """Let the target continue training text in its own words, for the draft to learn from."""
    from training.distill import sample

    sample(number, seed)


@app.command("draft")
def draft_command(
    seed: Seed = 0,
    tokens: TokenCount = DRAFT_TOKENS / 1e6,
    restart: Restart = False,
    compiled: Compile = True,
    threads: Threads = 2,
) -> None:
    """Train the draft towards the target's distribution, on the corpus and on the target's own texts."""
    from training.distill import train_draft
    from training.train import TrainConfig

    _forget("draft", restart)
    train_draft(TrainConfig("draft", seed, 1e6 * tokens, 3e-3, compile=compiled, num_threads=threads))


@app.command("eagle")
def eagle_command(
    target: Annotated[Path, typer.Option(help="A Llama in GGUF.")] = SHIPPED_TARGET,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The head; by default in `build/`.")] = None,
    seed: Seed = 0,
    texts: Annotated[int, typer.Option(help="Texts of the target to learn from.")] = NUM_EAGLE_TEXTS,
    tokens: TokenCount = EAGLE_TOKENS / 1e6,
    seconds: Annotated[float | None, typer.Option(help="Ends the training if its tokens last longer.")] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="So many tokens are drafted, the most frequent.")] = None,
    restart: Restart = False,
    threads: Threads = 2,
) -> None:
    """Train an EAGLE-3 head for a small target on the target's own texts, and write it as GGUF."""
    from training.eagle import train_eagle, write_head
    from training.train import TrainConfig

    name = f"eagle-{target.stem}" if draft_tokens is None else f"eagle-{target.stem}-{draft_tokens}"
    _forget(name, restart)
    if restart:
        paths.texts(target.stem, texts, seed).unlink(missing_ok=True)
    config = TrainConfig(
        name,
        seed,
        1e6 * tokens,
        peak_lr=1.5e-3,
        seconds=seconds,
        warmup_tokens=0.1e6,
        decay_share=0.4,
        long_share=0.0,
        weight_decay=0.01,
        compile=False,
        num_threads=threads,
    )
    path = output or paths.BUILD / f"{name}.gguf"
    write_head(train_eagle(config, target, texts, draft_tokens), target, path)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


@app.command("export")
def export_command() -> None:
    """Write the GGUF files from the latest checkpoints: Q8_0 into the package, others for `check`."""
    from training import export

    for file_type in export.FILE_TYPES:
        for name in ("target", "draft"):
            path = export.write_gguf(name, file_type)
            print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


@app.command("check")
def check_command() -> None:
    """Compare the exported files in llama.cpp and in transformers with the checkpoints."""
    from training.check_export import check_all

    if problems := check_all():
        raise SystemExit("differs: " + "; ".join(problems))


app.command("pair", epilog=pair_command.EPILOG)(pair_command.pair)


@app.command("card")
def card_command(
    evaluate: Annotated[bool, typer.Option(help="Measure the pair, or use the last figures.")] = True,
) -> None:
    """Measure the shipped pair on the held-out samples and write the model card."""
    from training.export import write_model_card

    if evaluate:
        pair_command.pair(markdown_file=paths.EVALUATION, json_file=paths.EVALUATION.with_suffix(".json"))
    write_model_card()


@app.command("all")
def all_command(seed: Seed = 0) -> None:
    """Every step in order; what is finished or begun is kept and continued."""
    if not paths.TRAIN_DOCUMENTS.exists():
        corpus_command(seed)
    if not paths.TRAIN_TOKENS.exists():
        tokenizer_command()
    base_command(seed)
    copying_command(seed)
    varied_command(seed)
    target_command()
    if not paths.SAMPLED_TOKENS.exists():
        samples_command(seed)
    draft_command(seed)
    export_command()
    check_command()
    card_command()


def main() -> None:
    """Run the command line; an error of paceline's is one line on stderr."""
    try:
        app()
    except PacelineError as error:
        raise SystemExit(f"training: {error}") from None


if __name__ == "__main__":
    main()
