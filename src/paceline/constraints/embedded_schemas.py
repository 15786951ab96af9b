"""JSON schemas that stand in a grammar in Lark's notation, behind ``%json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from paceline.constraints.schema_errors import place_of
from paceline.constraints.sources import Lark
from paceline.core.errors import ConstraintError

_EMBEDDED = re.compile(r"%json[ \t\r\n]*")


def _float_of(literal: str) -> float:
    """Return a number that JSON's readers take: Python's takes others too.

    Raises:
        ValueError: it is none.
    """
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(literal)
    return value


_DECODER = json.JSONDecoder(strict=False, parse_float=_float_of, parse_constant=_float_of)
_PLACE = re.compile(r"^at (\d+)\((\d+)\)")


def embedded_schemas(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the schemas in a grammar that are objects, each with where it begins.

    What looks like one in a string or a comment is yielded too: no reading of the notation but llguidance's own says
    for certain what is one.

    Raises:
        ConstraintError: one is nested too deeply.
    """
    for found in _EMBEDDED.finditer(text):
        try:
            schema, _ = _DECODER.raw_decode(text, found.end())
        except ValueError:
            # If this is to be a schema, llguidance refuses it.
            continue
        except RecursionError:
            raise ConstraintError(
                f"{Lark.name} cannot be used: {place_in(text, found.start())}: the JSON schema is nested too deeply: "
                "name its parts under $defs and refer to them"
            ) from None
        if isinstance(schema, dict):
            yield found.start(), schema


def embedded_place(text: str, problem: str) -> str:
    """Return where in a schema in a grammar a problem is, as a JSON pointer; empty where that is not known.

    Args:
        text: the grammar.
        problem: as llguidance says it, with the place of the expression that has the schema.
    """
    place = _PLACE.match(problem)
    if place is None or "JSON schema" not in problem:
        return ""
    lines = text.split("\n")
    before = sum(len(line) + 1 for line in lines[: int(place[1]) - 1]) + int(place[2]) - 1
    found = (place_of(problem, schema) for start, schema in embedded_schemas(text) if start >= before)
    return next(found, "")


def place_in(text: str, position: int) -> str:
    """Return the line and the column of a place in a text, both from 1."""
    return f"line {text.count(chr(10), 0, position) + 1}, column {position - text.rfind(chr(10), 0, position)}"
