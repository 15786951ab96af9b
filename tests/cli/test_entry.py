"""Ctrl-C before a command begins and after it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.invoking import heed_interrupts
from tests.timing import WAIT_S

WAIT = "import sys; print('waiting', flush=True); sys.stdin.read()\n"
"""Tells the test where the program is, and keeps it there."""


def interrupted(
    folder: Path, module: str, code: str, *words: str, preexec: Callable[[], None] = heed_interrupts
) -> tuple[int, bytes, bytes]:
    """Interrupt the program while it waits in a module that stands in for another; then let it go on."""
    (folder / f"{module}.py").write_text(code, encoding="utf-8")
    search = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        env={**os.environ, "PYTHONPATH": search},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=preexec,
    )
    assert process.stdout is not None
    said = b""
    while not said.endswith(b"waiting\n"):
        line = process.stdout.readline()
        assert line
        said += line
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, said + out, err


def test_an_interrupt_while_modules_are_imported_is_quiet(tmp_path: Path) -> None:
    outcome = interrupted(tmp_path, "typer", WAIT, "--version")
    assert outcome == (-signal.SIGINT, b"waiting\n", b"")


def test_an_interrupt_at_exit_is_quiet(tmp_path: Path) -> None:
    at_exit = f"import atexit\n\n\ndef wait() -> None:\n    {WAIT}\n\natexit.register(wait)\n"
    status, out, err = interrupted(tmp_path, "sitecustomize", at_exit, "--version")
    assert (status, err) == (-signal.SIGINT, b"")
    assert out.startswith(b"paceline ")


def test_interrupts_that_were_ignored_stay_so(tmp_path: Path) -> None:
    def ignore_interrupts() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    code = f"{WAIT}raise SystemExit(7)\n"
    assert interrupted(tmp_path, "typer", code, "--version", preexec=ignore_interrupts) == (7, b"waiting\n", b"")


def test_an_interrupt_within_a_command_is_its_own_to_handle(tmp_path: Path) -> None:
    # Others import further names of it, and use none of them here.
    code = f"def describe(path, **options):\n    {WAIT}\n\ndef __getattr__(name):\n    return type(name, (), {{}})\n"
    (tmp_path / "stand_in.py").write_text(code, encoding="utf-8")
    load = "import sys, stand_in\nsys.modules['paceline.models.description'] = stand_in\n"
    status, _, err = interrupted(tmp_path, "sitecustomize", load, "models", "show", "target")
    assert (status, err) == (130, b"")


@pytest.mark.parametrize("module", ["paceline", "paceline.cli.entry"])
def test_what_runs_before_interrupts_are_heard_imports_nothing_that_takes_time(module: str) -> None:
    heavy = {"numpy", "rich", "typer", "paceline.api", "paceline.cli.main"}
    program = f"import {module}, sys; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
