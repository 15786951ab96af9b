"""``python -m benchmarks planner-statics``: where ``auto`` is below the best static setting, which nobody knows before.

The best one is chosen in hindsight, for each profile of costs, temperature, pair of models and scene, among all coarse
ones; so a share of its lead is luck. What ``auto`` takes to decide counts, and a static setting decides nothing.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer
from rich.table import Table

from benchmarks.planner_ab.corpus import CORPORA, HALVES, LAPS, QUICK_LAPS
from benchmarks.planner_ab.report import console
from benchmarks.planner_ab.sides import Side, chosen_profiles, results_of, side_of
from benchmarks.replays import split
from paceline.atomic_output import atomic_file, check_parent
from paceline.core.errors import InputError
from paceline.engines.threads import usable_cores
from paceline.lab.bench.variants import AUTO
from paceline.machine import machine

EPILOG = """[bold]Examples[/bold]

python -m benchmarks planner-statics --quick --json statics.json

python -m benchmarks planner-statics --costs q4_0-quiet,h100-llama-8b-q4_0
"""

_PLAIN: Final = "plain"
_CLEARLY: Final = 0.95
"""Of the best static setting; what is below it is listed by workload."""


class Text(NamedTuple):
    """One text in one scene.

    Attributes:
        name: the workload first.
        plain_s: seconds of plain decoding.
        auto_s: of ``auto``.
        static_s: of every static setting, by name.
    """

    name: str
    plain_s: float
    auto_s: float
    static_s: Mapping[str, float]


class Best(NamedTuple):
    """``auto`` beside the best static setting of a cell; speeds are geometric means over texts.

    Attributes:
        texts: how many.
        auto: its speed over plain decoding's.
        static: the best setting; plain decoding is one, and
        static_of_plain: its speed over plain decoding's.
    """

    texts: int
    auto: float
    static: str
    static_of_plain: float

    @property
    def of_static(self) -> float:
        """``auto`` over the best static setting."""
        return self.auto / self.static_of_plain


def planner_statics(
    revision: Annotated[
        str | None, typer.Option("--rev", help="Revision to look at. \\[the working tree]", metavar="REV")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the texts.")] = False,
    profiles: Annotated[
        str | None, typer.Option("--costs", help="Profiles of benchmarks/costs. \\[all]", metavar="NAME[,...]")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Processes at once. \\[one a core]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")] = None,
) -> None:
    """List where auto is below the best static setting: by costs, temperature, models and scene, and by workload."""
    if json_file is not None:
        check_parent(json_file)
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs {jobs} is out of range: give 1 or more")
    side = side_of(revision, AUTO)
    names = chosen_profiles([side], None if profiles is None else split(profiles))
    laps = QUICK_LAPS if quick else LAPS
    cells = _cells(side, names, laps, jobs or usable_cores())
    by_scene = {key: best_of(texts) for key, texts in cells.items()}
    by_workload: dict[tuple[str, ...], Best] = {}
    for key, texts in cells.items():
        workloads: dict[str, list[Text]] = defaultdict(list)
        for text in texts:
            workloads[text.name.partition(" ")[0]].append(text)
        by_workload.update({(*key, workload): best_of(group) for workload, group in workloads.items()})
    out = console()
    below = {key: best for key, best in by_scene.items() if best.of_static < 1}
    out.print(f"{side.environment.title}, of plain decoding's speed")
    columns = ("costs", "temperature", "models", "scene")
    out.print(_table(f"below the best static setting: {len(below)} of {len(by_scene)} cells", columns, below))
    lost = {key: best for key, best in by_workload.items() if best.of_static < _CLEARLY}
    title = f"by workload too, below {_CLEARLY:.2f} of it: {len(lost)} of {len(by_workload)} cells"
    out.print(_table(title, (*columns, "workload"), lost))
    if json_file is not None:
        rows = [
            {"cell": key, **best._asdict(), "of_static": best.of_static}
            for found in (by_scene, by_workload)
            for key, best in found.items()
        ]
        with atomic_file(json_file) as partial:
            partial.write_text(json.dumps({"machine": machine(), "planner_statics": rows}) + "\n", encoding="utf-8")


def _cells(side: Side, names: Sequence[str], laps: int, processes: int) -> dict[tuple[str, ...], list[Text]]:
    job = {"laps": laps, "halves": HALVES}
    tasks = [
        (side, {"task": task, "profiles": [name], **side.replaying, **job})
        for name in names
        for task in ("statics", "replay")
    ]
    found: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {"seconds": {}, "statics": {}}
    for _, result in results_of(tasks, processes, f"{AUTO}, and every static setting"):
        found["statics" if "statics" in result else "seconds"][tuple(result["key"])] = result
    corpora = {corpus.name: corpus for corpus in CORPORA}
    cells: dict[tuple[str, ...], list[Text]] = {}
    for key, auto in sorted(found["seconds"].items(), key=lambda item: names.index(item[0][0])):
        profile, corpus_name, _, scene = key
        corpus = corpora[corpus_name]
        statics = found["statics"][key]["statics"]
        cells.setdefault((profile, corpus.temperature, corpus.models, scene), []).extend(
            Text(name, plain_s, auto_s, {static: seconds[index] for static, seconds in statics.items()})
            for index, (name, plain_s, auto_s) in enumerate(
                zip(auto["texts"], auto["plain_s"], auto["seconds"], strict=True)
            )
        )
    return cells


def best_of(texts: Sequence[Text]) -> Best:
    """Return ``auto`` beside the static setting that is best for these texts together."""

    def mean(seconds: Sequence[float]) -> float:
        logs = [math.log(text.plain_s / each) for text, each in zip(texts, seconds, strict=True)]
        return math.exp(sum(logs) / len(logs))

    statics = {name: mean([text.static_s[name] for text in texts]) for name in texts[0].static_s}
    statics[_PLAIN] = 1.0
    best = max(statics, key=lambda name: statics[name])
    return Best(len(texts), mean([text.auto_s for text in texts]), best, statics[best])


def _table(title: str, columns: Sequence[str], found: Mapping[tuple[str, ...], Best]) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for column in columns:
        table.add_column(column)
    for column in ("texts", "auto of plain", "best static of plain", "auto of that"):
        table.add_column(column, justify="right")
    table.add_column("best static")
    for key, best in sorted(found.items(), key=lambda item: item[1].of_static):
        figures = (f"{figure:.3f}" for figure in (best.auto, best.static_of_plain, best.of_static))
        table.add_row(*key, str(best.texts), *figures, best.static)
    return table
