"""llguidance's errors as one line for users, with their place in a JSON schema and what to do."""

from __future__ import annotations

import re
from typing import Any

from paceline.constraints.closed_objects import JOINED
from paceline.constraints.schema_parts import iter_reachable, shorten_pointer

LONGEST = 240
"""Characters of a reason."""

_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""Line and column with which llguidance begins an error."""
_EXCERPT = re.compile(r"^ *\d+ \|")
"""A line that shows the source."""
_NO_REASON = re.compile(r"^ *\d+ \||^[ ^]*$|^ *while processing ")
"""A line that shows the source, points into it, or says what llguidance was at."""

_SAID = {
    "Unable to determine if regex is empty": (
        "whether a text can match all of these patterns and lengths takes too long to tell: leave some out"
    ),
    "Unsatisfiable schema: Regex is empty": "no text matches all of these patterns, formats and lengths: change one",
    "circular references with sibling keys": (
        "a $ref to a schema that has itself as a part is not supported in oneOf, or with more beside it: say anyOf, or "
        "write it into that schema"
    ),
    "min/maxProperties only": (
        "minProperties and maxProperties are supported where all properties are required, or the number is 1 and "
        "none is: leave it out, or say `strict=False` and check answers for it"
    ),
    "oneOf constraints": "oneOf is supported where no JSON could match two of its parts: say anyOf",
}
_TOO_MUCH = (
    "too big",
    "too large",
    "too complex",
    "Too many items",
    "too many expressions",
    "Current row has",
    "fuel exhausted",
    "u16::MAX",
    "max_lexer_states",
    "too many states",
)

_LEFT_OUT = ("Unimplemented keys", "Unknown format", "oneOf not fully supported", "min/maxProperties only supported")

_WORDS = re.compile(r"[\w$./:#-]{2,}")
_UNSUPPORTED = re.compile(r"Unimplemented keys: \[(.*)\]")
_BY_NAME = ("Unknown format: {}", "Invalid type: {}")

# Keywords of which llguidance says the values alone, or others of.
_HINTS = (
    ("integer range", ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    ("does not contain a multiple", ("multipleOf",)),
    ("min/maxProperties", ("minProperties", "maxProperties")),
    ("patternProperty", ("patternProperties",)),
    ("oneOf", ("oneOf",)),
)


def is_resource_error(error: str) -> bool:
    return any(part in error for part in _TOO_MUCH)


def is_unenforced_warning(warning: str) -> bool:
    """Return whether a warning says that something in a schema is not kept to."""
    return warning.startswith(_LEFT_OUT)


def strip_excerpt(error: str) -> str:
    """Return an error without the lines of llguidance's own grammar, but with all else that tells its place."""
    return "\n".join(line for line in error.split("\n<non-verbose/>")[0].splitlines() if not _EXCERPT.match(line))


def one_line_reason(error: str, *, with_place: bool = False) -> str:
    """Return an error of llguidance on one line of bounded length.

    Args:
        error: what llguidance said.
        with_place: say the line and column too; they are those of llguidance's own grammar.
    """
    if error.startswith("panic") or "<backtrace>" in error:
        return "the grammar library could not take it"
    text = error.split("\n<non-verbose/>")[0]
    place = _PLACE.match(text)
    text = text[place.end() if place else 0 :].removeprefix("failed to compile JSON schema: ")
    for beginning, said in _SAID.items():
        if text.startswith(beginning):
            return said
    lines = [line.strip() for line in text.splitlines() if not _NO_REASON.match(line)]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if causes:
        lines = ["invalid regular expression:", causes[-1]]
    said = " ".join(lines)
    if place and with_place:
        said = f"line {place[1]}, column {place[2]}: {said}"
    return said if len(said) <= LONGEST else said[: LONGEST - 3] + "..."


def explain_schema_error(reason: str) -> str:
    """Return a reason of llguidance with the keywords that are not supported named, and what to do."""
    if reason.startswith("Unknown format"):
        return f"{reason}: leave it out, or say `strict=False` and check answers for it"
    return _UNSUPPORTED.sub(_explain_unsupported, reason)


def _explain_unsupported(found: re.Match[str]) -> str:
    keywords = found[1].split(", ")
    if len(keywords) == 1:
        return f"{keywords[0]} is not supported: leave it out, or say `strict=False` and check answers for it"
    named = f"{', '.join(keywords[:-1])} and {keywords[-1]}"
    return f"{named} are not supported: leave them out, or say `strict=False` and check answers for them"


def find_error_pointer(reason: str, schema: Any) -> str:
    """Return where in a schema what an error names stands, as a JSON pointer; empty where nothing does."""
    words = set(_WORDS.findall(reason))
    hinted = next((keywords for hint, keywords in _HINTS if hint in reason), ())
    for path, part in iter_reachable(schema):
        if JOINED in reason and "$ref" in part and len(part) > 1:
            return shorten_pointer((*path, "$ref"))
        for key, value in part.items():
            if key in hinted or (not hinted and _is_named(key, value, reason, words)):
                return shorten_pointer((*path, key))
    return ""


def _is_named(key: str, value: Any, reason: str, words: set[str]) -> bool:
    if key in words and key not in ("type", "format", "properties", "required", "$defs", "definitions"):
        return True
    if isinstance(value, str):
        if key in ("type", "format"):
            return any(said.format(value) in reason for said in _BY_NAME)
        if key == "pattern":
            return "regex" in reason.lower() and value in reason
        if key == "$ref":
            return "json-schema:///#" in reason.split() if value == "#" else value.lstrip("#") in reason
        return False
    if key == "required" and isinstance(value, list):
        return any(f"'{name}'" in reason for name in value)
    return value == [] and f"{key} is empty" in reason
