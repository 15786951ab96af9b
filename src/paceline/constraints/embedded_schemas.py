"""JSON schemas that stand in a grammar in Lark's notation, behind ``%json``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from paceline.constraints.schema_errors import find_error_pointer
from paceline.constraints.sources import Lark
from paceline.core.errors import ConstraintError

_EMBEDDED = re.compile(r"%json[ \t\r\n]*")


def _parse_float(literal: str) -> float:
    """Return a number that JSON's readers take, or raise ``ValueError``: Python's reader takes others too."""
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(literal)
    return value


_DECODER = json.JSONDecoder(strict=False, parse_float=_parse_float, parse_constant=_parse_float)
_PLACE = re.compile(r"^at (\d+)\((\d+)\)")


def find_embedded_schemas(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
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
                f"{Lark.name} cannot be used: {line_and_column(text, found.start())}: the JSON schema is nested too "
                "deeply: name its parts under $defs and refer to them"
            ) from None
        if isinstance(schema, dict):
            yield found.start(), schema


def locate_in_embedded(text: str, problem: str) -> str:
    """Return where in a schema in a grammar a problem is, as a JSON pointer; empty where that is not known.

    Args:
        problem: as llguidance says it, with the place of the expression that has the schema.
    """
    place = _PLACE.match(problem)
    if place is None or "JSON schema" not in problem:
        return ""
    lines = text.split("\n")
    before = sum(len(line) + 1 for line in lines[: int(place[1]) - 1]) + int(place[2]) - 1
    found = (find_error_pointer(problem, schema) for start, schema in find_embedded_schemas(text) if start >= before)
    return next(found, "")


def line_and_column(text: str, position: int) -> str:
    """Return the line and the column of a place in a text, both from 1."""
    return f"line {text.count(chr(10), 0, position) + 1}, column {position - text.rfind(chr(10), 0, position)}"
