"""``paceline doctor``: which draft models fit a target, how often they agree with it, and whether they pay."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import exits
from paceline.cli.display import error_console
from paceline.cli.downloads import locate_model, make_draft
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.options import (
    NAMED_BY_ARGUMENTS,
    NAMES_OF_MODELS,
    in_flags,
    refuse_given,
    with_options,
)
from paceline.cli.outputs import HtmlFile, JsonTo, Outputs, report_console
from paceline.cli.progress import ProgressBar
from paceline.cli.prompt import text_option
from paceline.cli.setup import tell_idle
from paceline.conversion.own_draft import complete_draft
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.engines.libraries import offload_devices
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.engines.threads import usable_cores
from paceline.environment import ModelChoice
from paceline.lab.comparison import Stopped
from paceline.lab.doctor.candidates import Candidate, Skipped, find_candidates
from paceline.lab.doctor.examiner import Diagnosis, Examiner
from paceline.lab.doctor.export import ALL as ALL_PROGRAMS
from paceline.lab.doctor.export import PROGRAMS, check_program
from paceline.lab.doctor.report import Candidate as Examined
from paceline.lab.doctor.report import advise, build_report, candidate_json, model_json
from paceline.lab.report import print_report, render_page
from paceline.lab.samples import file_samples, heldout_samples
from paceline.machine import machine
from paceline.models.description import describe
from paceline.models.registry import complete_model
from paceline.terminal_text import printable_line

EPILOG = """[bold]Examples[/bold]

paceline doctor target.gguf draft.gguf

paceline doctor target.gguf ~/models  [dim]# every model in a folder, ranked by what it would gain[/dim]

paceline doctor target.gguf  [dim]# those that paceline models lists, and those beside the target[/dim]

paceline doctor target.gguf draft.gguf self --text prompts.jsonl --temp 0

paceline doctor target.gguf draft.gguf --export llama-server

paceline doctor target-1b-q8_0 draft --json=doctor.json --html doctor.html
"""
"""Examples below the command's help."""

_what = functools.partial(typer.Option, rich_help_panel="What is looked at")
_DEFAULT_BUDGET_S = 60.0
"""Seconds for a candidate."""
_MIN_BUDGET_S = 5.0
"""Least seconds for a candidate that can be asked for."""


def _complete_programs(incomplete: str) -> list[str]:
    return [name for name in (*PROGRAMS, ALL_PROGRAMS) if name.startswith(incomplete)]


@with_options(helps=dict.fromkeys(NAMES_OF_MODELS))
def doctor(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="The model to speed up: a GGUF file, a Hugging Face folder, or a name from paceline models.",
            autocompletion=complete_model,
        ),
    ],
    candidates: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DRAFT|FOLDER",
            help="Draft models, folders to look for some in, or self, which is the target quantised smaller. "
            "[dim]\\[all that have names, and those beside the target][/dim]",
            autocompletion=complete_draft,
        ),
    ] = None,
    *,
    models: ModelChoice,
    text: Annotated[
        Path | None,
        text_option(rich_help_panel="What is looked at"),
    ] = None,
    temp: Annotated[
        float, _what("--temp", "--temperature", help="Sampling temperature; 0 is greedy.")
    ] = SamplingParams().temperature,
    seed: Annotated[int, _what("--seed", "-s", help="Random seed of the target's answers.")] = 1,
    budget_s: Annotated[
        float,
        _what("--budget-s", help=f"Seconds for a candidate, {_MIN_BUDGET_S:g} at least; more looks at more text."),
    ] = _DEFAULT_BUDGET_S,
    export_to: Annotated[
        str | None,
        typer.Option(
            "--export",
            help=f"Print the flags of another program, and what it will refuse: {', '.join(PROGRAMS)}, or "
            f"{ALL_PROGRAMS}.",
            metavar="PROGRAM",
            autocompletion=_complete_programs,
            rich_help_panel="Output",
        ),
    ] = None,
    json_to: JsonTo = None,
    html: HtmlFile = None,
) -> None:
    """Rank draft models for a target: how often they agree with it, and the speedup to expect.

    The target writes some answers without speculation, and each draft model says what it would have proposed at each
    position. Decoding is then simulated with the costs measured on this machine. This predicts a speed with its
    confidence interval: for policy auto, for fixed draft lengths, and without a draft model.

    The exit status is 0 if a candidate pays off, 3 if none does, and 2 if the command cannot be carried out.
    """
    refuse_given(
        context,
        dict.fromkeys(
            NAMES_OF_MODELS,
            NAMED_BY_ARGUMENTS,
        ),
    )
    if not _MIN_BUDGET_S <= budget_s < math.inf:
        raise InputError(f"--budget-s {budget_s:g}: give a finite number of seconds from {_MIN_BUDGET_S:g} on")
    # All answers have theirs of the same one, though it be drawn.
    seed = SamplingParams(temperature=temp, seed=seed).seed
    programs = () if export_to is None else check_program(export_to)
    outputs = Outputs(json_to, html)
    outputs.check()
    samples = heldout_samples() if text is None else file_samples(text)
    target_options = models.target_options(locate_model(target))
    what = describe(Path(target_options.path))
    found, skipped = find_candidates(candidates or [], what)
    skipped = [dataclasses.replace(each, why=in_flags(each.why)) for each in skipped]
    _tell_skipped(skipped)
    if not found:
        raise InputError(
            "there is no draft model to try: name one, a folder that holds some, or self, the target quantised smaller"
        )
    has_devices = bool(offload_devices(target_options))
    if not outputs.prints_json:
        tell_idle(target_options)
    examined: list[Examined] = []
    is_whole = True
    with hold_interrupts() as interrupted, ProgressBar("", total=float(len(found))) as progress:
        number, name = 0, ""

        def tell(doing: str, share: float) -> None:
            line = f"{name}: {doing}"
            progress.tell(line, number + share, None)
            progress.tell_line(line, new=line)

        examiner = Examiner(
            target_options,
            samples,
            temperature=temp,
            budget_s=budget_s,
            # What a user's own texts lead to is nobody else's.
            keep_answers=text is None,
            seed=seed,
            stopped=interrupted.is_set,
            tell=tell,
        )
        for number, candidate in enumerate(found):
            name = printable_line(candidate.name) + (f" ({number + 1} of {len(found)})" if len(found) > 1 else "")
            try:
                with progress.aside():  # two bars at once would write over each other
                    draft_options = _draft_options(candidate, models, target_options)
                diagnosis = _say_in_flags(examiner.examine(candidate.name, draft_options))
            except Stopped:
                is_whole = False
                break
            examined.append(
                advise(
                    diagnosis,
                    what,
                    programs,
                    has_devices=has_devices,
                    draft_on_cpu=has_devices and _is_on_cpu(models.draft) and not _is_on_cpu(models.settings),
                )
            )
    ranked = sorted(examined, key=lambda each: each.rank)
    facts: dict[str, Any] = {
        "target": model_json(what),
        "temperature": temp,
        "seed": seed,
        "text": None if text is None else str(text),
        "machine": machine(target_options.threads or usable_cores()),
        "candidates": [candidate_json(each) for each in ranked],
        "skipped": [dataclasses.asdict(each) for each in skipped],
        "ended_by": "done" if is_whole else "interrupt",
    }
    report = functools.partial(build_report, what, ranked, temperature=temp, machine=facts["machine"])
    outputs.write(
        facts,
        # What was not tried is told already, on standard error.
        lambda: print_report(report_console(), report(())),
        lambda: render_page(report(skipped)),
    )
    if not is_whole:
        error_console().print(
            f"interrupted after {len(examined)} of {len(found)} candidates: what was measured and written is kept, and "
            "the same command goes on from there",
            markup=False,
        )
        raise typer.Exit(exits.INTERRUPTED)
    if not any(each.diagnosis.prediction or each.diagnosis.fitting for each in examined):
        raise typer.Exit(exits.BAD_INPUT)
    if not any(each.diagnosis.prediction is not None and each.diagnosis.prediction.pays for each in examined):
        raise typer.Exit(exits.DOES_NOT_PAY)


def _draft_options(candidate: Candidate, models: ModelChoice, target: ModelOptions) -> ModelOptions:
    path = candidate.path if candidate.own is None else make_draft(candidate.own.of(Path(target.path)))
    return models.draft_options(target, path)


def _say_in_flags(diagnosis: Diagnosis) -> Diagnosis:
    fitting = diagnosis.fitting
    if fitting is not None and fitting.refusal is not None:
        fitting = dataclasses.replace(fitting, refusal=in_flags(fitting.refusal))
    error = None if diagnosis.error is None else in_flags(diagnosis.error)
    return dataclasses.replace(diagnosis, fitting=fitting, error=error)


def _is_on_cpu(options: ModelOptions | DraftOptions) -> bool:
    """Return whether a model was told to keep its layers off devices."""
    return options.gpu_layers == 0 or options.devices == ("none",)


def _tell_skipped(skipped: Sequence[Skipped]) -> None:
    for each in skipped:
        error_console().print(f"not tried: {each.name}: {each.why}", style="dim", markup=False)
