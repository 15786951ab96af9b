"""The core stands by itself: it may be read, and proved, without the rest of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paceline.core

CORE = Path(paceline.core.__path__[0])


@pytest.mark.parametrize("path", sorted(CORE.glob("*.py")), ids=lambda path: path.stem)
def test_core_imports_nothing_of_the_package_but_itself(path: Path) -> None:
    imported = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.startswith("paceline") and not name.startswith("paceline.core.")] == []
