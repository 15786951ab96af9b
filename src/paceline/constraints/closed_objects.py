"""Closes the objects of a JSON schema that say nothing of further properties.

The standard allows any others, which no program that wrote the schema expects, and which models invent until the answer
is cut off. llama.cpp closes such objects too. What a schema says of further properties itself stays as it is, and an
object of which nothing is named stays open.

An object may be described in several parts that are joined (``allOf``, ``$ref`` beside other keywords, ``if``). No part
may be closed by itself then: each would forbid what another names. They are closed as a whole, by all names in them::

    {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"y": {}}}]}
        -> {"allOf": [{"$ref": "#/$defs/joined-0"}, {"properties": {"y": {}}}],
            "properties": {"x": true, "y": true}, "additionalProperties": false}
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.constraints.schema_parts import (
    Path,
    References,
    as_list,
    as_mapping,
    iter_reachable,
    iter_standard_subschemas,
    iter_subschemas,
    shorten_pointer,
)
from paceline.core.errors import ConstraintError

_LISTS: Final = ("allOf", "anyOf", "oneOf")
_BRANCHES: Final = ("if", "then", "else")
_DEPENDENT: Final = ("dependentSchemas", "dependencies")
_OWN: Final = (
    *("properties", "patternProperties", "required", "dependentRequired", "additionalProperties"),
    "unevaluatedProperties",
)
_NAMED: Final = ("$schema", "$defs", "definitions", "$id", "$anchor")

JOINED: Final = "joined-"
"""What the names of definitions begin with that were copied to be joined with others."""

_DEEP: Final = 10
"""Levels of parts that are joined; an object of more stays open."""

_MAX_JOINED: Final = 100_000
"""Parts that are joined and the names in them, each counted for every object that they are joined to."""


@dataclass
class _JoinedParts:
    """What parts that are joined say together.

    Attributes:
        names: of properties, in the order in which they stand.
        required: names that have to be there, whether they are among ``names`` or not.
        has_patterns: whether names are described by patterns.
        is_described: whether names are listed or described at all.
        is_open: whether a part allows further properties by itself.
        is_known: whether all parts were found.
    """

    names: dict[str, None] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    has_patterns: bool = False
    is_described: bool = False
    is_open: bool = False
    is_known: bool = True


def close_objects(schema: Any, paths: dict[int, Path]) -> None:
    """Close objects that say nothing of further properties, in place.

    Args:
        paths: where parts of it are, by their ``id``. Those of parts that are copied are added, with the same place.

    Raises:
        ConstraintError: parts that are joined have too many names.
    """
    if not isinstance(schema, dict):
        return
    closing = _ObjectCloser(schema, paths)
    if closing.is_divided:
        return
    for path, part in list(iter_reachable(schema)):
        closing.close(path, part)


class _ObjectCloser:
    def __init__(self, schema: dict[str, Any], paths: dict[int, Path]) -> None:
        parts = list(iter_subschemas(schema))
        self._schema = schema
        self._references = References(schema, parts)
        self._known = {id(part) for _, part in parts}
        self._paths = paths
        # Within an ``$id`` of its own, a pointer leads elsewhere: no definition of such a schema is copied.
        self.is_divided = any(
            path and isinstance(part.get(key), str)
            for path, part in iter_standard_subschemas(schema)
            for key in ("$id", "id")
        )
        self._copies: dict[int, str] = {}
        self._to_copy: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._num_joined = 0

    def close(self, path: Path, part: dict[str, Any]) -> None:
        if not _is_joined(part):
            whole = _JoinedParts()
            self._add_own(part, whole)
        else:
            whole = self._join_parts(path, part)
            if whole.is_known and not (whole.is_described or part.get("unevaluatedProperties") is False):
                return
            part.update(self._open_joined(part))
            self._copy_targets()
            if not whole.is_known:
                return
        is_last = part.get("unevaluatedProperties") is False
        if is_last:
            # What is named anywhere in the whole is evaluated, and what is open evaluates all.
            del part["unevaluatedProperties"]
        if "additionalProperties" in part or whole.is_open or not (whole.is_described or is_last):
            return
        unnamed = [name for name in whole.required if name not in whole.names]
        if unnamed and whole.has_patterns:
            # To match a pattern of somebody else's here may take for ever.
            return
        own = as_mapping(part.get("properties"))
        more = dict.fromkeys((name for name in (*whole.names, *unnamed) if name not in own), True)
        if more:
            part["properties"] = {**own, **more}
        part["additionalProperties"] = False

    def _join_parts(self, path: Path, part: dict[str, Any]) -> _JoinedParts:
        whole, seen = _JoinedParts(), set[int]()
        self._add(part, whole, 0, seen)
        self._num_joined += len(seen) + len(whole.names) + len(whole.required)
        if self._num_joined > _MAX_JOINED:
            raise ConstraintError(
                f"{shorten_pointer(path)}: allOf, anyOf and $ref join more than {_MAX_JOINED:,} parts and properties: "
                "write out the objects that are wanted"
            )
        return whole

    def _add(self, part: Any, whole: _JoinedParts, depth: int, seen: set[int]) -> None:
        """Add what a part and all that are joined to it say."""
        if not isinstance(part, dict) or id(part) in seen:
            return
        if depth > _DEEP:
            whole.is_known = False
            return
        seen.add(id(part))
        self._add_own(part, whole)
        inner = [one for keyword in _LISTS for one in as_list(part.get(keyword))]
        inner += [part.get(keyword) for keyword in _BRANCHES]
        inner += [one for keyword in _DEPENDENT for one in as_mapping(part.get(keyword)).values()]
        if "$ref" in part:
            target = self._target(part["$ref"])
            whole.is_known &= target is not None
            inner.append(target)
        for one in inner:
            self._add(one, whole, depth + 1, seen)

    def _add_own(self, part: dict[str, Any], whole: _JoinedParts) -> None:
        whole.has_patterns |= bool(part.get("patternProperties"))
        whole.is_described |= isinstance(part.get("properties"), dict) or whole.has_patterns
        whole.is_open |= any(
            part.get(keyword, False) is not False for keyword in ("additionalProperties", "unevaluatedProperties")
        )
        whole.is_known &= "$dynamicRef" not in part and "$recursiveRef" not in part
        whole.names.update(dict.fromkeys(as_mapping(part.get("properties"))))
        required = [part.get("required"), *as_mapping(part.get("dependentRequired")).values()]
        required += as_mapping(part.get("dependencies")).values()
        whole.required.update((name, None) for names in required for name in as_list(names) if isinstance(name, str))

    def _target(self, ref: Any) -> dict[str, Any] | None:
        """Return what a reference stands for; ``None`` where that is not known for certain."""
        found = self._references.targets(ref)
        if len(found) != 1 or not isinstance(found[0], dict) or id(found[0]) not in self._known:
            return None
        return found[0]

    def _open_joined(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a part that join others to it, with those as they are before they are closed."""
        found: dict[str, Any] = {}
        for keyword in _LISTS:
            if isinstance(part.get(keyword), list):
                found[keyword] = [self._open(one) for one in part[keyword]]
        for keyword in _BRANCHES:
            if keyword in part:
                found[keyword] = self._open(part[keyword])
        for keyword in _DEPENDENT:
            if isinstance(part.get(keyword), dict):
                found[keyword] = {name: self._open(one) for name, one in part[keyword].items()}
        if "$ref" in part:
            found["$ref"] = self._open_reference(part["$ref"])
        return found

    def _open(self, part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        found = {key: value for key, value in (part | self._open_joined(part)).items() if key not in _NAMED}
        if id(part) in self._paths:
            self._paths[id(found)] = self._paths[id(part)]
        return found

    def _open_reference(self, ref: Any) -> Any:
        target = self._target(ref)
        if target is None:
            return ref
        pointer = self._copies.get(id(target))
        if pointer is None:
            shared = self._schema.setdefault("$defs", {})
            name = next(name for i in itertools.count() if (name := f"{JOINED}{i}") not in shared)
            pointer = self._copies[id(target)] = f"#/$defs/{name}"
            shared[name] = {}
            self._to_copy.append((shared[name], target))
        return pointer

    def _copy_targets(self) -> None:
        """Fill in the copies that are referred to, which refer to others."""
        while self._to_copy:
            copy, target = self._to_copy.pop()
            copy.update(self._open(target))
            self._paths[id(copy)] = self._paths.get(id(target), ())


def _is_joined(part: dict[str, Any]) -> bool:
    """Whether several parts say something of the same object, so that none is the whole."""
    if len(as_list(part.get("allOf"))) > 1 or any(keyword in part for keyword in (*_BRANCHES, *_DEPENDENT)):
        return True
    # What says nothing by itself leaves it to its parts.
    num_joining = sum(keyword in part for keyword in (*_LISTS, "$ref"))
    return num_joining > 1 or (num_joining == 1 and any(keyword in part for keyword in _OWN))
