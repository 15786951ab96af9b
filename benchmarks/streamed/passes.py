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

from benchmarks.reporting import (
    JsonOption,
    ThreadsOption,
    as_line,
    console,
    numbers,
    progress_bar,
    table,
    write_figures,
)
from benchmarks.streamed.box import Limits, Outcome, measure_in_box
from benchmarks.streamed.passing import CONTEXT, MMAP, STREAMED, VARIANTS
from paceline.atomic_output import check_parent, temporary_folder
from paceline.core.errors import EngineError, InputError
from paceline.engines.options import check_range
from paceline.models.registry import resolve_model
from paceline.sizes import parse_bytes

EPILOG = """[bold]Examples[/bold]

python -m benchmarks streamed-passes -m target-1b-q8_0 --memory 740M --limit 760M --rate 400M
"""

ROWS: Final = "1,8,16,32,64"
_WIDE: Final = 32
"""Rows whose pass is to cost what one row's does."""
_MB: Final = 1e6


def streamed_passes(
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file or a name.")],
    memory: Annotated[
        str, typer.Option("--memory", help="What paceline is told that it may hold, such as 740M.", metavar="SIZE")
    ],
    limit: Annotated[
        str | None,
        typer.Option("--limit", help="What the box allows, pages of files included. \\[as --memory]", metavar="SIZE"),
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Most that is read from the disk in a second. \\[any]", metavar="SIZE")
    ] = None,
    rows: Annotated[str, typer.Option("--rows", help="Widths of passes.", metavar="N[,...]")] = ROWS,
    repeats: Annotated[int, typer.Option("--repeats", help="Passes of each width in a process.", min=1)] = 3,
    laps: Annotated[int, typer.Option("--laps", help="Processes of each variant.", min=1)] = 2,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Measure passes of a model that is larger than memory: mapped by llama.cpp, and streamed.

    It needs root, to make control groups (version 1) that hold a process to little memory and a slow disk.
    """
    limits, widths = limits_of(memory, limit, rate), numbers(rows, "--rows")
    if max(widths) > CONTEXT // 2:
        raise InputError(f"--rows {max(widths)}: the most are {CONTEXT // 2}")
    if json_file is not None:
        check_parent(json_file)
    path = resolve_model(model)
    job = {"memory_bytes": parse_bytes(memory), "repeats": repeats, "threads": threads}
    found = {variant: Found() for variant in VARIANTS}
    with temporary_folder(path) as cache, progress_bar() as progress:
        order = [(variant, widths[:: -1 if lap % 2 else 1]) for lap in range(laps) for variant in VARIANTS]
        for variant, in_order in progress.track(order, description="passes"):
            if not found[variant].killed:
                found[variant].add(measure_in_box(path, limits, cache, {**job, "variant": variant, "rows": in_order}))
    report = {"model": path.name, **summary(found, limits, widths)}
    slow = "as fast as the disk is" if rate is None else f"at most {parse_bytes(rate) / _MB:.0f} MB/s"
    console().print(f"{path.name} in {limits.memory_bytes / _MB:.0f} MB, {slow}")
    _print(report, widths)
    if json_file is None:
        print(as_line("streamed passes", report))
    write_figures("streamed passes", report, json_file)


def limits_of(memory: str, limit: str | None, rate: str | None) -> Limits:
    memory_bytes = parse_bytes(memory)
    limit_bytes = memory_bytes if limit is None else parse_bytes(limit)
    if limit_bytes < memory_bytes:
        raise InputError(f"--limit {limit} is less than --memory {memory}: the process would be ended")
    bytes_per_s = None if rate is None else parse_bytes(rate)
    if bytes_per_s is not None:
        check_range("--rate", bytes_per_s, 1, 1 << 40)
    return Limits(limit_bytes, bytes_per_s)


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

    def add(self, outcome: Outcome) -> None:
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
    """Return what passes took and what follows of it, as plain data."""
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
