"""What a user sees of paceline, and what only a reader of its code does, as texts with their places."""

from __future__ import annotations

import ast
import functools
import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from typer.main import get_command

from tests.words.terms import CODE, prose_of

ROOT: Final = Path(__file__).parents[2]
"""Folder of the repository."""

SOURCES: Final = ROOT / "src" / "paceline"
"""Folder of the package."""

PLANNING: Final = SOURCES / "planning"
"""Folder of the planner, whose names follow when it is rewritten."""

_REPORTED: Final = PLANNING / "costs"
"""Folder of the planner's code whose fields ``paceline profile --json`` prints."""

_BETWEEN_TAGS: Final = re.compile(r">([^<]+)<")
"""Text of a page or a drawing."""

_NAME: Final = re.compile(r"[A-Za-z_][\w-]*")
"""A string that is one word: the name of a key, a label or a reason."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A text, or a name.

    Attributes:
        place: file and line, or the command whose help has it.
        text: prose without names of code, or a single name.
        is_name: whether ``text`` is a name, of which every word counts.
    """

    place: str
    text: str
    is_name: bool = False


def documents() -> Iterator[Seen]:
    """Yield the paragraphs of README, changelog and documentation."""
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for line, text in prose_of(path.read_text(encoding="utf-8")):
            yield Seen(f"{_shown(path)}:{line}", text)


def pages() -> Iterator[Seen]:
    """Yield the texts of pages and drawings, and the lines of their scripts; those that others wrote are left out."""
    drawings = (ROOT / "docs").rglob("*.svg")
    for path in sorted((*SOURCES.rglob("*.html"), *SOURCES.rglob("*.js"), *drawings)):
        if any(part.startswith("vendor") for part in path.parts):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            texts = [line] if path.suffix == ".js" else _BETWEEN_TAGS.findall(f">{line}<")
            yield from (Seen(f"{_shown(path)}:{number}", html.unescape(text)) for text in texts if text.strip())


def help_texts() -> Iterator[Seen]:
    """Yield what ``--help`` says of every command of ``paceline`` and of ``python -m benchmarks``."""
    from benchmarks.__main__ import app as benchmarks

    from paceline.cli.main import app as paceline

    for name, app in (("paceline", paceline), ("python -m benchmarks", benchmarks)):
        yield from _help_of(name, get_command(app))


def _help_of(name: str, command: Any) -> Iterator[Seen]:
    yield from (Seen(f"{name} --help", CODE.sub(" ", text)) for text in (command.help, command.epilog) if text)
    for parameter in command.params:
        for flag in (*parameter.opts, *parameter.secondary_opts):
            yield Seen(f"{name} --help", flag.lstrip("-"), is_name=True)
        if text := getattr(parameter, "help", None):
            yield Seen(f"{name} --help", CODE.sub(" ", text))
    for child_name, child in getattr(command, "commands", {}).items():
        yield from _help_of(f"{name} {child_name}", child)


def strings(folder: Path) -> Iterator[Seen]:
    """Yield the strings of a folder's code: errors, warnings, reports, metrics. Docstrings and keys are none of them.

    What stands in an f-string's braces is left out.
    """
    for path, tree in _modules(folder):
        apart = {id(node) for node in _docstrings(tree).values()} | {id(key) for key, _ in _keys(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part for part in node.values if isinstance(part, ast.Constant)]
                apart |= {id(part) for part in parts}
                text = " ".join(str(part.value) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
                text = node.value
            else:
                continue
            yield Seen(f"{_shown(path)}:{node.lineno}", text, is_name=_NAME.fullmatch(text) is not None)


def keys() -> Iterator[Seen]:
    """Yield the names that reports, the server and kept files may have as JSON keys.

    These are the keys of mappings that the code writes out, and the fields of classes: dataclasses and bodies of
    requests become JSON by theirs. Of the planner only what ``paceline profile`` prints is among them.
    """
    for path, tree in _modules(SOURCES):
        if path.is_relative_to(PLANNING) and not path.is_relative_to(_REPORTED):
            continue
        for key, name in _keys(tree):
            if _NAME.fullmatch(name):
                yield Seen(f"{_shown(path)}:{key.lineno}", name, is_name=True)
        for node in ast.walk(tree):
            for field in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield Seen(f"{_shown(path)}:{field.lineno}", field.target.id, is_name=True)


def bodies() -> Iterator[Seen]:
    """Yield the names and descriptions of what the server takes in requests, as its OpenAPI document has them."""
    from paceline.serving import schema as module

    for name, body in vars(module).items():
        if isinstance(body, type) and issubclass(body, BaseModel) and body is not BaseModel:
            yield from _described(name, body.model_json_schema())


def _described(place: str, schema: Any) -> Iterator[Seen]:
    if isinstance(schema, list):
        for each in schema:
            yield from _described(place, each)
    elif isinstance(schema, dict):
        for name, each in schema.items():
            if name in ("properties", "$defs"):
                yield from (Seen(place, property_name, is_name=True) for property_name in each)
            if name == "description" and isinstance(each, str):
                yield Seen(place, CODE.sub(" ", each))
            yield from _described(place, each)


def identifiers() -> Iterator[Seen]:
    """Yield the names that the package's code gives: modules, classes, functions, parameters, fields and variables."""
    for path, tree in _modules(SOURCES):
        yield Seen(f"{_shown(path)}:1", path.stem, is_name=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield Seen(f"{_shown(path)}:{node.lineno}", node.name, is_name=True)
            elif isinstance(node, ast.arg):
                yield Seen(f"{_shown(path)}:{node.lineno}", node.arg, is_name=True)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield Seen(f"{_shown(path)}:{node.lineno}", node.id, is_name=True)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield Seen(f"{_shown(path)}:{node.lineno}", node.attr, is_name=True)


def docstrings() -> Iterator[Seen]:
    """Yield the docstrings of the package's code, paragraph by paragraph, those of constants and fields included."""
    for path, tree in _modules(SOURCES):
        for line, node in _docstrings(tree).items():
            for offset, text in prose_of(str(node.value)):
                yield Seen(f"{_shown(path)}:{line + offset - 1}", text)


def _modules(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, _parsed(path)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _docstrings(tree: ast.Module) -> Mapping[int, ast.Constant]:
    """Return the strings that are statements of their own, by their first line."""
    return {
        node.lineno: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def _keys(tree: ast.Module) -> Iterator[tuple[ast.Constant, str]]:
    """Yield the strings by which mappings are made or filled, with their nodes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found: list[ast.expr | None] = list(node.keys)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found = [node.slice]
        else:
            continue
        yield from ((key, key.value) for key in found if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
