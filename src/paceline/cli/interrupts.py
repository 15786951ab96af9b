"""Ctrl-C between rounds: a pass is never torn, the text so far is kept, and the report is still printed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[threading.Event]:
    """Within the block the first Ctrl-C sets the event that is yielded; a second one interrupts as usual.

    Off the main thread, and where the process was started with interrupts ignored, nothing is changed.
    """
    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
        yield interrupted
        return

    def hold(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, hold)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
