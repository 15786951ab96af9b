"""`python -m training`: makes the embedded model pair step by step; every step can be repeated or resumed."""

from dataclasses import asdict
from typing import Annotated

import numpy as np
import typer

from training import corpus, paths, tokenizer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

Seed = Annotated[int, typer.Option(help="Fixes the corpus order, the initial weights and the batches.")]
Minutes = Annotated[float | None, typer.Option(help="Wall-clock budget, time before a resume included.")]
Steps = Annotated[int | None, typer.Option(help="Number of steps instead of a time budget (repeatable).")]
Restart = Annotated[bool, typer.Option("--restart", help="Forget the checkpoint and begin again.")]
Compile = Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile; needs a C++ compiler.")]
Threads = Annotated[int, typer.Option(help="CPU threads; fewer than there are cores where others use them.")]
Quantizations = Annotated[list[str] | None, typer.Option(help="q8_0 (ships), f16, f32; may be repeated.")]

TARGET_MINUTES = 55.0
DRAFT_MINUTES = 12.0
DEFAULT_THREADS = 2


@app.command("corpus")
def corpus_command(seed: Seed = 0) -> None:
    """Collect the standard library, split off the held-out files, write the held-out snippets."""
    train, heldout = corpus.build(seed)
    num_snippets = corpus.write_snippets(seed)
    for name, documents in (("train", train), ("held out", heldout)):
        characters = sum(len(document.text) for document in documents)
        print(f"{name}: {len(documents)} documents, {characters / 1e6:.2f} M characters")
    print(f"snippets: {num_snippets}")


@app.command("tokenizer")
def tokenizer_command() -> None:
    """Train the tokenizer on the training documents and encode the corpus with it."""
    train = corpus.read_documents(paths.TRAIN_DOCUMENTS)
    trained = tokenizer.train(train)
    for path, documents in (
        (paths.TRAIN_TOKENS, train),
        (paths.HELDOUT_TOKENS, corpus.read_documents(paths.HELDOUT_DOCUMENTS)),
    ):
        stream = tokenizer.encode_documents(trained, documents)
        np.save(path, stream)
        print(f"{path.name}: {len(stream)} tokens")


def _train(
    name: str,
    seed: int,
    minutes: float | None,
    steps: int | None,
    restart: bool,
    compiled: bool,
    threads: int,
    batch_size: int,
    peak_lr: float,
    distill_from: float = 1.0,
) -> None:
    # Imported here: torch takes seconds to load and the other steps do not need it.
    from training.train import TrainConfig, run

    config = TrainConfig(
        name=name,
        seed=seed,
        minutes=minutes,
        steps=steps,
        batch_size=batch_size,
        peak_lr=peak_lr,
        distill_from=distill_from,
        compile=compiled,
        num_threads=threads,
    )
    if restart:
        paths.checkpoint(name).unlink(missing_ok=True)
    run(config)


@app.command("target")
def target_command(
    seed: Seed = 0,
    minutes: Minutes = None,
    steps: Steps = None,
    restart: Restart = False,
    compiled: Compile = True,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Train the target with cross-entropy."""
    if minutes is None and steps is None:
        minutes = TARGET_MINUTES
    _train("target", seed, minutes, steps, restart, compiled, threads, batch_size=4, peak_lr=1.5e-3)


@app.command("draft")
def draft_command(
    seed: Seed = 0,
    minutes: Minutes = None,
    steps: Steps = None,
    restart: Restart = False,
    compiled: Compile = True,
    threads: Threads = DEFAULT_THREADS,
) -> None:
    """Train the draft: first with cross-entropy, then towards the target's distribution."""
    if minutes is None and steps is None:
        minutes = DRAFT_MINUTES
    _train("draft", seed, minutes, steps, restart, compiled, threads, batch_size=4, peak_lr=3e-3, distill_from=0.4)


@app.command("export")
def export_command(quantization: Quantizations = None) -> None:
    """Write the GGUF files and the model card from the latest checkpoints."""
    from training import export
    from training.train import load_trained, score_pair

    for kind in quantization or ["q8_0"]:
        for name in ("target", "draft"):
            path = export.write_gguf(name, kind)
            print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")
    score = score_pair(load_trained("target"), load_trained("draft"))
    print(asdict(score))
    export.write_model_card(score)


@app.command("check")
def check_command() -> None:
    """Compare the exported files in llama.cpp and in transformers with the checkpoints."""
    from training.check_export import check_all

    if problems := check_all():
        raise SystemExit("differs: " + "; ".join(problems))


@app.command("all")
def all_command(seed: Seed = 0, target_minutes: float = TARGET_MINUTES, draft_minutes: float = DRAFT_MINUTES) -> None:
    """Every step in order; what is finished or begun is kept and continued."""
    if not paths.TRAIN_TOKENS.exists():
        corpus_command(seed)
        tokenizer_command()
    target_command(seed, target_minutes)
    draft_command(seed, draft_minutes)
    export_command(["q8_0", "f16"])
    check_command()


if __name__ == "__main__":
    app()
