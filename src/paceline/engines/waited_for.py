"""Threads that passes wait for, in which nothing may wait for the engine's thread.

Python collects garbage in whatever thread happens to allocate, and runs finalizers there, users' own among them: one
that closes a stream waits for the engine's thread. In a thread that the engine's thread itself waits for, that would be
a deadlock. So such threads say what they are, and nothing in them waits.
"""

from __future__ import annotations

import threading
from typing import Final

_this: Final = threading.local()


def be_waited_for() -> None:
    """Say that passes wait for this thread, once when it starts."""
    _this.is_waited_for = True


def is_waited_for() -> bool:
    return getattr(_this, "is_waited_for", False)
