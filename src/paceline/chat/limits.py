"""What rendering a chat template may take: a template comes with the model, so from anybody.

Time is counted where a template can repeat itself (loops, calls, walks over texts) and size where texts and lists are
joined. Between two counts there is no more work than the size limits allow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

MOST_CPU_S: Final = 0.4
"""Processor time of this thread for one rendering, in seconds: a busy machine does not make it less."""
MOST_CHARACTERS: Final = 1 << 22
"""Characters of any one text that a template makes. A context of a million tokens has about as many."""
MOST_ITEMS: Final = 1 << 18
"""Lists, mappings and values within any one list that a template makes, counted as often as they come up."""
MOST_SOURCE: Final = 1 << 18
"""Characters of a template. The longest of 70 in use has 17 thousand."""
LARGEST_NUMBER: Final = 1 << 64
LARGEST_ARGUMENT: Final = 100_000
"""Largest number that a filter or a method is given, where it may be a width or a count; it is also what jinja2's
sandbox allows of a range."""

_CPU_EVERY: Final = 64
"""Counts between two looks at the clock."""


class LimitError(Exception):
    """A template takes more than it may; the message says of what, without the subject."""


class _Meter:
    """What one rendering has taken so far."""

    def __init__(self) -> None:
        self._ends_s = time.thread_time() + MOST_CPU_S
        self._left = _CPU_EVERY

    def count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._left = _CPU_EVERY
            if time.thread_time() > self._ends_s:
                raise LimitError(f"takes more than {MOST_CPU_S} seconds of processor time")


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


@contextmanager
def limited() -> Iterator[None]:
    """Bound what the block takes of this thread's time."""
    token = _METER.set(_Meter())
    try:
        yield
    finally:
        _METER.reset(token)


def count_step() -> None:
    """Count one step of a template.

    Raises:
        LimitError: its time is over.
    """
    meter = _METER.get()
    if meter is not None:
        meter.count()


def check_characters(count: int) -> None:
    """Refuse a text that is about to be made.

    Raises:
        LimitError: it would have more than :data:`MOST_CHARACTERS`.
    """
    if count > MOST_CHARACTERS:
        raise LimitError(f"makes a text of {count} characters, and the most are {MOST_CHARACTERS}")


def check_items(value: Any) -> None:
    """Refuse a list or mapping that has too much in it. What comes up in several places counts in each of them.

    Raises:
        LimitError: there are more than :data:`MOST_ITEMS`.
    """
    left = MOST_ITEMS
    waiting: list[Iterator[Any]] = [_items_of(value)]
    while waiting:
        for item in waiting[-1]:
            left -= 1
            if left < 0:
                raise LimitError(f"makes a list of more than {MOST_ITEMS} values")
            if isinstance(item, (list, tuple, dict)):
                waiting.append(_items_of(item))
                break
        else:
            waiting.pop()


def check_argument(value: Any) -> None:
    """Refuse a number that a filter or method could take for a width or a count.

    Raises:
        LimitError: it is beyond :data:`LARGEST_ARGUMENT`.
    """
    if isinstance(value, int) and abs(value) > LARGEST_ARGUMENT:
        raise LimitError(f"gives a filter or method {_told(value)}, and the largest is {LARGEST_ARGUMENT}")


def check_number(bits: float) -> None:
    """Refuse a whole number that is about to be made.

    Raises:
        LimitError: it may be beyond :data:`LARGEST_NUMBER`.
    """
    if bits > LARGEST_NUMBER.bit_length():
        raise LimitError(f"makes a number beyond {LARGEST_NUMBER}")


def _items_of(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        return iter(value.values())
    return iter(value) if isinstance(value, (list, tuple)) else iter(())


def _told(value: int) -> str:
    return str(value) if value.bit_length() < 128 else "a number of more than 38 digits"
