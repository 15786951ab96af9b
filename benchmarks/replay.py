"""``python -m benchmarks replay``: policies compared without models, and without noise.

It is limited by the interpreter alone: about a tenth of a millisecond a round, and for the oracle of each text.
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
from paceline.lab.replaying.oracle import oracle_s
from paceline.lab.replaying.recording import DrafterTrace, Recording, load_recordings
from paceline.lab.replaying.replay import replay as replayed
from paceline.lab.replaying.replay import trace_named
from paceline.planning.base import Policy
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.registry import ADAPTIVE_POLICIES, build_policy

EPILOG = """[bold]Examples[/bold]

python -m benchmarks replay --recordings pair.npz

python -m benchmarks replay --recordings pair.npz --costs Q8_0 --drafters suffix,draft --json replay.json

python -m benchmarks replay --recordings pair.npz --costs profile.json  [dim]# from paceline profile --json[/dim]
"""

STATIC_LENGTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16)


def replay(
    context: typer.Context,
    recordings: Annotated[
        Path, typer.Option("--recordings", help="Made with python -m benchmarks record.", metavar="FILE")
    ],
    costs: Annotated[
        str,
        typer.Option("--costs", help=f"Among {', '.join(PASS_MS)}, or a file of paceline profile --json.", metavar="X"),
    ] = "Q4_0",
    draft_ms: Annotated[
        float, typer.Option("--draft-ms", help="Milliseconds of a pass of the draft; not for a file.")
    ] = 1.0,
    drafters: Annotated[
        str | None, typer.Option("--drafters", help="Of those recorded. \\[all]", metavar="NAME[,...]")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Replay recordings under every policy and every static draft length, beside the best there could have been."""
    if json_file is not None:
        check_parent(json_file)
    check_draft_ms(context, draft_ms, [costs])
    groups = recordings_by_kind(recordings)
    first = next(iter(groups.values()))[0]
    names = [trace.name for trace in first.traces] if drafters is None else split(drafters)
    profile = costs_named(costs, draft_ms, [trace_named(first, name) for name in names])
    figures: dict[str, dict[str, dict[str, Any]]] = {}
    with progress_bar() as progress:
        for kind, group in progress.track(groups.items(), description="replaying"):
            policies: dict[str, Policy] = {f"fixed {length}": FixedPolicy(length) for length in (0, *STATIC_LENGTHS)}
            policies |= {name: build_policy(name, costs=profile) for name in ADAPTIVE_POLICIES}
            best_s = [oracle_s(recording, profile, drafters=names) for recording in group]
            figures[kind] = {name: _figures(group, policy, profile, names, best_s) for name, policy in policies.items()}
    for kind, of_kind in figures.items():
        _print(f"{kind}, {len(groups[kind])} texts, {costs}", of_kind)
    report = {"costs": costs, "draft_ms": draft_ms, "drafters": names, "kinds": figures}
    write_figures("replay", report, json_file)


def recordings_by_kind(path: Path) -> dict[str, list[Recording]]:
    """Load recordings; return them by the first word of their names, without those that have no rounds.

    Raises:
        InputError: the file cannot be read, or none is left.
    """
    groups: dict[str, list[Recording]] = {}
    for recording in load_recordings(path):
        # The first token comes with the prompt.
        if len(recording.token_ids) > 1:
            groups.setdefault(recording.name.partition(" ")[0], []).append(recording)
    if not groups:
        raise InputError(f"all answers in {path} are of one token: record longer ones (--tokens)")
    return groups


def _figures(
    group: Sequence[Recording], policy: Policy, profile: CostProfile, names: Sequence[str], best_s: Sequence[float]
) -> dict[str, Any]:
    stopwatch = Stopwatch(policy)
    result = replayed(group, stopwatch, profile, drafters=names)
    shares, share = result.oracle_shares(best_s)
    return {
        "tokens_per_second": result.tokens_per_second,
        "rounds": result.rounds,
        "accept_share": result.accept_share,
        "share_of_oracle": share,
        "lowest_share_of_oracle": min(shares),
        "deciding_us": stopwatch.spent_s / result.rounds * 1e6,
    }


def _print(title: str, of_kind: Mapping[str, Mapping[str, Any]]) -> None:
    made = table(title, "policy", "tokens/s", "of plain", "of oracle", "accepted", "rounds", "deciding, us a round")
    plain = of_kind["fixed 0"]["tokens_per_second"]
    for name, row in of_kind.items():
        accepted = row["accept_share"]
        made.add_row(
            "plain" if name == "fixed 0" else name,
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / plain:.2f}",
            f"{row['share_of_oracle']:.2f}",
            "" if accepted is None else f"{accepted:.0%}",
            str(row["rounds"]),
            f"{row['deciding_us']:.0f}",
        )
    console().print(made)


def check_draft_ms(context: typer.Context, draft_ms: float, costs: Sequence[str]) -> None:
    """Raise unless a pass of the draft can take so long, and some of the costs are a table that leaves it open.

    Raises:
        InputError: with the value and the way out.
    """
    if draft_ms <= 0:
        raise InputError(f"--draft-ms {draft_ms:g} is out of range: give more than 0")
    if not any(name in PASS_MS for name in costs):
        refuse_given(context, {"draft_ms": "has no effect on costs from a file, which holds the draft's: leave it out"})


def costs_named(name: str, draft_ms: float, traces: Iterable[DrafterTrace]) -> CostProfile:
    """Return a measured table by its name, or what ``paceline profile --json`` wrote to a file.

    Args:
        name: of the table, or the file's.
        draft_ms: see :func:`~benchmarks.cost_tables.measured_profile`.
        traces: of the drafters that take part.

    Raises:
        InputError: it is neither, or lacks the costs of a draft model that takes part.
    """
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
