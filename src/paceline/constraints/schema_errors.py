"""llguidance's errors about a JSON schema: their place in the schema, and what to do."""

from __future__ import annotations

import re
from typing import Any

from paceline.constraints.closed_objects import JOINED
from paceline.constraints.schema_parts import iter_reachable, shorten_pointer

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
