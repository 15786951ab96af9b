"""Schemas as the generators write them that clients have: pydantic, zod's two converters and OpenAPI's tools.

Those of pydantic are its own, of random models. Of the others the habits are written out here: which keywords they
say, where they put definitions, and how they say that a value may be null.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import json
import random
import uuid
from collections.abc import Callable, Collection
from typing import Annotated, Any, ForwardRef, Literal, TypeAlias

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, Json, SecretStr, WithJsonSchema, create_model

from paceline.constraints.schema_parts import iter_subschemas, shorten_pointer

Schema: TypeAlias = dict[str, Any]

_WORDS = (
    *("name", "title", "year", "kind", "city", "unit", "price", "count", "tags", "notes", "owner", "status", "is_open"),
    *("created_at", "language", "score", "address", "items", "parent", "meta", "level", "color", "email", "homepage"),
)
# As many versions of pydantic have it; the latest leave the pattern out.
_PATTERNED = Annotated[
    decimal.Decimal,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]}),
]
_TEXTS = ("celsius", "fahrenheit", "low", "high", "in progress", "été", "a/b", 'say "hi"', "", "north-east", "3")


def generated_schema(rng: random.Random) -> Schema:
    """Return the schema of an object, as one of the generators would write it; pydantic's may begin with a ``$ref``."""
    return rng.choice((pydantic_schema, zod_schema, zod_4_schema, openapi_schema))(rng)


def pydantic_schema(rng: random.Random) -> Schema:
    """Return what pydantic says of a random model."""
    model = _Models(rng).model(0)
    schema: Schema = model.model_json_schema(mode=rng.choice(("validation", "serialization")))
    return schema


def zod_schema(rng: random.Random) -> Schema:
    """Return a schema as ``zod-to-json-schema`` writes it for zod 3: draft 7, references into its own parts."""
    writer = _Zod(rng)
    schema = writer.object_of(0)
    return {**schema, "$schema": "http://json-schema.org/draft-07/schema#"}


def zod_4_schema(rng: random.Random) -> Schema:
    """Return a schema as zod 4 writes it by itself: draft 2020-12, patterns beside formats."""
    writer = _Zod4(rng)
    schema = writer.object_of(0)
    shared = {"$defs": writer.shared} if writer.shared else {}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, **shared}


def openapi_schema(rng: random.Random) -> Schema:
    """Return a schema of an OpenAPI document, with the components that it refers to."""
    writer = _OpenApi(rng)
    schema = writer.object_of(0)
    return {**schema, **({"components": {"schemas": writer.shared}} if writer.shared else {})}


def _names(rng: random.Random, most: int, spelled: Callable[[str], str] = str) -> list[str]:
    return [spelled(word) for word in rng.sample(_WORDS, rng.randint(1, most))]


def _camel(word: str) -> str:
    first, *others = word.split("_")
    return first + "".join(other.title() for other in others)


class _Models:
    """Makes models of pydantic, each named once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._number = 0
        self._models: list[type[BaseModel]] = []
        self._enums: list[type[enum.Enum]] = []

    def model(self, depth: int, **more: Any) -> type[BaseModel]:
        rng = self._rng
        self._number += 1
        name = f"Model{self._number}"
        fields: dict[str, Any] = dict(more)
        for word in _names(rng, 6):
            if word in fields:
                continue
            if rng.random() < 0.06:
                itself: Any = ForwardRef(name)
                maybe: Any = itself | None
                fields[word] = rng.choice(((maybe, None), (maybe, ...), (list[itself], Field(default_factory=list))))
                continue
            fields[word] = self._field(depth)
        config = ConfigDict(
            title=rng.choice((None, None, "A title")),
            extra=rng.choice((None, None, None, "forbid", "allow")),
            use_enum_values=rng.random() < 0.2,
        )
        made: type[BaseModel] = create_model(name, __config__=config, **fields)
        made.__doc__ = rng.choice((None, "What is asked for."))
        made.model_rebuild(_types_namespace={name: made})
        self._models.append(made)
        return made

    def _field(self, depth: int) -> Any:
        rng = self._rng
        kind = self._kind(depth)
        about: dict[str, Any] = {}
        if rng.random() < 0.3:
            about["description"] = "How it is said."
        if rng.random() < 0.15:
            about["examples"] = ["a", "b"]
        if rng.random() < 0.15:
            about["alias"] = rng.choice(("fieldName", "field-name", "@id")) + str(rng.randrange(100))
        if rng.random() < 0.3:
            return kind | None, Field(rng.choice((None, ...)), **about)
        return kind, Field(**about)

    def _kind(self, depth: int) -> Any:
        rng = self._rng
        plain: list[Callable[[], Any]] = [
            lambda: rng.choice((str, str, int, float, bool)),
            lambda: Annotated[str, Field(min_length=rng.randrange(3), max_length=rng.randint(3, 40))],
            lambda: Annotated[
                str, Field(pattern=rng.choice((r"^[A-Z]{3}-\d{2,4}$", r"^\+?[0-9 ]+$", "[a-z]", r"^\S+$")))
            ],
            lambda: Annotated[int, Field(ge=rng.randint(-5, 5), le=rng.randint(6, 2000))],
            lambda: Annotated[int, Field(multiple_of=5)],
            lambda: Annotated[float, Field(gt=0, lt=rng.choice((1, 0.5, 99.95)))],
            lambda: rng.choice((decimal.Decimal, _PATTERNED)),
            lambda: Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)],
            lambda: rng.choice((datetime.datetime, datetime.date, datetime.time, datetime.timedelta, uuid.UUID)),
            lambda: rng.choice((bytes, SecretStr, Json[list[int]], Any, object)),
            lambda: Literal[tuple(rng.sample(_TEXTS, rng.randint(1, 4)))],
            lambda: Literal[rng.choice(((1,), (1, 2, 3), (True,), ("auto", 0, None)))],
            self._enum,
        ]
        nested: list[Callable[[], Any]] = [
            lambda: list[self._kind(depth + 1)],  # type: ignore[misc]
            lambda: Annotated[list[self._kind(depth + 1)], Field(min_length=1, max_length=rng.randint(1, 4))],  # type: ignore[misc]
            lambda: dict[str, self._kind(depth + 1)],  # type: ignore[misc]
            lambda: dict[rng.choice((int, self._enum())), str],  # type: ignore[misc]
            lambda: tuple[self._kind(depth + 1), self._kind(depth + 1)],  # type: ignore[misc]
            lambda: tuple[self._kind(depth + 1), ...],  # type: ignore[misc]
            lambda: set[rng.choice((str, int))],  # type: ignore[misc]
            lambda: self._kind(depth + 1) | self._kind(depth + 1),
            lambda: self.model(depth + 1),
            lambda: self._models[0] if self._models else self.model(depth + 1),
            lambda: self._tagged(depth),
        ]
        return rng.choice(plain if depth > 2 or rng.random() < 0.6 else nested)()

    def _enum(self) -> type[enum.Enum]:
        rng = self._rng
        if self._enums and rng.random() < 0.5:
            return rng.choice(self._enums)
        values = rng.choice((rng.sample(_TEXTS, rng.randint(1, 4)), [1, 2, 3], [0.5, 1.5], ["mixed", 7]))
        made = enum.Enum(f"Enum{len(self._enums)}", [(f"m{i}", value) for i, value in enumerate(values)])  # type: ignore[misc]
        self._enums.append(made)
        return made

    def _tagged(self, depth: int) -> Any:
        one: Any
        other: Any
        one, other = (self.model(depth + 1, type=(Literal[tag], ...)) for tag in ("circle", "square"))
        both: Any = Annotated[one | other, Field(discriminator="type")]
        return list[both] if self._rng.random() < 0.5 else both


class _Writer:
    """What writers of schemas by hand share."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.shared: Schema = {}

    def about(self, schema: Schema) -> Schema:
        found = dict(schema)
        if self.rng.random() < 0.3:
            found["description"] = "How it is said."
        return found

    def text_enum(self) -> Schema:
        return {"type": "string", "enum": self.rng.sample(_TEXTS, self.rng.randint(1, 4))}

    def choice(self, *makers: Callable[[], Schema]) -> Schema:
        return self.rng.choice(makers)()


class _Zod(_Writer):
    """What stands a second time is a reference to where it stands first."""

    _by_place = True

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._places: list[str] = []

    def object_of(
        self, depth: int, path: str = "#", tag: str | None = None, *, without: Collection[str] = ()
    ) -> Schema:
        rng = self.rng
        properties: Schema = {} if tag is None else {"type": self.const(tag)}
        required = list(properties)
        for name in _names(rng, 6, _camel):
            if name in without:
                continue
            place = f"{path}/properties/{name}"
            properties[name] = self.about(self._any(depth, place))
            if rng.random() < 0.7:
                required.append(name)
            if self._by_place and "properties" in properties[name]:
                self._places.append(place)
        schema: Schema = {"type": "object", "properties": properties}
        if required:
            schema["required"] = required
        match rng.randrange(10):
            case 0:
                return {**schema, "additionalProperties": True}
            case 1:
                return {**schema, "additionalProperties": self._any(depth + 1, f"{path}/additionalProperties")}
        return {**schema, "additionalProperties": False}

    def const(self, value: object) -> Schema:
        return {"type": "string" if isinstance(value, str) else "number", "const": value}

    def tuple_of(self, parts: list[Schema]) -> Schema:
        return {"type": "array", "minItems": len(parts), "maxItems": len(parts), "items": parts}

    def nullable(self, schema: Schema) -> Schema:
        if schema.get("type") == "null":
            return schema
        if set(schema) <= {"type", "minLength", "maximum", "minimum"} and isinstance(schema.get("type"), str):
            return {**schema, "type": [schema["type"], "null"]}
        return {"anyOf": [schema, {"type": "null"}]}

    def _any(self, depth: int, path: str) -> Schema:
        rng = self.rng
        schema = self._plain() if depth > 2 or rng.random() < 0.6 else self._nested(depth, path)
        # What is wrapped stands elsewhere, and what refers to it would be led astray.
        if rng.random() < 0.2 and not any(place.startswith(path) for place in self._places):
            schema = self.nullable(schema)
        if schema.get("type") == "string" and "enum" in schema and rng.random() < 0.2:
            schema = {**schema, "default": schema["enum"][0]}
        return schema

    def _plain(self) -> Schema:
        rng = self.rng
        return self.choice(
            lambda: {"type": rng.choice(("string", "string", "number", "integer", "boolean"))},
            lambda: {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 60)},
            lambda: {"type": "string", "format": rng.choice(("email", "uri", "uuid", "date-time", "date", "time"))},
            lambda: {"type": "string", "pattern": rng.choice(("^[cC][^\\s-]{8,}$", "^abc", "xyz$", "^[0-9a-z]{2}$"))},
            lambda: {"type": "number", "exclusiveMinimum": 0},
            lambda: {"type": "integer", "minimum": 0, "maximum": rng.randint(0, 300)},
            lambda: {"type": "number", "multipleOf": rng.choice((0.01, 0.5, 3))},
            lambda: {"type": "integer", "format": "int64"},
            lambda: {"type": "string", "format": "date-time"},
            lambda: {"type": "string", "const": rng.choice(_TEXTS)},
            lambda: rng.choice(({"type": "number", "const": 1}, {"type": "boolean", "const": True})),
            lambda: {"type": "number", "enum": [0, 1, 2]},
            lambda: {"type": ["string", "number"], "enum": ["a", 1]},
            lambda: {"type": ["string", "number", "boolean"]},
            lambda: {"type": "null"},
            self.text_enum,
            dict,
        )

    def _nested(self, depth: int, path: str) -> Schema:
        rng = self.rng

        def inner(at: str) -> Schema:
            return self._any(depth + 1, f"{path}/{at}")

        return self.choice(
            lambda: {"type": "array", "items": inner("items")},
            lambda: {"type": "array", "items": inner("items"), "minItems": 1, "maxItems": rng.randint(1, 4)},
            lambda: {"type": "array", "items": self._plain(), "uniqueItems": True},
            lambda: self.tuple_of([inner("items/0"), inner("items/1")]),
            lambda: {"type": "object", "additionalProperties": inner("additionalProperties")},
            lambda: {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "propertyNames": {"enum": ["north", "south"]},
            },
            lambda: {"anyOf": [inner("anyOf/0"), inner("anyOf/1")]},
            lambda: {
                "anyOf": [
                    self.object_of(depth + 1, f"{path}/anyOf/{number}", tag) for number, tag in enumerate(("a", "b"))
                ]
            },
            lambda: self._intersection(depth, path),
            lambda: {"$ref": rng.choice(self._places)} if self._places else self._plain(),
            # What has itself as a part has an end somewhere.
            lambda: rng.choice(({"type": "array", "items": {"$ref": "#"}}, self.nullable({"$ref": "#"}))),
            lambda: self.object_of(depth + 1, path),
            lambda: self.object_of(depth + 1, path),
        )

    def _intersection(self, depth: int, path: str) -> Schema:
        parts: list[Schema] = []
        for number in range(2):
            known = parts[0]["properties"] if parts else ()
            part = self.object_of(depth + 1, f"{path}/allOf/{number}", without=known)
            del part["additionalProperties"]
            parts.append(part)
        return {"allOf": parts, **({"unevaluatedProperties": False} if self.rng.random() < 0.5 else {})}


_SAFE = {"minimum": -9007199254740991, "maximum": 9007199254740991}
_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?"


class _Zod4(_Zod):
    """What is named in a registry, or a part of itself, stands under ``$defs``."""

    _by_place = False

    def tuple_of(self, parts: list[Schema]) -> Schema:
        return {"type": "array", "prefixItems": parts}

    def nullable(self, schema: Schema) -> Schema:
        return {"anyOf": [schema, {"type": "null"}]}

    def _plain(self) -> Schema:
        inherited = super()._plain
        return self.choice(
            lambda: {"type": "integer", **_SAFE},
            lambda: {"type": "integer", "exclusiveMinimum": 0, "maximum": _SAFE["maximum"]},
            lambda: {"type": "string", "format": "email", "pattern": _EMAIL},
            lambda: {"type": "string", "format": "date-time", "pattern": rf"^\d{{4}}-\d\d-\d\dT{_CLOCK}Z$"},
            lambda: {"type": "string", "format": "date", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
            lambda: {"type": "string", "format": "time", "pattern": f"^{_CLOCK}$"},
            lambda: {
                "type": "string",
                "format": "uuid",
                "pattern": "^([0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12})$",
            },
            lambda: {"type": "string", "format": "uri"},
            lambda: {
                "type": "string",
                "format": "base64",
                "contentEncoding": "base64",
                "pattern": "^[0-9a-zA-Z+/]*=*$",
            },
            lambda: {"type": "string", "allOf": [{"pattern": "^a.*"}, {"pattern": ".*z$"}]},
            lambda: {"default": self.rng.choice(_TEXTS), "type": "string"},
            inherited,
            inherited,
            inherited,
        )

    def _nested(self, depth: int, path: str) -> Schema:
        rng = self.rng
        match rng.randrange(6):
            case 0:
                return {
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": self._any(depth + 1, path),
                }
            case 1:
                keys = ["north", "south"]
                return {
                    "type": "object",
                    "propertyNames": {"type": "string", "enum": keys},
                    "additionalProperties": self._plain(),
                    "required": keys,
                }
            case 2:
                name = f"__schema{len(self.shared)}" if rng.random() < 0.5 else f"Part{len(self.shared)}"
                self.shared[name] = {}
                self.shared[name] = self.object_of(depth + 1, f"#/$defs/{name}")
                return {"$ref": f"#/$defs/{name}"}
            case 3 if self.shared:
                return self.nullable({"$ref": f"#/$defs/{rng.choice(list(self.shared))}"})
        return super()._nested(depth, path)


class _OpenApi(_Writer):
    """OpenAPI 3.0 and 3.1, as frameworks write them: components, ``nullable``, compositions, formats of numbers."""

    def object_of(self, depth: int, more: Schema | None = None) -> Schema:
        rng = self.rng
        properties = dict(more or {})
        for name in _names(rng, 6, _camel):
            properties.setdefault(name, self.about(self._any(depth)))
        if rng.random() < 0.1:
            properties[rng.choice(("$filter", "x-request-id", "library-id"))] = {"type": "string"}
        schema: Schema = {"type": "object"}
        required = [name for name in properties if name in (more or ()) or rng.random() < 0.5]
        if required:
            schema["required"] = required
        schema["properties"] = properties
        match rng.randrange(12):
            case 0:
                schema["additionalProperties"] = rng.choice((True, {}, {"type": "string"}))
            case 1 | 2:
                schema["additionalProperties"] = False
            case 3:
                schema["example"] = dict.fromkeys(properties, "a")
            case 4:
                schema["xml"] = {"name": "part"}
            case 5:
                schema["x-tags"] = ["a"]
        return schema

    def _any(self, depth: int) -> Schema:
        rng = self.rng
        schema = self._plain() if depth > 2 or rng.random() < 0.6 else self._nested(depth)
        if "$ref" in schema:
            return (
                {"allOf": [schema], **({"nullable": True} if rng.random() < 0.5 else {})}
                if rng.random() < 0.3
                else schema
            )
        if "type" in schema and rng.random() < 0.2:
            return {**schema, "nullable": True} if rng.random() < 0.6 else {**schema, "type": [schema["type"], "null"]}
        if rng.random() < 0.1:
            return {**schema, rng.choice(("readOnly", "writeOnly", "deprecated")): True}
        return schema

    def _plain(self) -> Schema:
        rng = self.rng
        return self.choice(
            lambda: {"type": rng.choice(("string", "string", "number", "integer", "boolean"))},
            lambda: {"type": "integer", "format": rng.choice(("int32", "int64")), "minimum": 0, "example": 10},
            lambda: {"type": "integer", "format": "int32", "minimum": 1, "maximum": 100, "default": 20},
            lambda: {"type": "number", "format": rng.choice(("float", "double"))},
            lambda: {"type": "number", "minimum": 0, "exclusiveMinimum": True},
            lambda: {"type": "string", "format": rng.choice(("date-time", "date", "uuid", "email", "uri", "hostname"))},
            lambda: {"type": "string", "format": rng.choice(("byte", "binary", "password"))},
            lambda: {"type": "string", "minLength": 1, "maxLength": rng.choice((1, 64, 255, 2000))},
            lambda: {"type": "string", "pattern": rng.choice((r"^\d{3}-\d{2}$", "^[A-Z]+$", r"^[\w.-]+$"))},
            lambda: {**self.text_enum(), "example": "low"},
            lambda: {"type": "object"},
        )

    def _nested(self, depth: int) -> Schema:
        rng = self.rng
        return self.choice(
            lambda: {"type": "array", "items": self._any(depth + 1)},
            lambda: {"type": "array", "items": self._any(depth + 1), "maxItems": 10, "uniqueItems": rng.random() < 0.3},
            lambda: {"type": "object", "additionalProperties": self._any(depth + 1)},
            lambda: {"type": "object", "additionalProperties": True},
            lambda: self.object_of(depth + 1),
            lambda: self._component(lambda: self.object_of(depth + 1)),
            lambda: self._component(lambda: self.object_of(depth + 1)),
            lambda: self._component(self.text_enum),
            self._known,
            lambda: self._composed(depth),
            lambda: self._one_of(depth),
            lambda: {"anyOf": [self._any(depth + 1), self._any(depth + 1)]},
        )

    def _component(self, make: Callable[[], Schema]) -> Schema:
        name = f"Part{len(self.shared)}"
        self.shared[name] = {}
        self.shared[name] = make()
        return {"$ref": f"#/components/schemas/{name}"}

    def _known(self) -> Schema:
        if not self.shared:
            return self._component(self.text_enum)
        name = self.rng.choice(list(self.shared))
        part = {"$ref": f"#/components/schemas/{name}"}
        # What is being written has itself as a part, which has to have an end.
        return part if self.shared[name] else {"type": "array", "items": part}

    def _composed(self, depth: int) -> Schema:
        base = self._component(lambda: self.object_of(depth + 1))
        parent = self.shared[base["$ref"].rpartition("/")[2]]
        child = self.object_of(depth + 1)
        for part in (parent, child):
            part.pop("additionalProperties", None)
        for name in child["properties"].keys() & parent["properties"].keys():
            del child["properties"][name]
        if "required" in child:
            child["required"] = [name for name in child["required"] if name in child["properties"]]
        return {"allOf": [base, child]}

    def _one_of(self, depth: int) -> Schema:
        tags = ("cat", "dog")
        told_apart = self.rng.random() < 0.7
        kinds = [{"type": "string", "enum": [tag]} if told_apart else {"type": "string"} for tag in tags]
        parts = [self._component(lambda: self.object_of(depth + 1, {"petType": kind})) for kind in kinds]  # noqa: B023
        mapping = {tag: part["$ref"] for tag, part in zip(tags, parts, strict=True)}
        return {"oneOf": parts, "discriminator": {"propertyName": "petType", "mapping": mapping}}


def check(schema: dict[str, Any], answer: Any, left_out: tuple[str, ...]) -> None:
    """Hold an answer against a schema, but for what is said to be left out."""
    # 2.3 is a multiple of 0.01, and no float is one.
    schema = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
    for path, part in list(iter_subschemas(schema)):
        for key in [key for key in part if shorten_pointer((*path, key)) in left_out]:
            value = part.pop(key)
            if key == "oneOf":
                part.setdefault("allOf", []).append({"anyOf": value})
    jsonschema.validators.validator_for(schema)(schema).validate(answer)


def without_old_bounds(schema: Any) -> Any:
    """Return a schema in which OpenAPI 3.0 says by a truth value that a bound itself is left out, as drafts do now."""
    if isinstance(schema, list):
        return [without_old_bounds(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: without_old_bounds(each) for key, each in schema.items()}
    if found.get("exclusiveMinimum") is True:
        found["exclusiveMinimum"] = found.pop("minimum")
    return found
