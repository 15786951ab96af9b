"""The command, in this process or in one of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline.cli.main import main
from paceline.models.embedded import embedded_target

FAST = ("-n", "24", "-t", "1", "--temp", "0", "--seed", "1")
PLAIN = ("-t", "1", "--no-speculation", "--seed", "1")
SHORT = (*PLAIN, "-n", "8")


def by_template(templates: Path, name: str = "chatml") -> tuple[str, ...]:
    """Return options by which the embedded target chats."""
    return ("-m", str(embedded_target()), "--chat-template-file", str(templates / f"{name}.jinja"))


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


class Invoke:
    """Runs the command in this process, as the console script does."""

    COLUMNS = "200"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Outcome:
        self._monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        self._monkeypatch.setenv("COLUMNS", self.COLUMNS)
        try:
            main()
            status = 0
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        return Outcome(status, *self._capsys.readouterr())


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Invoke:
    return Invoke(monkeypatch, capsys)


def spawn(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start the command in a process that heeds interrupts, and whose output and errors are pipes by default."""
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heed_interrupts}
    return subprocess.Popen([sys.executable, "-m", "paceline", *arguments], **{**given, **options})


def without_stream(number: int, *arguments: str) -> list[str]:
    """Return the command as it is started where a standard stream is closed."""
    closing = f"import os, sys; os.close({number}); os.execv(sys.executable, sys.argv[1:])"
    return [sys.executable, "-c", closing, sys.executable, "-m", "paceline", *arguments]


def heed_interrupts() -> None:
    # A test run in the background of a shell, or under nohup, inherits ignored signals, and would pass them on.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run the command with options that it cannot use, and return the one line that it says."""

    def run(*options: str, status: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["paceline", "serve", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status
        said = capsys.readouterr().err.removeprefix("loading broken.gguf\n")
        assert said.count("\n") == 1, said
        assert said.startswith("paceline: ")
        return said

    return run
