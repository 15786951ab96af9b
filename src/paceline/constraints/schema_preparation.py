"""JSON schemas as they are given to llguidance: in keywords that it knows, and without what nothing keeps to.

::

    schema ──names of properties──> ──objects closed──> ──idle keywords out──> strict: as it is, with refusals
                                                                           └─> lenient: without what nothing keeps to

Keywords that nothing can keep an answer to are left out where what they say refuses nothing: published schemas say
``"uniqueItems": false`` and the like. Else they are errors, unless a schema is to be kept to as far as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from paceline.constraints.closed_objects import close_objects
from paceline.constraints.schema_parts import (
    Path,
    References,
    as_list,
    as_mapping,
    is_number,
    iter_reachable,
    iter_standard_subschemas,
    iter_subschemas,
    shorten_pointer,
)
from paceline.core.errors import ConstraintError

_JUST_WITHIN: Final = 1e-9
"""How far a bound is moved that is left out itself."""

_LARGE: Final = 1e6
"""Bounds up to here are moved: larger floats are too coarse."""

_MAX_NAMED: Final = 8


def _is_open(value: Any) -> bool:
    return value is True or value == {}


_IDLE: Final[dict[str, tuple[str, Callable[[Any, dict[str, Any]], bool]]]] = {
    # keyword: the type of what it refuses ("" for any), and whether it refuses nothing
    "uniqueItems": ("array", lambda value, part: value is False or _is_at_most(part.get("maxItems"), 1)),
    "contains": ("array", lambda value, part: part.get("minContains") == 0 and "maxContains" not in part),
    "minContains": ("array", lambda value, part: "contains" not in part or value == 0),
    "maxContains": ("array", lambda value, part: "contains" not in part),
    "unevaluatedItems": ("array", lambda value, part: _is_open(value)),
    "unevaluatedProperties": ("object", lambda value, part: _is_open(value)),
    "propertyNames": ("object", lambda value, part: _is_open(value) or value == {"type": "string"}),
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


_SAID_ABOUT: Final = frozenset(
    (
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("nullable", "discriminator", "xml", "externalDocs"),
    )
)
"""Keywords that describe: llguidance takes nothing beside a reference to what has itself as a part."""

_ANNOTATIONS: Final = frozenset(
    (
        # OpenAPI's
        *("byte", "binary", "password"),
        # pydantic's
        *("path", "file-path", "directory-path", "json-string", "multi-host-uri", "ipv4network", "ipv6network"),
        *("ipv4interface", "ipv6interface", "ipvanyaddress", "ipvanynetwork", "ipvanyinterface", "decimal"),
        # zod's, which says most of them by a pattern too
        *("base64", "base64url", "jwt", "cuid", "cuid2", "ulid", "nanoid", "ksuid", "xid", "emoji", "e164", "cidrv4"),
        *("cidrv6", "guid", "json_string"),
    )
)
"""Formats that generators of schemas write and no draft of the standard has: they describe, and nothing checks them."""

_ERRORS: Final = ("$dynamicRef", "$recursiveRef", *_IDLE)
_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)


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
    _remove_idle_keywords(schema)
    if strict:
        _check_patterns(schema, paths)
        return PreparedSchema(schema, ())
    places = _find_unenforced(schema, paths)
    _remove_unenforced(schema)
    return PreparedSchema(schema, tuple(dict.fromkeys(places)))


def list_places(places: Sequence[str]) -> str:
    """Return places of a schema in words, for messages: the first of many."""
    more = f" and {len(places) - _MAX_NAMED} more places" if len(places) > _MAX_NAMED else ""
    return ", ".join(places[:_MAX_NAMED]) + more


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


def _find_unenforced(schema: Any, paths: Mapping[int, Path]) -> list[str]:
    """Return what of a schema may not be kept to if it is kept to as far as possible, as JSON pointers.

    Args:
        paths: where parts are in the schema as it was given, by their ``id``.
    """
    return [
        place
        for path, part in _iter_as_given(schema, paths)
        for key in part
        for place in (
            [shorten_pointer((*path, key))]
            if _is_unenforced(key, part)
            else [shorten_pointer((*path, key, pattern)) for pattern in _unusable_names(key, part)]
        )
    ]


def _remove_unenforced(schema: Any) -> None:
    """Take what may not be kept to out of a schema, and write ``oneOf`` as ``anyOf``.

    Where its parts can be told apart, both say the same.
    """
    for _, part in list(iter_reachable(schema)):
        for key in [key for key in part if _is_unenforced(key, part)]:
            value = part.pop(key)
            part.pop("discriminator", None)
            if key == "oneOf" and "anyOf" not in part:
                part["anyOf"] = value
            elif key == "oneOf":
                part["allOf"] = [*as_list(part.get("allOf")), {"anyOf": value}]
        for pattern in _unusable_names("patternProperties", part):
            del part["patternProperties"][pattern]
            # What the pattern described is allowed, whatever it is.
            part["additionalProperties"] = True


def _iter_as_given(schema: Any, paths: Mapping[int, Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path, part in iter_reachable(schema):
        yield paths.get(id(part), path), part


def _check_patterns(schema: Any, paths: Mapping[int, Path]) -> None:
    """Refuse patterns that no answer can be kept to, though they are patterns; the message says where."""
    for path, part in _iter_as_given(schema, paths):
        places: list[tuple[Path, str]] = [((*path, key), part[key]) for key in part if _has_unusable(key, part)]
        places += [((*path, "patternProperties", name), name) for name in _unusable_names("patternProperties", part)]
        for place, pattern in places:
            raise ConstraintError(
                f"{shorten_pointer(place)}: the pattern has {_find_unsupported_syntax(pattern)}, which is not "
                "supported: write it without, leave it out, or say `strict=False` and check answers for it"
            )


def _has_unusable(key: str, part: dict[str, Any]) -> bool:
    return (
        key == "pattern"
        and isinstance(part[key], str)
        and bool(_find_unsupported_syntax(part[key]))
        and _may_have_type("string", part)
    )


def _unusable_names(key: str, part: dict[str, Any]) -> list[str]:
    return (
        [name for name in as_mapping(part.get(key)) if _find_unsupported_syntax(name)]
        if key == "patternProperties"
        else []
    )


def _find_unsupported_syntax(pattern: str) -> str:
    """Return what a pattern has that no automaton can say; empty for nothing."""
    at, is_class = 0, False
    while at < len(pattern):
        if pattern[at] == "\\":
            if not is_class and (what := _find_unsupported_escape(pattern[at : at + 3])):
                return what
            at += 2
            continue
        if is_class:
            is_class = pattern[at] != "]"
        elif pattern[at] == "[":
            is_class = True
            # A bracket that comes first is one of the characters.
            at += 1 if pattern.startswith("[^", at) else 0
            at += 1 if pattern.startswith("]", at + 1) else 0
        elif pattern.startswith(("(?=", "(?!"), at):
            return "a look-ahead"
        elif pattern.startswith(("(?<=", "(?<!"), at):
            return "a look-behind"
        at += 1
    return ""


def _find_unsupported_escape(escape: str) -> str:
    if escape[1:2] in ("b", "B"):
        return f"a word boundary ({escape[:2]})"
    if escape[1:2] in tuple("123456789") or escape[1:] == "k<":
        return f"a reference back to a group ({escape[:2]})"
    return ""


def _is_unenforced(key: str, part: dict[str, Any]) -> bool:
    if _has_unusable(key, part):
        return True
    if key == "format":
        return isinstance(part[key], str) and part[key] not in _FORMATS and _may_have_type("string", part)
    if key in ("minProperties", "maxProperties"):
        required = set(map(str, as_list(part.get("required"))))
        optional = as_mapping(part.get("properties")).keys() - required
        is_closed = part.get("additionalProperties") is False and "patternProperties" not in part
        is_kept = part[key] == 0 or (part[key] == 1 and is_closed and not required)
        return bool(optional) and not is_kept and _may_have_type("object", part)
    if key == "oneOf":
        # Where its parts can be told apart, it is kept to.
        return len(as_list(part[key])) > 1
    return key in _ERRORS


def _remove_idle_keywords(schema: Any) -> None:
    """Take unsupported keywords that refuse nothing out of a schema and of all in it."""
    parts = list(_iter_all_parts(schema))
    # Such as #/x-definitions/a.
    led_through = {key for _, part in parts if isinstance(part.get("$ref"), str) for key in part["$ref"].split("/")}
    for _, part in parts:
        if isinstance(part.get("format"), str) and _describes(part):
            del part["format"]
        for keyword in [keyword for keyword in part if keyword in _SAID_ABOUT or keyword.startswith("x-")]:
            if keyword not in led_through:
                del part[keyword]
        if len(as_list(part.get("oneOf"))) > 1:
            # Beside another keyword llguidance looks behind references, and sees what tells them apart.
            part["discriminator"] = {}
        idle = [
            keyword
            for keyword, (kind, refuses_nothing) in _IDLE.items()
            if keyword in part and (not _may_have_type(kind, part) or refuses_nothing(part[keyword], part))
        ]
        for keyword in idle:
            del part[keyword]


def _iter_all_parts(schema: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the parts of a schema that stand where the standard has schemas, and those that references lead to."""
    known = set[int]()
    for parts in (iter_standard_subschemas(schema), list(iter_reachable(schema))):
        for path, part in parts:
            if id(part) not in known:
                known.add(id(part))
                yield path, part


def _describes(part: dict[str, Any]) -> bool:
    """Whether the format of a part says nothing that an answer could be kept to."""
    # A pattern beside a time is more exact: zod's have no zone, without which the standard has no time.
    return part["format"] in _ANNOTATIONS or (part["format"] == "time" and isinstance(part.get("pattern"), str))


def _may_have_type(kind: str, part: dict[str, Any]) -> bool:
    """Whether a value of a type may be one that a schema describes; of any type if none is named."""
    types = part.get("type")
    if not kind or not isinstance(types, str | list):
        return True
    return kind in ([types] if isinstance(types, str) else types)


def _is_at_most(value: Any, most: int) -> bool:
    return is_number(value) and bool(value <= most)
