"""The report as one page that needs nothing else: inline SVG, inline style, no script, no network."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from paceline.lab.bench import charts
from paceline.lab.bench.results import BenchResult, WorkloadResult
from paceline.lab.bench.table import (
    FIGURES,
    NOTHING_DRAFTED,
    caption,
    describe_texts,
    drafted_nothing,
    format_figures,
    unrest_words,
    variant_title,
)

if TYPE_CHECKING:
    from jinja2 import Template

_COLUMNS: Final = ("variant", *FIGURES, "texts")
_HARDWARE: Final = ("processor", "system")


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the top of the page. The kind of its variant gives it its colour."""

    figure: str
    words: str
    kind: str


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of a table. Its kind gives the row its look."""

    title: str
    kind: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """All figures of a workload."""

    name: str
    about: str
    rows: tuple[Row, ...]


def render(result: BenchResult) -> str:
    measured = [workload for workload in result.workloads if workload.measured]
    steps = [charts.draw_staircase(result.profile.target, "target: a whole round", "rows verified in one pass")]
    if result.profile.draft is not None:
        steps.append(charts.draw_staircase(result.profile.draft, "draft model: a pass", "tokens fed"))
    predictions, ledgers = _planning(measured)
    return template("paceline.lab.bench", "report.html").render(
        style=style(),
        target=result.target,
        draft=result.draft,
        facts=_facts(result),
        tiles=_tiles(result),
        unrest=unrest_words(result),
        legend=charts.draw_legend(result) if measured else None,
        speeds=charts.draw_speeds(result) if measured else None,
        steps=steps,
        sweeps=[charts.draw_sweep(workload) for workload in result.workloads if workload.static],
        acceptance=_acceptance(measured),
        predictions=predictions,
        ledgers=ledgers,
        columns=_COLUMNS,
        tables=[_table(workload) for workload in result.workloads],
        left_out=_left_out(result),
    )


@functools.cache
def template(package: str, name: str) -> Template:
    """Return a page's template, which a package has as a file."""
    from jinja2 import Environment, StrictUndefined  # they take a while to import

    source = files(package).joinpath(name).read_text(encoding="utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        source
    )


def style() -> str:
    """Return the style of all pages, for a template to put in whole."""
    return files("paceline.lab").joinpath("page.css").read_text(encoding="utf-8")


def _facts(result: BenchResult) -> str:
    sampling = "greedy" if result.temperature == 0 else f"temperature {result.temperature:g}"
    versions = ", ".join(f"{name} {version}" for name, version in result.machine.items() if name not in _HARDWARE)
    hardware = ", ".join(result.machine[name] for name in _HARDWARE if name in result.machine)
    run = f"{sampling}, answers of up to {result.tokens} tokens, {result.took_s:.0f} s"
    return " · ".join(part for part in (run, hardware, versions) if part)


def _tiles(result: BenchResult) -> list[Tile]:
    """Put the answer first: the gain, the loss at worst, and whether the texts are equal."""
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
    equal = sum(pair.differs_at is None for pair in pairs)
    if pairs:
        tiles.append(Tile(f"{equal} of {len(pairs)}", "texts equal to plain's, token for token", "plain"))
    if result.noise is not None:
        low, high = (f"{ratio:.2f}" for ratio in result.noise)
        tiles.append(Tile(low if low == high else f"{low}–{high}", "plain against plain: the noise here", "plain"))
    return tiles


def _acceptance(measured: list[WorkloadResult]) -> list[str]:
    """Draw acceptance by depth, of the best static setting and of auto."""
    plots = []
    for workload in measured:
        chosen = [each for each in (workload.best("static"), workload.best("auto")) if each is not None]
        plots.append(charts.draw_acceptance(workload, chosen))
    return [plot for plot in plots if plot]


def _planning(measured: list[WorkloadResult]) -> tuple[list[str], list[str]]:
    """Draw the predictions and the ledger of a planning policy."""
    predictions, ledgers = [], []
    for workload in measured:
        auto = workload.best("auto")
        snapshot = None if auto is None else auto.snapshot
        by_drafter = charts.read_calibration(snapshot)
        if by_drafter:
            predictions.append(charts.draw_reliability(workload.name, by_drafter))
        entries = charts.read_ledger(snapshot)
        if entries:
            ledgers.append(charts.draw_ledger(workload.name, entries))
    return predictions, ledgers


def _table(workload: WorkloadResult) -> Table:
    rows = tuple(
        Row(variant_title(each), each.variant.kind, (*format_figures(each), describe_texts(each)))
        for each in workload.variants
        if each.laps()
    )
    return Table(workload.name, caption(workload), rows)


def _left_out(result: BenchResult) -> list[str]:
    lines = list(result.notes)
    if result.ended_by != "done":
        lines.append(f"ended by {result.ended_by} before all was measured and every difference explained")
    return lines
