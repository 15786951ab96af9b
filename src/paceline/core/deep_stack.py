"""Runs work that may take much stack in a thread with a large one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 256 << 20
"""Stack of the thread: address space, of which a page is memory once it was used."""

_starting = threading.Lock()


def with_deep_stack(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, or raise what it raises.

    Nothing can end a thread from outside, so ``work`` has to be bounded by itself.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="paceline-deep", daemon=True)
    _start(thread)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _start(thread: threading.Thread) -> None:
    """Start a thread with a large stack, whose size is a setting of the process that is read at a start."""
    with _starting:
        before = threading.stack_size()
        with suppress(ValueError):
            threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
