"""``python -m benchmarks streamed-soak``: answers for as long as one likes in a box that is smaller than the model.

Prompts change from answer to answer. Some answers are read to their end, some cancelled in the middle, some dropped or
left in a generator that nobody ends, and some interrupted at any moment of a pass. One request is asked again and again
and must be answered as ever. It is decoded plainly: passes are the same every time then, and so is their rounding.

It fails where the process comes to hold more memory of its own than after its warm-up, by more than a stated margin, or
more threads or open files. What the box holds is told beside it: pages of files are in it, and may fill it. Nothing
here is about speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from benchmarks.planner_ab.report import console
from benchmarks.streamed import boxed
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
    table,
)
from paceline.atomic_output import temporary_folder
from paceline.cli import exits
from paceline.core.errors import EngineError, InputError
from paceline.sizes import parse_bytes

EPILOG = """[bold]Examples[/bold]

python -m benchmarks streamed-soak -m target-1b-q8_0 --memory 740M --limit 760M --rate 400M --minutes 60
"""

_BYTES: Final = "_bytes"
_WARM_UP: Final = 0.2
"""Share of the samples that are not judged."""


def streamed_soak(
    model: ModelOption,
    memory: MemoryOption,
    limit: LimitOption = None,
    rate: RateOption = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="self, a file or a name. \\[none: suffixes draft]", metavar="MODEL")
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="How long.")] = 60.0,
    requests: Annotated[int, typer.Option("--requests", help="At least so many, however long that takes.")] = 1,
    every: Annotated[float, typer.Option("--every", help="Seconds between two samples.")] = 60.0,
    margin: Annotated[str, typer.Option("--margin", help="Growth of memory that passes.", metavar="SIZE")] = "16M",
    prompt_cache: Annotated[
        int, typer.Option("--prompt-cache", help="MiB for what was read and said, which come on top.", metavar="MIB")
    ] = 0,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of prompts, and of what becomes of them.")] = 0,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Answer for hours with a model that is larger than memory; fail where the process grows.

    It needs root, to make control groups (version 1) that hold a process to little memory and a slow disk.
    """
    limits, margin_bytes = limits_of(memory, limit, rate), parse_bytes(margin)
    if not (minutes > 0 and requests > 0 and every > 0):
        raise InputError(f"{minutes} minutes, {requests} requests, a sample every {every} seconds: give more than 0")
    path = found_model(model, json_file)
    job = {
        "task": "soak",
        "memory": memory,
        "threads": threads,
        "seconds": 60 * minutes,
        "requests": requests,
        "every_s": every,
        "seed": seed,
        "prompt_cache_mib": prompt_cache,
    }
    out = console()
    out.print(box_text(path, limits))

    def told(result: Mapping[str, Any]) -> None:
        if "loaded" in result:
            out.print(result["loaded"])
            return
        out.print(
            f"after {result['after_s'] / 60:.1f} minutes: {result['anonymous_bytes'] >> 20} MiB of its own, "
            f"{result['group_bytes'] >> 20} MiB in the box, {result['threads']} threads, {result['files']} files, "
            f"{sum(result['counts'].values())} requests"
        )

    with temporary_folder(path) as cache:
        drafting, file = (None, None) if draft is None else boxed.draft_of(draft, path, cache)
        outcome = boxed.do(boxed.Boxed(path, limits, cache, file), {**job, "draft": drafting}, told)
    if outcome.killed:
        raise EngineError(f"the system ended it: {limits.memory_bytes >> 20} MiB were used up")
    samples = [one for one in outcome.results if "after_s" in one]
    judged = growth(samples)
    made = table("after the warm-up", "", "at first", "in the end")
    for name, (first, last) in judged.items():
        unit = 2**20 if name.endswith(_BYTES) else 1
        title = f"{name.removesuffix(_BYTES)} MiB" if name.endswith(_BYTES) else name
        made.add_row(title, f"{first / unit:.0f}", f"{last / unit:.0f}")
    out.print(made)
    out.print(", ".join(f"{kind} {count}" for kind, count in sorted(samples[-1]["counts"].items())))
    failed = reasons(judged, margin_bytes)
    for reason in failed:
        out.print(f"[red]fails[/red] {reason}")
    if not failed:
        out.print("[green]passes[/green]: it holds what it held, and every answer that was checked was as ever")
    figures_out("streamed soak", {"peak_bytes": outcome.peak_bytes, "samples": samples, "fails": failed}, json_file)
    if failed:
        raise typer.Exit(exits.FAILURE)


def growth(samples: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return what was held after the warm-up and in the end, as medians of the first third and the last one."""
    warm = samples[min(int(len(samples) * _WARM_UP), len(samples) - 1) :]
    third = -(-len(warm) // 3)
    return {
        name: (
            statistics.median(one[name] for one in warm[:third]),
            statistics.median(one[name] for one in warm[-third:]),
        )
        for name in ("anonymous_bytes", "group_bytes", "threads", "files")
    }


def reasons(judged: Mapping[str, tuple[float, float]], margin_bytes: int) -> list[str]:
    """Return what grew by too much; nothing where all is well."""
    found = []
    first, last = judged["anonymous_bytes"]
    if last - first > margin_bytes:
        found.append(
            f"{(last - first) / 2**20:.1f} MiB more of its own in the end, and {margin_bytes / 2**20:.1f} may be"
        )
    for name in ("threads", "files"):
        first, last = judged[name]
        if last > first:
            found.append(f"{last:g} {name} in the end, and {first:g} at first")
    return found
