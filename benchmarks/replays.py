"""``python -m benchmarks record`` and ``replay``: policies compared without models, and without noise.

Recording needs the models once: for each token of each answer as many passes of the draft as it records levels. Replay
is limited by the interpreter alone: about a tenth of a millisecond a round, and for the oracle of each text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cost_tables import PASS_MS, measured_profile
from benchmarks.progress import progress_bar
from benchmarks.stopwatch import Stopwatch
from paceline.api import load
from paceline.atomic_output import atomic_file, check_parent
from paceline.cli.options import refuse_given
from paceline.core.errors import InputError
from paceline.drafters.registry import DRAFTER_NAMES, check_drafter_names
from paceline.engines.base import Engine
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.lab.bench.results import WorkloadResult
from paceline.lab.bench.sessions import wall_engines
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.tasks import TaskFinder
from paceline.lab.bench.variants import AUTO
from paceline.lab.bench.workloads import MIXED, WORKLOADS, check_workload_names
from paceline.lab.replaying.oracle import oracle_s
from paceline.lab.replaying.recorder import record
from paceline.lab.replaying.recording import (
    RECORDED_DEPTH,
    RECORDED_SIBLINGS,
    DrafterTrace,
    Recording,
    load_recordings,
    save_recordings,
)
from paceline.lab.replaying.replay import replay, trace_named
from paceline.machine import machine
from paceline.models.embedded import HELDOUT_KINDS, embedded_draft, embedded_target, heldout
from paceline.models.registry import resolve_model
from paceline.planning.base import Policy
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.registry import ADAPTIVE_POLICIES, build_policy
from paceline.runtime.worker import Worker

RECORD_EPILOG = """[bold]Examples[/bold]

python -m benchmarks record --output pair.npz

python -m benchmarks record --output code.npz --kinds code --prompts 4 --tokens 64 --temperature 0.8

python -m benchmarks record --output big.npz --target big.gguf --draft small.gguf --drafters draft,suffix

python -m benchmarks record --output bench.npz --workloads all --prompts 5 --temperature 0.8  [dim]# for sweep[/dim]
"""

REPLAY_EPILOG = """[bold]Examples[/bold]

python -m benchmarks replay --recordings pair.npz

python -m benchmarks replay --recordings pair.npz --costs Q8_0 --drafters suffix,draft --json replay.json

python -m benchmarks replay --recordings pair.npz --costs profile.json  [dim]# from paceline profile --json[/dim]
"""

_OF_KINDS = ("kinds", "prompt_characters", "depth", "siblings")
"""Parameters that say something of texts of a kind; the bench's tasks have theirs."""

STATIC_LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
_PIPE_WIDTH = 120


def record_command(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", help="File of recordings to write (.npz).", metavar="FILE")],
    target: Annotated[str | None, typer.Option("--target", help="By path or name. \\[the embedded one]")] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="By path or name. \\[the embedded one]")] = None,
    drafters: Annotated[
        str, typer.Option("--drafters", help=f"Among {', '.join(DRAFTER_NAMES)}.", metavar="NAME[,...]")
    ] = "suffix,lookup,draft",
    kinds: Annotated[
        str, typer.Option("--kinds", help=f"Among {', '.join(HELDOUT_KINDS)}.", metavar="NAME[,...]")
    ] = ",".join(HELDOUT_KINDS),
    workloads: Annotated[
        str | None,
        typer.Option(
            "--workloads",
            help=f"Instead of kinds, tasks of paceline bench: all, or among {', '.join(WORKLOADS)}.",
            metavar="NAME[,...]",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", help="Texts of each kind or workload.")] = 10,
    prompt_characters: Annotated[int, typer.Option("--prompt-characters", help="Of each text.")] = 600,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of an answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    depth: Annotated[int, typer.Option("--depth", help="Deepest drafts to record.")] = RECORDED_DEPTH,
    siblings: Annotated[int, typer.Option("--siblings", help="Proposals for a position.")] = RECORDED_SIBLINGS,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads. \\[one a core]")] = None,
) -> None:
    """Record what every drafter would propose at every position of answers to held-out text."""
    names = split(drafters)
    check_drafter_names(names)
    if "draft" in names and target is not None and draft is None:
        raise InputError("--target without --draft: name one with its vocabulary, or --drafters suffix,lookup")
    check_parent(output)
    for option, value in (("--prompts", prompts), ("--tokens", tokens), ("--prompt-characters", prompt_characters)):
        if value < 1:
            raise InputError(f"{option} {value} is out of range: give 1 or more")
    options = {
        "target": ModelOptions(
            embedded_target() if target is None else resolve_model(target), threads=threads, model_defaults=False
        ),
        "draft": ModelOptions(embedded_draft() if draft is None else resolve_model(draft), threads=threads),
    }
    if workloads is not None:
        refuse_given(context, dict.fromkeys(_OF_KINDS, "has no effect with --workloads: leave out one of them"))
        chosen = list(WORKLOADS) if workloads == "all" else split(workloads)
        check_workload_names(chosen)
        if MIXED in chosen:
            raise InputError(f"--workloads {MIXED}: it is made of the others' tasks; leave it out")
        settings = BenchSettings(
            chosen, (AUTO,), names, temperature=temperature, tokens=tokens, prompts=prompts, laps=prompts
        )
        recordings = record_workloads(settings, options["target"], options["draft"])
    else:
        texts = [(kind, n, text) for kind in split(kinds) for n, text in enumerate(heldout(kind)[:prompts], 1)]
        loaded = load(
            options["target"],
            draft=options["draft"] if "draft" in names else None,
            drafters=names,
            policy=FixedPolicy(depth),
        )
        recordings = []
        with loaded as model, progress_bar() as progress:
            task = progress.add_task("", total=len(texts))
            for index, (kind, number, text) in enumerate(texts):
                progress.update(task, description=f"{kind}, text {number}")
                recordings.append(
                    record(
                        model,
                        text[:prompt_characters],
                        name=f"{kind} {number}",
                        depth=depth,
                        siblings=siblings,
                        report=lambda share, index=index: progress.update(task, completed=index + share),  # type: ignore[misc]
                        max_tokens=tokens,
                        temperature=temperature,
                        seed=index,
                    )
                )
    save_recordings(output, recordings)
    num_tokens = sum(len(recording.token_ids) for recording in recordings)
    print(f"{len(recordings)} recordings of {num_tokens} tokens, {output.stat().st_size / 1e6:.1f} MB: {output}")


def record_workloads(settings: BenchSettings, target: ModelOptions, draft: ModelOptions) -> list[Recording]:
    recordings = []
    with Worker() as worker, ExitStack() as opened, progress_bar() as progress:

        def open_here(options: ModelOptions) -> Engine:
            engine = worker.call(lambda: open_engine(options))
            opened.callback(worker.call, engine.close)
            return engine

        engines = wall_engines(open_here(target), open_here(draft) if "draft" in settings.drafters else None, worker)
        bar = progress.add_task("", total=len(settings.workloads) * settings.prompts)
        finder = TaskFinder(engines, settings, tell=lambda doing: progress.update(bar, description=doing))
        for number, name in enumerate(settings.workloads, start=1):
            workload = WORKLOADS[name]
            found = WorkloadResult(name, workload.about, workload.forced)
            for prepared in finder.find(found):
                recordings.append(prepared.recording)
                progress.advance(bar)
            progress.update(bar, completed=number * settings.prompts)
    return recordings


def replay_command(
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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")] = None,
) -> None:
    """Replay recordings under every policy and every static draft length, beside the best there could have been."""
    if json_file is not None:
        check_parent(json_file)
    check_draft_ms(context, draft_ms, [costs])
    groups = recordings_by_kind(recordings)
    first = next(iter(groups.values()))[0]
    names = [trace.name for trace in first.traces] if drafters is None else split(drafters)
    profile = costs_named(costs, draft_ms, [trace_named(first, name) for name in names])
    policies = {f"fixed {length}": length for length in (0, *STATIC_LENGTHS)} | dict.fromkeys(ADAPTIVE_POLICIES, None)
    figures: dict[str, Any] = {}
    console = Console(highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    with progress_bar() as progress:
        task = progress.add_task("", total=len(groups) * (len(policies) + 1))
        for kind, group in groups.items():
            progress.update(task, description=f"{kind}: oracle")
            best_s = [oracle_s(recording, profile, drafters=names) for recording in group]
            progress.advance(task)
            figures[kind] = {}
            for name, length in policies.items():
                progress.update(task, description=f"{kind}: {name}")
                policy: Policy = FixedPolicy(length) if length is not None else build_policy(name, costs=profile)
                figures[kind][name] = _figures(group, policy, profile, names, best_s)
                progress.advance(task)
    for kind, of_kind in figures.items():
        console.print(_table(kind, len(groups[kind]), costs, of_kind))
    if json_file is not None:
        report = {"costs": costs, "draft_ms": draft_ms, "drafters": names, "kinds": figures}
        with atomic_file(json_file) as partial:
            partial.write_text(json.dumps({"machine": machine(), "replay": report}) + "\n", encoding="utf-8")


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
    result = replay(group, stopwatch, profile, drafters=names)
    shares, share = result.oracle_shares(best_s)
    return {
        "tokens_per_second": result.tokens_per_second,
        "rounds": result.rounds,
        "accept_share": result.accept_share,
        "share_of_oracle": share,
        "lowest_share_of_oracle": min(shares),
        "deciding_us": stopwatch.spent_s / result.rounds * 1e6,
    }


def _table(kind: str, count: int, costs: str, of_kind: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{kind}, {count} texts, {costs}", title_justify="left", box=None)
    table.add_column("policy")
    for column in ("tokens/s", "of plain", "of oracle", "accepted", "rounds", "deciding, us a round"):
        table.add_column(column, justify="right")
    plain = of_kind["fixed 0"]["tokens_per_second"]
    for name, row in of_kind.items():
        accepted = row["accept_share"]
        table.add_row(
            "plain" if name == "fixed 0" else name,
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / plain:.2f}",
            f"{row['share_of_oracle']:.2f}",
            "" if accepted is None else f"{accepted:.0%}",
            str(row["rounds"]),
            f"{row['deciding_us']:.0f}",
        )
    return table


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


def split(names: str) -> list[str]:
    """Return names that are given with commas between them."""
    return [name.strip() for name in names.split(",") if name.strip()]
