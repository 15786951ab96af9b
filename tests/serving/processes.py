"""Servers in processes of their own, started by the command."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.cli.invoking import heed_interrupts
from tests.timing import WAIT_S

BODY: dict[str, Any] = {"prompt": "def fibonacci(n):\n", "ignore_eos": True, "seed": 1}
UNMEASURED = ("--draft-max", "3", "-fa", "off", "-c", "4096")
"""Options with which nothing is measured when the embedded pair is loaded."""


@dataclass
class Process:
    """A server that runs.

    Attributes:
        url: where it is.
        process: the process.
        said: lines on standard error so far.
    """

    url: str
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def status(self) -> int:
        """Wait for its end, and return its exit status."""
        return self.process.wait(WAIT_S)


def poll(holds: Callable[[], object]) -> None:
    """Wait until something holds that another process brings about, and leave it the processor meanwhile."""
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.005)


@contextmanager
def served(
    *options: str, variables: Mapping[str, str] | None = None, before: Callable[[], object] = heed_interrupts
) -> Iterator[Process]:
    """Yield a server of the embedded pair, once it says that it is ready; it is killed if it still runs afterwards.

    Args:
        options: of the command.
        variables: of the environment, beside those of the tests.
        before: is called in the new process before the command.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", *UNMEASURED, *options],
        env={**os.environ, **{"PACELINE_PORT": "0"}, **(variables or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    assert process.stderr is not None
    running = Process("", process)
    try:
        for line in process.stderr:
            running.said.append(line.rstrip("\n"))
            if " served at " in line:
                running.url = line.split(" served at ")[1].strip()
                break
        assert running.url, running.said
        # What it says later is read, so that it is never held up by a full pipe.
        reader = threading.Thread(target=lambda: running.said.extend(process.stderr or ()))
        reader.start()
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if running.url:
            reader.join(WAIT_S)
        process.stderr.close()
