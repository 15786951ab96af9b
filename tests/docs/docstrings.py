"""Docstrings that point back by a pronoun, and constants that share a docstring or have none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CONSTANT: Final = re.compile(r"(?!TYPE_CHECKING$)_?[A-Z][A-Z0-9_]+")
"""Names of module constants; type variables have one letter, and ``TYPE_CHECKING`` is the language's."""

HEADING: Final = re.compile(r"(Attributes|Args|Raises|Returns|Yields|Examples?|Notes?):")
"""Headings of a docstring's sections, as they stand on a line of their own."""

LISTS: Final = ("Attributes", "Args")
"""Sections whose entries are checked."""

ENTRY: Final = re.compile(r"(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?P<text>.*)")
"""First line of an entry: names and what they are."""

POINTS_BACK: Final = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:it|its|them|these|those|this|that|one|who|why|how|how many|which|what|the others?|the other one)\W*",
        r"(?:of|with|for|to|by) (?:it|them|these|those|one)\W*",
        r"(?:its|their) [\w-]+\W*",
        r"(?:as|what) (?:it|they) (?:was|were) \w+\W*",
        r"(?:(?:for|of|by|with|to) )?the same\b(?! \w+ (?:as|to|with)\b).*",
        r"(?:of|for) (?:these|those|them|which)\b.*",
        r".*\blikewise\b.*",
        r".*\bof the same\W*",
        r".*(?:,|\b(?:and|or))",
    )
)
"""What a description looks like that says nothing in an editor's tooltip, or that runs on into the next entry."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One docstring that does not stand by itself.

    Attributes:
        place: file and line.
        name: the constant, or the owner of the docstring and its entry.
        text: the docstring, or the entry.
    """

    place: str
    name: str
    text: str


def entry_faults(path: Path, root: Path) -> Iterator[Fault]:
    """Yield entries of ``Attributes:`` and ``Args:`` that say nothing without what stands above them.

    Args:
        path: of a module.
        root: folder from which places are given.
    """
    for owner in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(owner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for names, text in entries(ast.get_docstring(owner) or ""):
            if points_back(text):
                yield Fault(f"{path.relative_to(root)}:{owner.lineno}", f"{owner.name}.{names}", text)


def points_back(text: str) -> bool:
    """Return whether a description says nothing without what stands above it, or runs on into what follows."""
    return any(pattern.fullmatch(" ".join(text.split())) for pattern in POINTS_BACK)


def entries(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield names and description of each entry in the sections of :data:`LISTS`, on one line each."""
    section, indent, held = "", 0, None
    for line in docstring.splitlines():
        text = line.strip()
        heading = HEADING.fullmatch(text)
        if heading or (text and not line.startswith(" ")):
            section, indent = (heading[1] if heading else ""), 0
            continue
        if section not in LISTS or not text:
            continue
        indent = indent or len(line) - len(text)
        entry = ENTRY.fullmatch(text) if line[:indent].isspace() and line[indent] != " " else None
        if entry:
            if held:
                yield held
            held = (entry["names"], entry["text"])
        elif held:
            held = (held[0], f"{held[1]} {text}")
    if held:
        yield held


def constant_faults(path: Path, root: Path) -> Iterator[Fault]:
    """Yield constants whose docstring points back, and those without one that are public or stand above one with one.

    A docstring below two constants may be read as that of both, and an editor shows it for one of them.

    Args:
        path: of a module.
        root: folder from which places are given.
    """
    body = ast.parse(path.read_text(encoding="utf-8")).body
    shared = ""
    for index in reversed(range(len(body))):
        statement = body[index]
        name = constant_name(statement)
        below = body[index + 1] if index + 1 < len(body) else None
        if name is None:
            continue
        place = f"{path.relative_to(root)}:{statement.lineno}"
        if below is not None and (docstring := literal_text(below)) is not None:
            if points_back(docstring):
                yield Fault(place, name, docstring)
            shared = docstring
            continue
        adjacent = below is not None and below.lineno == (statement.end_lineno or 0) + 1
        if not (adjacent and below is not None and constant_name(below)):
            shared = ""
        if shared or not name.startswith("_"):
            yield Fault(place, name, shared)


def constant_name(statement: ast.stmt) -> str | None:
    """Return the name of the constant that a statement sets; ``None`` if it sets none."""
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return None
    return target.id if isinstance(target, ast.Name) and CONSTANT.fullmatch(target.id) else None


def literal_text(statement: ast.stmt) -> str | None:
    """Return the text of a statement that is nothing but a string; ``None`` of others."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return None
    return statement.value.value if isinstance(statement.value.value, str) else None
