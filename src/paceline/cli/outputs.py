"""Where the figures of a command go: a report or one JSON object on standard output, and files beside it."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer
from rich.console import Console

from paceline.atomic_output import atomic_file, check_parent
from paceline.cli.display import error_console, output_console, print_json
from paceline.core.errors import InputError
from paceline.terminal_text import json_text, printable

OPTIONAL_VALUE: Final = "[=FILE]"
"""What the help shows of the value of an option that may have none."""

STANDARD_OUTPUT: Final = "-"
"""Value of such an option where it has none."""

json_option = functools.partial(
    typer.Option,
    "--json",
    help="Print one JSON object instead; with =FILE, also write it to a file.",
    metavar=OPTIONAL_VALUE,
)
"""Makes ``--json``, which is the same in all commands."""

JsonTo: TypeAlias = Annotated[str | None, json_option(rich_help_panel="Output")]
HtmlFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--html", help="Write a report as an HTML page.", metavar="FILE", rich_help_panel="Output"),
]


@dataclass(frozen=True, slots=True)
class Outputs:
    """What ``--json`` and ``--html`` ask for.

    Attributes:
        json_to: the path of a file, ``"-"`` for standard output, or ``None`` for neither.
    """

    json_to: str | None
    html: Path | None = None

    @property
    def prints_json(self) -> bool:
        """Whether standard output gets the JSON object, and nothing else."""
        return self.json_to == STANDARD_OUTPUT

    @property
    def _json_file(self) -> Path | None:
        return None if self.json_to is None or self.prints_json else Path(self.json_to)

    def check(self) -> None:
        """Raise as :func:`check_outputs` does."""
        check_outputs({"--json": self._json_file, "--html": self.html})

    def write(self, facts: Any, report: Callable[[], None], page: Callable[[], str] = str) -> None:
        """Write the files, then print the JSON or the report.

        A reader that leaves early takes nothing but its own, and what took an hour to measure is said though a file
        cannot be written.
        """
        errors: list[InputError] = []
        written: list[str] = []
        files: tuple[tuple[str, Path | None, Callable[[], str]], ...] = (
            ("all figures", self._json_file, lambda: json_text(facts, indent=1) + "\n"),
            ("to look at", self.html, lambda: printable(page())),
        )
        for about, path, text in files:
            if path is None:
                continue
            try:
                with atomic_file(path) as partial:
                    partial.write_text(text(), encoding="utf-8")
                written.append(f"{about}: {path}")
            except InputError as error:
                errors.append(error)
        if self.prints_json:
            print_json(facts)
        else:
            report()
        for line in written:
            error_console().print(line, markup=False)
        if errors:
            raise errors[0]


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Refuse files that cannot be written, or are the same, before what they are for has taken long."""
    options: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        if path.is_dir() or not path.name:
            raise InputError(f"{option} {path} is a folder: give the path of a file")
        check_parent(path)
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"{option} {path} cannot be written: there is no permission to write into {path.parent}")
        other = options.setdefault(path.resolve(), option)
        if other != option:
            raise InputError(f"{other} and {option} are the same file, {path}: give two")


def report_console(pipe_width: int = 120) -> Console:
    """Return a console for a report with tables, which has this many columns where standard output is no terminal."""
    console = output_console(soft_wrap=False)
    # Not rich's word for it, which FORCE_COLOR changes.
    if not sys.stdout.isatty():
        console.width = pipe_width
    return console
