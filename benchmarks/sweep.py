"""``python -m benchmarks sweep``: ``auto`` held against every static setting and every other policy, without noise.

Texts recorded once are replayed in virtual time with the costs of several kinds of weights, each workload by itself and
``mixed`` through all of them in turn, as ``paceline bench`` does live. Nothing is noise here, so speeds are those of
all texts together, where the bench takes medians. Limited by the interpreter: some 130 replays of every text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cost_tables import PASS_MS
from benchmarks.progress import progress_bar
from benchmarks.replays import check_draft_ms, costs_named, recordings_by_kind, split
from paceline.atomic_output import atomic_file, check_parent
from paceline.lab.bench.variants import AUTO, Variant, lap_seconds, policy_variants, static_variants
from paceline.lab.bench.workloads import MIXED
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import replay
from paceline.machine import machine
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.planning.registry import ADAPTIVE_POLICIES

EPILOG = """[bold]Examples[/bold]

python -m benchmarks sweep --recordings bench.npz  [dim]# made by record --workloads[/dim]

python -m benchmarks sweep --recordings bench.npz --costs f16.json,q4_0.json --json sweep.json
"""

OTHER_POLICIES: tuple[str, ...] = tuple(name for name in ADAPTIVE_POLICIES if name != AUTO)
_PIPE_WIDTH = 160

Seconds: TypeAlias = Sequence[float]
"""Of every text of a workload, in their order."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What came out for one workload.

    Attributes:
        texts: how many.
        auto: its speed over plain's, of all texts together.
        lowest: of a single text, and what was
        lowest_text: its name.
        static: the best static setting, and
        static_ratio: its speed over plain's.
        tuned_ratio: the same with every workload at the static setting that is best for it.
        policies: the other policies', each with the set of drafters that suits it best.
    """

    texts: int
    auto: float
    lowest: float
    lowest_text: str
    static: str
    static_ratio: float
    tuned_ratio: float
    policies: Mapping[str, float]

    @property
    def of_static(self) -> float:
        """``auto`` over the best static setting."""
        return self.auto / self.static_ratio


def sweep(
    context: typer.Context,
    recordings: Annotated[
        Path, typer.Option("--recordings", help="Made with python -m benchmarks record --workloads.", metavar="FILE")
    ],
    costs: Annotated[
        str,
        typer.Option(
            "--costs", help=f"Among {', '.join(PASS_MS)}, or files of paceline profile --json.", metavar="X[,...]"
        ),
    ] = "F16,Q8_0,Q4_0",
    draft_ms: Annotated[
        float, typer.Option("--draft-ms", help="Milliseconds of a pass of the draft; not for files.")
    ] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")] = None,
) -> None:
    """Hold auto against every static setting and policy, on each workload and on all of them in one session."""
    if json_file is not None:
        check_parent(json_file)
    names = split(costs)
    check_draft_ms(context, draft_ms, names)
    groups = recordings_by_kind(recordings)
    traces = next(iter(groups.values()))[0].traces
    profiles = {name: costs_named(name, draft_ms, traces) for name in names}
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    report = {}
    for name, profile in profiles.items():
        with progress_bar() as progress:
            task = progress.add_task(name, total=None)

            def tell(doing: str) -> None:
                progress.update(task, description=f"{name}: {doing}")  # noqa: B023 - told within this turn alone

            swept = sweep_costs(groups, profile, tell)
        console.print(_table(name, swept))
        report[name] = {workload: {**asdict(found), "of_static": found.of_static} for workload, found in swept.items()}
    if json_file is not None:
        with atomic_file(json_file) as partial:
            partial.write_text(json.dumps({"machine": machine(), "sweep": report}) + "\n", encoding="utf-8")


def sweep_costs(
    groups: Mapping[str, Sequence[Recording]], profile: CostProfile, tell: Callable[[str], None]
) -> dict[str, Swept]:
    """Replay everything with one profile; return what came out by workload, ``mixed`` last."""
    drafters = [trace.name for trace in next(iter(groups.values()))[0].traces]
    statics = list(static_variants(drafters))
    found: dict[str, Swept] = {}
    # Static settings and plain decoding know nothing of the text before, so a session of several is the sum of them.
    plain: dict[str, Seconds] = {}
    by_static: dict[str, list[Seconds]] = {}
    for name, group in groups.items():
        tell(f"{name}, static settings")
        plain[name] = _seconds(group, None, profile)
        by_static[name] = [_seconds(group, variant, profile) for variant in statics]
        tell(f"{name}, policies")
        found[name] = _swept(group, plain[name], statics, by_static[name], None, drafters, profile)
    if len(groups) > 1:
        tell(f"{MIXED}, policies")
        laps = max(map(len, groups.values()))

        def mix(by_name: Mapping[str, Seconds]) -> list[float]:
            return [by_name[name][lap % len(group)] for lap in range(laps) for name, group in groups.items()]

        session = [group[lap % len(group)] for lap in range(laps) for group in groups.values()]
        mixed_statics = [mix({name: by_static[name][number] for name in groups}) for number in range(len(statics))]
        tuned = mix({name: min(by_static[name], key=sum) for name in groups})
        found[MIXED] = _swept(session, mix(plain), statics, mixed_statics, tuned, drafters, profile)
    return found


def _swept(
    group: Sequence[Recording],
    plain: Seconds,
    statics: Sequence[Variant],
    static_seconds: Sequence[Seconds],
    tuned: Seconds | None,
    drafters: Sequence[str],
    profile: CostProfile,
) -> Swept:
    def ratio(seconds: Seconds) -> float:
        return sum(plain) / sum(seconds)

    (auto,) = policy_variants(AUTO, drafters)
    auto_s = _seconds(group, auto, profile)
    lowest, lowest_text = min(
        (before / after, recording.name) for before, after, recording in zip(plain, auto_s, group, strict=True)
    )
    static_ratio, static = max(
        (ratio(each), variant.name) for each, variant in zip(static_seconds, statics, strict=True)
    )
    policies = {
        name: max(ratio(_seconds(group, variant, profile)) for variant in policy_variants(name, drafters))
        for name in OTHER_POLICIES
    }
    tuned_ratio = static_ratio if tuned is None else ratio(tuned)
    return Swept(len(group), ratio(auto_s), lowest, lowest_text, static, static_ratio, tuned_ratio, policies)


def _seconds(group: Sequence[Recording], variant: Variant | None, profile: CostProfile) -> Seconds:
    """Return the seconds of every text, one after the other in one session; plain's for no variant."""
    policy, drafters = (NO_SPECULATION, ()) if variant is None else (variant.build(profile), variant.drafters)
    return lap_seconds(group, replay(group, policy, profile, drafters=drafters), profile, 1)


def _table(costs: str, swept: Mapping[str, Swept]) -> Table:
    table = Table(title=costs, title_justify="left", box=None)
    table.add_column("workload")
    for column in ("texts", "auto of plain", "lowest text", "best static of plain", "auto of that", "tuned apart"):
        table.add_column(column, justify="right")
    for name in OTHER_POLICIES:
        table.add_column(name, justify="right")
    table.add_column("best static")
    for workload, found in swept.items():
        figures = (
            found.auto,
            found.lowest,
            found.static_ratio,
            found.of_static,
            found.tuned_ratio,
            *found.policies.values(),
        )
        table.add_row(workload, str(found.texts), *(f"{figure:.3f}" for figure in figures), found.static)
    return table
