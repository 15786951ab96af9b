"""JSON schemas as they are given to llguidance: in keywords that it knows, and without what nothing keeps to.

::

    schema ──names of properties──> ──objects closed──> ──idle keywords out──> strict: as it is, with refusals
                                                                           └─> lenient: without what nothing keeps to
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from paceline.constraints.closed_objects import close_objects
from paceline.constraints.schema_parts import (
    References,
    as_list,
    as_mapping,
    is_number,
    iter_reachable,
    iter_subschemas,
)
from paceline.constraints.unsupported_keywords import (
    check_patterns,
    find_unenforced,
    remove_idle_keywords,
    remove_unenforced,
)

_JUST_WITHIN: Final = 1e-9
"""How far a bound is moved that is left out itself."""

_LARGE: Final = 1e6
"""Bounds up to here are moved: larger floats are too coarse."""


class PreparedSchema(NamedTuple):
    """A schema to be compiled.

    Attributes:
        schema: what llguidance is given.
        unenforced: what of the schema as it was is left out, as JSON pointers.
    """

    schema: Any
    unenforced: tuple[str, ...]


def has_alternatives(schema: Any) -> bool:
    """Whether exactly one of several parts has to fit."""
    return any(len(as_list(part.get("oneOf"))) > 1 for _, part in iter_reachable(schema))


def prepare_schema(schema: Any, *, strict: bool, closed: bool = True) -> PreparedSchema:
    """Return a schema as it is given to llguidance. What it is made of is changed in place.

    Args:
        strict: have what nothing can keep an answer to refused, and not left out.
        closed: close objects that say nothing of further properties.

    Raises:
        ConstraintError: it cannot be used.
    """
    # Held, so that none of these is made anew elsewhere under the same id.
    parts = list(iter_subschemas(schema))
    paths = {id(part): path for path, part in parts}
    for _, part in iter_reachable(schema):
        _narrow_bounds(part)
    _name_properties(schema)
    if closed:
        close_objects(schema, paths)
    remove_idle_keywords(schema)
    if strict:
        check_patterns(schema, paths)
        return PreparedSchema(schema, ())
    places = find_unenforced(schema, paths)
    remove_unenforced(schema)
    return PreparedSchema(schema, tuple(dict.fromkeys(places)))


def _narrow_bounds(part: dict[str, Any]) -> None:
    """Write a bound that is left out itself as one just within, where llguidance takes it in, in place.

    It does where the bound is whole and the other is less than 1 from it: in numbers above 0 and up to 0.5, 0 is one.
    """
    for bound, excluded, other, sign in (
        ("minimum", "exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("maximum", "exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        limit: Any = part.get(bound) if part.get(excluded) is True else part.get(excluded)
        if not _is_small(limit) or limit != int(limit):
            continue
        if any(_is_small(part.get(key)) and 0 < (part[key] - limit) * sign < 1 for key in other):
            del part[excluded]
            part[bound] = limit + sign * _JUST_WITHIN


def _is_small(value: Any) -> bool:
    return is_number(value) and abs(value) < _LARGE


def _name_properties(schema: Any) -> None:
    """Write objects whose names are of a list or a pattern as such that list these properties, in place."""
    parts = list(iter_reachable(schema))
    references: References | None = None
    for _, part in parts:
        names = part.get("propertyNames")
        if not isinstance(names, dict) or "properties" in part or "patternProperties" in part:
            continue
        if "$ref" in names:
            references = references or References(schema, iter_subschemas(schema))
            found = references.targets(names["$ref"])
            names = as_mapping(found[0]) if len(found) == 1 else {}
        said, rest = names.keys() - {"type", "title", "description"}, part.get("additionalProperties", True)
        if names.get("type", "string") != "string":
            continue
        if said == {"enum"} and isinstance(names["enum"], list):
            part["properties"] = {text: rest for text in names["enum"] if isinstance(text, str)}
        elif said == {"const"} and isinstance(names["const"], str):
            part["properties"] = {names["const"]: rest}
        elif said == {"pattern"} and isinstance(names["pattern"], str):
            part["patternProperties"] = {names["pattern"]: rest}
        else:
            continue
        del part["propertyNames"]
        part["additionalProperties"] = False
