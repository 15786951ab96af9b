"""Writes sources as grammars that llguidance reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from paceline.constraints.gbnf_to_lark import gbnf_to_lark
from paceline.constraints.llguidance_errors import find_error_pointer
from paceline.constraints.schema_limits import MAX_PATTERN, SchemaBudget
from paceline.constraints.schema_preparation import has_alternatives, prepare_schema
from paceline.constraints.sources import Calls, Choice, Gbnf, JsonObject, JsonSchema, Lark, Regex, Source, Whitespace
from paceline.constraints.vocabulary import import_llguidance
from paceline.core.errors import ConstraintError
from paceline.core.vocabulary import Vocabulary

_WHITESPACE: dict[Whitespace, dict[str, object]] = {
    "any": {},
    "short": {"whitespace_pattern": r" |\n[ \t]{0,20}"},
    "single": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    "none": {"whitespace_flexible": False},
}


_ALL_TOKENS = '%llguidance {"no_forcing": true}'
"""A mask has all tokens that may follow. Else it had one alone where bytes are certain, whichever the model prefers,
and to find all certain bytes takes a second where there is no end of them."""

MAX_LARK_BYTES = 64 << 10
"""Bytes of a grammar in llguidance's own language."""

MAX_LARK_RULES = 500
"""Rules: those that double others take time with their square, and stack with their number."""


def _schema_options(whitespace: Whitespace, *, strict: bool) -> dict[str, object]:
    return {"lenient": not strict, "coerce_one_of": not strict, **_WHITESPACE[whitespace]}


_OWN_OPTIONS = [_schema_options(whitespace, strict=strict) for whitespace in _WHITESPACE for strict in (True, False)]

_RULE = re.compile(r"^\s*[?!]*[A-Za-z_][\w-]*\s*(?:[\[{(.:])", re.MULTILINE)
_EMBEDDED = re.compile(r"%json[ \t\r\n]*")


def _parse_float(literal: str) -> float:
    """Return a number that JSON's readers take, or raise ``ValueError``: Python's reader takes others too."""
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(literal)
    return value


_DECODER = json.JSONDecoder(strict=False, parse_float=_parse_float, parse_constant=_parse_float)
_PLACE = re.compile(r"^at (\d+)\((\d+)\)")


def max_source_bytes(source: Source) -> float:
    """Return the most bytes that the text of a source may have, as far as that is its notation's own limit."""
    match source:
        case Calls():
            return math.inf
        case Lark():
            return MAX_LARK_BYTES
        case Regex():
            return MAX_PATTERN
        case _:
            return math.inf


def build_grammar(source: Source, vocabulary: Vocabulary) -> str:
    """Return llguidance's grammar for a source; ``vocabulary`` is for those that name tokens.

    Raises:
        ConstraintError: llguidance's grammar has no way to say it, or it would take too long.
    """
    match source:
        case JsonSchema():
            lark = f"start: %json {write_schema(json.loads(source.text), source.whitespace, strict=source.strict)}"
        case JsonObject():
            lark = f"start: %json {write_schema(json.loads(source.text), source.whitespace)}"
        case Gbnf():
            lark = gbnf_to_lark(source.text, vocabulary)
        case Lark():
            _check_embedded(source)
            num_rules = len(_RULE.findall(source.text))
            if num_rules > MAX_LARK_RULES and not isinstance(source, Calls):
                raise ConstraintError(
                    f"{source.name} has {num_rules:,} rules, and the most is {MAX_LARK_RULES:,}: make it smaller"
                )
            lark = source.text
        case Regex():
            lark = f"start: /{import_llguidance().regex_to_lark(source.text, '')}/"
        case Choice():
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(source.text))
            lark = f"start: CHOICE\nCHOICE: {texts}"
    grammar: str = import_llguidance().LLMatcher.grammar_from_lark(f"{lark}\n{_ALL_TOKENS}")
    return grammar


def build_open_grammar(source: Source) -> str:
    """Return the grammar of a schema with its objects open, if it has to be one; empty if not.

    Objects that are closed may tell alternatives of ``oneOf`` apart, of which the schema itself allows both at once.
    """
    if not isinstance(source, JsonSchema) or not source.strict or not has_alternatives(json.loads(source.text)):
        return ""
    lark = f"start: %json {write_schema(json.loads(source.text), source.whitespace, closed=False)}"
    grammar: str = import_llguidance().LLMatcher.grammar_from_lark(lark)
    return grammar


def write_schema(schema: Any, whitespace: Whitespace = "short", *, strict: bool = True, closed: bool = True) -> str:
    """Return a schema as it stands in llguidance's grammar, with how it is read.

    Args:
        whitespace: where there may be space between the parts of the JSON.
        strict: have what nothing can keep an answer to refused, and not left out.
        closed: close objects that say nothing of further properties.

    Raises:
        ConstraintError: the schema cannot be used, or would take too long.
    """
    SchemaBudget().take(schema)
    if schema is False:
        raise ConstraintError("the JSON schema is false and allows no text at all, so it has no valid answer")
    # Its own settings are no part of the standard, and a user's were refused.
    whole = json.loads(json.dumps(schema)) if isinstance(schema, dict) else {}
    whole = prepare_schema(whole, strict=strict, closed=closed).schema
    whole["x-guidance"] = _schema_options(whitespace, strict=strict)
    return json.dumps(whole, ensure_ascii=False)


def _check_embedded(source: Lark) -> None:
    """Refuse schemas in a grammar in Lark's notation that would take too long, as those that stand alone."""
    budget = SchemaBudget()
    for start, schema in _find_embedded(source.text):
        if schema.get("x-guidance") in _OWN_OPTIONS:
            del schema["x-guidance"]
        try:
            budget.take(schema)
        except ConstraintError as error:
            raise ConstraintError(
                f"{source.name} cannot be used: {_line_and_column(source.text, start)}: {error}"
            ) from None


def _find_embedded(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
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
                f"{Lark.name} cannot be used: {_line_and_column(text, found.start())}: the JSON schema is nested too "
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
    found = (find_error_pointer(problem, schema) for start, schema in _find_embedded(text) if start >= before)
    return next(found, "")


def _line_and_column(text: str, position: int) -> str:
    return f"line {text.count(chr(10), 0, position) + 1}, column {position - text.rfind(chr(10), 0, position)}"
