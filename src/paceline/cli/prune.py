"""``paceline prune``: a draft model cut smaller, and what that costs."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.atomic_output import check_parent
from paceline.cli import exits
from paceline.cli.display import error_console
from paceline.cli.downloads import locate_model
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.outputs import HtmlFile, JsonTo, Outputs, report_console
from paceline.cli.progress import stage_progress
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.engines.options import ModelOptions
from paceline.engines.threads import usable_cores
from paceline.lab.comparison import Stopped
from paceline.lab.prune.pruner import Asked, Pruner, Verdict
from paceline.lab.prune.report import build_report, forecast_lines, report_json
from paceline.lab.report import print_report, render_page
from paceline.lab.samples import file_samples, heldout_samples
from paceline.machine import machine
from paceline.models.description import describe
from paceline.models.registry import complete_model
from paceline.sizes import format_bytes, parse_count

EPILOG = """[bold]Examples[/bold]

paceline prune draft.gguf small.gguf --vocab 32k  [dim]# the commonest tokens, and all that spell any text[/dim]

paceline prune draft.gguf small.gguf --vocab 32k --text mine.jsonl --for target.gguf

paceline prune draft.gguf small.gguf --layers 4  [dim]# those it does best without, each measured[/dim]

paceline prune draft.gguf small.gguf --width 10% --type Q4_0

paceline doctor target.gguf draft.gguf small.gguf  [dim]# which of both pays more[/dim]
"""
"""Examples below the command's help."""

_PIPE_WIDTH = 100
"""Columns of the report where standard output is no terminal."""

_cuts = functools.partial(typer.Option, rich_help_panel="What to cut")
_measures = functools.partial(typer.Option, rich_help_panel="Measuring")


def prune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The model to cut: a GGUF file, or a name from paceline models.",
            autocompletion=complete_model,
        ),
    ],
    output: Annotated[str, typer.Argument(metavar="OUT", help="The GGUF file to make.")],
    vocab: Annotated[
        str | None, _cuts("--vocab", help="Keep so many tokens, such as 32k or 32000.", metavar="N")
    ] = None,
    layers: Annotated[
        int | None, _cuts("--layers", help="Remove so many layers: those that cost least, each measured.", metavar="N")
    ] = None,
    width: Annotated[
        str | None,
        _cuts(
            "--width",
            help="Remove this share (10%) or number of each layer's feed-forward units, in whole blocks: those whose "
            "weights are least.",
            metavar="SHARE|N",
        ),
    ] = None,
    file_type: Annotated[
        str | None, _cuts("--type", help="Quantise to this type afterwards: Q4_0, Q4_K_M and the like.", metavar="TYPE")
    ] = None,
    target: Annotated[
        str | None,
        _measures(
            "--for",
            help="The model to draft for. [dim]\\[the uncut model][/dim]",
            metavar="TARGET",
            autocompletion=complete_model,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        _measures(
            "--text",
            help="Text of the kind that you generate, or prompts, one a line (.jsonl with prompt or text). "
            "[dim]\\[code, prose, JSON and logs of paceline's own][/dim]",
            metavar="FILE",
        ),
    ] = None,
    temp: Annotated[
        float, _measures("--temp", "--temperature", help="Sampling temperature; 0 is greedy.")
    ] = SamplingParams().temperature,
    seed: Annotated[int, _measures("--seed", "-s", help="Random seed of the target's answers.")] = 1,
    threads: Annotated[
        int | None, _measures("--threads", "-t", help="CPU threads of passes. [dim]\\[one for each free core][/dim]")
    ] = None,
    no_measure: Annotated[bool, _measures("--no-measure", help="Do not measure what was made.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file that exists.", rich_help_panel="Output")
    ] = False,
    json_to: JsonTo = None,
    html: HtmlFile = None,
) -> None:
    """Make a draft model smaller, and measure what that saves and costs.

    A draft model reads all its weights for every token that it drafts. In a small model most of them may be rows of the
    vocabulary, and some layers contribute little. The rest of the weights stay as they are: nothing is trained. A draft
    with fewer tokens still works with its target, because drafts are translated.

    The file appears once it is complete, loads, and spells texts exactly.
    """
    started_s = time.monotonic()
    outputs = Outputs(json_to, html)
    outputs.check()
    asked = _parse(vocab, layers, width, file_type)
    seed = SamplingParams(temperature=temp, seed=seed).seed
    samples = heldout_samples() if text is None else file_samples(text)
    source = locate_model(model)
    destination = _check_output(output, source, force=force)
    what = describe(source)
    options = ModelOptions(source, threads=threads)
    target_options = None if target is None else ModelOptions(locate_model(target), threads=threads)
    if target_options is not None and Path(target_options.path).resolve() == source.resolve():
        target_options = None  # it is the default
    verdict: Verdict | None = None
    was_interrupted = False
    with hold_interrupts() as interrupted, stage_progress() as tell:
        pruner = Pruner(
            options,
            asked,
            target=target_options,
            samples=samples,
            temperature=temp,
            seed=seed,
            # What a user's own texts lead to is nobody else's.
            keep_answers=text is None,
            stopped=interrupted.is_set,
            tell=tell,
        )
        forecast = pruner.forecast()
        for line in forecast_lines(forecast):
            error_console().print(line, style="dim", markup=False)
        try:
            made = pruner.make(destination)
        except Stopped:
            error_console().print("interrupted: nothing was written", markup=False)
            raise typer.Exit(exits.INTERRUPTED) from None
        if not no_measure:
            try:
                verdict = pruner.measure(destination)
            except Stopped:
                was_interrupted = True
    facts: dict[str, Any] = {
        "source": str(source),
        "path": str(destination),
        "target": None if target_options is None else str(target_options.path),
        "temperature": temp,
        "seed": seed,
        "text": None if text is None else str(text),
        "machine": machine(threads or usable_cores()),
        **report_json(forecast, made, verdict),
        "took_s": time.monotonic() - started_s,
    }
    report = build_report(
        what,
        describe(destination),
        None if target_options is None else describe(Path(target_options.path)),
        forecast,
        made,
        verdict,
        temperature=temp,
        machine=facts["machine"],
    )

    def tell_report() -> None:
        print_report(report_console(_PIPE_WIDTH), report)
        error_console().print(
            f"wrote {destination}: {format_bytes(made.bytes_after)}, in {facts['took_s']:.1f} s", markup=False
        )

    outputs.write(facts, tell_report, lambda: render_page(report))
    if was_interrupted:
        error_console().print("interrupted: the file is whole, and was not measured", markup=False)
        raise typer.Exit(exits.INTERRUPTED)


def _parse(vocab: str | None, layers: int | None, width: str | None, file_type: str | None) -> Asked:
    if vocab is None and layers is None and width is None and file_type is None:
        raise InputError("there is nothing to cut: give --vocab, --layers, --width or --type")
    if layers is not None and layers < 1:
        raise InputError(f"--layers {layers}: give how many layers to remove, 1 at least")
    if file_type is not None:
        from paceline.conversion.quantize import file_types

        file_type = file_type.upper()
        if file_type not in file_types():
            raise InputError(f"file type {file_type!r} (--type) is unknown; choose from {', '.join(file_types())}")
    return Asked(None if vocab is None else _parse_vocab(vocab), layers or 0, _parse_width(width), file_type)


def _parse_vocab(text: str) -> int:
    try:
        count = parse_count(text)
    except InputError as error:
        raise InputError(f"--vocab: {error}") from None
    if count < 1:
        raise InputError(f"--vocab {text}: give how many tokens to keep, 1 at least")
    return count


def _parse_width(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or (value > 1 and value != int(value)) or (value >= 1 and text.endswith("%")):
        raise InputError(
            f"--width {text!r}: give a share of the units such as 10% or 0.1, or a number of them such as 256"
        )
    return value


def _check_output(output: str, source: Path, *, force: bool) -> Path:
    destination = Path(output)
    if source.is_dir():
        raise InputError(
            f"{source} is a folder, and GGUF files can be cut: make one first (paceline convert {source} x.gguf)"
        )
    if not output or destination.suffix.lower() != ".gguf" or destination.is_dir():
        raise InputError(f"{output!r} is no name of a .gguf file to make: give one")
    check_parent(destination)
    if destination.exists() and destination.samefile(source):
        raise InputError(f"{destination} is the model itself: give another path to write to")
    if destination.exists() and not force:
        raise InputError(f"{destination} exists; give another name, or replace it with --force")
    return destination
