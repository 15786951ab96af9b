"""Files and names that pages and docstrings mention are there."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
PACKAGE = SOURCES / "paceline"

THEIRS = {"generation/candidate_generator.py"}  # of transformers

FILE = re.compile(r"(?:`|^ {4,})([\w./]+\.py)[` ]", re.MULTILINE)
ROLE = re.compile(r":(?:mod|class|func|meth|data|attr|exc):`~?\.?([\w.]+)`")


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield whatever a module or one of its classes defines, sets or imports, and what its texts name in exports."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((each.asname or each.name).partition(".")[0] for each in names)
            case ast.Constant(value=str(name)) if name.isidentifier():
                yield name


def test_files_that_are_mentioned_are_there() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*.py")]
    for folder in ("src", "tests", "benchmarks", "docs", "examples", "training", "tools"):
        files += [path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")]
    # What is dated says how things were.
    texts = [page for page in (ROOT / "docs").rglob("*.md") if "notes" not in page.parts]
    texts += [ROOT / "README.md", *PACKAGE.rglob("*.py")]
    found = {
        (text, name) for text in texts for name in FILE.findall(text.read_text(encoding="utf-8")) if name not in THEIRS
    }
    missing = [
        f"{text.relative_to(ROOT)}: {name}"
        for text, name in found
        if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    assert sorted(missing) == []


def test_names_in_docstrings_are_there() -> None:
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCES).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules[module] = (path, {*names_in(tree), *(each.stem for each in path.parent.iterdir())})
    missing = []
    for path, own in modules.values():
        for name in ROLE.findall(path.read_text(encoding="utf-8")):
            parts = name.split(".")
            owner = next((end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in modules), 0)
            known = modules[".".join(parts[:owner])][1] if owner else own
            # The members of a class may be inherited, and of other packages nothing is known.
            first = parts[owner] if owner < len(parts) else None
            is_elsewhere = not owner and (len(parts) > 1 or hasattr(builtins, name))
            if first is not None and first not in known and not is_elsewhere:
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert sorted(missing) == []
