r"""Text that remembers, character by character, whether the template wrote it or somebody else.

A template joins its own text with what users wrote, and may trim, split and replace both on the way. What it makes is
one text, in which ``<|im_end|>`` ends a turn where the template wrote it and is plain text where a user did::

    <|im_start|>user\n Never write <|im_end|>, please. <|im_end|>\n
    ^^^^^^^^^^^^^^^^^^ ............................... ^^^^^^^^^^^^^      ^ the template's    . somebody's

Whatever an operation leaves unsaid counts as somebody's: a mark that is lost can break a turn's form, and never makes a
control token of what a user wrote.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, SupportsIndex

from paceline.chat.template_limits import check_characters, count_step

_OURS: Final = b"\1"
"""Mark of a character that the template wrote."""
_THEIRS: Final = b"\0"
"""Mark of a character that came with the conversation."""
_OVERHEAD: Final = sys.getsizeof(b"")
"""Bytes that the marks of a text take besides themselves."""


class MarkedText(str):
    """A text with a mark on each character, for :func:`template_marks`. It equals the same text without marks.

    Methods are those of ``str``; what they return has its marks.
    """

    # Private, as a template could do things with bytes that are not counted.
    __slots__ = ("_marks",)

    _marks: bytes

    def __new__(cls, text: str, marks: bytes | None = None) -> MarkedText:
        """Return a text with these marks; without any, all of it is somebody's."""
        if marks is None:
            marks = text._marks if isinstance(text, MarkedText) else _THEIRS * len(text)
        made = super().__new__(cls, text)
        assert len(marks) == len(made)
        made._marks = marks
        count_step(_OVERHEAD + made.__sizeof__() + len(marks))
        return made

    @classmethod
    def of_template(cls, text: str) -> MarkedText:
        return cls(text, _OURS * len(text))

    @classmethod
    def joined(cls, parts: Iterable[Any]) -> MarkedText:
        """Return the parts, texts or what turns into texts, one after the other; refuse what is too long together."""
        texts, length = [], 0
        for part in parts:
            text = part if isinstance(part, str) else str(part)
            length += len(text)
            check_characters(length)
            texts.append(text)
        return cls("".join(texts), b"".join(map(template_marks, texts)))

    # ``str(text)`` and jinja2's output keep the marks by this.
    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> MarkedText:
        return MarkedText.joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> MarkedText:
        return MarkedText.joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> MarkedText:
        times = operator.index(count)
        check_characters(len(self) * times)
        return MarkedText(str.__mul__(self, times), self._marks * times)

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> MarkedText:
        marks = self._marks[key]
        return MarkedText(str.__getitem__(self, key), marks if isinstance(key, slice) else bytes((marks,)))

    def __iter__(self) -> Iterator[str]:
        for place in range(len(self)):
            yield self[place]

    def strip(self, characters: str | None = None, /) -> MarkedText:
        return self.lstrip(characters).rstrip(characters)

    def lstrip(self, characters: str | None = None, /) -> MarkedText:
        return self[len(self) - len(str.lstrip(self, characters)) :]

    def rstrip(self, characters: str | None = None, /) -> MarkedText:
        return self[: len(str.rstrip(self, characters))]

    def removeprefix(self, prefix: str, /) -> MarkedText:
        return self[len(self) - len(str.removeprefix(self, prefix)) :]

    def removesuffix(self, suffix: str, /) -> MarkedText:
        return self[: len(str.removesuffix(self, suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._mark_parts(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        parts = str.rsplit(self, sep, maxsplit)
        if sep is not None:
            return self._mark_parts(parts, sep)
        found: list[str] = []
        end = len(self)
        for part in reversed(parts):
            start = str.rindex(self, part, 0, end)
            found.append(self[start : start + len(part)])
            end = start
        return found[::-1]

    def splitlines(self, keepends: bool = False) -> list[str]:
        shown, found, start = str.splitlines(self, keepends), list[str](), 0
        for whole, part in zip(str.splitlines(self, True), shown, strict=True):
            found.append(self[start : start + len(part)])
            start += len(whole)
        return found

    def partition(self, separator: str, /) -> tuple[str, str, str]:
        return self._mark_partition(*map(len, str.partition(self, separator)[:2]))

    def rpartition(self, separator: str, /) -> tuple[str, str, str]:
        return self._mark_partition(*map(len, str.rpartition(self, separator)[:2]))

    def _mark_partition(self, before: int, between: int) -> tuple[str, str, str]:
        end = before + between
        return self[:before], self[before:end], self[end:]

    def replace(self, old: str, new: str, /, count: SupportsIndex = -1) -> MarkedText:
        """As :meth:`str.replace`; what is put in keeps its own marks."""
        if not isinstance(new, str):
            raise TypeError(f"{type(new).__name__} cannot be put into a text")
        most = operator.index(count)
        places = str.count(self, old)
        if most >= 0:
            places = min(places, most)
        check_characters(len(self) + places * (len(new) - len(old)))
        if not places:
            return self
        if not old:
            # Between all characters, and at both ends.
            parts: list[str] = []
            for place in range(places):
                parts += (new, self[place : place + 1])
            return MarkedText.joined([*parts, self[places:]])
        return MarkedText(new).join(self.split(old, places))

    def join(self, parts: Iterable[str], /) -> MarkedText:
        """As :meth:`str.join`; the parts keep their own marks."""
        woven: list[str] = []
        for part in parts:
            if not isinstance(part, str):
                raise TypeError(f"{type(part).__name__} cannot be joined: only texts can")
            woven += (self, part)
        return MarkedText.joined(woven[1:])

    def _same_length(self, changed: str) -> MarkedText:
        """Return the text with letters changed. Marks stay where no letter became several."""
        return MarkedText(changed, self._marks if len(changed) == len(self) else None)

    def upper(self) -> MarkedText:
        return self._same_length(str.upper(self))

    def lower(self) -> MarkedText:
        return self._same_length(str.lower(self))

    def capitalize(self) -> MarkedText:
        return self._same_length(str.capitalize(self))

    def title(self) -> MarkedText:
        return self._same_length(str.title(self))

    def _mark_parts(self, parts: Sequence[str], separator: str | None) -> list[str]:
        """Return parts that follow each other in the text, with its marks.

        A separator that is ``None`` is white space, which no part but the last has within.
        """
        found: list[str] = []
        start = 0
        for part in parts:
            if separator is None:
                start = str.index(self, part, start)
            found.append(self[start : start + len(part)])
            start += len(part) + len(separator or "")
        return found


def trailing_template_text(text: MarkedText) -> MarkedText:
    """Return what the template wrote at the end of a text, behind all that others wrote."""
    return text[text._marks.rfind(_THEIRS) + 1 :]


def template_marks(text: str) -> bytes:
    """Return a byte for each character of a text: 1 where a template wrote it."""
    return text._marks if isinstance(text, MarkedText) else _THEIRS * len(text)
