"""The build hook on a small project of its own: which wheel is built, and what stays behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import paceline

needs_setuptools = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="setuptools, which compiles, is not installed"
)
"""The test's own process does not import it: where that succeeds depends on what was imported before."""

CHECKOUT = Path(__file__).parent.parent

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "paceline"
version = "1.0"
requires-python = ">=3.11"

[tool.hatch.build.targets.wheel]
packages = ["src/paceline"]

[tool.hatch.build.targets.wheel.hooks.custom]
modules = ["paceline/planning/*.py"]
"""

SOURCES = {
    "__init__.py": "",
    "planning/__init__.py": "",
    "planning/rounds.py": "from paceline.sizes import ONE\n\n\ndef more(count: int) -> int:\n    return count + ONE\n",
    "sizes.py": "ONE: int = 1\n",
}

# A wheel's name has no tag of a machine where nothing was compiled.
NOT_COMPILED = "paceline-1.0-py3-none-any.whl"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in SOURCES.items():
        path = folder / "src" / "paceline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "pyproject.toml").write_text(PROJECT)
    shutil.copy(CHECKOUT / "hatch_build.py", folder)
    return folder


def build(project: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(project.parent)],
        cwd=project,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def sources(project: Path) -> set[str]:
    return {str(path.relative_to(project / "src")) for path in (project / "src").rglob("*") if path.is_file()}


def test_without_compiling_the_wheel_is_for_every_machine(project: Path) -> None:
    built = build(project, PACELINE_COMPILE="0")
    assert built.returncode == 0, built.stdout
    assert "compiled" not in built.stdout
    with zipfile.ZipFile(project.parent / NOT_COMPILED) as wheel:
        assert {f"paceline/{name}" for name in SOURCES} < set(wheel.namelist())


def test_without_a_compiler_one_line_says_so(project: Path) -> None:
    built = build(project, CC="false")
    assert built.returncode == 0, built.stdout
    (said,) = [line for line in built.stdout.splitlines() if "compiled" in line]
    assert said.startswith("The planner is not compiled")
    assert said.endswith("no C compiler was found that can include Python.h")
    assert (project.parent / NOT_COMPILED).exists()


def test_without_a_compiler_compiling_can_be_insisted_on(project: Path) -> None:
    built = build(project, CC="no-such-compiler", PACELINE_COMPILE="1")
    assert built.returncode != 0
    assert "PACELINE_COMPILE=1, but the planner cannot be compiled: no C compiler" in built.stdout
    assert not list(project.parent.glob("*.whl"))


def test_another_wish_is_refused_with_the_choices(project: Path) -> None:
    built = build(project, PACELINE_COMPILE="yes")
    assert built.returncode != 0
    assert "PACELINE_COMPILE=yes is unknown; choose from auto, 0, 1" in built.stdout


@needs_setuptools
def test_what_mypyc_refuses_is_left_as_it_is(project: Path) -> None:
    (project / "src/paceline/planning/rounds.py").write_text("def more(:\n")
    built = build(project)
    assert built.returncode == 0, built.stdout
    assert "The planner is not compiled" in built.stdout
    assert "mypyc or the C compiler failed" in built.stdout
    assert (project.parent / NOT_COMPILED).exists()


@pytest.mark.long
@needs_setuptools
def test_what_is_compiled_is_in_the_wheel_and_not_among_the_sources(project: Path) -> None:
    built = build(project, PACELINE_COMPILE="1")
    assert built.returncode == 0, built.stdout
    (path,) = project.parent.glob("*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert path.name.startswith(f"paceline-1.0-{tag}-{tag}-")
    assert sources(project) == {f"paceline/{name}" for name in SOURCES}
    unpacked = project.parent / "unpacked"
    with zipfile.ZipFile(path) as wheel:
        compiled = {name.partition(".")[0] for name in wheel.namelist() if name.endswith((".so", ".pyd"))}
        wheel.extractall(unpacked)
    assert compiled == {"paceline/planning/rounds", "paceline__mypyc"}
    code = "from paceline.planning import rounds; print(rounds.more(1), rounds.__file__)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=unpacked, capture_output=True, text=True, check=True)
    result, _, file = ran.stdout.strip().partition(" ")
    assert result == "2"
    assert not file.endswith(".py")


def test_the_version_is_in_one_place() -> None:
    assert ProjectMetadata(str(CHECKOUT), PluginManager()).version == paceline.__version__
