"""A plan as a report: what to buy, the figures of every simulation, and how they change with the number of replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.lab.capacity.grid import Cell
from paceline.lab.capacity.simulate import Outcome, percentiles
from paceline.lab.capacity.traffic import Traffic
from paceline.lab.charts import Series, draw_plot
from paceline.lab.report import NONE, Charts, Line, Report, Row, Section, Table, Tile, machine_fact

_WAYS: Final = ((False, False), (False, True), (True, False), (True, True))
"""Speculation and affinity, as they follow each other in tables."""
LEFT_OUT: Final = (
    "Not simulated: the network, the gateway's own time, HTTP, and turning texts into tokens and back; caches hold all "
    "requests that are answered at once. At first no replica has read anything.",
    "Costs are those of this machine: make the plan on one like those to be bought, with nothing else running.",
)
"""What the figures leave out."""
_ABOUT_TABLES: Final = (
    "TTFT is the time from a request to its first token, in seconds. TPOT is the time per output token after the "
    "first, in milliseconds, averaged over each answer. Gap is the time between tokens that did not come at once, in "
    "milliseconds. Read is the share of prompts that was not in a cache. Busy is the share of the time that replicas "
    "worked; where it is 100% the queue grows, and times say how long the load is."
)
_ABOUT_CHARTS: Final = (
    "Grey is plain decoding, orange speculation; solid lines are with prefix affinity, dashed ones without. The dotted "
    "line is the target. Both axes are logarithmic."
)


@dataclass(frozen=True, slots=True)
class Targets:
    """What 99 of 100 requests must have.

    Attributes:
        ttft_s: seconds to the first token.
        tpot_s: seconds a token after it.
    """

    ttft_s: float
    tpot_s: float

    def are_met(self, outcome: Outcome) -> bool:
        ttft, tpot = percentiles(outcome.ttft_s), percentiles(outcome.tpot_s)
        met = outcome.keeps_up and ttft is not None and ttft["p99"] <= self.ttft_s
        return met and (tpot is None or tpot["p99"] <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Advice:
    """What to buy for a load.

    Attributes:
        replicas: by speculation and affinity, the least that meet the targets, of those that were simulated; ``None``
            where none do.
        read: by affinity, the share of prompts that is read, with speculation, at ``compared`` replicas.
        compared: replicas at which affinity is judged; ``None`` where there were never several.
    """

    load: str
    replicas: Mapping[tuple[bool, bool], int | None]
    read: Mapping[bool, float]
    compared: int | None

    @property
    def saving(self) -> str:
        """Say what affinity saves."""
        return (
            f"{self.load}: with speculation and {self.compared} replicas {self.read[True]:.0%} of the prompts' tokens "
            f"are read with prefix affinity, {self.read[False]:.0%} without"
        )


def advise(found: Mapping[Cell, Outcome], targets: Targets) -> list[Advice]:
    """Return what to buy for each load."""
    advice = []
    for load in dict.fromkeys(cell.load for cell in found):
        counts = sorted({cell.replicas for cell in found if cell.load == load})
        least: dict[tuple[bool, bool], int | None] = {}
        for speculative, affinity in _WAYS:
            met = (
                count
                for count in counts
                if targets.are_met(found[_cell(load, count, speculative=speculative, affinity=affinity)])
            )
            least[speculative, affinity] = next(met, None)
        several = [count for count in counts if count > 1]
        # Where the plan would be carried out, or else at the most.
        bought = least[True, True] or counts[-1]
        compared = None if not several else max(bought, several[0])
        read = {}
        if compared is not None:
            for affinity in (False, True):
                outcome = found[_cell(load, compared, speculative=True, affinity=affinity)]
                read[affinity] = outcome.read_tokens / outcome.prompt_tokens
        advice.append(Advice(load, least, read, compared))
    return advice


def _cell(load: str, replicas: int, *, speculative: bool, affinity: bool) -> Cell:
    """Return the simulation that says it: of one replica affinity is nothing."""
    return Cell(load, replicas, speculative, affinity and replicas > 1)


def build_report(
    found: Mapping[Cell, Outcome],
    loads: Mapping[str, Traffic],
    targets: Targets,
    *,
    names: Sequence[str],
    slots: int,
    machine: Mapping[str, str],
    left_out: Sequence[str],
) -> Report:
    """Return the report; ``names`` are lines on the models, ``left_out`` steps there was no time for."""
    advice, most = advise(found, targets), max(cell.replicas for cell in found)
    traffic = next(iter(loads.values()))
    beginnings = f", {traffic.prefix_tokens} of them one of {traffic.prefixes} beginnings"
    facts = [
        f"{traffic.rate:.3g} requests a second, {traffic.requests} in each simulation; prompts of "
        f"{traffic.prompt_tokens} tokens{beginnings if traffic.prefix_tokens else ''}; answers of "
        f"{traffic.answer_tokens} on average; {slots} requests at once in a replica",
        *machine_fact(machine),
    ]
    wanted = (
        f"Least replicas of those simulated for which 99 of 100 requests have their first token within "
        f"{targets.ttft_s:g} s, and 99 of 100 answers take {targets.tpot_s * 1e3:g} ms a token or less"
    )
    rows = [
        Row(
            [
                each.load,
                *(
                    _count(each.replicas[way], most)
                    for way in ((True, True), (False, True), (True, False), (False, False))
                ),
            ]
        )
        for each in advice
    ]
    columns = ("load", "with speculation", "plain", "with speculation, no affinity", "plain, no affinity")
    savings = [Line(each.saving, item=True) for each in advice if each.compared is not None]
    missing = [Line("There was no time for " + ", ".join(left_out) + ".", look="soft")] if left_out else []
    sections = [
        Section("What to buy", [Table(columns, rows), *savings, *missing], wanted),
        Section("By the number of replicas", [Charts(list(_draw(found, loads, targets)))], _ABOUT_CHARTS),
        Section("All simulations", [_table(found, load, targets) for load in loads], _ABOUT_TABLES),
        Section("What is left out", [Line(words, look="soft") for words in LEFT_OUT]),
    ]
    return Report("paceline plan", names, facts, sections, list(_tiles(advice, most)))


def _tiles(advice: Sequence[Advice], most: int) -> Iterator[Tile]:
    for each in advice:
        for speculative, words, kind in ((True, "with speculation", "auto"), (False, "without speculation", "plain")):
            count = each.replicas[speculative, True]
            yield Tile(_count(count, most), f"replicas {words}, {each.load} load", kind)


def _count(count: int | None, most: int) -> str:
    """Write a number of replicas; there is none where not even ``most`` meet the targets."""
    return f"> {most}" if count is None else str(count)


def _table(found: Mapping[Cell, Outcome], load: str, targets: Targets) -> Table:
    rows = []
    for cell, outcome in found.items():
        if cell.load != load:
            continue
        words = ["speculation" if cell.speculative else "plain", *(["affinity"] if cell.affinity else [])]
        cells = [
            f"{cell.replicas} {', '.join(words)}",
            f"{outcome.tokens_per_s:.1f}",
            *_figures(outcome.ttft_s, 1.0, 2),
            *_figures(outcome.tpot_s, 1e3, 1),
            _figures(outcome.gaps_s, 1e3, 1)[1],
            f"{outcome.read_tokens / outcome.prompt_tokens:.0%}",
            f"{outcome.busy:.0%}",
        ]
        met = targets.are_met(outcome)
        rows.append(Row(cells, "auto" if met else "", wins=met))
    columns = ("replicas", "t/s a replica", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    return Table(
        (*columns, "gap p99", "read", "busy"),
        rows,
        f"{load} load; bold rows (green on a terminal) meet the targets",
        spare=("gap p99", "busy", "read", "TPOT p50", "TTFT p50"),
    )


def _figures(values: Sequence[float], factor: float, digits: int) -> tuple[str, str]:
    known = percentiles(values)
    if known is None:
        return NONE, NONE
    return f"{factor * known['p50']:.{digits}f}", f"{factor * known['p99']:.{digits}f}"


def _draw(found: Mapping[Cell, Outcome], loads: Mapping[str, Traffic], targets: Targets) -> Iterator[str]:
    def p99(values: Sequence[float]) -> float:
        known = percentiles(values)
        return 0.0 if known is None else known["p99"]

    for load in loads:
        for title, unit, figure, target in (
            ("TTFT, p99", "s", lambda outcome: p99(outcome.ttft_s), targets.ttft_s),
            ("TPOT, p99", "ms a token", lambda outcome: 1e3 * p99(outcome.tpot_s), 1e3 * targets.tpot_s),
            ("tokens a second of a replica", "t/s", lambda outcome: outcome.tokens_per_s, None),
        ):
            values = {cell: figure(outcome) for cell, outcome in found.items() if cell.load == load}
            if not all(value > 0 for value in values.values()):
                continue
            counts = sorted({cell.replicas for cell in values})
            ends = (counts[0] * 0.9, max(counts[-1] * 1.1, 2.0))
            shown = [*values.values(), *([] if target is None else [target])]
            series = []
            for speculative, affinity in _WAYS:
                cells = [_cell(load, count, speculative=speculative, affinity=affinity) for count in counts]
                name = "" if not affinity else "speculation" if speculative else "plain"
                tips = [
                    f"{count} replicas: {values[cell]:.3g} {unit}" for count, cell in zip(counts, cells, strict=True)
                ]
                points = [(float(count), values[cell]) for count, cell in zip(counts, cells, strict=True)]
                series.append(Series(name, "auto" if speculative else "plain", points, tips, dashed=not affinity))
            yield draw_plot(
                f"{load}: {title}",
                ("replicas", unit),
                ends,
                (min(shown) / 1.5, max(shown) * 1.5),
                series,
                unity=[] if target is None else [(ends[0], target), (ends[1], target)],
                logarithmic=True,
                about=f"{title}, by the number of replicas, {load} load",
            )


def to_json(found: Mapping[Cell, Outcome], loads: Mapping[str, Traffic], targets: Targets) -> dict[str, Any]:
    """Return all figures as plain data; times are in seconds."""
    return {
        "loads": {name: dataclasses.asdict(traffic) for name, traffic in loads.items()},
        "targets": dataclasses.asdict(targets),
        "simulations": [
            {
                **dataclasses.asdict(cell),
                "tokens_per_s": outcome.tokens_per_s,
                "ttft_s": percentiles(outcome.ttft_s),
                "tpot_s": percentiles(outcome.tpot_s),
                "gap_s": percentiles(outcome.gaps_s),
                "answer_tokens": outcome.answer_tokens,
                "prompt_tokens": outcome.prompt_tokens,
                "read_tokens": outcome.read_tokens,
                "wall_s": outcome.wall_s,
                "busy": outcome.busy,
                "keeps_up": outcome.keeps_up,
                "meets_targets": targets.are_met(outcome),
            }
            for cell, outcome in found.items()
        ],
        "advice": [
            {
                "load": each.load,
                "replicas": [
                    {"speculative": speculative, "affinity": affinity, "least": least}
                    for (speculative, affinity), least in each.replicas.items()
                ],
            }
            for each in advise(found, targets)
        ],
    }
