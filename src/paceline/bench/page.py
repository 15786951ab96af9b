"""The report as one page that needs nothing else: inline SVG, inline style, no script, no network."""

from __future__ import annotations

import statistics
from html import escape
from importlib.resources import files
from string import Template

from paceline.bench import charts
from paceline.bench.results import BenchResult, VariantResult, WorkloadResult
from paceline.bench.table import (
    FIGURES,
    NOTHING_DRAFTED,
    caption,
    drafted_nothing,
    figures,
    texts,
    title,
    unrest_words,
)

_COLUMNS = (*FIGURES, "texts")


def render(result: BenchResult) -> str:
    """Return the page."""
    template = Template(files("paceline.bench").joinpath("report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(f"paceline bench: {result.target}"),
        target=escape(result.target),
        draft=f"<p>draft: {escape(result.draft)}</p>" if result.draft else "",
        facts=escape(_facts(result)),
        tiles="".join(_tiles(result)),
        sections="".join(_sections(result)),
    )


def _facts(result: BenchResult) -> str:
    sampling = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    versions = ", ".join(f"{name} {version}" for name, version in result.machine.items() if name not in _HARDWARE)
    hardware = ", ".join(result.machine[name] for name in _HARDWARE if name in result.machine)
    run = f"{sampling}, answers of up to {result.tokens} tokens, {result.took_s:.0f} s"
    return " · ".join(part for part in (run, hardware, versions) if part)


_HARDWARE = ("processor", "system")


def _tiles(result: BenchResult) -> list[str]:
    """Put the answer first: what one gains, what one loses at worst, and whether the texts are equal."""
    tiles = []
    measured = [workload for workload in result.workloads if workload.measured]
    for kind, words in (("auto", "auto"), ("static", "best static setting of each workload")):
        ratios, drafted = [], False
        for workload in measured:
            fastest = workload.best(kind)
            if fastest is not None and (ratio := fastest.ratio()) is not None:
                nothing = drafted_nothing(fastest)
                ratios.append((ratio.median, f"{workload.name}, {NOTHING_DRAFTED}" if nothing else workload.name))
                drafted = drafted or not nothing
        if len(ratios) == 1:
            tiles.append(_tile(f"{ratios[0][0]:.2f}×", f"{words}: {ratios[0][1]}", kind))
        elif ratios:
            middle = statistics.median(value for value, _ in ratios)
            lowest = min(ratios)
            over = f"median over {len(ratios)} workloads{'' if drafted else f', {NOTHING_DRAFTED}'}"
            tiles.append(_tile(f"{middle:.2f}×", f"{words}, {over}", kind))
            tiles.append(_tile(f"{lowest[0]:.2f}×", f"{words} where it gains least: {lowest[1]}", kind))
    # A server's texts are its own: it samples by other noise. Plain's and forced ones could not be others.
    ours = [each for workload in measured for each in workload.variants if each.variant.kind not in ("server", "plain")]
    pairs = [pair for each in ours for pair in each.pairs if not pair.forced]
    equal = sum(pair.differs_at is None for pair in pairs)
    if pairs:
        tiles.append(_tile(f"{equal} of {len(pairs)}", "texts equal to plain's, token for token", "plain"))
    if result.noise is not None:
        low, high = (f"{ratio:.2f}" for ratio in result.noise)
        tiles.append(_tile(low if low == high else f"{low}–{high}", "plain against plain: the noise here", "plain"))
    return tiles


def _tile(figure: str, words: str, kind: str) -> str:
    return f'<div class="tile {kind}"><b>{escape(figure)}</b><span>{escape(words)}</span></div>'


def _sections(result: BenchResult) -> list[str]:
    measured = [workload for workload in result.workloads if workload.measured]
    sections = []
    unrest = unrest_words(result)
    if measured:
        sections.append(
            _section(
                "Speed by workload",
                "Decoding speed over that of the plain runs before and after; the mark is the median over laps, the "
                "bar its 95% interval, the ring what replay of recorded answers says, in virtual time. Right of the "
                "line is faster." + (f" Note: {unrest}." if unrest else ""),
                f'<div class="scroll"><div class="wide">{charts.legend(result)}{charts.speeds(result)}</div></div>',
            )
        )
    steps = charts.staircase(result.profile.target, "target: a whole round", "rows verified in one pass")
    if result.profile.draft is not None:
        steps += charts.staircase(result.profile.draft, "draft model: a pass", "tokens fed")
    sections.append(
        _section(
            "What passes cost here",
            "Median and quartiles as measured; the dotted line is one row at a time. Drafting pays where the staircase "
            "lies well below it. Orange marks are cheaper than a narrower pass.",
            f'<div class="grid two">{steps}</div>',
        )
    )
    sweeps = "".join(f"<figure>{charts.sweep(workload)}</figure>" for workload in result.workloads if workload.static)
    if sweeps:
        sections.append(
            _section(
                "Every static setting, by replay",
                "Speed over plain's in virtual time, on recorded drafts and with the costs above: blue is faster. The "
                "outlined setting is the best for that text.",
                f'<div class="grid sweeps">{sweeps}</div>',
            )
        )
    sections += _drafting(measured)
    sections += _planning(measured)
    sections.append(_section("All figures", "", "".join(_table(workload) for workload in result.workloads)))
    if result.notes or result.ended_by != "done":
        lines = list(result.notes)
        if result.ended_by != "done":
            lines.append(f"ended by {result.ended_by} before all was measured and every difference explained")
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        sections.append(_section("Left out", "", f"<ul>{items}</ul>"))
    return sections


def _drafting(measured: list[WorkloadResult]) -> list[str]:
    plots = []
    for workload in measured:
        chosen = [each for each in (workload.best("static"), workload.best("auto")) if each is not None]
        plot = charts.acceptance(workload, chosen)
        if plot:
            plots.append(f"<figure>{plot}</figure>")
    if not plots:
        return []
    return [
        _section(
            "Acceptance by depth",
            "Share of draft tokens accepted at each depth, of those whose predecessors all were; circles are the best "
            "static setting, diamonds auto, which drafts deep only where it expects to be right.",
            f'<div class="grid">{"".join(plots)}</div>',
        )
    ]


def _planning(measured: list[WorkloadResult]) -> list[str]:
    """Draw what a planning policy says of itself, where it does."""
    predictions, ledgers = [], []
    for workload in measured:
        auto = workload.best("auto")
        snapshot = None if auto is None else auto.snapshot
        by_drafter = charts.calibration_of(snapshot)
        if by_drafter:
            predictions.append(f"<figure>{charts.reliability(workload.name, by_drafter)}</figure>")
        entries = charts.ledger_of(snapshot)
        if entries:
            ledgers.append(f"<figure>{charts.ledger(workload.name, entries)}</figure>")
    sections = []
    if predictions:
        sections.append(
            _section(
                "Predicted against actual",
                "How likely auto held a draft to be accepted, and how often that came true; the larger a circle, the "
                "more drafts. On the line, predictions are right.",
                f'<div class="grid">{"".join(predictions)}</div>',
            )
        )
    if ledgers:
        sections.append(
            _section(
                "The ledger",
                "Time lost against plain as auto goes on, in its own account; below zero it is ahead. The dashed line "
                "is what it may lose.",
                f'<div class="grid">{"".join(ledgers)}</div>',
            )
        )
    return sections


def _table(workload: WorkloadResult) -> str:
    head = "".join(f"<th>{column}</th>" for column in ("variant", *_COLUMNS))
    rows = "".join(_row(workload, each) for each in workload.variants if each.laps())
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else "<p>nothing measured</p>"
    return (
        f"<details open><summary>{escape(workload.name)}</summary>"
        f'<p class="about">{escape(caption(workload))}</p><div class="scroll">{body}</div></details>'
    )


def _row(workload: WorkloadResult, each: VariantResult) -> str:
    cells = (*figures(each), texts(each))
    return (
        f'<tr class="{each.variant.kind}"><th>{escape(title(each))}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
    )


def _section(title: str, words: str, body: str) -> str:
    about = f'<p class="about">{escape(words)}</p>' if words else ""
    return f"<section><h2>{escape(title)}</h2>{about}{body}</section>"
