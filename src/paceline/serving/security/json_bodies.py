"""Bodies as JSON: what anybody may send, read so that nothing worse than one clear line can come of it."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Final, NoReturn

from paceline.core.errors import InputError
from paceline.serving.security.scopes import LONGEST_SHOWN
from paceline.terminal_text import printable_line

MOST_LEVELS: Final = 128
"""Lists and objects within each other. Deeper ones would exhaust the stack here, or of whoever walks them later."""
SMALLEST_INTEGER: Final = -(1 << 63)
"""Smallest integer of a body: that of 64 bits with a sign."""
LARGEST_INTEGER: Final = (1 << 64) - 1
"""Largest integer of a body: that of 64 bits without a sign. The largest seeds are among them."""

# Without the quote at its end a text still is one match: else each quote within would be tried as a beginning.
_STRING: Final = r'"(?:[^"\\]++|\\.)*+"?+'
_MARKS: Final = re.compile(rf"{_STRING}|[\[{{]|[\]}}]", re.DOTALL)
_LITERALS: Final = re.compile(
    rf"{_STRING}|NaN|-?Infinity|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", re.DOTALL
)
_LONG_INTEGER: Final = re.compile(rb"[0-9]{19}")
_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_ESCAPES: Final = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)


class BodyError(InputError):
    """A request's body is not the JSON that it has to be."""


class _UnfitLiteralError(Exception):
    """A number or word that JSON does not have, or that does not fit."""


def read_json(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a request's body is.

    Beyond what JSON demands, these are refused: more than :data:`MOST_LEVELS` levels, numbers that are not finite,
    integers that do not fit into 64 bits, a field given twice in one object, and half a surrogate pair in a text.

    Args:
        body: all of it, in UTF-8.

    Raises:
        BodyError: with the place: line and column, both from 1.
    """
    text = _decoded(body)
    _check_levels(text)
    # Python's own parsers of integers are much faster than ours, and lists of tokens are long.
    read_integer = _read_integer if _LONG_INTEGER.search(body) else None
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_read_float,
            parse_int=read_integer,
            object_pairs_hook=_read_object,
        )
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise BodyError(f"the body is not JSON: {reason} ({_place(text, error.pos)})") from None
    except _UnfitLiteralError as error:
        literal, reason = error.args
        found = next(found for found in _LITERALS.finditer(text) if found[0] == literal)
        raise BodyError(f"the body has {_shown(literal)} at {_place(text, found.start())}: {reason}") from None
    if not isinstance(value, dict):
        raise BodyError(f"the body is a JSON {_KINDS[type(value)]}: send an object, such as {{}}")
    if _HALF_PAIR.search(body):
        _check_pairs(text)
    return value


_KINDS: Final[dict[type[Any], str]] = {
    list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"
}  # fmt: skip


def _decoded(body: bytes) -> str:
    if not body.strip():
        raise BodyError("the body is empty: send a JSON object, such as {}")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8: byte {error.start + 1} of {len(body)} cannot be read") from None


def _check_levels(text: str) -> None:
    if text.count("[") + text.count("{") <= MOST_LEVELS:
        return
    level = 0
    for found in _MARKS.finditer(text):
        mark = found[0]
        if mark in "[{":
            level += 1
            if level > MOST_LEVELS:
                raise BodyError(f"the body nests deeper than {MOST_LEVELS} levels at {_place(text, found.start())}")
        elif mark in "]}":
            level -= 1


def _check_pairs(text: str) -> None:
    # Outside of its strings JSON has no backslash.
    for found in _ESCAPES.finditer(text):
        if found[1]:
            raise BodyError(
                f"the body has {_shown(found[0])} at {_place(text, found.start())}: half a surrogate pair is no "
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
        raise BodyError(f"the body gives the field {_shown(_first_twice(pairs))} twice in one object: give it once")
    return value


def _first_twice(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            break
        seen.add(name)
    return json.dumps(name)


def _place(text: str, position: int) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - text.rfind("\n", 0, position)
    return f"line {line}, column {column}"


def _shown(literal: str) -> str:
    literal = printable_line(literal)
    return literal if len(literal) <= LONGEST_SHOWN else f"{literal[:LONGEST_SHOWN]}..."
