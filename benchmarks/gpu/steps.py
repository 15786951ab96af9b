"""Steps under a limit of time: the most important first, and what one of them fails at is the others' nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from paceline.core.clock import Clock

Figures: TypeAlias = Mapping[str, Any]
"""What is said of one measurement: plain data."""


class FailedError(Exception):
    """A step cannot be done; the message is one line."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    least_s: float
    most_s: float
    run: Callable[[float], Iterator[Figures]]


def run_steps(steps: Iterable[Step], until_s: float, clock: Clock, write: Callable[[Figures], None]) -> None:
    """Run steps in their order; write a line for each figure, for each failure and for each that had no time."""
    for step in steps:
        began_s = clock.now_s()
        left_s = until_s - began_s
        if left_s < step.least_s:
            write({"step": step.name, "left_out": f"{left_s:.0f} s were left, and it takes {step.least_s:.0f}"})
            continue

        def took(began_s: float = began_s) -> dict[str, float]:
            return {"took_s": round(clock.now_s() - began_s, 1)}

        try:
            for figures in step.run(min(step.most_s, left_s)):
                write({"step": step.name, **took(), **figures})
        except Exception as error:
            # Whatever it is, the others have nothing to do with it.
            write({"step": step.name, **took(), "failed": f"{type(error).__name__}: {error}".splitlines()[0]})


@contextlib.contextmanager
def ended_after(process: subprocess.Popen[Any], most_s: float) -> Iterator[None]:
    """End a process after so many seconds, or where the block is left, with all that it started."""
    late = threading.Event()

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end_late() -> None:
        late.set()
        end()

    timer = threading.Timer(most_s, end_late)
    timer.start()
    try:
        yield
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            end()
            process.wait()
    if late.is_set():
        raise FailedError(f"not done within {most_s:.0f} s")
