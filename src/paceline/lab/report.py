"""What a command found out, said once: sentences, tables and charts, printed on a terminal or written as a page.

A page needs nothing else: inline SVG, inline style, no script, no network. Its charts are left out on a terminal.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from paceline.terminal_text import printable, printable_line

if TYPE_CHECKING:
    from jinja2 import Template

NONE: Final = "-"
"""Cell of a figure that there is not."""
_WIDEST: Final = 1000
"""Columns that any table fits in."""
_STYLES: Final = {"": "", "soft": "dim", "bad": "yellow"}


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the top of a page. ``kind``, of the variant it is about, gives it its colour."""

    figure: str
    words: str
    kind: str = "plain"


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence, or one of a list's."""

    words: str
    look: Literal["", "soft", "bad"] = ""
    item: bool = False
    block: ClassVar = "line"


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table. ``kind`` gives it its look on a page; what ``wins`` is green on a terminal."""

    cells: Sequence[str]
    kind: str = ""
    wins: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table, whose first column says what a row is about.

    Attributes:
        wordy: further columns that hold words and no figures.
        spare: columns that a narrow terminal goes without, the least important first.
    """

    columns: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    wordy: Collection[str] = ()
    spare: Sequence[str] = ()
    block: ClassVar = "table"


@dataclass(frozen=True, slots=True)
class Code:
    """Lines to be copied as they are, for what the title names, and why they may be of no use."""

    title: str
    text: str
    warnings: Sequence[str] = ()
    block: ClassVar = "code"


@dataclass(frozen=True, slots=True)
class Charts:
    """Markup of charts, which escapes the names in it itself; ``wide`` ones take a page's whole width."""

    pictures: Sequence[str]
    wide: bool = False
    block: ClassVar = "charts"


Block: TypeAlias = Line | Table | Code | Charts


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report. Of one that holds charts alone, a terminal shows nothing."""

    title: str
    blocks: Sequence[Block]
    about: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A whole report of ``command``. The title's lines name the models, the facts what was measured and where."""

    command: str
    title: Sequence[str]
    facts: Sequence[str]
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()


def machine_fact(machine: Mapping[str, str]) -> list[str]:
    """Return a line on what was measured on: the processor, the system and the versions; none of nothing."""
    whole = ("processor", "system")
    words = [machine[name] for name in whole if name in machine]
    others = [f"{name} {version}" for name, version in machine.items() if name not in whole]
    # How many threads there were decides more than any version.
    words += sorted(others, key=lambda fact: not fact.startswith("threads "))
    return [", ".join(words)] if words else []


def render_page(report: Report) -> str:
    return _template().render(report=report, style=files("paceline.lab").joinpath("page.css").read_text("utf-8"))


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined  # they take a while to import

    source = files("paceline.lab").joinpath("page.html").read_text("utf-8")
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True).from_string(
        source
    )


def print_report(console: Console, report: Report) -> None:
    for line in report.title:
        console.print(line, style="bold", markup=False)
    for line in report.facts:
        console.print(line, style="dim", markup=False)
    for section in report.sections:
        if all(isinstance(block, Charts) for block in section.blocks):
            continue
        console.print()
        if section.title:
            console.print(section.title, style="bold cyan", markup=False)
        if section.about:
            console.print(section.about, style="dim", markup=False)
        for block in section.blocks:
            _print_block(console, block)


def _print_block(console: Console, block: Block) -> None:
    match block:
        case Line():
            words = f"- {block.words}" if block.item else block.words
            console.print(words, style=_STYLES[block.look], markup=False)
        case Code():
            console.print(f"\n{block.title}", style="bold", markup=False)
            for warning in block.warnings:
                console.print(warning, style=_STYLES["bad"], markup=False)
            # Not as the console would have it, in lines of its width, so that it can be copied.
            console.file.write(printable(block.text) + "\n")
        case Table():
            _print_table(console, block)
        case Charts():
            pass


def _print_table(console: Console, table: Table) -> None:
    unbounded = console.options.update(width=_WIDEST)
    left_out: set[str] = set()
    grid = _make_grid(table, left_out)
    for column in table.spare:
        if console.measure(grid, options=unbounded).maximum <= console.width:
            break
        left_out.add(column)
        grid = _make_grid(table, left_out)
    console.print(grid)
    if left_out:
        words = ", ".join(column for column in table.columns if column in left_out)
        console.print(f"not shown on {console.width} columns: {words}", style="dim", markup=False)


def _make_grid(table: Table, left_out: Collection[str]) -> Grid:
    grid = Grid(box=None, pad_edge=False, title=table.title or None, title_justify="left")
    shown = [index for index, column in enumerate(table.columns) if column not in left_out]
    for index in shown:
        if index == 0 or table.columns[index] in table.wordy:
            grid.add_column(table.columns[index], overflow="fold")
        else:
            # Figures are cut short where they may not wrap, so a table that has nothing to spare wraps them.
            grid.add_column(table.columns[index], justify="right", no_wrap=bool(table.spare), overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(printable_line(row.cells[index])) for index in shown), style="green" if row.wins else None)
    return grid
