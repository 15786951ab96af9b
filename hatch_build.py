"""Compile the planner into the wheel where there is a C compiler.

What is decided every round takes 0.4 of the time when it is compiled (mypyc). The same code runs uncompiled too. So a
wheel is built either way, with the tag that is right for it. The environment variable ``PACELINE_COMPILE`` says which:

    auto    compile where that is possible, otherwise warn in one line (default)
    1       compile, or fail
    0       do not compile

Everything is compiled in a temporary folder: modules that lay among the sources would be imported in their place.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "PACELINE_COMPILE"

_SETUP = """\
import json
import sys
from mypyc.build import mypycify
from setuptools import setup

# No configuration of the machine's: the result must depend on the sources alone.
arguments = ["--config-file=", "--no-site-packages", "--ignore-missing-imports", *json.loads(sys.argv.pop())]
modules = mypycify(arguments, opt_level="3", debug_level="0", group_name="paceline", target_dir="generated")
setup(name="paceline", packages=[], py_modules=[], ext_modules=modules)
"""


class CompilePlanner(BuildHookInterface[Any]):
    """Add compiled modules to a wheel; ``modules`` of the hook's table are patterns of what is compiled, in ``src``."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what the build environment needs: nothing where nothing is going to be compiled."""
        mode = _mode()
        wanted = mode == "1" or (mode == "auto" and _find_compiler() is not None)
        return ["mypy>=2.4", "setuptools>=77"] if wanted else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and say what the wheel has then."""
        mode = _mode()
        if mode == "0" or version == "editable":
            return
        folder = tempfile.TemporaryDirectory(prefix="paceline-")
        try:
            compiled = _compile(Path(self.root, "src"), self.config["modules"], Path(folder.name).resolve())
        except CannotCompileError as error:
            if mode == "1":
                self.app.abort(f"{VARIABLE}=1, but the planner cannot be compiled: {error}\n{error.output}".rstrip())
            self.app.display_warning(f"The planner is not compiled, so planning a round takes longer: {error}")
            return
        self._folder = folder
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update(compiled)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: it is in the wheel."""
        if (folder := getattr(self, "_folder", None)) is not None:
            folder.cleanup()


class CannotCompileError(Exception):
    """There is nothing to compile with, or it failed.

    Attributes:
        output: all that the compilers said.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


def _mode() -> str:
    mode = os.environ.get(VARIABLE) or "auto"
    if mode not in ("auto", "0", "1"):
        raise ValueError(f"{VARIABLE}={mode} is unknown; choose from auto, 0, 1")
    return mode


def _compile(sources: Path, patterns: list[str], folder: Path) -> dict[str, str]:
    """Return the compiled modules in ``folder``: each file's path, and its place in the wheel.

    Raises:
        CannotCompileError: something is missing, or a compiler failed.
    """
    compiler = _find_compiler()
    if compiler is None:
        raise CannotCompileError("no C compiler was found that can include Python.h")
    if missing := [name for name in ("mypyc", "setuptools") if importlib.util.find_spec(name) is None]:
        raise CannotCompileError(f"{' and '.join(missing)} cannot be imported, and the build is not isolated")
    modules = sorted(
        path.relative_to(sources).as_posix()
        for pattern in patterns
        for path in sources.glob(pattern)
        if path.name != "__init__.py"
    )
    for path in sources.rglob("*.py"):
        copy = folder / path.relative_to(sources)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    setup = folder / "setup.py"
    setup.write_text(_SETUP, encoding="utf-8")
    built = folder / "built"
    ended = subprocess.run(
        [sys.executable, str(setup), "build_ext", "--build-lib", str(built), json.dumps(modules)],
        cwd=folder,
        env={**os.environ, **compiler},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if ended.returncode:
        last = (ended.stdout.strip().splitlines() or ["no reason was given"])[-1]
        raise CannotCompileError(f"mypyc or the C compiler failed: {last}", ended.stdout)
    return {str(path): path.relative_to(built).as_posix() for path in sorted(built.rglob("*")) if path.is_file()}


def _find_compiler() -> dict[str, str] | None:
    """Return the variables with which setuptools takes a C compiler that works; none where there is no such one."""
    if sys.implementation.name != "cpython":  # mypyc compiles for no other
        return None
    if sys.platform == "win32":
        # setuptools finds Microsoft's compiler, by the registry and this program of its installer.
        installer = Path(os.environ.get("PROGRAMFILES(X86)", ""), "Microsoft Visual Studio", "Installer")
        return {} if shutil.which("cl") or (installer / "vswhere.exe").is_file() else None
    for variables, command in _compilers():
        if _includes_python(command):
            return variables
    return None


def _compilers() -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield commands to try; another than Python's own, which is setuptools' choice, has to be named to it."""
    if named := os.environ.get("CC"):
        yield {}, shlex.split(named)
        return
    if own := sysconfig.get_config_var("CC"):
        yield {}, shlex.split(own)
    for name in ("cc", "gcc", "clang"):
        yield {"CC": name}, [name]


def _includes_python(command: list[str]) -> bool:
    include = sysconfig.get_path("include")
    try:
        ended = subprocess.run(
            [*command, "-fsyntax-only", "-I", include, "-x", "c", "-"],
            input=b"#include <Python.h>\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return False
    return ended.returncode == 0
