"""Bodies as JSON: what anybody may send, read so that nothing worse than one clear line can come of it.

Python's parser lets no other thread run before it is done. So a long body is read piece by piece, each in a few
milliseconds. A piece ends before a comma or within a text, and is completed to be JSON by itself::

    body       {"prompt": [1, 2, 3, 4], "stop": "long text"}
    pieces     {"prompt": [1, 2        , 3, 4], "stop": "long         text"}
    as parsed  {"prompt": [1, 2,0]}   {"B":[0, 3, 4], "stop": "long"}   {"B":"text"}
"""

from __future__ import annotations

import codecs
import itertools
import json
import math
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from paceline.core.errors import InputError
from paceline.serving.errors import LONGEST_SHOWN
from paceline.terminal_text import printable_line

MAX_LEVELS: Final = 128
"""Lists and objects within each other. Deeper ones would exhaust the stack here, or of whoever walks them later."""
MAX_VALUES: Final = 1_000_000
"""Values of a body. A bias for each token of the largest vocabularies, in pairs, comes to 800,000."""
MAX_CONTAINERS: Final = 270_000
"""Lists and objects of a body. A bias for each token of the largest vocabularies, in pairs, comes to 262,144. Python's
garbage collector looks at all of them at once, which takes up to 50 ms."""
PIECE_BYTES: Final = 1 << 16
"""Bytes of a body that are read at once. The name of a field may have as many, as it is written in the body."""
MAX_UNCUT: Final = 1 << 20
"""Characters that are read at once at most, where there is no place to cut: within a number, among blanks, or where
objects are in each other and have long names."""
SMALLEST_INTEGER: Final = -(1 << 63)
"""Smallest integer of a body: that of 64 bits with a sign."""
LARGEST_INTEGER: Final = (1 << 64) - 1
"""Largest integer of a body: that of 64 bits without a sign. The largest seeds are among them."""

_BLANKS: Final = " \t\n\r"
# Without the quote at its end a text still is one match: else each quote within would be tried as a beginning.
_REST: Final = r'(?:[^"\\]++|\\.)*+("?+)'
_TOKENS: Final = re.compile(rf'"{_REST}|[\[{{]|[\]}}]|[^"\[\]{{}}]++', re.DOTALL)
_REST_OF_TEXT: Final = re.compile(_REST, re.DOTALL)
# As much of a text as ends with no part of an escape, and with no half of a pair of them.
_UNCUT: Final = re.compile(r'(?:[^"\\]++|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u])*+', re.DOTALL)
_LONGEST_ESCAPE: Final = len(r"\ud83d\ude00")
_LITERALS: Final = re.compile(
    r'"(?:[^"\\]++|\\.)*+"?+|NaN|-?Infinity|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?', re.DOTALL
)
_LONG_INTEGER: Final = re.compile("[0-9]{19}")
_HALF_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPES: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_CLOSING: Final = {"[": "]", "{": "}"}
# Names of what a piece has in the place of what comes before it, and behind it. No client can guess them.
_BEFORE: Final = secrets.token_hex(8)
_AFTER: Final = secrets.token_hex(8)


class BodyError(InputError):
    """A request's body is not the JSON that it has to be."""


class _UnfitLiteralError(Exception):
    """A number or word that JSON does not have, or that does not fit."""


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a request's body is. Other threads run while a long one is read.

    Beyond what JSON demands, these are refused: more than :data:`MAX_LEVELS` levels, :data:`MAX_VALUES` values or
    :data:`MAX_CONTAINERS` lists and objects, numbers that are not finite, integers that do not fit into 64 bits, a
    field given twice in one object, and half a surrogate pair in a text. Errors say the place.
    """
    if not body or body.isspace():
        raise BodyError("the body is empty: send a JSON object, such as {}")
    if len(body) <= PIECE_BYTES:
        source = _Source("".join(_decode_pieces(body)))
        _check_levels(source)
        value = _parse(source)
    else:
        value = _LongBody().read(body)
    if not isinstance(value, dict):
        raise _not_an_object(value)
    return value


_KINDS: Final[dict[type[Any], str]] = {
    list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"
}  # fmt: skip


def _decode_pieces(body: bytes) -> Iterator[str]:
    """Iterate over the pieces of a body, as texts."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = len(codecs.BOM_UTF8) if body.startswith(codecs.BOM_UTF8) else 0
    while start < len(body):
        end = start + PIECE_BYTES
        try:
            yield decoder.decode(body[start:end], final=end >= len(body))
        except UnicodeDecodeError as error:
            place = min(end, len(body)) - len(error.object) + error.start + 1
            raise BodyError(f"the body is not UTF-8: byte {place} of {len(body)} cannot be read") from None
        start = end


@dataclass(frozen=True, slots=True)
class _Source:
    """JSON that is parsed at once.

    Attributes:
        start: where in the text that begins which the body has.
        line: of the start in the body, from 1.
        column: of the start in the body, from 1.
        opening: where a text began that goes on at the start.
    """

    text: str
    start: int = 0
    line: int = 1
    column: int = 1
    opening: str = ""

    def place(self, position: int) -> str:
        """Return where in the body a position in the text is."""
        if position < self.start:
            return self.opening
        return "line {}, column {}".format(*self.at(position))

    def at(self, position: int) -> tuple[int, int]:
        """Return line and column in the body of a position in the text."""
        line = self.line + self.text.count("\n", self.start, position)
        new_line = self.text.rfind("\n", self.start, position)
        return line, position - new_line if new_line >= 0 else self.column + position - self.start


@dataclass(frozen=True, slots=True)
class _Cut:
    """The end of a piece.

    Attributes:
        end: where in the text.
        opened: brackets of the lists and objects that go on behind it, from the outermost; none where nothing does.
        num_commas: of the piece, outside of texts.
        num_opened: lists and objects that begin in the piece.
        text_start: where the text begins that goes on behind the cut: 0 if it went on before too, -1 if none does.
    """

    end: int
    opened: str = ""
    num_commas: int = 0
    num_opened: int = 0
    text_start: int = -1

    @property
    def completion(self) -> str:
        """What makes JSON of the piece."""
        if not self.opened:
            return ""
        closed = "".join(_CLOSING[mark] for mark in reversed(self.opened))
        return f'"{closed}' if self.text_start >= 0 else f',"{_AFTER}":0{closed}' if closed[0] == "}" else f",0{closed}"


class _LongBody:
    """A body that is read piece by piece."""

    def __init__(self) -> None:
        self._value: Any = None
        self._opened = ""
        self._is_in_text = False
        self._text_parts: list[str] = []
        self._text_place = ""
        self._line = self._column = 1
        self._num_values = self._num_containers = 0
        self._is_over = False

    def read(self, body: bytes) -> Any:
        text, least = "", 0
        for piece in itertools.chain(_decode_pieces(body), [""]):
            text += piece
            # At the end all is looked at, as the limits are kept there.
            if piece and len(text) < least:
                continue
            cut = None if self._is_over else self._cut(text)
            if cut is not None:
                self._take(text[: cut.end], cut)
                text = text[cut.end :]
            if self._is_over:
                self._check_blank(text)
                text = ""
            if len(text) > MAX_UNCUT:
                raise BodyError(
                    f"the body has {MAX_UNCUT:,} characters and more from {self._place(text, 0)} on without a comma "
                    "or a value that is a text: send fewer blanks and shorter names"
                )
            # What has no place to be cut at is not looked at anew with each piece.
            least = 2 * len(text) if cut is None else 0
        if not self._is_over:
            self._take(text, _Cut(len(text)))
        return self._value

    def _cut(self, text: str) -> _Cut | None:
        """Return where what is not read yet can be cut, as far behind as may be; ``None`` for nowhere."""
        opened, num_commas, num_opened, start = self._opened, 0, 0, 0
        if self._is_in_text:
            found = _REST_OF_TEXT.match(text)
            assert found is not None
            if not found[1]:
                return self._within(text, _Cut(0, opened, text_start=0))
            start = found.end()
        last, text_start = (0, "", 0, 0), -1
        for found in _TOKENS.finditer(text, start):
            token = found[0]
            mark = token[0]
            if mark == '"':
                if not found[1]:
                    text_start = found.start()
                    break
            elif mark in "[{":
                opened += mark
                num_opened += 1
                if len(opened) > MAX_LEVELS:
                    raise _too_deep(self._place(text, found.start()))
            elif mark in "]}":
                if _CLOSING.get(opened[-1:]) != mark or len(opened) == 1:
                    # It closes all of it, or nothing.
                    return _Cut(found.end(), "", num_commas, num_opened)
                opened = opened[:-1]
            elif opened and "," in token:
                last = (found.start() + token.rfind(","), opened, num_commas + token.count(",") - 1, num_opened)
                num_commas = last[2] + 1
        if last[0]:
            return _Cut(*last)
        here = _Cut(text_start, opened, num_commas, num_opened, text_start)
        return None if text_start < 0 else self._within(text, here)

    def _within(self, text: str, cut: _Cut) -> _Cut | None:
        """Return a cut within a text that begins where ``cut`` says; ``None`` where it may be the name of a field."""
        start = cut.text_start
        if start or not self._is_in_text:
            before = text[:start]
            if not cut.opened:
                # However it ends, it is no object.
                raise _not_an_object(_parse(_Source(f'{before}""')))
            if cut.opened[-1] == "{" and before.rstrip(_BLANKS)[-1:] != ":":
                if len(text) - start - len('"') <= PIECE_BYTES:
                    return None
                raise BodyError(
                    f"the name of a field at {self._place(text, start)} has more than {PIECE_BYTES} bytes: send a "
                    "shorter one"
                )
        found = _UNCUT.match(text, start + bool(start))
        assert found is not None
        end = found.end()
        if len(text) - end >= _LONGEST_ESCAPE:
            # It is no escape, or half a pair, and is refused.
            end += _LONGEST_ESCAPE // 2
        return replace(cut, end=end)

    def _take(self, text: str, cut: _Cut) -> None:
        """Read a piece, which goes on with what was read before."""
        self._num_values += cut.num_commas + cut.num_opened
        self._num_containers += cut.num_opened
        for count, most, what in (
            (self._num_containers, MAX_CONTAINERS, "lists and objects"),
            (self._num_values, MAX_VALUES, "values"),
        ):
            if count > most:
                raise BodyError(f"the body has more than {most:,} {what}: send fewer")
        before = "".join(f'{{"{_BEFORE}":' if mark == "{" else "[" for mark in self._opened)
        before += "" if not before else '"' if self._is_in_text else "0"
        source = _Source(before + text + cut.completion, len(before), self._line, self._column, self._text_place)
        self._join(_parse(source), cut)
        if cut.text_start > 0:
            self._text_place = self._place(text, cut.text_start)
        self._line, self._column = source.at(len(before) + len(text))
        self._opened, self._is_in_text, self._is_over = cut.opened, cut.text_start >= 0, not cut.opened

    def _join(self, part: Any, cut: _Cut) -> None:
        """Put what a piece has behind what was read before."""
        value = self._value
        if not self._opened:
            self._value = part
        for level, mark in enumerate(self._opened, 1):
            if mark == "{":
                last = next(reversed(value))
                first = part.pop(_BEFORE)
                twice = next((name for name in part if name in value), None)
                if twice is not None:
                    raise _duplicate_field(twice)
                value.update(part)
            else:
                last = len(value) - 1
                first = part[0]
                value.extend(part[1:])
            if level == len(self._opened) and self._is_in_text:
                self._text_parts.append(first)
                if cut.text_start != 0:
                    value[last] = "".join(self._text_parts)
            value, part = value[last], first
        if not cut.opened:
            return
        inner = self._value
        for _ in cut.opened[1:]:
            inner = _last_value(inner)
        if cut.text_start > 0:
            self._text_parts = [_last_value(inner)]
        elif cut.text_start < 0:
            # What completed the piece.
            inner.pop(_AFTER if isinstance(inner, dict) else -1)

    def _check_blank(self, text: str) -> None:
        """Refuse what follows the whole value."""
        rest = text.lstrip(_BLANKS)
        if rest:
            raise _not_json("Extra data", self._place(text, len(text) - len(rest)))
        self._line, self._column = self._at(text).at(len(text))

    def _at(self, text: str) -> _Source:
        return _Source(text, line=self._line, column=self._column)

    def _place(self, text: str, position: int) -> str:
        return self._at(text).place(position)


def _last_value(value: Any) -> Any:
    return next(reversed(value.values())) if isinstance(value, dict) else value[-1]


def _parse(source: _Source) -> Any:
    """Return the value that JSON is."""
    text = source.text
    # Python's own parsers of integers are much faster than ours, and lists of tokens are long.
    decoder = _WITH_LONG_INTEGERS if _LONG_INTEGER.search(text) else _DECODER
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        raise _not_json(error.msg.removesuffix(" at"), source.place(error.pos)) from None
    except _UnfitLiteralError as error:
        literal, reason = error.args
        found = next(found for found in _LITERALS.finditer(text) if found[0] == literal)
        raise BodyError(f"the body has {_shorten(literal)} at {source.place(found.start())}: {reason}") from None
    if _HALF_PAIR.search(text):
        _check_pairs(source)
    return value


def _not_json(reason: str, place: str) -> BodyError:
    return BodyError(f"the body is not JSON: {reason} ({place})")


def _not_an_object(value: Any) -> BodyError:
    return BodyError(f"the body is a JSON {_KINDS[type(value)]}: send an object, such as {{}}")


def _too_deep(place: str) -> BodyError:
    return BodyError(f"the body is nested deeper than {MAX_LEVELS} levels at {place}")


def _duplicate_field(name: str) -> BodyError:
    return BodyError(f"the body gives the field {_shorten(json.dumps(name))} twice in one object: give it once")


def _check_levels(source: _Source) -> None:
    text = source.text
    if text.count("[") + text.count("{") <= MAX_LEVELS:
        return
    level = 0
    for found in _TOKENS.finditer(text):
        token = found[0]
        if token in "[{":
            level += 1
            if level > MAX_LEVELS:
                raise _too_deep(source.place(found.start()))
        elif token in "]}":
            level -= 1


def _check_pairs(source: _Source) -> None:
    # Outside of its strings JSON has no backslash.
    for found in _ESCAPES.finditer(source.text):
        if found[1]:
            raise BodyError(
                f"the body has {_shorten(found[0])} at {source.place(found.start())}: half a surrogate pair is not a "
                "character; send both halves, or the character itself"
            )


def _refuse_constant(literal: str) -> NoReturn:
    raise _UnfitLiteralError(literal, "JSON has no such number; leave the field out")


def _read_float(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise _UnfitLiteralError(literal, "the number is too large; the largest is about 1.8e308")
    return value


def _read_integer(literal: str) -> int:
    value = int(literal) if len(literal) <= len(str(SMALLEST_INTEGER)) else None
    if value is None or not SMALLEST_INTEGER <= value <= LARGEST_INTEGER:
        raise _UnfitLiteralError(literal, "an integer has to fit into 64 bits")
    return value


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _duplicate_field(_find_duplicate(pairs))
    return value


def _find_duplicate(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    return name


_DECODER: Final = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_read_float, object_pairs_hook=_read_object
)
_WITH_LONG_INTEGERS: Final = json.JSONDecoder(
    parse_constant=_refuse_constant, parse_float=_read_float, parse_int=_read_integer, object_pairs_hook=_read_object
)


def _shorten(literal: str) -> str:
    literal = printable_line(literal)
    return literal if len(literal) <= LONGEST_SHOWN else f"{literal[:LONGEST_SHOWN]}..."
