"""``python -m benchmarks replay``: policies compared without models, and without noise.

Texts recorded once are replayed in virtual time, each kind by itself and all of them in turn, in one session
(``mixed``). It is limited by the interpreter alone: about a tenth of a millisecond a round, and for the oracle of each
text. ``--statics`` replays every text a hundred times more, under every static setting that ``paceline bench`` tries.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.cost_tables import PASS_MS, measured_profile
from benchmarks.reporting import JsonOption, console, progress_bar, split, table, write_figures
from benchmarks.stopwatch import Stopwatch
from paceline.atomic_output import check_parent
from paceline.cli.options import refuse_given
from paceline.core.errors import InputError
from paceline.lab.bench.workloads import MIXED
from paceline.lab.replaying.oracle import oracle_s
from paceline.lab.replaying.recording import DrafterTrace, Recording, load_recordings
from paceline.lab.replaying.replay import replay as replayed
from paceline.lab.replaying.replay import trace_named
from paceline.lab.variants import lap_seconds, static_variants
from paceline.planning.base import Policy
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import ADAPTIVE_POLICIES, build_policy

EPILOG = """[bold]Examples[/bold]

python -m benchmarks replay --recordings pair.npz

python -m benchmarks replay --recordings pair.npz --costs Q8_0 --drafters suffix,draft --json replay.json

python -m benchmarks replay --recordings bench.npz --costs f16.json,q4_0.json --statics
"""

STATIC_LENGTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
PLAIN: Final = "plain"
BEST_STATIC: Final = "best static"


def replay(
    context: typer.Context,
    recordings: Annotated[
        Path, typer.Option("--recordings", help="Made with python -m benchmarks record.", metavar="FILE")
    ],
    costs: Annotated[
        str,
        typer.Option(
            "--costs", help=f"Among {', '.join(PASS_MS)}, or files of paceline profile --json.", metavar="X[,...]"
        ),
    ] = "Q4_0",
    draft_ms: Annotated[
        float, typer.Option("--draft-ms", help="Milliseconds of a pass of the draft; not for files.")
    ] = 1.0,
    drafters: Annotated[
        str | None, typer.Option("--drafters", help="Of those recorded. \\[all]", metavar="NAME[,...]")
    ] = None,
    statics: Annotated[bool, typer.Option("--statics", help="Find the best of all static settings, too.")] = False,
    json_file: JsonOption = None,
) -> None:
    """Replay recordings under every policy and every static draft length, beside the best there could have been."""
    if json_file is not None:
        check_parent(json_file)
    check_draft_ms(context, draft_ms, split(costs))
    groups = recordings_by_kind(recordings)
    first = next(iter(groups.values()))[0]
    names = [trace.name for trace in first.traces] if drafters is None else split(drafters)
    traces = [trace_named(first, name) for name in names]
    profiles = {name: costs_named(name, draft_ms, traces) for name in split(costs)}
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    for costs_name, profile in profiles.items():
        with progress_bar() as progress:
            figures[costs_name] = {
                kind: figures_of(group, profile, names, statics=statics)
                for kind, group in progress.track(groups.items(), description=costs_name)
            }
        for kind, of_kind in figures[costs_name].items():
            _print(f"{kind}, {len(groups[kind])} texts, {costs_name}", of_kind)
    write_figures("replay", {"draft_ms": draft_ms, "drafters": names, "costs": figures}, json_file)


def recordings_by_kind(path: Path) -> dict[str, list[Recording]]:
    """Load recordings; return them by the first word of their names, and all in turn as ``mixed``."""
    groups: dict[str, list[Recording]] = {}
    for recording in load_recordings(path):
        # The first token comes with the prompt.
        if len(recording.token_ids) > 1:
            groups.setdefault(recording.name.partition(" ")[0], []).append(recording)
    if not groups:
        raise InputError(f"all answers in {path} are of one token: record longer ones (--tokens)")
    if len(groups) > 1:
        laps = range(max(map(len, groups.values())))
        # The shorter ones come again.
        groups[MIXED] = [group[lap % len(group)] for lap in laps for group in groups.values()]
    return groups


def figures_of(
    group: Sequence[Recording], profile: CostProfile, names: Sequence[str], *, statics: bool
) -> dict[str, dict[str, Any]]:
    """Return what texts that follow each other come to, by policy."""
    policies: dict[str, Policy] = {PLAIN: NO_SPECULATION}
    policies |= {f"fixed {length}": FixedPolicy(length) for length in STATIC_LENGTHS}
    policies |= {name: build_policy(name, costs=profile) for name in ADAPTIVE_POLICIES}
    best_s = [oracle_s(recording, profile, drafters=names) for recording in group]
    plain_s: Sequence[float] = ()

    def figures(policy: Policy, drafters: Sequence[str]) -> dict[str, Any]:
        nonlocal plain_s
        stopwatch = Stopwatch(policy)
        result = replayed(group, stopwatch, profile, drafters=drafters)
        seconds = lap_seconds(group, result, profile, 1)
        plain_s = plain_s or seconds
        shares, share = result.oracle_shares(best_s)
        return {
            "tokens_per_second": result.tokens_per_second,
            "of_plain": sum(plain_s) / sum(seconds),
            "lowest_of_plain": min(before / after for before, after in zip(plain_s, seconds, strict=True)),
            "rounds": result.rounds,
            "accept_share": result.accept_share,
            "share_of_oracle": share,
            "lowest_share_of_oracle": min(shares),
            "deciding_us": stopwatch.spent_s / result.rounds * 1e6,
        }

    found = {name: figures(policy, names) for name, policy in policies.items()}
    if statics:
        tried = {each.name: figures(each.build(profile), each.drafters) for each in static_variants(names)}
        best = max(tried, key=lambda name: float(tried[name]["of_plain"]))
        found[BEST_STATIC] = {**tried[best], "setting": best}
    return found


def _print(title: str, of_kind: Mapping[str, Mapping[str, Any]]) -> None:
    columns = ("tokens/s", "of plain", "lowest text", "of oracle", "accepted", "rounds", "deciding, us a round")
    made = table(title, "policy", *columns)
    for name, row in of_kind.items():
        accepted = row["accept_share"]
        made.add_row(
            f"{name}: {row['setting']}" if name == BEST_STATIC else name,
            f"{row['tokens_per_second']:.1f}",
            *(f"{row[figure]:.2f}" for figure in ("of_plain", "lowest_of_plain", "share_of_oracle")),
            "" if accepted is None else f"{accepted:.0%}",
            str(row["rounds"]),
            f"{row['deciding_us']:.0f}",
        )
    console().print(made)


def check_draft_ms(context: typer.Context, draft_ms: float, costs: Sequence[str]) -> None:
    """Raise unless a pass of the draft can take so long, and some of the costs are a table that leaves it open."""
    if draft_ms <= 0:
        raise InputError(f"--draft-ms {draft_ms:g} is out of range: give more than 0")
    if not any(name in PASS_MS for name in costs):
        refuse_given(context, {"draft_ms": "has no effect on costs from a file, which holds the draft's: leave it out"})


def costs_named(name: str, draft_ms: float, traces: Iterable[DrafterTrace]) -> CostProfile:
    """Return a measured table by its name, or what ``paceline profile --json`` wrote to a file."""
    if name in PASS_MS:
        return measured_profile(name, draft_ms)
    try:
        data = json.loads(Path(name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{name} is neither among {', '.join(PASS_MS)} nor a file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the costs {name}: {error}") from None
    # The command's report holds the profile among other figures.
    profile = CostProfile.from_json(data.get("profile", data) if isinstance(data, dict) else data)
    if profile.draft is None and any(trace.is_model for trace in traces):
        raise InputError(f"{name} is of no draft model, and one was recorded: measure both (paceline profile -md)")
    return profile
