"""What the measurements have in common: options that are lists, bars, tables, and figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.atomic_output import atomic_file
from paceline.cli.display import error_console
from paceline.core.errors import InputError
from paceline.machine import machine

_PIPE_WIDTH: Final = 160

JsonOption: TypeAlias = Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")]
ThreadsOption: TypeAlias = Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads. \\[one a core]")]


def split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def numbers(text: str, option: str) -> list[int]:
    """Return the numbers of a list such as ``1,8,16``."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InputError(f"{option} {text!r}: give numbers from 1 on, such as 1,8,16")
    return found


def console() -> Console:
    """Return where tables go; as wide as they need where nobody watches."""
    found = Console(highlight=False, emoji=False)
    if not found.is_terminal:
        found.width = _PIPE_WIDTH
    return found


def progress_bar() -> Progress:
    """Return a bar on the terminal's stderr, which disappears in the end."""
    out = error_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    return Progress(*columns, console=out, disable=not out.is_terminal, transient=True)


def table(title: str, *columns: str, names: int = 1) -> Table:
    """Return an empty table; the first columns are ``names``, the others are of figures."""
    made = Table(title=title or None, title_justify="left", box=None)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < names else "right")
    return made


def as_line(name: str, figures: Mapping[str, Any]) -> str:
    """Return figures as one line of JSON, beside the machine that they are of."""
    return json.dumps({"machine": machine(), name: figures})


def write_figures(name: str, figures: Mapping[str, Any], file: Path | None) -> None:
    if file is not None:
        with atomic_file(file) as partial:
            partial.write_text(as_line(name, figures) + "\n", encoding="utf-8")
