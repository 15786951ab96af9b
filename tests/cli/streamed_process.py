"""Commands in processes of their own whose models are streamed, and whose disk answers when the test lets it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.cli.invoking import heed_interrupts
from tests.timing import WAIT_S

_SCRIPT = """
import os, sys

from paceline.cli.main import main
from paceline.engines.streaming.disk import WeightFiles
from paceline.engines.streaming.ring import Ring
from tests.engines.streamed import mostly_streamed

told, let = int(sys.argv.pop(1)), int(sys.argv.pop(1))
read, init, last = WeightFiles.read, Ring.__init__, []

def noting(self, source, sections, order, **more):
    last[:] = [sections[order[-1]].extents]
    init(self, source, sections, order, **more)

def held(self, extents, slot):
    if extents in last:
        os.write(told, b".")
        os.read(let, 1)  # nothing, and at once, where nothing is held any more
    read(self, extents, slot)

WeightFiles.read, Ring.__init__ = held, noting
sys.argv[0] = "paceline"
with mostly_streamed():
    main()
"""

STREAMED = ("--memory", "1")
"""Options with which layers are streamed, as the least memory is not checked."""


class Disk:
    """What a process reads from. Reads of what a pass needs last wait for a word, which comes at once for some passes.

    There are two slots, so that it is asked for when its pass has begun, and its pass waits for it.
    """

    def __init__(self, told: int, let: int, passes: float) -> None:
        self._told, self._let = told, let
        self._passes = passes
        self._waits = threading.Event()
        self._changing = threading.Lock()
        self._answering = threading.Thread(target=self._answer)
        self._answering.start()

    def wait_until_held(self) -> None:
        """Return when the first such read is held: a pass has begun, and cannot end."""
        assert self._waits.wait(WAIT_S)

    def go_on(self) -> None:
        """Hold nothing any more."""
        with self._changing:
            if self._let >= 0:
                os.close(self._let)
                self._let = -1

    def close(self) -> None:
        """End, when the process has ended."""
        self.go_on()
        self._answering.join(WAIT_S)
        os.close(self._told)

    def _answer(self) -> None:
        passes = 0
        while os.read(self._told, 1):
            passes += 1
            if passes > self._passes:
                self._waits.set()
                continue
            with self._changing:
                if self._let >= 0:
                    os.write(self._let, b".")


@contextmanager
def streamed_command(
    *arguments: str,
    passes: float = math.inf,
    stdin: int = subprocess.DEVNULL,
    variables: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], Disk]]:
    """Yield a command that runs, and its disk, which holds what comes after so many passes.

    The command is killed if it still runs afterwards.
    """
    (told, tell), (let_in, let) = os.pipe(), os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(tell), str(let_in), *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **(variables or {})},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # What a test has not read of the output is there for it to read later.
        bufsize=0,
        pass_fds=(tell, let_in),
        preexec_fn=heed_interrupts,
    )
    os.close(tell)
    os.close(let_in)
    disk = Disk(told, let, passes)
    try:
        with process:
            try:
                yield process, disk
            finally:
                if process.poll() is None:
                    process.kill()
    finally:
        disk.close()
