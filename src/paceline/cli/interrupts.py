"""Ctrl-C between rounds: a pass is never torn, the text so far is kept, and the report is still printed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]


@contextmanager
def hold_interrupts() -> Iterator[threading.Event]:
    """Within the block the first Ctrl-C sets the event that is yielded; a second one interrupts as usual."""
    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)

    def hold(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    with _handling(hold):
        yield interrupted


@contextmanager
def allow_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C interrupts as usual, also where it is held outside of it."""
    with _handling(signal.default_int_handler):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have a handler take Ctrl-C, but off the main thread, or where interrupts were ignored from the start."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def hide_keys() -> Iterator[None]:
    """Within the block the terminal does not show what is typed, which would stand in the middle of an answer.

    What is typed meanwhile is there to be read afterwards. Where there is no such terminal, nothing is changed.
    """
    if termios is None or sys.stdin is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    unseen = list(before)
    unseen[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSADRAIN, unseen)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
