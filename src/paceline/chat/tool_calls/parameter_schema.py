"""The schema of a function's parameters, with what stands behind references and ``allOf``.

The grammar and the reader of calls both ask here: what one makes a model write, the other reads.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from paceline.constraints.schema_limits import SchemaBudget
from paceline.constraints.schema_parts import (
    References,
    as_list,
    as_mapping,
    is_number,
    iter_subschemas,
    map_subschemas,
)
from paceline.core.errors import ConstraintError

Schema: TypeAlias = Mapping[str, Any]

TYPES: Final = ("string", "integer", "number", "boolean", "null", "object", "array")
"""All types of JSON, as schemas name them."""

# What a part is not copied with, to be a schema of its own.
_OF_WHOLES: Final = frozenset({"$defs", "definitions", "$id", "id", "$anchor", "$schema"})
_UNIONS: Final = ("anyOf", "oneOf")
_LOWER: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})
_HIGHER: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_MAX_JOINED: Final = 64

_MAX_STEPS: Final = 5_000
"""References, parts of ``allOf`` and choices that are followed to know what a part of a schema says."""

_MAX_ENTRIES: Final = 200_000
"""Properties and values that are joined to know it."""

_MAX_PARAMETERS: Final = 20_000
"""Parameters of all variants of a function."""


class Parameter(NamedTuple):
    """A parameter of a function. Its schema is as it was given: it may be a reference."""

    name: str
    schema: Any
    required: bool


class ParameterSchema:
    """The schema of a function's parameters: of an object, whose properties these are.

    Methods raise ConstraintError where following references takes too much.
    """

    def __init__(self, schema: Schema) -> None:
        SchemaBudget().take(schema)
        self._whole = schema
        self._references = References(schema, list(iter_subschemas(schema)))
        self._num_steps = self._num_entries = 0

    @functools.cached_property
    def variants(self) -> Sequence[Sequence[Parameter]]:
        """The parameters of which the arguments keep to one list."""
        self._num_steps = self._num_entries = 0
        found: list[list[Parameter]] = []
        num_parameters = 0
        for branch in self._branches(self._whole, ()):
            if not _allows(branch, "object"):
                continue
            found.append(self.parameters(branch))
            num_parameters += len(found[-1])
            if num_parameters > _MAX_PARAMETERS:
                raise ConstraintError(
                    f"the alternatives of the JSON schema have more than {_MAX_PARAMETERS:,} properties together: "
                    "leave some out"
                )
        return found

    @functools.cached_property
    def schemas(self) -> Mapping[str, Sequence[Any]]:
        """What each variant says of a parameter, by its name."""
        found: dict[str, list[Any]] = {}
        for one in itertools.chain.from_iterable(self.variants):
            found.setdefault(one.name, []).append(one.schema)
        return found

    def parameters(self, variant: Schema) -> list[Parameter]:
        """Return the parameters that a variant names, in its order, and then those that it needs alone."""
        properties = as_mapping(variant.get("properties"))
        needed = dict.fromkeys(name for name in as_list(variant.get("required")) if isinstance(name, str))
        more = as_mapping(variant.get("additionalProperties"))
        return [
            *(Parameter(name, part, name in needed) for name, part in properties.items()),
            *(Parameter(name, more, True) for name in needed if name not in properties),
        ]

    def branches(self, schema: Any) -> list[Schema]:
        """Return what a schema chooses from, references followed; the schema itself where it chooses nothing."""
        self._num_steps = self._num_entries = 0
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
        copied = self._copy(schema, names, shared)
        if not isinstance(copied, dict):
            return {"anyOf": [copied]}
        return {**copied, "$defs": shared} if shared else copied

    def _resolve(self, schema: Any, seen: tuple[str, ...]) -> Schema:
        """Return a schema with what its reference and its ``allOf`` say, but for what is in its own parts.

        A reference that leads nowhere, and one that leads to itself, is left where it is.
        """
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
            found = self._join(self._resolve(target, seen), beside)
        parts = as_list(found.get("allOf"))
        if parts:
            found = {key: value for key, value in found.items() if key != "allOf"}
            for part in parts:
                found = self._join(found, self._resolve(part, seen))
        return found

    def _branches(self, schema: Any, seen: tuple[int, ...]) -> Iterator[Schema]:
        whole = self._resolve(schema, ())
        union = next((name for name in _UNIONS if as_list(whole.get(name))), None)
        if union is None:
            yield whole
            return
        beside = {key: value for key, value in whole.items() if key != union}
        for choice in whole[union]:
            if id(choice) not in seen:
                yield from self._branches({"allOf": [beside, choice]} if beside else choice, (*seen, id(choice)))

    def _join(self, one: Schema, other: Schema) -> Schema:
        parts = [part[key] for key in other if key in one for part in (one, other)]
        self._num_entries += sum(len(part) for part in parts if isinstance(part, dict | list))
        if self._num_entries > _MAX_ENTRIES:
            raise ConstraintError(
                f"$ref, allOf, anyOf and oneOf of the JSON schema join more than {_MAX_ENTRIES:,} properties and "
                "values: write out what is wanted"
            )
        return _join_schemas(one, other)

    def _count_step(self) -> None:
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise ConstraintError(
                f"the JSON schema has parts that take more than {_MAX_STEPS:,} steps to follow through $ref, allOf, "
                "anyOf and oneOf: write out what is wanted"
            )

    def _target(self, reference: str) -> Any:
        return next((one for one in self._references.targets(reference) if isinstance(one, dict | bool)), None)

    def _copy(self, schema: Any, names: dict[int, str], shared: dict[str, Any]) -> Any:
        """Return a copy that refers to what is shared alone, which is added to that."""
        if not isinstance(schema, dict):
            return schema
        own = {key: one for key, one in schema.items() if key not in _OF_WHOLES}
        copied = map_subschemas(own, lambda part: self._copy(part, names, shared))
        reference = schema.get("$ref")
        target = self._target(reference) if isinstance(reference, str) else None
        if target is not None and isinstance(reference, str):
            if id(target) not in names:
                last = reference.rpartition("/")[2].strip("#")
                # No two have one number.
                name = f"{last}_{len(names)}"
                names[id(target)] = name
                shared[name] = None
                shared[name] = self._copy(target, names, shared)
            pointed = names[id(target)].replace("~", "~0").replace("/", "~1")
            copied["$ref"] = f"#/$defs/{pointed}"
        return copied


def choices(schema: Schema) -> Sequence[Any]:
    """Return the values that a schema without references lists; none where it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return as_list(schema.get("enum"))


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


def _join_schemas(one: Schema, other: Schema) -> Schema:
    """Return what keeps to two schemas, as far as that can be said in one; of notes the other's."""
    found = dict(one)
    for key, value in other.items():
        if key not in found or found[key] == value:
            found[key] = value
        elif key == "pattern":
            # No pattern says two.
            found["allOf"] = [*as_list(found.get("allOf")), {key: value}]
        else:
            found[key] = _join_values(key, found[key], value)
    return found


def _join_values(key: str, one: Any, other: Any) -> Any:
    if key == "properties" and isinstance(one, dict) and isinstance(other, dict):
        shared = {
            name: {"allOf": [one[name], other[name]]} for name in one if name in other and one[name] != other[name]
        }
        return {**one, **other, **shared}
    if key == "required" and isinstance(one, list) and isinstance(other, list):
        return list(dict.fromkeys(name for name in (*one, *other) if isinstance(name, str)))
    if key == "type":
        return _shared_types(one, other)
    if key == "enum" and isinstance(one, list) and isinstance(other, list):
        listed_there = {json.dumps(value, sort_keys=True) for value in other}
        return [value for value in one if json.dumps(value, sort_keys=True) in listed_there]
    if key in _UNIONS and isinstance(one, list) and isinstance(other, list) and len(one) * len(other) <= _MAX_JOINED:
        return [{"allOf": [left, right]} for left in one for right in other]
    if key == "additionalProperties" and False in (one, other):
        return False
    if key in ("items", "additionalProperties") and isinstance(one, dict) and isinstance(other, dict):
        return {"allOf": [one, other]}
    if (key in _LOWER or key in _HIGHER) and is_number(one) and is_number(other):
        return min(one, other) if key in _LOWER else max(one, other)
    return other


def _shared_types(one: Any, other: Any) -> Any:
    left, right = ([kind] if isinstance(kind, str) else as_list(kind) for kind in (one, other))
    both = [
        kind
        for kind in TYPES
        if (kind in left or (kind == "integer" and "number" in left))
        and (kind in right or (kind == "integer" and "number" in right))
    ]
    return both[0] if len(both) == 1 else both
