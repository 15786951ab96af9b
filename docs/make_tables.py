"""Writes the tables of results into the pages that show them: ``python docs/make_tables.py``.

Results lie in ``docs/results``, one JSON file for each table::

    {"machine": "...", "date": "2026-11-24", "commands": ["..."], "notes": ["..."],
     "columns": ["weights", "of plain"], "rows": [["Q4_0", 1.33]]}

A cell is a text, a number, or ``null`` for what was not measured. Where figures need a fixed number of digits they are
written as texts, as they were printed by what measured them. A page names the table between two comments::

    <!-- table: sessions -->
    <!-- end of table -->

``--check`` writes nothing, and ends with status 1 where a page would change.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
PLACE = re.compile(r"(<!-- table: (?P<name>[a-z0-9-]+) -->\n)(?P<table>.*?)(?=<!-- end of table -->)", re.DOTALL)
NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+( ?%)?")


@dataclass(frozen=True, slots=True)
class Results:
    """One table.

    Attributes:
        columns: headings.
        rows: cells, as many in each row as there are columns.
        machine: what it was measured on.
        date: when, as ``YYYY-MM-DD``, or ``""`` where nothing was measured.
        commands: what measures it again.
        notes: what a reader has to know of it, a sentence or two each.
    """

    columns: list[str]
    rows: list[list[str | int | float | None]]
    machine: str
    date: str
    commands: list[str]
    notes: list[str]


def read(path: Path) -> Results:
    """Read a file of results.

    Raises:
        ValueError: a key is missing or unknown, or a row has more or fewer cells than there are columns.
    """
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    wanted = set(Results.__dataclass_fields__)
    if set(data) != wanted:
        raise ValueError(f"{path.name}: has the keys {sorted(data)}, and needs {sorted(wanted)}")
    for number, row in enumerate(data["rows"], start=1):
        if len(row) != len(data["columns"]):
            raise ValueError(f"{path.name}: row {number} has {len(row)} cells for {len(data['columns'])} columns")
    return Results(**data)


def markdown(results: Results) -> str:
    """Return the table, and below it the notes, the machine, the day and the commands."""
    texts = [
        ["" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row]
        for row in results.rows
    ]
    numeric = [
        all(NUMBER.fullmatch(cell) for cell in column if cell) and any(column) for column in zip(*texts, strict=True)
    ]
    lines = [_line(results.columns), _line(["--:" if is_number else "---" for is_number in numeric])]
    lines += [_line(row) for row in texts]
    source = ". ".join(text for text in (results.machine, results.date) if text)
    below = [*results.notes]
    if source:
        below.append(f"*{source}.*")
    if results.commands:
        below.append("```sh\n" + "\n".join(results.commands) + "\n```")
    return "\n".join(lines) + "\n\n" + "".join(f"{paragraph}\n\n" for paragraph in below)


def filled(page: str) -> str:
    """Return the text of a page with its tables as the results are now.

    Raises:
        ValueError: a table has no results, or no end.
    """
    if page.count("<!-- table: ") != page.count("<!-- end of table -->"):
        raise ValueError("a table lacks its beginning or its end")

    def table(place: re.Match[str]) -> str:
        path = RESULTS / f"{place['name']}.json"
        if not path.exists():
            raise ValueError(f"there are no results {path.name}")
        return place[1] + "\n" + markdown(read(path))

    return PLACE.sub(table, page)


def named(page: str) -> set[str]:
    """Return the names of a page's tables."""
    return {place["name"] for place in PLACE.finditer(page)}


def main(arguments: list[str]) -> int:
    """Fill all pages; return the exit status."""
    if arguments not in ([], ["--check"]):
        print(f"{' '.join(arguments)}: the only option is --check", file=sys.stderr)
        return 2
    stale = []
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        new = filled(page)
        if new != page:
            stale.append(path.relative_to(DOCS.parent))
            if not arguments:
                path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'is not' if arguments else 'now'} as its results are")
    return 1 if stale and arguments else 0


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
