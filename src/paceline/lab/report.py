"""What a command found out, said once: sentences, tables and charts, printed on a terminal or written as a page.

A page needs nothing else: inline SVG, inline style, no script, no network. A terminal shows no charts and passages.
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

from paceline.lab.intervals import Ratio
from paceline.sizes import format_bytes, format_count
from paceline.terminal_text import printable, printable_line

if TYPE_CHECKING:
    from jinja2 import Template

    from paceline.models.description import ModelDescription

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
    """A row of a table.

    Attributes:
        kind: gives it its look on a page.
        wins: it is green on a terminal.
        link: name of the token of a passage that its first cell leads to on a page; empty for none.
    """

    cells: Sequence[str]
    kind: str = ""
    wins: bool = False
    link: str = ""


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


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a passage.

    Attributes:
        share: how strongly it is marked, from 0 to 1.
        words: what is said of it where it is pointed at or focused.
        lists: columns that are shown with the words: a heading, and lines of a text and a figure each.
        anchor: name that others link to it by; empty for none.
    """

    text: str
    share: float
    words: str
    lists: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    anchor: str = ""

    @property
    def level(self) -> int:
        """Its mark in steps, from 0 to 10."""
        return round(10 * min(max(self.share, 0.0), 1.0))


@dataclass(frozen=True, slots=True)
class Passage:
    """A text whose tokens are marked, after one that only leads up to it."""

    title: str
    before: str
    tokens: Sequence[Token]
    block: ClassVar = "passage"


Block: TypeAlias = Line | Table | Code | Charts | Passage


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report. Of one that holds charts and passages alone, a terminal shows nothing."""

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


def format_percent(ratio: Ratio) -> str:
    if ratio.value is None:
        return NONE
    if ratio.standard_error is None:
        return f"{ratio.value:.1%}"
    return f"{ratio.value * 100:.1f} ± {ratio.standard_error * 100:.1f}%"


def describe_size(what: ModelDescription) -> str:
    parameters = "unknown number of" if what.num_parameters is None else format_count(what.num_parameters)
    parts = (format_bytes(what.num_bytes), f"{parameters} parameters", what.file_type)
    return ", ".join(part for part in parts if part is not None)


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
        if all(isinstance(block, Charts | Passage) for block in section.blocks):
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
        case Charts() | Passage():
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
