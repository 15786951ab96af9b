"""Work that may take long, or much stack: in a thread of its own, awaited so long and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from paceline.core.errors import ConstraintError

T = TypeVar("T")

STACK_BYTES = 256 << 20
"""Stack of the thread: address space, of which a page is memory once it was used."""

_starting = threading.Lock()


def run_bounded(work: Callable[[], T], seconds: float, *, refusal: str, ended: Callable[[], None] | None = None) -> T:
    """Return what ``work`` returns, or raise what it raises.

    Nothing can end a thread: work that takes longer goes on, and nobody waits for it.

    Args:
        work: what to do.
        seconds: how long to wait.
        refusal: message of the error if it takes longer.
        ended: called when the work has ended, by its own thread; ``None`` for nothing.

    Raises:
        ConstraintError: the work takes longer.
    """
    done = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            if ended is not None:
                ended()
            done.set()

    try:
        _start(threading.Thread(target=run, name="paceline-grammar", daemon=True))
    except BaseException:
        if ended is not None:
            ended()
        raise
    if not done.wait(seconds):
        raise ConstraintError(refusal)
    if errors:
        raise errors[0]
    return results[0]


def _start(thread: threading.Thread) -> None:
    """Start a thread with a large stack: its size is a setting of the process, and read at a start."""
    with _starting:
        before = threading.stack_size()
        with suppress(ValueError):
            threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
