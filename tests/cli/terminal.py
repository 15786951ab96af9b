"""A terminal with a program in it, and a person who waits for what it shows before the next key."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from tests.timing import WAIT_S

CTRL_C: Final = "\x03"
CTRL_D: Final = "\x04"
ENTER: Final = "\r"
ALT_ENTER: Final = "\x1b\r"

_SHOWN: Final = re.compile(r"(?s)(\x1b)(?:\[\??([0-9]*)[0-9;]*[ -/]*([@-~])|[=>]|\][^\x07]*\x07)|(.)")
"""A control sequence, with its first number and its last letter, or a character."""
_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[=>]|\][^\x07]*\x07)")


class Terminal:
    """Runs ``paceline`` in a terminal of its own, which is the one that it is controlled by.

    Args:
        arguments: of the command.
        columns: of the terminal, which has 30 lines.
        program: what Python runs, before the arguments.
        **environment: variables besides those of this process.

    Attributes:
        shown: all that was shown so far, with its control sequences.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        columns: int = 80,
        program: Sequence[str] = ("-m", "paceline"),
        **environment: str,
    ) -> None:
        self._columns = columns
        self._leader, self._follower = pty.openpty()
        termios.tcsetwinsize(self._follower, (30, columns))
        self.before = termios.tcgetattr(self._follower)
        self.shown = ""
        self._read_up_to = 0
        inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
        self._process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdin=self._follower,
            stdout=self._follower,
            stderr=self._follower,
            env={**inherited, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
            preexec_fn=self._take_control,
        )

    def _take_control(self) -> None:
        os.setsid()
        fcntl.ioctl(self._follower, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._leader)
        os.close(self._follower)

    @property
    def echoes(self) -> bool:
        """Whether the terminal shows what is typed by itself."""
        return bool(termios.tcgetattr(self._follower)[3] & termios.ECHO)

    @property
    def settings(self) -> list[object]:
        """How the terminal is set, for a comparison with ``before``."""
        return termios.tcgetattr(self._follower)

    def type(self, *keys: str) -> None:
        """Press keys, one after the other."""
        data = "".join(keys).encode()
        while data:
            data = data[os.write(self._leader, data) :]

    def wait_for(self, pattern: str) -> str:
        """Wait until a pattern is shown, behind what was waited for before; return what was shown up to its end.

        Control sequences are left out, and so are carriage returns.
        """
        ends_s = time.monotonic() + WAIT_S
        while True:
            text = self._plain()[self._read_up_to :]
            if found := re.search(pattern, text):
                self._read_up_to += found.end()
                return text[: found.end()]
            still_runs = self._read() and time.monotonic() < ends_s
            assert still_runs, f"{pattern} is not shown, but {text!r}"

    def wait(self) -> int:
        """Wait until the program ends, reading what it shows; return its status."""
        ends_s = time.monotonic() + WAIT_S
        while self._process.poll() is None:
            self._read(0.05)
            assert time.monotonic() < ends_s, f"it does not end, and shows {self.rest()!r}"
        return self._process.returncode

    def rest(self) -> str:
        """Return what was shown and not waited for."""
        return self._plain()[self._read_up_to :]

    def lines(self) -> list[str]:
        """Return what stands on the screen, and what was scrolled off it: what was erased or written over is gone."""
        screen, row, column = [""], 0, 0
        for escape, number, command, character in _SHOWN.findall(self.shown):
            count = int(number or 0)
            if command == "A":
                row = max(0, row - max(count, 1))
            elif command in "CD" and command:
                column = max(0, column + max(count, 1) * (1 if command == "C" else -1))
            elif command == "G":
                column = max(count, 1) - 1
            elif command == "K":
                line = screen[row].ljust(column)
                screen[row] = {0: line[:column], 1: " " * column + line[column:]}.get(count, "")
            elif command == "J" and count == 0:
                screen[row:] = [screen[row].ljust(column)[:column]]
            elif character == "\r":
                column = 0
            elif character == "\b":
                column = max(0, column - 1)
            elif character and not escape:
                if character == "\n" or column == self._columns:
                    row, column = row + 1, column if character == "\n" else 0
                    screen += [""] * (row + 1 - len(screen))
                if character != "\n":
                    line = screen[row].ljust(column)
                    screen[row], column = line[:column] + character + line[column + 1 :], column + 1
        return [line.rstrip() for line in screen]

    def _plain(self) -> str:
        # A sequence at the end may not be whole yet.
        text = re.sub(r"\x1b[^@-Z\\^-~]*$", "", self.shown)
        return _SEQUENCE.sub("", text).replace("\r", "")

    def _read(self, patience_s: float = WAIT_S) -> bool:
        if not select.select([self._leader], [], [], patience_s)[0]:
            return False
        self.shown += os.read(self._leader, 65536).decode(errors="replace")
        return True
