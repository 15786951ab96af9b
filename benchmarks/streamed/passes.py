"""``python -m benchmarks streamed-passes``: what passes take in a box that is smaller than the model.

Two variants take turns, each time in a new process in a new box: ``mmap`` is llama.cpp by itself, which maps the file
and leaves its pages to the system, and ``streamed`` is paceline within ``--memory``. Passes of all widths take turns
within a process; what the first of each computes is compared between the variants, and its time not counted.

What limits the speed is the disk, and of wide passes the processor. Streamed weights have to be read once a pass, so
no pass takes less than their bytes over the disk's bandwidth; one row and some tens of them take the same until
computing takes longer than reading. The system, which lets go of the page that was used longest ago, lets go of those
that are needed next: mapped, nearly all of the file is read for every pass.

Bytes of ``group`` are the kernel's own count of what the box read from the disk, and those of ``engine`` are
paceline's. A pass reads ahead for the next one, so single passes differ, and their mean says what one reads. Without
``--rate`` the bandwidth is that of the reads while the model was loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer

from benchmarks.planner_ab.report import console
from benchmarks.progress import progress_bar
from benchmarks.streamed import boxed
from benchmarks.streamed.box import Limits
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
from benchmarks.streamed.passing import CONTEXT, MMAP, STREAMED, VARIANTS
from paceline.atomic_output import temporary_folder
from paceline.core.errors import EngineError, InputError
from paceline.sizes import parse_bytes

EPILOG = """[bold]Examples[/bold]

python -m benchmarks streamed-passes -m target-1b-q8_0 --memory 740M --limit 760M --rate 400M
"""

ROWS: Final = "1,8,16,32,64"
_WIDE: Final = 32
"""Rows whose pass is to cost what one row's does."""
_MB: Final = 1e6


def streamed_passes(
    model: ModelOption,
    memory: MemoryOption,
    limit: LimitOption = None,
    rate: RateOption = None,
    rows: Annotated[str, typer.Option("--rows", help="Widths of passes.", metavar="N[,...]")] = ROWS,
    repeats: Annotated[int, typer.Option("--repeats", help="Passes of each width in a process.")] = 3,
    laps: Annotated[int, typer.Option("--laps", help="Processes of each variant.")] = 2,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure passes of a model that is larger than memory: mapped by llama.cpp, and streamed.

    It needs root, to make control groups (version 1) that hold a process to little memory and a slow disk.
    """
    limits, widths = limits_of(memory, limit, rate), numbers(rows, "--rows")
    if max(widths) > CONTEXT // 2 or repeats < 1 or laps < 1:
        raise InputError(
            f"{max(widths)} rows, {repeats} repeats, {laps} laps: the most rows are {CONTEXT // 2}, and the least of "
            "the others is 1"
        )
    path = found_model(model, json_file)
    job = {"task": "passes", "memory_bytes": parse_bytes(memory), "repeats": repeats, "threads": threads}
    found = {variant: Found() for variant in VARIANTS}
    with temporary_folder(path) as cache, progress_bar() as progress:
        box = boxed.Boxed(path, limits, cache)
        order = [(variant, widths[:: -1 if lap % 2 else 1]) for lap in range(laps) for variant in VARIANTS]
        for variant, in_order in progress.track(order, description="passes"):
            if found[variant].killed:
                continue
            found[variant].add(boxed.do(box, {**job, "variant": variant, "rows": in_order}))
    report = summary(found, limits, widths)
    console().print(box_text(path, limits))
    _print(report, widths)
    figures_out("streamed passes", {"model": path.name, **report}, json_file)


@dataclass
class Found:
    """What was found of a variant, over all its processes.

    Attributes:
        passes: of each width.
        logits: what passes computed, as hashes by width.
        loaded: what each process told of its load.
        peak_bytes: most memory that the box held, pages of files included, which may fill it.
        anonymous_bytes: memory of the process's own after all passes.
        killed: the system ended a process of it.
    """

    passes: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    logits: dict[int, set[str]] = field(default_factory=dict)
    loaded: list[dict[str, Any]] = field(default_factory=list)
    peak_bytes: int = 0
    anonymous_bytes: int = 0
    killed: bool = False

    def add(self, outcome: boxed.Outcome) -> None:
        """Add what a process found."""
        self.killed |= outcome.killed
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        for result in outcome.results:
            if "loaded" in result:
                self.loaded.append(result)
            elif "logits" in result:
                self.logits.setdefault(result["rows"], set()).add(result["logits"])
            elif "rows" in result:
                self.passes.setdefault(result["rows"], []).append(result)
            else:
                self.anonymous_bytes = max(self.anonymous_bytes, result["anonymous_bytes"])
        if not self.killed and not self.passes:
            raise EngineError("a process ended without a pass")


def summary(found: Mapping[str, Found], limits: Limits, widths: Sequence[int]) -> dict[str, Any]:
    """Return what passes took and what follows of it, as plain data.

    Args:
        found: by variant.
        limits: of the box.
        widths: of passes.
    """
    variants = {name: _variant(one) for name, one in found.items()}
    mapped, streamed = (variants[name]["passes"] for name in (MMAP, STREAMED))
    # None where all fits, or a process was ended before any load.
    plans = [one["plan"] for one in found[STREAMED].loaded if one["plan"] is not None]
    streamed_bytes = plans[0]["pass_bytes"] if plans else 0
    bandwidth = limits.bytes_per_s or (statistics.median(plan["bytes_per_s"] for plan in plans) if plans else None)
    read_s = streamed_bytes / bandwidth if bandwidth else None
    ratios: dict[str, Any] = {
        "mmap / streamed": {
            rows: mapped[rows]["median_s"] / streamed[rows]["median_s"]
            for rows in widths
            if rows in mapped and rows in streamed
        },
        "streamed / bytes over bandwidth": {
            rows: streamed[rows]["median_s"] / read_s for rows in widths if rows in streamed and read_s
        },
        "bytes read / streamed bytes": {
            rows: streamed[rows]["bytes_of_engine"] / streamed_bytes
            for rows in widths
            if rows in streamed and streamed_bytes
        },
    }
    if 1 in streamed and _WIDE in streamed:
        ratios[f"{_WIDE} rows / 1 row"] = streamed[_WIDE]["median_s"] / streamed[1]["median_s"]
    same = [rows for rows in widths if len({one for each in found.values() for one in each.logits.get(rows, ())}) == 1]
    return {
        "limits": {"memory_bytes": limits.memory_bytes, "bytes_per_s": limits.bytes_per_s},
        "streamed_bytes": streamed_bytes,
        "bandwidth": bandwidth,
        "bytes_over_bandwidth_s": read_s,
        "variants": variants,
        "ratios": ratios,
        "same_logits": same,
    }


def _variant(found: Found) -> dict[str, Any]:
    passes = {}
    for rows, each in found.passes.items():
        seconds = [one["seconds"] for one in each]
        passes[rows] = {
            "median_s": statistics.median(seconds),
            "least_s": min(seconds),
            "most_s": max(seconds),
            **{
                name: statistics.mean(one[name] for one in each)
                for name in ("bytes_of_group", "bytes_of_engine", "waited_s")
            },
            "all": each,
        }
    return {
        "passes": passes,
        "loaded": found.loaded,
        "peak_bytes": found.peak_bytes,
        "anonymous_bytes": found.anonymous_bytes,
        "killed": found.killed,
    }


def _print(report: Mapping[str, Any], widths: Sequence[int]) -> None:
    out, variants, ratios = console(), report["variants"], report["ratios"]
    for name, variant in variants.items():
        for loaded in variant["loaded"][:1]:
            out.print(f"{name}: {loaded['loaded']}")
        ended = "; the system ended it, as that was too little" if variant["killed"] else ""
        out.print(
            f"{name}: {variant['anonymous_bytes'] / _MB:.0f} MB of its own, at most {variant['peak_bytes'] / _MB:.0f} "
            f"with pages of files{ended}"
        )
    made = table("passes", "rows", "variant", "seconds", "least", "most", "MB read", "by engine", "waited s")
    for rows in widths:
        for name, variant in variants.items():
            if rows not in variant["passes"]:
                continue
            one = variant["passes"][rows]
            made.add_row(
                str(rows),
                name,
                *(f"{one[key]:.3f}" for key in ("median_s", "least_s", "most_s")),
                *(f"{one[key] / _MB:.1f}" for key in ("bytes_of_group", "bytes_of_engine")),
                f"{one['waited_s']:.3f}",
            )
    out.print(made)
    if report["bytes_over_bandwidth_s"]:
        out.print(
            f"streamed {report['streamed_bytes'] / _MB:.1f} MB over {report['bandwidth'] / _MB:.0f} MB/s: "
            f"{report['bytes_over_bandwidth_s']:.3f} s"
        )
    made = table("ratios", "", *(f"{rows} rows" for rows in widths))
    for name, ratio in ratios.items():
        if isinstance(ratio, dict):
            made.add_row(name, *(f"{ratio[rows]:.3f}" if rows in ratio else "" for rows in widths))
    out.print(made)
    if (wide := ratios.get(f"{_WIDE} rows / 1 row")) is not None:
        out.print(f"{_WIDE} rows / 1 row, streamed: {wide:.3f}")
    others = [str(rows) for rows in widths if rows not in report["same_logits"]]
    out.print(f"logits of {', '.join(others)} rows differ" if others else "logits are the same, bit for bit")
