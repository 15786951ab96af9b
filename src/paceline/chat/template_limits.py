"""What rendering a chat template may take: a template comes with the model, so from anybody.

Steps and texts are counted one by one, and the clock is looked at every so many. What takes long at once, such as a
filter over all of a list, looks at the clock itself. Sizes are checked where texts and lists are made, so between two
looks there is no more work than the size limits allow.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, Final

MAX_CPU_S: Final = 0.4
"""Processor time of this thread for one rendering, in seconds: a busy machine does not make it less."""
CPU_S_PER_MESSAGE: Final = 0.01
"""Processor time for each message beyond that, in seconds: templates in use walk all messages for each of them."""
MAX_CHARACTERS: Final = 1 << 22
"""Characters of any one text that a template makes. A context of a million tokens has about as many."""
MAX_BYTES: Final = 1 << 29
"""Bytes of all texts that one rendering makes, whether it keeps them or not."""
MAX_ITEMS: Final = 1 << 18
"""Lists, mappings, keys and values within any one list that a template makes, counted as often as they come up. Their
texts have at most :data:`MAX_CHARACTERS` together."""
MAX_LEVELS: Final = 500
"""Lists and mappings within each other."""
MAX_SOURCE: Final = 1 << 16
"""Characters of a template. The longest of 70 in use has 17 thousand."""
MAX_NODES: Final = 1 << 13
"""Names, constants, operations and tags of a template. The most of 70 in use are 1,325."""
LARGEST_NUMBER: Final = 1 << 64
"""Largest whole number that a template may make, or smallest where it is negative."""
LARGEST_ARGUMENT: Final = 100_000
"""Largest number that a filter or a method is given, where it may be a width or a count; jinja2's sandbox allows a
range of as many."""

_CPU_EVERY: Final = 64
"""Counts between two looks at the clock."""
_NESTED: Final[tuple[type[Any], ...]] = (list, tuple, dict, type({}.items()), type({}.keys()), type({}.values()))


class LimitError(Exception):
    """A template takes more than it may; the message says of what, without the subject."""


class _Meter:
    """What one rendering has taken so far.

    Attributes:
        has_grown: whether anything was added to a list, which may be in others whose sizes were checked before.
    """

    def __init__(self, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._ends_s = time.thread_time() + cpu_s
        self._collection_began_s = 0.0
        self._left = _CPU_EVERY
        self._bytes_left = MAX_BYTES
        self.has_grown = False

    def count(self, num_bytes: int) -> None:
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise LimitError(f"makes texts of more than {MAX_BYTES} bytes, all of them together")
        self._left -= 1
        if self._left <= 0:
            self.look()

    def look(self) -> None:
        self._left = _CPU_EVERY
        if time.thread_time() > self._ends_s:
            raise LimitError(f"takes more than {self._cpu_s:.1f} seconds of processor time")

    def leave_out_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Not count a full collection of garbage within the rendering: it takes as long as the process has objects."""
        if info["generation"] < 2 or _METER.get() is not self:
            return
        if phase == "start":
            self._collection_began_s = time.thread_time()
        else:
            self._ends_s += time.thread_time() - self._collection_began_s


_METER: ContextVar[_Meter | None] = ContextVar("meter", default=None)


@contextmanager
def limit_rendering(num_messages: int = 0) -> Iterator[None]:
    """Bound what the block takes of this thread's time, to render so many messages."""
    meter = _Meter(MAX_CPU_S + num_messages * CPU_S_PER_MESSAGE)
    token, leave_out = _METER.set(meter), meter.leave_out_collection
    gc.callbacks.append(leave_out)
    try:
        yield
    finally:
        gc.callbacks.remove(leave_out)
        _METER.reset(token)


def count_step(num_bytes: int = 0) -> None:
    """Count one step of a template, which takes little time and made a text of ``num_bytes``.

    Raises:
        LimitError: the template's time is over, or it made too much.
    """
    meter = _METER.get()
    if meter is not None:
        meter.count(num_bytes)


def check_time() -> None:
    meter = _METER.get()
    if meter is not None:
        meter.look()


def check_characters(count: int) -> None:
    """Refuse a text that is about to be made."""
    if count > MAX_CHARACTERS:
        raise LimitError(f"makes a text of {count} characters, and the most are {MAX_CHARACTERS}")


def check_items(value: Any) -> None:
    """Refuse a list or mapping that has too much in it. What comes up in several places counts in each of them."""
    if not isinstance(value, _NESTED):
        return
    items_left, characters = MAX_ITEMS, 0
    waiting: list[Iterator[Any]] = [_iter_items(value)]
    while waiting:
        for item in waiting[-1]:
            items_left -= 1
            if items_left < 0:
                raise LimitError(f"makes a list of more than {MAX_ITEMS} values")
            if isinstance(item, str):
                characters += len(item)
            elif isinstance(item, _NESTED):
                waiting.append(_iter_items(item))
                break
        else:
            waiting.pop()
        if len(waiting) > MAX_LEVELS:
            raise LimitError(f"makes lists within each other, more than {MAX_LEVELS}")
        if characters > MAX_CHARACTERS:
            raise LimitError(f"makes a list of texts of more than {MAX_CHARACTERS} characters together")


def grow(values: list[Any], value: Any) -> None:
    """Add a value to a list of a template, unless the list has :data:`MAX_ITEMS`."""
    meter = _METER.get()
    if meter is not None:
        meter.has_grown = True
    if len(values) >= MAX_ITEMS:
        raise LimitError(f"makes a list of more than {MAX_ITEMS} values")
    values.append(value)


def check_grown(*values: Any) -> None:
    """Refuse lists and mappings that have grown too large since they were made, before all in them is walked."""
    meter = _METER.get()
    if meter is None or not meter.has_grown:
        return
    for value in values:
        if isinstance(value, _NESTED):
            check_items(value)
            meter.look()


def check_argument(value: Any) -> None:
    """Refuse a number that a filter or method could take for a width or a count."""
    if isinstance(value, int) and abs(value) > LARGEST_ARGUMENT:
        raise LimitError(f"gives a filter or method {_show_number(value)}, and the largest is {LARGEST_ARGUMENT}")


def check_number(bits: int) -> None:
    """Refuse a whole number that is about to be made, and may have so many bits."""
    if bits > LARGEST_NUMBER.bit_length():
        raise LimitError(f"makes a number beyond {LARGEST_NUMBER}")


def _iter_items(value: Any) -> Iterator[Any]:
    return chain.from_iterable(value.items()) if isinstance(value, dict) else iter(value)


def _show_number(value: int) -> str:
    return str(value) if value.bit_length() < 128 else "a number of more than 38 digits"
