"""Options that the measurements of streamed models share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.table import Table

from benchmarks.streamed.box import Limits
from paceline.atomic_output import atomic_file, check_parent
from paceline.core.errors import InputError
from paceline.engines.limits import check_range
from paceline.machine import machine
from paceline.models.registry import resolve_model
from paceline.sizes import parse_bytes

ModelOption: TypeAlias = Annotated[str, typer.Option("-m", "--model", help="A GGUF file or a name.")]
MemoryOption: TypeAlias = Annotated[
    str, typer.Option("--memory", help="What paceline is told that it may hold, such as 740M.", metavar="SIZE")
]
LimitOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--limit", help="What the box allows, pages of files included. \\[as --memory]", metavar="SIZE"),
]
RateOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--rate", help="Most that is read from the disk in a second. \\[any]", metavar="SIZE"),
]
ThreadsOption: TypeAlias = Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads.")]
JsonOption: TypeAlias = Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")]


def limits_of(memory: str, limit: str | None, rate: str | None) -> Limits:
    """Return what the box allows.

    Raises:
        InputError: a size is none, or the box is smaller than what the process may hold.
    """
    memory_bytes = parse_bytes(memory)
    limit_bytes = memory_bytes if limit is None else parse_bytes(limit)
    if limit_bytes < memory_bytes:
        raise InputError(f"--limit {limit} is less than --memory {memory}: the process would be ended")
    bytes_per_s = None if rate is None else parse_bytes(rate)
    if bytes_per_s is not None:
        check_range("--rate", bytes_per_s, 1, 1 << 40)
    return Limits(limit_bytes, bytes_per_s)


def found_model(model: str, json_file: Path | None) -> Path:
    """Return the path of a model, once it is known that figures can be written.

    Raises:
        InputError: there is no such model, or no folder for the figures.
    """
    if json_file is not None:
        check_parent(json_file)
    return resolve_model(model)


def box_text(path: Path, limits: Limits) -> str:
    """Return which model is in which box."""
    rate = limits.bytes_per_s
    slow = "as fast as the disk is" if rate is None else f"at most {rate / 1e6:.0f} MB/s"
    return f"{path.name} in {limits.memory_bytes / 1e6:.0f} MB, {slow}"


def numbers(text: str, option: str, *, least: int = 1) -> list[int]:
    """Return the numbers of a list such as ``1,8,16``.

    Raises:
        InputError: it is none, or one is too small.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text!r}: give numbers, such as 1,8,16") from None
    for number in found:
        check_range(option, number, least, 1 << 20)
    return found


def figures_out(name: str, figures: Mapping[str, Any], file: Path | None) -> None:
    """Print figures as one line, or write them to a file."""
    line = json.dumps({"machine": machine(), name: figures})
    if file is None:
        print(line)
        return
    with atomic_file(file) as partial:
        partial.write_text(f"{line}\n", encoding="utf-8")


def table(title: str, *columns: str) -> Table:
    """Return an empty table; the first column is of names."""
    made = Table(title=title, title_justify="left", box=None)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    return made
