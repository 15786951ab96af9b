"""Keywords of JSON Schema that are not supported, where what they say refuses nothing: then they are left out.

Published schemas say ``"uniqueItems": false`` and the like, which is what a schema says that does not name it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from paceline.constraints.schema_parts import in_its_places


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


def leave_out_idle(schema: Any) -> None:
    """Take unsupported keywords that refuse nothing out of a schema and of all in it."""
    for _, part in in_its_places(schema):
        types = part.get("type")
        kinds = {types} if isinstance(types, str) else set(map(str, types)) if isinstance(types, list) else None
        idle = [
            keyword
            for keyword, (kind, refuses_nothing) in _IDLE.items()
            if keyword in part
            and ((kind and kinds is not None and kind not in kinds) or refuses_nothing(part[keyword], part))
        ]
        for keyword in idle:
            del part[keyword]


def _at_most(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value <= most
