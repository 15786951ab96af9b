"""``python -m benchmarks sweep``: ``auto`` held against every static setting and every other policy, without noise.

Texts recorded once are replayed in virtual time with the costs of several kinds of weights, each workload by itself and
``mixed`` through all of them in turn, as ``paceline bench`` does live. Nothing is noise here, so speeds are those of
all texts together, where the bench takes medians. Limited by the interpreter: some 130 replays of every text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from benchmarks.cost_tables import PASS_MS
from benchmarks.replay import check_draft_ms, costs_named, recordings_by_kind
from benchmarks.reporting import JsonOption, console, progress_bar, split, table, write_figures
from paceline.atomic_output import check_parent
from paceline.lab.bench.workloads import MIXED
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import replay
from paceline.lab.variants import AUTO, Variant, lap_seconds, policy_variants, static_variants
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.planning.registry import ADAPTIVE_POLICIES

EPILOG = """[bold]Examples[/bold]

python -m benchmarks sweep --recordings bench.npz  [dim]# made by record --workloads[/dim]

python -m benchmarks sweep --recordings bench.npz --costs f16.json,q4_0.json --json sweep.json
"""

OTHER_POLICIES: tuple[str, ...] = tuple(name for name in ADAPTIVE_POLICIES if name != AUTO)

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
    json_file: JsonOption = None,
) -> None:
    """Hold auto against every static setting and policy, on each workload and on all of them in one session."""
    if json_file is not None:
        check_parent(json_file)
    names = split(costs)
    check_draft_ms(context, draft_ms, names)
    groups = recordings_by_kind(recordings)
    traces = next(iter(groups.values()))[0].traces
    profiles = {name: costs_named(name, draft_ms, traces) for name in names}
    report = {}
    for name, profile in profiles.items():
        with progress_bar() as progress:
            progress.add_task(name, total=None)
            swept = sweep_costs(groups, profile)
        _print(name, swept)
        report[name] = {workload: {**asdict(found), "of_static": found.of_static} for workload, found in swept.items()}
    write_figures("sweep", report, json_file)


def sweep_costs(groups: Mapping[str, Sequence[Recording]], profile: CostProfile) -> dict[str, Swept]:
    """Replay everything with one profile; return what came out by workload, ``mixed`` last."""
    drafters = [trace.name for trace in next(iter(groups.values()))[0].traces]
    statics = list(static_variants(drafters))
    found: dict[str, Swept] = {}
    # Static settings and plain decoding know nothing of the text before, so a session of several is the sum of them.
    plain: dict[str, Seconds] = {}
    by_static: dict[str, list[Seconds]] = {}
    for name, group in groups.items():
        plain[name] = _seconds(group, None, profile)
        by_static[name] = [_seconds(group, variant, profile) for variant in statics]
        found[name] = _swept(group, plain[name], statics, by_static[name], None, drafters, profile)
    if len(groups) > 1:
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


def _print(costs: str, swept: Mapping[str, Swept]) -> None:
    columns = ("texts", "auto of plain", "lowest text", "best static of plain", "auto of that", "tuned apart")
    made = table(costs, "workload", *columns, *OTHER_POLICIES, "best static")
    for workload, found in swept.items():
        ratios = (found.auto, found.lowest, found.static_ratio, found.of_static, found.tuned_ratio)
        figures = (f"{figure:.3f}" for figure in (*ratios, *found.policies.values()))
        made.add_row(workload, str(found.texts), *figures, found.static)
    console().print(made)
