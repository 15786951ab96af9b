"""The report on a terminal: a table for each workload, and one line for each at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

from paceline.lab.bench.results import BenchResult, VariantResult, WorkloadResult
from paceline.lab.intervals import Estimate

_RESTLESS = 0.15
"""Difference of plain decoding from itself above which a report says that the machine was not quiet."""

_NONE = "-"

_WIDEST = 1000
"""Columns that any table fits in."""

NOTHING_DRAFTED = "nothing drafted"
"""Shown where a ratio would pass for a gain."""

FIGURES = (
    "t/s",
    "of plain",
    "95%",
    "lowest prompt",
    "by replay",
    "accepted",
    "tokens/round",
    "own time",
    "laps",
)
"""Columns of a workload's table, between the variant's name and the verdict on its texts."""

_LEFT_OUT_FIRST = ("laps", "own time", "by replay", "lowest prompt", "tokens/round", "accepted")
"""Columns that a narrow terminal goes without, the least important first."""


def print_result(console: Console, result: BenchResult) -> None:
    """Print everything a person wants to know at once; the JSON has the rest."""
    console.print(f"target: {result.target}", style="bold", markup=False)
    if result.draft is not None:
        console.print(f"draft: {result.draft}", style="bold", markup=False)
    sampling = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    console.print(
        f"{sampling}, answers of up to {result.tokens} tokens; 'of plain' is the speed of decoding over that of the "
        "plain runs around it: the median over laps, and its 95% interval",
        style="dim",
        markup=False,
    )
    for workload in result.workloads:
        console.print()
        _print_workload(console, workload)
    measured = [workload for workload in result.workloads if workload.measured]
    if len(measured) > 1:
        console.print()
        console.print(_summary(measured))
    unrest = unrest_words(result)
    lines = [f"note: {note}" for note in [*([unrest] if unrest else []), *result.notes]]
    if result.ended_by != "done":
        lines.append(f"ended by {result.ended_by}: {_progress_words(result)}")
    lines.append(f"took {result.took_s:.0f} s")
    console.print()
    for line in lines:
        console.print(line, style="dim", markup=False)


def unrest_words(result: BenchResult) -> str | None:
    """Say that something else ran, and what to do about it, where the speed of plain decoding varied."""
    if result.noise is None:
        return None
    low, high = result.noise
    if low >= 1 - _RESTLESS and high <= 1 / (1 - _RESTLESS):
        return None
    return (
        f"plain decoding ran at {low:.2f} to {high:.2f} of its own speed, so ratios that are closer say little: close "
        "other programs, or leave them a core (-t), and measure again"
    )


def caption(workload: WorkloadResult) -> str:
    """Say what a workload's figures rest on: its text, its prompts, and what was left out."""
    parts = [workload.about]
    if workload.prompt_tokens:
        count = len(workload.prompt_tokens)
        parts.append(
            f"{count} prompt{'s' * (count > 1)} of {_format_range(workload.prompt_tokens)} tokens, "
            f"answers of {_format_range(workload.answer_tokens)}"
        )
    if workload.looped:
        parts.append(f"left out: {workload.looped} of {workload.tried}, whose plain output loops")
    if workload.ended_early:
        parts.append(f"left out: {workload.ended_early} of {workload.tried}, whose plain output ends at once")
    return "; ".join(parts)


def variant_title(each: VariantResult) -> str:
    return "plain against plain" if each.variant.kind == "plain" else each.variant.name


def drafted_nothing(each: VariantResult) -> bool:
    """Return whether a variant that was to draft did not: its difference from plain is no gain."""
    return bool(each.variant.drafters) and each.num_drafted == 0


def format_figures(each: VariantResult) -> list[str]:
    """Write the figures of a variant that finished a lap, in the order of :data:`FIGURES`."""
    ratio, speed = each.ratio(), each.per_second()
    assert ratio is not None
    assert speed is not None
    share, length = each.accept_share, each.acceptance_length
    return [
        f"{speed.median:.1f}",
        f"{ratio.median:.2f}",
        format_interval(ratio),
        f"{min(each.by_task().values()):.2f}",
        _NONE if each.replayed is None else f"{each.replayed.ratio:.2f}",
        NOTHING_DRAFTED if drafted_nothing(each) else _NONE if share is None else f"{share:.0%}",
        _NONE if length is None else f"{length:.2f}",
        _NONE if each.own_share is None else f"{each.own_share:.1%}",
        str(ratio.count),
    ]


def describe_texts(each: VariantResult) -> str:
    """Say whether a variant's texts were plain's, and if not, why."""
    if each.num_equal == len(each.pairs):
        forced = [pair.forced for pair in each.pairs]
        if all(forced):
            return "equal (forced)"
        return "equal (some forced)" if any(forced) else "equal"
    if each.variant.kind == "server":
        left_out = f"; {each.left_out} loop or end at once" if each.left_out else ""
        return f"{each.num_equal} of {len(each.pairs)} equal, not judged{left_out}"
    counts = Counter(judgement.verdict for judgement in each.judgements)
    reasons = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{each.num_equal} of {len(each.pairs)} equal" + (f": {reasons}" if reasons else "")


def format_interval(value: Estimate | None) -> str:
    """Write the interval of an estimate."""
    if value is None or value.low is None or value.high is None:
        return _NONE
    return f"{value.low:.2f} to {value.high:.2f}"


def _print_workload(console: Console, workload: WorkloadResult) -> None:
    console.print(workload.name, style="bold cyan", markup=False)
    console.print(caption(workload), style="dim", markup=False)
    if not workload.measured:
        replayed = [f"{each.variant.name} {each.replayed.ratio:.2f}" for each in workload.variants if each.replayed]
        by_replay = f"; by replay, of plain: {', '.join(replayed)}" if replayed else ""
        console.print(f"nothing was measured here{by_replay}", style="yellow", markup=False)
        return
    unbounded = console.options.update(width=_WIDEST)
    left_out: set[str] = set()
    table = _workload_table(workload, left_out)
    for column in _LEFT_OUT_FIRST:
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
        left_out.add(column)
        table = _workload_table(workload, left_out)
    console.print(table)
    if left_out:
        words = ", ".join(column for column in FIGURES if column in left_out)
        console.print(f"not shown on {console.width} columns: {words}", style="dim", markup=False)


def _workload_table(workload: WorkloadResult, left_out: Collection[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("variant", overflow="fold")
    for column in FIGURES:
        if column not in left_out:
            table.add_column(column, justify="right", no_wrap=True)
    table.add_column("texts", overflow="fold")
    ran = [(each, ratio.median) for each in workload.variants if (ratio := each.ratio()) is not None]
    fastest = max((speed for each, speed in ran if not drafted_nothing(each)), default=0.0)
    for each, speed in ran:
        wins = speed == fastest and each.variant.kind != "plain" and not drafted_nothing(each)
        shown = [cell for column, cell in zip(FIGURES, format_figures(each), strict=True) if column not in left_out]
        table.add_row(variant_title(each), *shown, describe_texts(each), style="green" if wins else None)
    return table


def _summary(workloads: Sequence[WorkloadResult]) -> Table:
    """Return a table of all workloads: the best static setting, the policies, and auto."""
    names = list(
        dict.fromkeys(
            each.variant.policy
            for workload in workloads
            for each in workload.variants
            if each.variant.kind in ("policy", "auto")
        )
    )
    table = Table(title="speed of decoding, of plain's", title_justify="left", box=None, pad_edge=False)
    table.add_column("workload", no_wrap=True)
    has_server = any(workload.best("server") for workload in workloads)
    for column in ("plain", *(["best server"] * has_server), "best static", *names):
        table.add_column(column, justify="right")
    has_auto = "auto" in names
    if has_auto:
        table.add_column("auto over best static", justify="right")
    for workload in workloads:
        plain, server, static, auto = (workload.best(kind) for kind in ("plain", "server", "static", "auto"))
        cells = [_format_ratio(plain), *([_format_ratio(server)] * has_server), _format_ratio(static)]
        for name in names:
            cells.append(_format_ratio(next((each for each in workload.variants if each.variant.policy == name), None)))
        if has_auto:
            quotient = auto.against(static) if auto is not None and static is not None else None
            cells.append(_NONE if quotient is None else f"{quotient.median:.2f} ({format_interval(quotient)})")
        table.add_row(workload.name, *cells)
    return table


def _format_ratio(each: VariantResult | None) -> str:
    if each is None or (ratio := each.ratio()) is None:
        return _NONE
    return f"{ratio.median:.2f}" + (f" ({NOTHING_DRAFTED})" if drafted_nothing(each) else "")


def _progress_words(result: BenchResult) -> str:
    counts = [len(each.laps()) for workload in result.workloads for each in workload.variants]
    if not counts:
        return "no pair was measured"
    return f"{min(counts)} to {max(counts)} of {result.laps} laps each"


def _format_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
