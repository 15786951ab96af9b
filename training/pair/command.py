"""``python -m training pair``: options, the texts, progress, and where the figures go."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from benchmarks.reporting import JsonOption, ThreadsOption, console, progress_bar, split, write_figures

from paceline.api import Model, load
from paceline.atomic_output import atomic_file
from paceline.cli.outputs import check_outputs
from paceline.core.errors import InputError
from paceline.engines.options import ModelOptions
from paceline.models.embedded import HELDOUT_KINDS, embedded_draft, embedded_target, heldout
from paceline.models.registry import resolve_model
from paceline.planning.policies.fixed import FixedPolicy
from training.pair.evaluation import CONTEXT_TOKENS, DRAFT_LENGTH, PROMPT_TOKENS, Evaluation, Figures, work
from training.pair.report import markdown, print_tables, tables

MAX_ANSWER = CONTEXT_TOKENS - PROMPT_TOKENS

EPILOG = """[bold]Examples[/bold]

python -m training pair  [dim]# the embedded pair, all kinds of text[/dim]

python -m training pair --prompts 4 --kinds code,logs

python -m training pair --target new-target.gguf --draft new-draft.gguf --json pair.json --markdown pair.md
"""


def pair(
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Target: a GGUF file, a Hugging Face folder or a name of `paceline models`. \\[the embedded one]",
        ),
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Draft model with the same vocabulary. \\[the embedded one]")
    ] = None,
    prompts: Annotated[
        int, typer.Option("--prompts", help="Held-out texts of each kind, or all there are if fewer.", min=1)
    ] = 40,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of an answer.", min=1, max=MAX_ANSWER)] = 256,
    kinds: Annotated[
        str, typer.Option("--kinds", help=f"Among {', '.join(HELDOUT_KINDS)}.", metavar="NAME[,...]")
    ] = ",".join(HELDOUT_KINDS),
    threads: ThreadsOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the first text; each next one has the next.", min=0)] = 0,
    json_file: JsonOption = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here too, for a model card.", metavar="FILE")
    ] = None,
) -> None:
    """Measure a model pair on held-out text: loss, agreement, acceptance by depth, looping and copying.

    What limits the figures is the models and the number of texts, not the machine.
    """
    if target is not None and draft is None:
        raise InputError("--target without --draft: name the draft model that goes with it")
    names = list(dict.fromkeys(split(kinds)))
    texts = {name: heldout(name)[:prompts] for name in names}
    if not texts:
        raise InputError(f"--kinds names no kind of text: choose from {', '.join(HELDOUT_KINDS)}")
    check_outputs({"--json": json_file, "--markdown": markdown_file})
    paths = {
        "target": embedded_target() if target is None else resolve_model(target),
        "draft": embedded_draft() if draft is None else resolve_model(draft),
    }
    started_s = time.perf_counter()
    options = {
        name: ModelOptions(path, threads=threads, context_length=CONTEXT_TOKENS, model_defaults=False)
        for name, path in paths.items()
    }
    with load(options["target"], draft=options["draft"], policy=FixedPolicy(DRAFT_LENGTH, p_min=0.0)) as model:
        figures = evaluate(model, texts, tokens, seed)
    report = {
        "options": {"prompts": prompts, "tokens": tokens, "kinds": names, "threads": threads, "seed": seed},
        "files": {name: _identity(path) for name, path in paths.items()},
        "seconds": time.perf_counter() - started_s,
        **figures.as_json(),
    }
    shown = tables(figures, tokens)
    print_tables(console(), shown, figures)
    write_figures("pair", report, json_file)
    if markdown_file is not None:
        with atomic_file(markdown_file) as partial:
            text = markdown(shown, figures, {name: path.name for name, path in paths.items()})
            partial.write_text(text + "\n", encoding="utf-8")


def evaluate(model: Model, texts: dict[str, list[str]], max_tokens: int, seed: int) -> Figures:
    """Return the figures of a pair on the texts of each kind, with progress on standard error."""
    with progress_bar() as progress:
        task = progress.add_task("", total=sum(work(len(of_kind), max_tokens) for of_kind in texts.values()))
        evaluation = Evaluation(
            model, max_tokens=max_tokens, seed=seed, advance=lambda done: progress.advance(task, done)
        )
        for kind, of_kind in texts.items():
            for number, text in enumerate(of_kind, 1):
                progress.update(task, description=f"{kind}, text {number} of {len(of_kind)}")
                evaluation.take(kind, model.target.vocabulary.tokenize(text))
    return evaluation.figures()


def _identity(path: Path) -> dict[str, Any]:
    """Return a model's name and, of a file, its size in bytes and its SHA-256."""
    if path.is_dir():
        return {"name": path.name}
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}
