"""``paceline profile``: what rounds cost on this machine, as a table with bars, a page, and JSON."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from paceline.cli.display import error_console, output_console
from paceline.cli.downloads import locate_pair
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.options import (
    OF_THE_DRAFT_MODEL,
    WITHOUT_DRAFT_MODEL,
    ModelFlags,
    refuse_given,
    with_options,
)
from paceline.cli.outputs import HtmlFile, JsonTo, Outputs
from paceline.cli.setup import show_measuring
from paceline.core.errors import InputError
from paceline.engines.base import Engine, paced_draft
from paceline.engines.threads import usable_cores
from paceline.environment import ModelChoice
from paceline.lab.profile_page import build_report
from paceline.lab.report import render_page
from paceline.machine import machine
from paceline.model_pair import managed_pair
from paceline.models.embedded import embedded_draft
from paceline.planning.costs.meter import ProfilingBudget
from paceline.planning.costs.profile import CostProfile, PassCost
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.costs.profiling import default_widths, usable_widths
from paceline.terminal_text import can_encode

EPILOG = """[bold]Examples[/bold]

paceline profile  [dim]# the embedded pair[/dim]

paceline profile -m big.gguf -md small.gguf -t 4

paceline profile -m target-1b-q4_0 --widths 1-16 --budget-s 60 --force

paceline profile -m big.gguf --html staircase.html --json=profile.json

paceline profile --json | jq .profile.target.widths
"""
"""Examples below the command's help."""

_measuring = functools.partial(typer.Option, rich_help_panel="Measuring")
_DEFAULT_BUDGET_S = ProfilingBudget().max_s

_MAX_ROWS = 1024
_PIPE_WIDTH = 100
_LONGEST_BAR = 48
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_CHARACTERS = _EIGHTHS + "–↓"


@with_options(together=(("dtype", "max_sequences"),))
def profile_command(
    context: typer.Context,
    *,
    models: Annotated[ModelChoice, ModelFlags(also=("max_sequences",), draft_help="Draft model.")],
    widths: Annotated[
        str | None,
        _measuring(
            "--widths",
            help="Rows to measure before others, the most important first, such as 1-8,12,16.",
            metavar="N[-M],...",
        ),
    ] = None,
    budget_s: Annotated[float, _measuring("--budget-s", help="Maximum seconds to measure.")] = _DEFAULT_BUDGET_S,
    force: Annotated[bool, _measuring("--force", help="Measure again, whatever was measured before.")] = False,
    json_to: JsonTo = None,
    html: HtmlFile = None,
) -> None:
    """Measure what a pass of the target costs on this machine, by the number of tokens that it reads.

    Drafted tokens are verified as further tokens (rows) of one pass, so this cost decides how many are worth drafting.
    The profile is kept on this machine for these models and settings, and planning uses it. --force measures it again.
    """
    wanted = None if widths is None else _parse_widths(widths)
    if not 0 < budget_s < math.inf:
        raise InputError(f"--budget-s {budget_s:g}: give a finite number of seconds, more than 0")
    budget = ProfilingBudget(budget_s, max_passes=None)
    outputs = Outputs(json_to, html)
    outputs.check()
    named_draft = models.named_draft
    if models.target is None and named_draft is None:
        named_draft = embedded_draft()
    if named_draft is None:
        refuse_given(context, dict.fromkeys(OF_THE_DRAFT_MODEL, WITHOUT_DRAFT_MODEL))
    target_options, draft_options = locate_pair(models, named_draft)
    with (
        # Loading calls back from native code, where an interrupt would be lost; passes are not torn either.
        hold_interrupts() as interrupted,
        show_measuring(interrupted) as report,
        managed_pair(target_options, draft_options, force=force, report=report) as pair,
    ):
        report(0.0)
        _check_widths(pair.target, wanted or [])
        planned = usable_widths(pair.target, wanted or default_widths(pair.target))
        kept = find_or_measure(
            pair.target,
            pair.target_options,
            paced_draft(pair.draft),
            pair.draft_options,
            budget=budget,
            widths=wanted,
            force=force,
            report=report,
        )
        names = _ModelNames(pair.target.description, None if pair.draft is None else pair.draft.description)
    missing = [rows for rows in planned if not kept.profile.target.is_measured(rows)]
    if missing:
        error_console().print(
            f"not measured for lack of time: {', '.join(map(str, sorted(missing)))} rows; raise --budget-s",
            markup=False,
        )
    versions = machine(target_options.threads or usable_cores())
    facts = {
        "target": names.target,
        "draft": names.draft,
        "machine": versions,
        "measured_now": kept.measured,
        "kept_at": None if kept.path is None else str(kept.path),
        "profile": kept.profile.to_json(),
    }
    outputs.write(
        facts,
        lambda: _print_report(kept.profile, names),
        lambda: render_page(build_report(kept.profile, target=names.target, draft=names.draft, machine=versions)),
    )
    console = error_console()
    if not kept.measured:
        console.print(f"measured before, and kept at {kept.path}: measure again with --force", markup=False)
    elif kept.path is None:
        console.print("the profile could not be kept: the cache cannot be written (see PACELINE_CACHE)", markup=False)
    else:
        console.print(f"kept at {kept.path}", markup=False)


@dataclass(frozen=True, slots=True)
class _ModelNames:
    """What the engines call the models."""

    target: str
    draft: str | None


# --- the table --------------------------------------------------------------------------------------------------------


def _print_report(profile: CostProfile, names: _ModelNames) -> None:
    console = output_console()
    # Not rich's word for it, which FORCE_COLOR changes.
    width = console.width if sys.stdout.isatty() else _PIPE_WIDTH
    blocks = can_encode(_CHARACTERS, sys.stdout.encoding or "ascii")
    console.print(f"target: {names.target}", style="bold", markup=False)
    _print_table(console, profile.target, width, of_target=True, blocks=blocks)
    if profile.draft is not None:
        console.print(f"\ndraft: {names.draft}", style="bold", markup=False)
        _print_table(console, profile.draft, width, of_target=False, blocks=blocks)
    console.print()
    for line in _further_lines(profile, blocks=blocks):
        console.print(line, style="dim", markup=False)


def _print_table(console: Console, cost: PassCost, width: int, *, of_target: bool, blocks: bool) -> None:
    """Print a line with a bar for each width that was measured."""
    label, rate = ("rows", "  t/s if all accepted") if of_target else ("tokens fed", "")
    dash = "–" if blocks else "-"
    header = f"{label:>10}  {'ms median':>9}  {'quartiles':>17}  {'ms each':>8}{rate}  "
    console.print(header.rstrip(), style="dim", markup=False)
    longest = max(1, min(_LONGEST_BAR, width - len(header) - len(" ↓")))
    dearest_s = max(step.median_s for step in cost.widths)
    cheaper = cost.cheaper_rows()
    for step in cost.widths:
        quartiles = f"{_ms(step.low_s)} {dash} {_ms(step.high_s)}"
        figures = f"{step.rows:>10}  {_ms(step.median_s):>9}  {quartiles:>17}  {_ms(step.median_s / step.rows):>8}"
        if of_target:
            figures += f"{step.rows / step.median_s:>{len(rate)}.1f}"
        line = Text(figures + "  ")
        line.append(
            _draw_bar(step.median_s / dearest_s, longest, blocks), style="green" if step.rows in cheaper else "cyan"
        )
        if step.rows in cheaper:
            line.append(" ↓" if blocks else " <", style="green")
        console.print(line)


def _further_lines(profile: CostProfile, *, blocks: bool) -> list[str]:
    mark = "↓" if blocks else "<"
    passes = [("round", profile.target)]
    if profile.draft is not None:
        passes.append(("draft pass", profile.draft))
    lines = []
    if any(cost.cheaper_rows() for _, cost in passes):
        lines.append(f"{mark} costs less than a narrower pass")
    for name, cost in passes:
        if cost.long_context is None:
            lines.append(
                f"{name}: what more context than {cost.context} tokens adds was not measured: it takes a larger "
                "--budget-s, or -c"
            )
        else:
            lines.append(
                f"{name}: 1,000 more tokens of context add {_ms(1000 * cost.token_s)} ms, and "
                f"{_ms(1000 * cost.token_row_s)} ms a row (measured from {cost.context} to {cost.long_context})"
            )
    if profile.request_s is not None:
        lines.append(f"each further request in a round adds {_ms(profile.request_s)} ms")
    if profile.change_s:
        lines.append(f"round: one of another width than the one before takes {_ms(profile.change_s)} ms more")
    lines.append(f"sampling at temperature adds {_ms(profile.sampling_row_s)} ms a row that is visited")
    lines.append(f"{profile.num_passes} passes in {profile.took_s:.1f} s")
    return lines


def _draw_bar(share: float, longest: int, blocks: bool) -> str:
    if not blocks:
        return "#" * max(1, round(share * longest))
    eighths = max(1, round(share * longest * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _ms(seconds: float) -> str:
    """Write seconds as milliseconds, with three digits that mean something."""
    ms = seconds * 1e3
    digits = 0 if ms >= 99.95 else 1 if ms >= 9.995 else 2 if ms >= 0.9995 else 3
    return f"{ms:.{digits}f}"


# --- input ------------------------------------------------------------------------------------------------------------


def _parse_widths(text: str) -> list[int]:
    """Read widths and ranges of widths, such as ``1-8,12,16``."""
    widths: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise InputError(
                f"--widths {text!r}: {part.strip()!r} is neither a number nor a range such as 1-8"
            ) from None
        if not 1 <= low <= high <= _MAX_ROWS:
            raise InputError(f"--widths {text!r}: {part.strip()!r} is not within 1 to {_MAX_ROWS}, the lower end first")
        widths += range(low, high + 1)
    return widths


def _check_widths(target: Engine, wanted: list[int]) -> None:
    """Refuse widths that rounds of this target cannot have."""
    usable = usable_widths(target, wanted)
    for rows in wanted:
        if rows not in usable:
            capabilities = target.capabilities
            raise InputError(
                f"a round of {rows} rows (--widths) cannot be measured: this target takes {capabilities.max_outputs} "
                f"rows in a round, and half its context of {capabilities.context_length} tokens at most"
            )
