"""What tests may know of time: none passes or fails by how busy its machine is."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

WAIT_S: Final = 240.0
"""Seconds until a test gives up on what hangs: longer than anything takes on a busy machine, and shorter than pytest's
``faulthandler_timeout``, so that a test says what it waited for."""

_TIMES: Final = 8
_MAX_GROWTH: Final = 4.0
_TRIES: Final = 3


def assert_grows_with_length_alone(run: Callable[[int], object], length: int) -> None:
    """Check that eight times the length takes about eight times the processor time.

    What is read again for each character takes 64 times as long; 32 times is allowed. Both are measured here and now,
    in time that other programs take nothing of, and the least of three counts: what disturbs only adds.

    Args:
        run: does the work for a text of a length.
        length: the longer one.
    """
    short = min(processor_s(lambda: run(length // _TIMES)) for _ in range(_TRIES))
    most = _MAX_GROWTH * _TIMES * short
    took = [processor_s(lambda: run(length))]
    while min(took) > most and len(took) < _TRIES:
        took.append(processor_s(lambda: run(length)))
    assert min(took) <= most, f"{length // _TIMES}: {short:.3g} s, and {length}: {min(took):.3g} s of processor time"


def processor_s(work: Callable[[], object]) -> float:
    """Return the seconds of processor time that this thread takes for something."""
    collects = gc.isenabled()
    # It would look at all that earlier tests left.
    gc.disable()
    try:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    finally:
        if collects:
            gc.enable()


class LoopTime:
    """The time of event loops, which a test moves on.

    Loops that are there already keep the machine's time: a server of several tests would be ahead of it later.

    Args:
        patch: undoes it.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._skipped_s = 0.0
        # By type, as what a module gives out lazily may warn when it is asked for its class.
        others = weakref.WeakSet(each for each in gc.get_objects() if issubclass(type(each), asyncio.BaseEventLoop))

        def moved_on(loop: asyncio.BaseEventLoop) -> float:
            return time.monotonic() + (0.0 if loop in others else self._skipped_s)

        patch.setattr(asyncio.BaseEventLoop, "time", moved_on)

    def skip(self, seconds: float) -> None:
        """Move it on."""
        self._skipped_s += seconds

    async def pass_by(self, seconds: float) -> None:
        """Move it on, and let the loop do what is due."""
        self.skip(seconds)
        for _ in range(2):
            await asyncio.sleep(0)

    @contextmanager
    def flies(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Move it on again and again within the block, whatever the loop comes to wait for."""
        over = threading.Event()

        def move() -> None:
            while not over.wait(0.001):
                loop.call_soon_threadsafe(self.skip, 10.0)

        mover = threading.Thread(target=move)
        mover.start()
        try:
            yield
        finally:
            over.set()
            mover.join()


class LoopWatch:
    """How long an event loop was kept from running by other work of its process.

    It asks to run again and again. What counts of a delay is at most the processor time that the process took
    meanwhile, so no other program adds to it.

    Attributes:
        blocked_s: the longest of these delays, in seconds.
        silent_s: the longest delay by the clock, whoever took it; for people to read.
    """

    _EVERY_S: Final = 0.002

    def __init__(self) -> None:
        self.blocked_s = self.silent_s = 0.0
        self._is_over = False

    @classmethod
    @contextmanager
    def of(cls, loop: asyncio.AbstractEventLoop) -> Iterator[LoopWatch]:
        """Watch an event loop within the block, from any thread."""
        watch = cls()
        loop.call_soon_threadsafe(watch._begin, loop)
        try:
            yield watch
        finally:
            watch._is_over = True

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s, spent_s = time.monotonic() + self._EVERY_S, time.process_time()

        def look() -> None:
            silent_s = time.monotonic() - due_s
            self.silent_s = max(self.silent_s, silent_s)
            self.blocked_s = max(self.blocked_s, min(silent_s, time.process_time() - spent_s))
            if not self._is_over:
                self._begin(loop)

        loop.call_later(self._EVERY_S, look)
