"""The schema of a function's parameters, with what stands behind references and ``allOf``.

The grammar and the reader of calls both ask here: what one makes a model write, the other reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from paceline.constraints.schema_limits import SchemaBudget
from paceline.constraints.schema_parts import References, listed, mapping, subschemas
from paceline.core.errors import ConstraintError

Schema: TypeAlias = Mapping[str, Any]

TYPES: Final = ("string", "integer", "number", "boolean", "null", "object", "array")
"""All types of JSON, as schemas name them."""

# What says nothing of a value: it may hold anything, also what looks like a reference.
_DATA: Final = frozenset({"enum", "const", "default", "example", "examples"})
_NAMES: Final = frozenset({"$id", "id", "$anchor", "$schema"})
_UNIONS: Final = ("anyOf", "oneOf")
_LOWER: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_HIGHER: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_MOST_JOINED: Final = 64

_MOST_STEPS: Final = 5_000
"""References, parts of ``allOf`` and choices that are followed to know what a part of a schema says."""


class Parameter(NamedTuple):
    """A parameter of a function.

    Attributes:
        name: of the parameter.
        schema: as it was given: it may be a reference.
        required: whether a call needs it.
    """

    name: str
    schema: Any
    required: bool


class ParameterSchema:
    """The schema of a function's parameters.

    Args:
        schema: of an object, whose properties are the parameters.

    Raises:
        ConstraintError: it is none, or takes too much.
    """

    def __init__(self, schema: Schema) -> None:
        SchemaBudget().take(schema)
        self._whole = schema
        self._references = References(schema, list(subschemas(schema)))
        self._num_steps = 0

    def variants(self) -> list[Schema]:
        """Return the schemas of which the arguments keep to one."""
        return [branch for branch in self.branches(self._whole) if _allows(branch, "object")]

    def parameters(self, variant: Schema) -> list[Parameter]:
        """Return the parameters that a variant names, in its order, and then those that it needs alone."""
        properties = mapping(variant.get("properties"))
        needed = [name for name in listed(variant.get("required")) if isinstance(name, str)]
        more = mapping(variant.get("additionalProperties"))
        return [
            *(Parameter(name, part, name in needed) for name, part in properties.items()),
            *(Parameter(name, more, True) for name in dict.fromkeys(needed) if name not in properties),
        ]

    def resolved(self, schema: Any) -> Schema:
        """Return a schema with what its reference and its ``allOf`` say, but for what is in its own parts.

        A reference that leads nowhere, and one that leads to itself, is left where it is.

        Raises:
            ConstraintError: that takes too much.
        """
        self._num_steps = 0
        return self._resolved(schema, ())

    def branches(self, schema: Any) -> list[Schema]:
        """Return what a schema chooses from, references followed; the schema itself where it chooses nothing.

        Raises:
            ConstraintError: that takes too much.
        """
        self._num_steps = 0
        return list(self._branches(schema, ()))

    def types(self, schema: Any) -> list[str] | None:
        """Return the types that a schema allows; ``None`` for any."""
        found: dict[str, None] = {}
        for branch in self.branches(schema):
            types = own_types(branch)
            if types is None:
                return None
            found.update(dict.fromkeys(types))
        return list(found)

    def alone(self, schema: Any) -> Schema:
        """Return a part of the schema as one of its own, with the definitions that it refers to."""
        shared: dict[str, Any] = {}
        names: dict[int, str] = {}
        copied = self._copied(schema, names, shared)
        if not isinstance(copied, dict):
            return {"anyOf": [copied]}
        return {**copied, "$defs": shared} if shared else copied

    def _resolved(self, schema: Any, seen: tuple[str, ...]) -> Schema:
        self._count_step()
        if not isinstance(schema, dict):
            return {"not": {}} if schema is False else {}
        found: Schema = schema
        while isinstance(reference := found.get("$ref"), str):
            target = self._target(reference)
            if target is None or reference in seen:
                return found
            seen = (*seen, reference)
            beside = {key: value for key, value in found.items() if key != "$ref"}
            found = _joined(self._resolved(target, seen), beside)
        parts = listed(found.get("allOf"))
        if parts:
            found = {key: value for key, value in found.items() if key != "allOf"}
            for part in parts:
                found = _joined(found, self._resolved(part, seen))
        return found

    def _branches(self, schema: Any, seen: tuple[int, ...]) -> Iterator[Schema]:
        whole = self._resolved(schema, ())
        union = next((name for name in _UNIONS if listed(whole.get(name))), None)
        if union is None:
            yield whole
            return
        beside = {key: value for key, value in whole.items() if key != union}
        for choice in whole[union]:
            if id(choice) not in seen:
                yield from self._branches({"allOf": [beside, choice]} if beside else choice, (*seen, id(choice)))

    def _count_step(self) -> None:
        self._num_steps += 1
        if self._num_steps > _MOST_STEPS:
            raise ConstraintError(
                f"the JSON schema has parts that take more than {_MOST_STEPS:,} steps to follow through $ref, allOf, "
                "anyOf and oneOf: write out what is wanted"
            )

    def _target(self, reference: str) -> dict[str, Any] | None:
        return next((one for one in self._references.targets(reference) if isinstance(one, dict)), None)

    def _copied(self, value: Any, names: dict[int, str], shared: dict[str, Any]) -> Any:
        """Return a copy that refers to what is shared alone, which is added to that."""
        if isinstance(value, list):
            return [self._copied(one, names, shared) for one in value]
        if not isinstance(value, dict):
            return value
        copied = {
            key: one if key in _DATA else self._copied(one, names, shared)
            for key, one in value.items()
            if not (key in ("$defs", "definitions") or (key in _NAMES and isinstance(one, str)))
        }
        reference = value.get("$ref")
        target = self._target(reference) if isinstance(reference, str) else None
        if target is not None and isinstance(reference, str):
            if id(target) not in names:
                last = reference.rpartition("/")[2].strip("#")
                name = last if last and last not in shared else f"{last}_{len(names)}"
                names[id(target)] = name
                shared[name] = None
                shared[name] = self._copied(target, names, shared)
            pointed = names[id(target)].replace("~", "~0").replace("/", "~1")
            copied["$ref"] = f"#/$defs/{pointed}"
        return copied


def choices(schema: Schema) -> Sequence[Any]:
    """Return the values that a schema without references lists; none where it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return listed(schema.get("enum"))


def own_types(schema: Schema) -> list[str] | None:
    """Return the types that a schema without references and unions allows; ``None`` for any."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, list) and declared:
        return [str(one) for one in declared]
    if values := choices(schema):
        return list(dict.fromkeys(type_of(value) for value in values))
    return None


def type_of(value: Any) -> str:
    """Return the type of a value as JSON."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "number"
    kinds: dict[type, str] = {str: "string", int: "integer", type(None): "null", dict: "object"}
    return kinds.get(type(value), "array")


def has_type(value: Any, types: Sequence[str]) -> bool:
    """Return whether a value is of one of the types of a schema, where 3.0 is an integer and any integer a number."""
    kind = type_of(value)
    if kind == "number":
        return "number" in types or ("integer" in types and value.is_integer())
    return kind in types or (kind == "integer" and "number" in types)


def _allows(schema: Schema, kind: str) -> bool:
    types = own_types(schema)
    return types is None or kind in types


def _joined(one: Schema, other: Schema) -> Schema:
    """Return what keeps to two schemas, as far as that can be said in one; of notes the other's."""
    found = dict(one)
    for key, value in other.items():
        if key not in found or found[key] == value:
            found[key] = value
        elif key == "pattern":
            # No pattern says two.
            found["allOf"] = [*listed(found.get("allOf")), {key: value}]
        else:
            found[key] = _both(key, found[key], value)
    return found


def _both(key: str, one: Any, other: Any) -> Any:
    if key == "properties" and isinstance(one, dict) and isinstance(other, dict):
        shared = {
            name: {"allOf": [one[name], other[name]]} for name in one if name in other and one[name] != other[name]
        }
        return {**one, **other, **shared}
    if key == "required" and isinstance(one, list) and isinstance(other, list):
        return [*one, *(name for name in other if name not in one)]
    if key == "type":
        return _shared_types(one, other)
    if key == "enum" and isinstance(one, list) and isinstance(other, list):
        listed_there = [json.dumps(value, sort_keys=True) for value in other]
        return [value for value in one if json.dumps(value, sort_keys=True) in listed_there]
    if key in _UNIONS and isinstance(one, list) and isinstance(other, list) and len(one) * len(other) <= _MOST_JOINED:
        return [{"allOf": [left, right]} for left in one for right in other]
    if key == "additionalProperties" and False in (one, other):
        return False
    if key in ("items", "additionalProperties") and isinstance(one, dict) and isinstance(other, dict):
        return {"allOf": [one, other]}
    if (key in _LOWER or key in _HIGHER) and isinstance(one, int | float) and isinstance(other, int | float):
        return min(one, other) if key in _LOWER else max(one, other)
    return other


def _shared_types(one: Any, other: Any) -> Any:
    left, right = ([kind] if isinstance(kind, str) else listed(kind) for kind in (one, other))
    both = [
        kind
        for kind in TYPES
        if (kind in left or (kind == "integer" and "number" in left))
        and (kind in right or (kind == "integer" and "number" in right))
    ]
    return both[0] if len(both) == 1 else both
