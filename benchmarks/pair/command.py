"""``python -m benchmarks pair``: options, the texts, progress, and where the figures go."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.pair.evaluation import CONTEXT_TOKENS, DRAFT_LENGTH, PROMPT_TOKENS, Evaluation, Figures, work
from benchmarks.pair.report import markdown, print_tables, tables
from benchmarks.reporting import progress_bar
from paceline.api import Model, load
from paceline.atomic_output import atomic_file
from paceline.cli.outputs import check_outputs
from paceline.core.errors import InputError
from paceline.core.params import MAX_SEED
from paceline.engines.options import ModelOptions
from paceline.machine import machine
from paceline.models.embedded import HELDOUT_KINDS, embedded_draft, embedded_target, heldout
from paceline.models.registry import resolve_model
from paceline.planning.policies.fixed import FixedPolicy

MAX_ANSWER = CONTEXT_TOKENS - PROMPT_TOKENS

EPILOG = """[bold]Examples[/bold]

python -m benchmarks pair  [dim]# the embedded pair, all kinds of text[/dim]

python -m benchmarks pair --prompts 4 --kinds code,logs

python -m benchmarks pair --target new-target.gguf --draft new-draft.gguf --json pair.json --markdown pair.md
"""

_PIECE = 1 << 20
_STDOUT = Path("-")
_PIPE_WIDTH = 120


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
        int, typer.Option("--prompts", help="Held-out texts of each kind, or all there are if fewer.")
    ] = 40,
    tokens: Annotated[int, typer.Option("--tokens", help=f"Length of an answer, {MAX_ANSWER} at most.")] = 256,
    kinds: Annotated[
        str, typer.Option("--kinds", help=f"Among {', '.join(HELDOUT_KINDS)}.", metavar="NAME[,...]")
    ] = ",".join(HELDOUT_KINDS),
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads. \\[one a core]")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the first text; each next one has the next seed.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write all figures here; - is standard output.", metavar="FILE"),
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", help="Write the tables here too, for a model card.", metavar="FILE")
    ] = None,
) -> None:
    """Measure a model pair on held-out text: loss, agreement, acceptance by depth, looping and copying.

    What limits the figures is the models and the number of texts, not the machine.
    """
    if target is not None and draft is None:
        raise InputError("--target without --draft: name the draft model that goes with it")
    _check_range("--prompts", prompts, 1, None)
    _check_range("--tokens", tokens, 1, MAX_ANSWER)
    # Each text has the next seed.
    _check_range("--seed", seed, 0, MAX_SEED - prompts * len(HELDOUT_KINDS))
    if threads is not None:
        _check_range("--threads", threads, 1, None)
    names = _names(kinds)
    files = {"--json": json_file, "--markdown": markdown_file}
    check_outputs({option: None if file == _STDOUT else file for option, file in files.items()})
    paths = {
        "target": embedded_target() if target is None else resolve_model(target),
        "draft": embedded_draft() if draft is None else resolve_model(draft),
    }
    texts = {name: heldout(name)[:prompts] for name in names}
    started_s = time.perf_counter()
    options = {
        name: ModelOptions(path, threads=threads, context_length=CONTEXT_TOKENS, model_defaults=False)
        for name, path in paths.items()
    }
    with load(options["target"], draft=options["draft"], policy=FixedPolicy(DRAFT_LENGTH, p_min=0.0)) as model:
        figures = evaluate(model, texts, tokens, seed)
    shown = tables(figures, tokens)
    report = {
        "options": {"prompts": prompts, "tokens": tokens, "kinds": names, "threads": threads, "seed": seed},
        "files": {name: _identity(path) for name, path in paths.items()},
        "seconds": time.perf_counter() - started_s,
        **figures.as_json(),
    }
    if _STDOUT not in (json_file, markdown_file):
        console = Console(highlight=False, emoji=False)
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        print_tables(console, shown, figures)
    if json_file is not None:
        _write(json_file, json.dumps({"machine": machine(), "pair": report}))
    if markdown_file is not None:
        _write(markdown_file, markdown(shown, figures, {name: path.name for name, path in paths.items()}))


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


def _names(kinds: str) -> list[str]:
    names = [name.strip() for name in kinds.split(",") if name.strip()]
    if not names:
        raise InputError(f"--kinds names no kind of text: choose from {', '.join(HELDOUT_KINDS)}")
    for index, name in enumerate(names):
        if name not in HELDOUT_KINDS:
            raise InputError(f"there is no held-out text of kind {name!r}; choose from {', '.join(HELDOUT_KINDS)}")
        if name in names[:index]:
            raise InputError(f"--kinds names {name} twice: name each kind once")
    return names


def _check_range(option: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        raise InputError(f"{option} {value} is out of range: give {low} {'or more' if high is None else f'to {high}'}")


def _identity(path: Path) -> dict[str, Any]:
    """Return a model's name and, of a file, its size in bytes and its SHA-256."""
    if path.is_dir():
        return {"name": path.name}
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write(file: Path, text: str) -> None:
    """Write a line or more; a file appears only when it is complete."""
    if file == _STDOUT:
        print(text)
        return
    with atomic_file(file) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
