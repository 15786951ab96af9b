"""Keywords of JSON Schema that nothing can keep an answer to.

Where what they say refuses nothing they are left out: published schemas say ``"uniqueItems": false`` and the like.
Else they are errors, unless a schema is to be kept to as far as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from paceline.constraints.schema_parts import in_its_places, listed, mapping, reachable, said

_MOST_NAMED: Final = 8


def _is_open(value: Any) -> bool:
    """Whether a schema allows everything."""
    return value is True or value == {}


_IDLE: Final[dict[str, tuple[str, Callable[[Any, dict[str, Any]], bool]]]] = {
    # keyword: the type of what it refuses ("" for any), and whether it refuses nothing
    "uniqueItems": ("array", lambda value, part: value is False or _at_most(part.get("maxItems"), 1)),
    "contains": ("array", lambda value, part: part.get("minContains") == 0 and "maxContains" not in part),
    "minContains": ("array", lambda value, part: "contains" not in part or value == 0),
    "maxContains": ("array", lambda value, part: "contains" not in part),
    "unevaluatedItems": ("array", lambda value, part: _is_open(value)),
    "unevaluatedProperties": ("object", lambda value, part: _is_open(value)),
    "propertyNames": ("object", lambda value, part: _is_open(value)),
    "dependentRequired": ("object", lambda value, part: value == {}),
    "dependentSchemas": ("object", lambda value, part: value == {}),
    "dependencies": ("object", lambda value, part: value == {}),
    "not": ("", lambda value, part: value is False),
    "if": ("", lambda value, part: all(_is_open(part.get(name, True)) for name in ("then", "else"))),
    "then": ("", lambda value, part: "if" not in part or _is_open(value)),
    "else": ("", lambda value, part: "if" not in part or _is_open(value)),
    "$dynamicAnchor": ("", lambda value, part: True),
    "$recursiveAnchor": ("", lambda value, part: True),
}


_ERRORS: Final = ("$dynamicRef", "$recursiveRef", *_IDLE)
_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)


def unenforced(schema: Any) -> list[str]:
    """Return what of a schema may not be kept to if it is kept to as far as possible, as JSON pointers.

    Args:
        schema: the schema, without the keywords that :func:`leave_out_idle` takes out.
    """
    return [said((*path, key)) for path, part in reachable(schema) for key in part if _is_unenforced(key, part)]


def leave_out_unenforced(schema: Any) -> None:
    """Take what may not be kept to out of a schema, but for ``oneOf``, read as ``anyOf`` where it has to be."""
    for _, part in list(reachable(schema)):
        for key in [key for key in part if key != "oneOf" and _is_unenforced(key, part)]:
            del part[key]


def _is_unenforced(key: str, part: dict[str, Any]) -> bool:
    if key == "format":
        return isinstance(part[key], str) and part[key] not in _FORMATS and _may_be("string", part)
    if key in ("minProperties", "maxProperties"):
        optional = mapping(part.get("properties")).keys() - set(map(str, listed(part.get("required"))))
        return part[key] != 0 and bool(optional) and _may_be("object", part)
    if key == "oneOf":
        # Where its parts can be told apart, it is kept to.
        return len(listed(part[key])) > 1
    return key in _ERRORS


def leave_out_idle(schema: Any) -> None:
    """Take unsupported keywords that refuse nothing out of a schema and of all in it."""
    for _, part in in_its_places(schema):
        idle = [
            keyword
            for keyword, (kind, refuses_nothing) in _IDLE.items()
            if keyword in part and (not _may_be(kind, part) or refuses_nothing(part[keyword], part))
        ]
        for keyword in idle:
            del part[keyword]


def _may_be(kind: str, part: dict[str, Any]) -> bool:
    """Whether a value of a type may be one that a schema describes; of any type if none is named."""
    types = part.get("type")
    if not kind or not isinstance(types, str | list):
        return True
    return kind in ([types] if isinstance(types, str) else types)


def _at_most(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= most


def named_places(places: Sequence[str]) -> str:
    """Return places of a schema in words, for messages: the first of many."""
    more = f" and {len(places) - _MOST_NAMED} more places" if len(places) > _MOST_NAMED else ""
    return ", ".join(places[:_MOST_NAMED]) + more
