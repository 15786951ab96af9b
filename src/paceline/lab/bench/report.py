"""A bench's results as a report: the answer first, then charts, a table for each workload, and what was left out."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Final

from paceline.lab.bench import charts
from paceline.lab.bench.charts import NOTHING_DRAFTED
from paceline.lab.bench.results import BenchResult, VariantResult, WorkloadResult
from paceline.lab.charts import draw_staircase
from paceline.lab.profile_page import ABOUT_PASSES
from paceline.lab.report import NONE, Charts, Line, Report, Row, Section, Table, Tile, machine_fact

_RESTLESS: Final = 0.15
"""Difference of plain decoding from itself above which a report says that the machine was not quiet."""

_COLUMNS: Final = (
    "variant",
    "t/s",
    "of plain",
    "95%",
    "lowest prompt",
    "by replay",
    "accepted",
    "tokens/round",
    "own time",
    "laps",
    "texts",
)
"""Columns of a workload's table."""

_LEFT_OUT_FIRST: Final = ("laps", "own time", "by replay", "lowest prompt", "tokens/round", "accepted")
"""Columns that a narrow terminal goes without, the least important first."""

_ABOUT_SPEEDS: Final = (
    "Decoding speed over that of the plain runs before and after; the mark is the median over laps, the bar its 95% "
    "interval, the ring what replay of recorded answers says, in virtual time. Right of the line is faster."
)
_ABOUT_SWEEPS: Final = (
    "Speed over plain's in virtual time, on recorded drafts and with the costs above: blue is faster. The outlined "
    "setting is the best for that text."
)
_ABOUT_ACCEPTANCE: Final = (
    "Share of draft tokens accepted at each depth, of those whose predecessors all were; circles are the best static "
    "setting, diamonds auto, which drafts deep only where it expects to be right."
)
_ABOUT_PREDICTIONS: Final = (
    "How likely auto held a draft to be accepted, and how often that came true; the larger a circle, the more drafts. "
    "On the line, predictions are right."
)
_ABOUT_LEDGERS: Final = (
    "Time lost against plain as auto goes on, in its own account; below zero it is ahead. The dashed line is what "
    "drafts may lose: none is made that could lose more, by what passes took so far. The line crosses it where passes "
    "took longer than ever before, as beside other programs, and where deciding, some 0.1 ms a round, is much beside "
    "a pass."
)


def build_report(result: BenchResult) -> Report:
    """Return everything a person wants to know at once; the JSON has the rest."""
    measured = [workload for workload in result.workloads if workload.measured]
    auto = [(workload.name, best.snapshot) for workload in measured if (best := workload.best("auto")) is not None]
    steps = [draw_staircase(result.profile.target, "target: a whole round", "rows verified in one pass")]
    if result.profile.draft is not None:
        steps.append(draw_staircase(result.profile.draft, "draft model: a pass", "tokens fed"))
    drawn = (
        ("Speed by workload", _ABOUT_SPEEDS, [charts.draw_speeds(result)]),
        ("What passes cost here", ABOUT_PASSES, steps),
        ("Every static setting, by replay", _ABOUT_SWEEPS, [charts.draw_sweep(each) for each in result.workloads]),
        ("Acceptance by depth", _ABOUT_ACCEPTANCE, [charts.draw_acceptance(each) for each in measured]),
        (
            "Predicted against actual",
            _ABOUT_PREDICTIONS,
            [charts.draw_reliability(name, found) for name, told in auto if (found := charts.read_calibration(told))],
        ),
        (
            "The ledger",
            _ABOUT_LEDGERS,
            [charts.draw_ledger(name, entries) for name, told in auto if (entries := charts.read_ledger(told))],
        ),
    )
    sections = [
        Section(title, [Charts([one for one in pictures if one], wide=title == "Speed by workload")], about)
        for title, about, pictures in drawn
        if any(pictures)
    ]
    sections += [_workload_section(workload) for workload in result.workloads]
    if len(measured) > 1:
        sections.append(Section("", [_summary(measured)]))
    unrest = describe_unrest(result)
    lines = [f"note: {note}" for note in [*([unrest] if unrest else []), *result.notes]]
    if result.ended_by != "done":
        lines.append(f"ended by {result.ended_by}: {_describe_progress(result)}")
    sections.append(Section("", [Line(line, "soft") for line in [*lines, f"took {result.took_s:.0f} s"]]))
    settings = result.settings
    sampling = "greedy" if settings.temperature == 0 else f"temperature {settings.temperature:g}"
    return Report(
        "paceline bench",
        [f"target: {result.target}", *([] if result.draft is None else [f"draft: {result.draft}"])],
        [
            f"{sampling}, answers of up to {settings.tokens} tokens; 'of plain' is the speed of decoding over that of "
            "the plain runs around it: the median over laps, and its 95% interval",
            *machine_fact(result.machine),
        ],
        sections,
        _tiles(result, measured),
    )


def _tiles(result: BenchResult, measured: Sequence[WorkloadResult]) -> list[Tile]:
    """Put the answer first: the gain, the loss at worst, and whether the texts are equal."""
    tiles = []
    for kind, words in (("auto", "auto"), ("static", "best static setting of each workload")):
        ratios, drafted = [], False
        for workload in measured:
            fastest = workload.best(kind)
            if fastest is not None and (ratio := fastest.ratio()) is not None:
                nothing = fastest.drafted_nothing
                ratios.append((ratio.median, f"{workload.name}, {NOTHING_DRAFTED}" if nothing else workload.name))
                drafted = drafted or not nothing
        if len(ratios) == 1:
            tiles.append(Tile(f"{ratios[0][0]:.2f}×", f"{words}: {ratios[0][1]}", kind))
        elif ratios:
            middle = statistics.median(value for value, _ in ratios)
            lowest = min(ratios)
            over = f"median over {len(ratios)} workloads{'' if drafted else f', {NOTHING_DRAFTED}'}"
            tiles.append(Tile(f"{middle:.2f}×", f"{words}, {over}", kind))
            tiles.append(Tile(f"{lowest[0]:.2f}×", f"{words} where it gains least: {lowest[1]}", kind))
    # A server samples by other noise, and plain's and forced texts cannot differ.
    ours = [each for workload in measured for each in workload.variants if each.variant.kind not in ("server", "plain")]
    pairs = [pair for each in ours for pair in each.pairs if not pair.forced]
    if pairs:
        equal = sum(pair.differs_at is None for pair in pairs)
        tiles.append(Tile(f"{equal} of {len(pairs)}", "texts equal to plain's, token for token"))
    if result.noise is not None:
        low, high = (f"{ratio:.2f}" for ratio in result.noise)
        tiles.append(Tile(low if low == high else f"{low}–{high}", "plain against plain: the noise here"))
    return tiles


def describe_unrest(result: BenchResult) -> str | None:
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


def _workload_section(workload: WorkloadResult) -> Section:
    """Return a workload's table, with what its figures rest on: its text, its prompts, and what was left out."""
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
    if workload.measured:
        block: Line | Table = _workload_table(workload)
    else:
        replayed = [f"{each.variant.name} {each.replayed.ratio:.2f}" for each in workload.variants if each.replayed]
        by_replay = f"; by replay, of plain: {', '.join(replayed)}" if replayed else ""
        block = Line(f"nothing was measured here{by_replay}", "bad")
    return Section(workload.name, [block], "; ".join(parts))


def _workload_table(workload: WorkloadResult) -> Table:
    ran = [(each, ratio.median) for each in workload.variants if (ratio := each.ratio()) is not None]
    fastest = max((speed for each, speed in ran if not each.drafted_nothing), default=0.0)
    rows = [
        Row(
            _format_figures(each),
            each.variant.kind,
            wins=speed == fastest and each.variant.kind != "plain" and not each.drafted_nothing,
        )
        for each, speed in ran
    ]
    return Table(_COLUMNS, rows, wordy=("texts",), spare=_LEFT_OUT_FIRST)


def _format_figures(each: VariantResult) -> list[str]:
    """Write the figures of a variant that finished a lap, in the order of the columns."""
    ratio, speed = each.ratio(), each.per_second()
    assert ratio is not None
    assert speed is not None
    share, length = each.accept_share, each.acceptance_length
    return [
        each.title,
        f"{speed.median:.1f}",
        f"{ratio.median:.2f}",
        ratio.interval,
        f"{min(each.by_task().values()):.2f}",
        NONE if each.replayed is None else f"{each.replayed.ratio:.2f}",
        NOTHING_DRAFTED if each.drafted_nothing else NONE if share is None else f"{share:.0%}",
        NONE if length is None else f"{length:.2f}",
        NONE if each.own_share is None else f"{each.own_share:.1%}",
        str(ratio.count),
        _describe_texts(each),
    ]


def _describe_texts(each: VariantResult) -> str:
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
    has_server, has_auto = any(workload.best("server") for workload in workloads), "auto" in names
    columns = ["workload", "plain", *(["best server"] * has_server), "best static", *names]
    rows = []
    for workload in workloads:
        plain, server, static, auto = (workload.best(kind) for kind in ("plain", "server", "static", "auto"))
        policies = [next((each for each in workload.variants if each.variant.policy == name), None) for name in names]
        cells = [_format_ratio(each) for each in (plain, *([server] * has_server), static, *policies)]
        if has_auto:
            quotient = auto.against(static) if auto is not None and static is not None else None
            cells.append(NONE if quotient is None else f"{quotient.median:.2f} ({quotient.interval})")
        rows.append(Row([workload.name, *cells]))
    columns += ["auto over best static"] * has_auto
    return Table(columns, rows, title="speed of decoding, of plain's")


def _format_ratio(each: VariantResult | None) -> str:
    if each is None or (ratio := each.ratio()) is None:
        return NONE
    return f"{ratio.median:.2f}" + (f" ({NOTHING_DRAFTED})" if each.drafted_nothing else "")


def _describe_progress(result: BenchResult) -> str:
    counts = [len(each.laps()) for workload in result.workloads for each in workload.variants]
    if not counts:
        return "no pair was measured"
    return f"{min(counts)} to {max(counts)} of {result.settings.laps} laps each"


def _format_range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
