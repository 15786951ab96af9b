"""No docstring that only points at another, no constant without one, and nothing that others build on without any."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.docs.docstrings import Fault, constant_faults, entries, entry_faults

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text",
    [
        "it.",
        "its type.",
        "likewise.",
        "likewise; ``None`` without a draft model.",
        "the same of a plain one.",
        "for the same requests.",
        "how many.",
        "as it was given.",
        "of these, what was read.",
        "tokens for each second, of the same.",
        "rows that were read, and",
    ],
)
def test_descriptions_that_point_back_are_found(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'def f(a, b):\n    """Do.\n\n    Args:\n        a: the first\n            of two.\n'
        f'        b: {text}\n    """\n'
    )
    assert list(entry_faults(path, tmp_path)) == [Fault("module.py:1", "f.b", text)]


@pytest.mark.parametrize(
    "text",
    ["it is said how.", "the drafter to ask.", "of the model.", "these tokens, in order.", "its own rows, in order."],
)
def test_descriptions_that_say_something_are_left(text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f'class C:\n    """Is.\n\n    Attributes:\n        a: {text}\n    """\n')
    assert list(entry_faults(path, tmp_path)) == []


def test_entries_are_those_of_arguments_and_attributes() -> None:
    docstring = (
        "Do.\n\nArgs:\n    a, b: two\n        lines: of it.\n    **c: more.\n\n"
        "Raises:\n    Error: likewise.\n\nIt: ends."
    )
    assert list(entries(docstring)) == [("a, b", "two lines: of it."), ("**c", "more.")]


def test_constants_have_a_docstring_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        'LOW = 1\n_HIGH = 2\n"""Limits."""\n\n_ALONE = 3\n\nSECOND = 4\n"""Likewise."""\n'
        'THIRD: int = 5\n"""Rows."""\n'
        "_PRIVATE = 6\n_PAIR = 7\n\nPUBLIC = 8\nT = 9\n"
    )
    assert sorted((fault.name, fault.text) for fault in constant_faults(path, tmp_path)) == [
        ("LOW", "Limits."),
        ("PUBLIC", ""),
        ("SECOND", "Likewise."),
    ]


def test_docstrings_stand_by_themselves() -> None:
    paths = sorted((ROOT / "src" / "paceline").rglob("*.py"))
    faults = [fault for path in paths for check in (entry_faults, constant_faults) for fault in check(path, ROOT)]
    assert faults == []


# Beside what the package exports.
CONTRACTS = {
    "paceline.core.constraint": ["Constraint"],
    "paceline.core.verify": ["Verifier"],
    "paceline.core.vocabulary": ["Vocabulary"],
    "paceline.drafters.base": ["Drafter"],
    "paceline.engines.base": ["Engine"],
    "paceline.planning.base": ["Policy", "Observer"],
    "paceline.runtime.output_queue": ["OutputQueue"],
}


def undescribed(value: Any) -> list[str]:
    """Return what has no docstring in the source of a class or function: itself, or public methods of its own."""
    # What is compiled has none when it runs.
    path = ROOT.joinpath("src", *value.__module__.split(".")).with_suffix(".py")
    (found,) = (
        node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == value.__name__
    )
    inner = found.body if isinstance(found, ast.ClassDef) else []
    methods = [node for node in inner if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    bases = inspect.getmro(value)[1:] if isinstance(value, type) else ()
    own = [node for node in methods if node.name[0] != "_" and not any(hasattr(base, node.name) for base in bases)]
    return [
        f"{value.__module__}.{value.__name__}: {node.name}" for node in (found, *own) if not ast.get_docstring(node)
    ]


def test_what_others_build_on_is_described() -> None:
    exported = [getattr(paceline, name) for name in paceline.__all__]
    owners = {value for value in exported if isinstance(value, type) or inspect.isroutine(value)}
    owners |= {getattr(importlib.import_module(module), name) for module, names in CONTRACTS.items() for name in names}
    assert len(owners) > 60
    assert [fault for owner in owners for fault in undescribed(owner)] == []
