"""``python -m benchmarks planner-ab``: both sides run, then judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer

from benchmarks.planner_ab.corpus import CORPORA, HALVES, LAPS, QUICK_LAPS
from benchmarks.planner_ab.environments import Job, run_all
from benchmarks.planner_ab.policies import POLICY_HELP, builder
from benchmarks.planner_ab.sides import Side, chosen_profiles, side_of
from benchmarks.planner_ab.verdict import CELLS, GROUPINGS, LOW, Answer, Figures, figures, grouped, most_lost, reasons
from benchmarks.reporting import JsonOption, console, progress_bar, split, table, write_figures
from paceline.atomic_output import check_parent
from paceline.cli import exits
from paceline.core.errors import InputError
from paceline.engines.threads import usable_cores
from paceline.lab.variants import AUTO

EPILOG = """[bold]Examples[/bold]

python -m benchmarks planner-ab --old main  [dim]# the working tree against main[/dim]

python -m benchmarks planner-ab --old main --quick --half tuning  [dim]# while trying things out[/dim]

python -m benchmarks planner-ab --old v1.2 --new HEAD --json gate.json

python -m benchmarks planner-ab --old HEAD --new-policy "fixed 5"

python -m benchmarks planner-ab --old HEAD --new-policy mine.py:build  [dim]# see docs/guides/planner-gate.md[/dim]
"""

_WORST: Final = 10
_SAME: Final = 1e-9
"""Relative difference of plain seconds within which both sides replayed the same."""


def planner_ab(
    old: Annotated[str, typer.Option("--old", help="Revision to compare with.", metavar="REV")],
    new: Annotated[
        str | None, typer.Option("--new", help="Revision to judge. \\[the working tree]", metavar="REV")
    ] = None,
    old_policy: Annotated[
        str, typer.Option("--old-policy", help=f"The policy to compare with: {POLICY_HELP}.", metavar="POLICY")
    ] = AUTO,
    new_policy: Annotated[
        str, typer.Option("--new-policy", help="The policy to judge, likewise.", metavar="POLICY")
    ] = AUTO,
    quick: Annotated[bool, typer.Option("--quick", help="A third of the texts.")] = False,
    half: Annotated[str | None, typer.Option("--half", help=f"{' or '.join(HALVES)}. \\[both]", metavar="HALF")] = None,
    profiles: Annotated[
        str | None, typer.Option("--costs", help="Profiles of benchmarks/costs. \\[all]", metavar="NAME[,...]")
    ] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", help="Processes at once. \\[one a core]", min=1)] = None,
    json_file: JsonOption = None,
) -> None:
    """Judge a change of the planner: what it costs, by replay of the same texts under the old one and the new one.

    The exit status is 1 if it costs too much anywhere. A rerun gives the same figures.
    """
    if json_file is not None:
        check_parent(json_file)
    if half is not None and half not in HALVES:
        raise InputError(f"unknown half {half!r}: choose from {', '.join(HALVES)}")
    for policy in (old_policy, new_policy):
        builder(policy)
    sides = [side_of(old, old_policy), side_of(new, new_policy)]
    names = chosen_profiles(sides, None if profiles is None else split(profiles))
    job = {"laps": QUICK_LAPS if quick else LAPS, "halves": HALVES if half is None else [half]}
    answers = _answers(sides, names, job, max((jobs or usable_cores()) // len(sides), 1))
    overall = figures(answers)
    groups = {title: grouped(answers, key) for title, key in GROUPINGS.items()}
    failed = reasons(overall, groups[CELLS])
    _print(sides, answers, overall, groups, failed)
    if json_file is not None:
        report = {
            "sides": [
                {
                    "revision": side.environment.name,
                    "commit": side.environment.commit,
                    "policy": side.policy,
                    "own_times_us": side.own_times,
                }
                for side in sides
            ],
            "quick": quick,
            "half": half,
            "overall": dataclasses.asdict(overall),
            "groups": {
                title: {name: dataclasses.asdict(row) for name, row in rows.items()} for title, rows in groups.items()
            },
            "reasons": failed,
            "columns": list(Answer._fields),
            "answers": answers,
        }
        write_figures("planner_ab", report, json_file)
    if failed:
        raise typer.Exit(exits.FAILURE)


def _answers(sides: Sequence[Side], names: Sequence[str], job: Job, processes: int) -> list[Answer]:
    """Run both sides; return what both have, in the order of the new one."""
    shares = [share for share in (names[number::processes] for number in range(processes)) if share]
    tasks = [
        (side, {"task": "replay", "profiles": share, **side.replaying, **job}) for share in shares for side in sides
    ]
    with progress_bar() as bar:
        step = bar.add_task("replaying", total=sum(side.steps(task) for side, task in tasks))
        found = run_all([(side.environment, task) for side, task in tasks], lambda result: bar.advance(step))
    results = [
        {tuple(result["key"]): result for of_task in found[number :: len(sides)] for result in of_task}
        for number in range(len(sides))
    ]
    corpora = {corpus.name: corpus for corpus in CORPORA}
    answers: list[Answer] = []
    # Whatever order they came in.
    ordered = sorted(results[1].items(), key=lambda item: names.index(item[0][0]))
    for (profile, corpus_name, half, scene), new in ordered:
        old = results[0].get((profile, corpus_name, half, scene))
        if old is None:
            continue
        corpus = corpora[corpus_name]
        columns = (old["texts"], new["texts"], old["plain_s"], new["plain_s"], old["seconds"], new["seconds"])
        for old_text, text, old_plain_s, plain_s, old_s, new_s in zip(*columns, strict=True):
            if old_text != text or abs(old_plain_s - plain_s) > _SAME * plain_s:
                raise InputError(
                    f"{text} with {profile}, {scene}: the sides replay different texts or costs, as plain decoding "
                    f"takes {old_plain_s:.6g} and {plain_s:.6g} s; leave it out (--costs), or give a later --old"
                )
            answers.append(
                Answer(
                    profile, corpus_name, corpus.models, corpus.temperature, half, scene, text, plain_s, old_s, new_s
                )
            )
    return answers


def _print(
    sides: Sequence[Side],
    answers: Sequence[Answer],
    overall: Figures,
    groups: Mapping[str, Mapping[str, Figures]],
    failed: Sequence[str],
) -> None:
    out = console()
    for what, side in zip(("old", "new"), sides, strict=True):
        own = ", ".join(
            f"{kind} {by_requests[min(by_requests)]:g}" for kind, by_requests in side.own_times["pair"].items()
        )
        out.print(f"{what}: {side.environment.title}, {side.policy}; microseconds of deciding a round: {own}")
    for title, rows in groups.items():
        made = table(title, "", *_COLUMNS)
        for name, row in {**rows, "all": overall}.items():
            made.add_row(name, *_cells(row))
        out.print()
        out.print(made)
    if lost := most_lost(answers, _WORST):
        said = ("costs", "temperature", "scene", "models", "half", "text")
        made = table("answers that lost most", *said, "old of plain", "new", names=len(said))
        for answer in lost:
            words = (answer.profile, answer.temperature, answer.scene, answer.models, answer.half, answer.text)
            made.add_row(*words, *(f"{answer.plain_s / each_s:.3f}" for each_s in (answer.old_s, answer.new_s)))
        out.print()
        out.print(made)
    out.print()
    for reason in failed:
        out.print(f"[red]fails[/red] {reason}")
    if not failed:
        out.print("[green]passes[/green]: it costs nothing that shows")


_COLUMNS: Final = (
    *("texts", "answers", "new over old", "95 %", "old of plain", "new"),
    *(f"old below {LOW:.2f}", "new", "old lowest", "new"),
)


def _cells(row: Figures) -> list[str]:
    return [
        f"{row.texts}",
        f"{row.answers}",
        f"{row.ratio:.4f}",
        f"{row.low:.4f} to {row.high:.4f}",
        *(f"{figure:.3f}" for figure in (row.old_of_plain, row.new_of_plain)),
        *(f"{count}" for count in (row.old_low, row.new_low)),
        *(f"{figure:.3f}" for figure in (row.old_lowest, row.new_lowest)),
    ]
