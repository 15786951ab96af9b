"""A model that waits, and interrupts for who waits for it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.engines.scripted import LogitFunction
from tests.timing import WAIT_S

SIZE = 10

ENDLESS = 10**9
"""Tokens of an answer that nobody waits for the end of."""

needs_signals = pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system signals no threads")


def counting(tokens: Sequence[int]) -> Float64Array:
    row: Float64Array = np.eye(SIZE)[(tokens[-1] + 1) % SIZE]
    return row


class Gate:
    """A model that stops after a token until it is let through.

    Attributes:
        reached: set once it stands there.
        let_through: to be set.
    """

    def __init__(self, token_id: int, model: LogitFunction = counting) -> None:
        self.reached = threading.Event()
        self.let_through = threading.Event()
        self._token_id = token_id
        self._model = model

    def __call__(self, tokens: Sequence[int]) -> Float64Array:
        if tokens[-1] == self._token_id:
            self.reached.set()
            assert self.let_through.wait(WAIT_S)
        return self._model(tokens)


@contextlib.contextmanager
def interrupt_once(waits: Callable[[], bool]) -> Iterator[None]:
    """Interrupt this thread within the block, once ``waits`` says that it waits."""
    heard = threading.Event()

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def watch() -> None:
        while not waits():
            pass
        # Python does not hear of a signal that comes just before it waits for a lock, until the wait is over.
        while not heard.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
