"""``python -m benchmarks streamed-answers``: what a token costs in a box that is smaller than the model.

Every variant is a whole paceline in a process of its own, in a box of its own, that answers one prompt of each workload
after the other:

=============  ========================================================================================================
``mmap``       llama.cpp by itself: the file mapped, decoded plainly
``plain``      streamed within ``--memory``, decoded plainly
``auto``       streamed, with the draft, planned by what passes cost; the costs are measured in the box, at load
``fixed:N``    streamed, chains of ``N`` tokens of the draft model
=============  ========================================================================================================

Seconds are those from the first token of an answer to its last, over the tokens after the first: the reading of prompts
and loads are told apart. A plain token takes as long as any other, so plain variants make few. Answers go on past their
end, so that all of them have the same length; those that repeat themselves, which flatters every drafter, are marked.
What limits the speed is the disk, and how many tokens a pass that reads all streamed layers brings (tau).

Texts are compared as far as the shorter one goes. Rows of passes of different widths differ in their last bits where
weights are quantised, so a near-tie may turn.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from benchmarks.planner_ab.report import console
from benchmarks.progress import progress_bar
from benchmarks.replays import split
from benchmarks.streamed import boxed
from benchmarks.streamed.answering import AUTO, FIXED, MMAP, PLAIN
from benchmarks.streamed.options import (
    JsonOption,
    LimitOption,
    MemoryOption,
    ModelOption,
    RateOption,
    ThreadsOption,
    box_text,
    figures_out,
    found_model,
    limits_of,
    numbers,
    table,
)
from paceline.atomic_output import temporary_folder
from paceline.core.divergence import first_difference
from paceline.core.errors import InputError
from paceline.lab.bench.repetition import is_repetitive
from paceline.lab.bench.workloads import FORCED_SUFFIX, WORKLOADS
from paceline.models.registry import OWN_DRAFT
from paceline.planning.policies.fixed import MAX_DRAFT

EPILOG = """[bold]Examples[/bold]

python -m benchmarks streamed-answers -m target-1b-f16 --memory 1200M --rate 400M  [dim]# its own copy drafts[/dim]

python -m benchmarks streamed-answers -m target-1b-q8_0 --memory 740M --limit 760M --rate 400M --draft draft
"""

CHOICES: Final = tuple(name for name in WORKLOADS if not name.endswith(FORCED_SUFFIX))
"""A text that a target is made to follow says nothing of what a copy of it drafts."""

_DEFAULT: Final = "new-code,editing,summary,structured,hard"


def streamed_answers(
    model: ModelOption,
    memory: MemoryOption,
    limit: LimitOption = None,
    rate: RateOption = None,
    draft: Annotated[
        str, typer.Option("--draft", help="self for a small copy of the target, or a file or a name.", metavar="MODEL")
    ] = OWN_DRAFT,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of an answer.")] = 96,
    few: Annotated[int, typer.Option("--few", help="Tokens of an answer where each takes the same.")] = 8,
    workloads: Annotated[
        str, typer.Option("--workloads", help=f"Among {', '.join(CHOICES)}.", metavar="NAME[,...]")
    ] = _DEFAULT,
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts of each workload.")] = 1,
    temperatures: Annotated[
        str, typer.Option("--temperatures", help="Of all workloads but hard, which has its own.", metavar="T[,...]")
    ] = "0,0.8",
    variants: Annotated[
        str | None, typer.Option("--variants", help="\\[mmap,plain,auto and the static settings]", metavar="NAME[,...]")
    ] = None,
    statics: Annotated[
        str, typer.Option("--static", help="Chain lengths of the static settings.", metavar="N[,...]")
    ] = "16,32,64",
    context: Annotated[int, typer.Option("-c", "--ctx-size", help="Context, which takes memory, too.")] = 512,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of texts and sampling.")] = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure seconds a token of a model that is larger than memory: mapped, streamed, and drafted for.

    It needs root, to make control groups (version 1) that hold a process to little memory and a slow disk.
    """
    limits = limits_of(memory, limit, rate)
    lengths = numbers(statics, "--static")
    names = _chosen(split(variants) if variants else [MMAP, PLAIN, AUTO, *(f"{FIXED}:{each}" for each in lengths)])
    chosen = _workloads(split(workloads))
    degrees = _temperatures(temperatures)
    if not (tokens >= few >= 2 and prompts >= 1):
        raise InputError(
            f"{tokens} tokens, {few} tokens where few do, {prompts} prompts: give 2 or more, no more than that, and 1"
        )
    path = found_model(model, json_file)
    job = {
        "task": "answers",
        "memory": memory,
        "prompts": prompts,
        "tokens": tokens,
        "few": few,
        "context": context,
        "seed": seed,
        "threads": threads,
    }
    processes: list[dict[str, Any]] = []
    with temporary_folder(path) as cache, progress_bar() as progress:
        box, drafting = boxed.Boxed(path, limits, cache), None
        if any(name not in (MMAP, PLAIN) for name in names):
            drafting, file = boxed.draft_of(draft, path, cache)
            box = dataclasses.replace(box, draft=file)
        order = [(degree, name) for degree in degrees for name in names]
        for degree, name in progress.track(order, description="answers"):
            # A workload that has a temperature of its own is the same at every one.
            asked = [each for each in chosen if degree == degrees[0] or not _has_its_own(each)]
            outcome = _without_profiles(
                box, {**job, "draft": drafting, "variant": name, "temperature": degree, "workloads": asked}
            )
            processes.append(
                {
                    "variant": name,
                    "temperature": degree,
                    "killed": outcome.killed,
                    "peak_bytes": outcome.peak_bytes,
                    "bytes_read": outcome.bytes_read,
                    "loaded": next((one for one in outcome.results if "loaded" in one), None),
                    "answers": [one for one in outcome.results if "token_ids" in one],
                }
            )
    report = {
        "limits": {"memory": memory, "bytes": limits.memory_bytes, "bytes_per_s": limits.bytes_per_s},
        "rows": rows_of(processes, names),
        "processes": processes,
    }
    console().print(f"{box_text(path, limits)}; {memory} are paceline's")
    _print(report, names)
    figures_out("streamed answers", {"model": path.name, "draft": draft, **report}, json_file)


def rows_of(processes: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures of every workload and temperature, by variant.

    Args:
        processes: what each told, with its variant.
        names: of the variants.
    """
    found: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = {}
    for process in processes:
        for one in process["answers"]:
            key = one["workload"], one["temperature"]
            found.setdefault(key, {}).setdefault(process["variant"], []).append(one)
    return [
        {"workload": workload, "temperature": temperature, **_row(by_variant, names)}
        for (workload, temperature), by_variant in found.items()
    ]


def _row(by_variant: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str]) -> dict[str, Any]:
    seconds, tau, prompt_s = {}, {}, {}
    for name, answers in by_variant.items():
        later = sum(len(one["token_ids"]) - 1 for one in answers)
        seconds[name] = sum(one["seconds"] for one in answers) / later
        tau[name] = later / sum(one["rounds"] for one in answers)
        prompt_s[name] = statistics.mean(one["prompt_s"] for one in answers)
    best = min((seconds[name] for name in names if name.startswith(FIXED) and name in seconds), default=None)
    auto = seconds.get(AUTO)
    reference = by_variant.get(AUTO) or next(iter(by_variant.values()))
    return {
        "s_per_token": seconds,
        "tau": tau,
        "prompt_s": prompt_s,
        "mmap / auto": seconds[MMAP] / auto if auto and MMAP in seconds else None,
        "best static / auto": best / auto if auto and best else None,
        "differences": _differences(by_variant, reference),
        "loops": sum(is_repetitive(one["token_ids"]) for one in reference),
    }


def _differences(
    by_variant: Mapping[str, Sequence[Mapping[str, Any]]], reference: Sequence[Mapping[str, Any]]
) -> dict[str, int]:
    """Return the variants that say something else than the reference, and from which token on."""
    found: dict[str, int] = {}
    for name, answers in by_variant.items():
        for one, other in zip(answers, reference, strict=False):
            length = min(len(one["token_ids"]), len(other["token_ids"]))
            index = first_difference(one["token_ids"][:length], other["token_ids"][:length])
            if index is not None:
                found[name] = min(index, found.get(name, index))
    return found


def _without_profiles(box: boxed.Boxed, job: Mapping[str, Any]) -> boxed.Outcome:
    """Do a job in a process that measures what passes cost, whatever others measured."""
    for kept in (box.cache / "profiles").glob("*"):
        kept.unlink()
    return boxed.do(box, job)


def _chosen(names: Iterable[str]) -> list[str]:
    found = list(names)
    for name in found:
        kind, _, length = name.partition(":")
        if name in (MMAP, PLAIN, AUTO):
            continue
        if kind != FIXED or not length.isdecimal() or not 1 <= int(length) <= MAX_DRAFT:
            raise InputError(
                f"unknown variant {name!r}: choose from {MMAP}, {PLAIN}, {AUTO} and {FIXED}:1 to {FIXED}:{MAX_DRAFT}"
            )
    return found


def _workloads(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in CHOICES:
            raise InputError(f"unknown workload {name!r}: choose from {', '.join(CHOICES)}")
    return list(names)


def _temperatures(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--temperatures {text!r}: give numbers, such as 0,0.8") from None
    if not all(0 <= each < 10 for each in found):
        raise InputError(f"--temperatures {text}: give numbers from 0 to 10")
    return found


def _has_its_own(workload: str) -> bool:
    """Return whether a workload is sampled in a way of its own."""
    return workload == "hard"


def _print(report: Mapping[str, Any], names: Sequence[str]) -> None:
    out, rows = console(), report["rows"]
    for process in report["processes"]:
        title = f"{process['variant']}, temperature {process['temperature']:g}"
        if process["killed"]:
            out.print(f"{title}: ended by the system, as its memory was used up")
        elif process["loaded"] is not None:
            profile = process["loaded"]["profile"]
            measured = f", costs by {profile['num_passes']} passes in {profile['took_s']:.1f} s" if profile else ""
            out.print(
                f"{title}: loaded in {process['loaded']['load_s']:.1f} s{measured}, at most "
                f"{process['peak_bytes'] / 1e6:.0f} MB held"
            )
    made = table("seconds a token", "workload", "temperature", *names, "mmap / auto", "best static / auto", "texts")
    for row in rows:
        marks = [f"{name} from token {index}" for name, index in row["differences"].items()]
        said = f"differ: {', '.join(marks)}" if marks else "same"
        made.add_row(
            row["workload"],
            f"{row['temperature']:g}",
            *(_figure(row["s_per_token"].get(name), 3) for name in names),
            *(_figure(row[name], 2) for name in ("mmap / auto", "best static / auto")),
            f"{said}, loops" if row["loops"] else said,
        )
    out.print(made)
    made = table("tokens a pass (tau)", "workload", "temperature", *names)
    for row in rows:
        made.add_row(
            row["workload"],
            f"{row['temperature']:g}",
            *(_figure(row["tau"].get(name), 1) for name in names),
        )
    out.print(made)


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
