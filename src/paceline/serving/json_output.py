"""JSON of answers: written at once, or beside other work where it has long lists."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Final


class Listed:
    """A list that may be long: ``made_of`` some items at a time, of which each comes to ``num_each`` values."""

    def __init__(self, items: Sequence[Any], made_of: Callable[[Sequence[Any]], list[Any]], num_each: int = 1) -> None:
        self._items = items
        self._made_of = made_of
        self._at_once = max(_MAX_AT_ONCE // num_each, 1)

    def whole(self) -> list[Any]:
        return self._made_of(self._items)

    def pieces(self) -> Iterator[bytes]:
        between = b"["
        for start in range(0, len(self._items), self._at_once):
            yield between + to_json(self._made_of(self._items[start : start + self._at_once]))[1:-1]
            between = b","
        yield b"[]" if between == b"[" else b"]"


_MAX_AT_ONCE: Final = 1000
"""Values that are written at once. Python writes JSON beside nothing else, and takes some 2 ms for these."""

PLACE: Final = secrets.token_hex(8)
"""Text that stands for something else in JSON. No answer has it."""


def as_events(chunks: Sequence[dict[str, Any]], *, named: bool = False, in_pieces: bool = False) -> bytes:
    """Return chunks of a stream as server-sent events, to be sent at once.

    An event that is ``named`` says the ``type`` of its chunk too. With ``in_pieces`` other threads run meanwhile.
    """
    found: list[bytes] = []
    for chunk in chunks:
        found.append(b"event: %b\ndata: " % chunk["type"].encode() if named else b"data: ")
        found += json_pieces(chunk) if in_pieces else (to_json(chunk),)
        found.append(b"\n\n")
    return b"".join(found)


def to_json(value: Any, default: Callable[[Any], Any] = Listed.whole) -> bytes:
    """Return JSON. Characters that UTF-8 cannot write, such as half a pair of surrogates, are escaped.

    ``default`` returns what is written in the place of a :class:`Listed`.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=default)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=default).encode()


def json_pieces(value: Any) -> Iterator[bytes]:
    """Iterate over JSON. Other threads run while a :class:`Listed` in it is written."""
    found: list[Listed] = []

    def place(listed: Listed) -> str:
        found.append(listed)
        return PLACE

    written = to_json(value, place)
    # Of JSON that was written once more the lists come a second time.
    for part, listed in zip_longest(written.split(f'"{PLACE}"'.encode()), found[: written.count(PLACE.encode())]):
        yield part
        if listed is not None:
            yield from listed.pieces()
