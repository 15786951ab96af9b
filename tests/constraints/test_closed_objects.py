from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("llguidance")

from paceline.constraints import ConstraintCompiler, JsonSchema
from paceline.core.errors import ConstraintError
from tests.constraints.helpers import BYTES, accepts

COMPILER = ConstraintCompiler(BYTES)
A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}
REF = {"$ref": "#/$defs/A"}
SHARED = {"$defs": {"A": A, "B": B}}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    # a schema, answers that keep to it, and others that do not
    "silent": (A, '{"a":1}', '{"a":1,"b":2}'),
    "without a type": ({"properties": {"a": {}}}, '{"a":1} 3', '{"b":2}'),
    "open": ({**A, "additionalProperties": True}, '{"a":1,"b":[]}', "{}"),
    "open to anything": ({**A, "additionalProperties": {}}, '{"a":1,"b":[]}', "{}"),
    "open to some": ({**A, "additionalProperties": {"type": "null"}}, '{"a":1,"b":null}', '{"a":1,"b":2}'),
    "unevaluated": ({**A, "unevaluatedProperties": True}, '{"a":1,"b":2}', "{}"),
    "no properties are named": ({"type": "object"}, '{"b":2}', "3"),
    "required alone": ({"type": "object", "required": ["a"]}, '{"a":1,"b":2}', '{"b":2}'),
    "it has none": ({"type": "object", "properties": {}}, "{}", '{"a":1}'),
    "within": ({"type": "array", "items": A}, '[{"a":1}]', '[{"a":1,"b":2}]'),
    "required and not named": (
        {"properties": {"a": {}}, "required": ["b"]},
        '{"b":[1]} {"a":1,"b":2}',
        '{"b":1,"c":2}',
    ),
    "patterns": ({"patternProperties": {"^x": {"type": "null"}}}, '{"x1":null}', '{"x":1} {"b":1}'),
    "patterns beside names": ({**A, "patternProperties": {"^x": {}}}, '{"a":1,"x":2}', '{"a":1,"b":2}'),
    "required by a pattern": ({"patternProperties": {"^x": {}}, "required": ["x1"]}, '{"x1":2} {"x1":1,"b":2}', "{}"),
    "a definition": ({"properties": {"p": REF}, **SHARED}, '{"p":{"a":1}}', '{"p":{"a":1,"b":2}}'),
    "components": (
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": A}}},
        '{"a":1}',
        '{"a":1,"b":2}',
    ),
    "any of several": ({"anyOf": [A, B, {"type": "null"}]}, '{"a":1} {"b":1} null', '{"a":1,"b":2} {"b":1,"c":1}'),
    "all of one": ({"allOf": [REF], "description": "a", **SHARED}, '{"a":1}', '{"a":1,"b":2}'),
    "all of several": ({"allOf": [A, B]}, '{"a":1,"b":2} {"a":1}', '{"b":2} {"a":1,"b":2,"c":3}'),
    "all of definitions": (
        {"allOf": [REF, {"$ref": "#/$defs/B"}, {"required": ["b"]}], **SHARED},
        '{"a":1,"b":2}',
        '{"a":1} {"a":1,"b":2,"c":3} {"a":"x","b":2}',
    ),
    "a definition, joined and by itself": (
        {"properties": {"p": {"allOf": [REF, B]}, "q": REF}, **SHARED},
        '{"p":{"a":1,"b":2},"q":{"a":1}}',
        '{"q":{"a":1,"b":2}} {"p":{"a":1,"c":2}}',
    ),
    "beside a reference": (
        {**REF, "properties": {"c": {}}, **SHARED},
        '{"a":1} {"a":1,"c":2}',
        '{"c":1} {"a":1,"b":2}',
    ),
    "beside alternatives": (
        {"properties": {"c": {}}, "anyOf": [A, B]},
        '{"c":1,"a":1} {"b":1}',
        '{"a":1,"d":2} {"b":"x"}',
    ),
    "alternatives of what is required": (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        '{"a":1} {"b":1} {"a":1,"b":2}',
        '{} {"a":1,"c":2}',
    ),
    "joined and open": ({"allOf": [A, {**B, "additionalProperties": True}]}, '{"a":1,"c":2}', "{}"),
    "opened from above": ({"allOf": [REF], "additionalProperties": True, **SHARED}, '{"a":1,"c":2}', "{}"),
    "joined and closed": ({"allOf": [A, B], "unevaluatedProperties": False}, '{"a":1,"b":2}', '{"a":1,"c":2}'),
    "closed alone": ({"type": "object", "unevaluatedProperties": False}, "{}", '{"a":1}'),
    "of itself": (
        {"$ref": "#/$defs/N", "$defs": {"N": {"allOf": [B, {"properties": {"n": {"$ref": "#/$defs/N"}}}]}}},
        '{"b":1,"n":{"b":2,"n":{}}}',
        '{"n":{"c":1}} {"c":1}',
    ),
    "joined by joined": (
        {
            "allOf": [{"$ref": "#/$defs/AB"}, {"properties": {"c": {}}}],
            "$defs": {**SHARED["$defs"], "AB": {"allOf": [A, B]}},
        },
        '{"a":1,"b":2,"c":3}',
        '{"a":1,"d":3} {"b":1}',
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_objects_that_say_nothing_of_further_properties_have_none(name: str) -> None:
    schema, kept, refused = CASES[name]
    for strict in (True, False):
        source = JsonSchema(schema, whitespace="none", strict=strict)
        assert source.unenforced == ()
        state = COMPILER.compile(source)
        assert [answer for answer in kept.split(" ") if not accepts(state, answer)] == []
        assert [answer for answer in refused.split(" ") if accepts(state, answer)] == []


def test_what_is_named_in_parts_that_nothing_keeps_to_is_allowed() -> None:
    schema = {"properties": {"a": {}}, "if": {"required": ["a"]}, "then": {"properties": {"b": {}}, "required": ["c"]}}
    source = JsonSchema(schema, whitespace="none", strict=False)
    state = COMPILER.compile(source)
    assert source.unenforced == ("#/if", "#/then")
    assert accepts(state, '{"a":1,"b":2,"c":3}')
    assert not accepts(state, '{"a":1,"d":2}')


def test_what_a_joined_definition_leaves_out_is_told_where_it_stands() -> None:
    ill = {"properties": {"a": {"uniqueItems": True}}}
    schema = {"properties": {"p": {"allOf": [REF, B]}, "q": REF}, "$defs": {"A": ill}}
    assert JsonSchema(schema, strict=False).unenforced == ("#/$defs/A/properties/a/uniqueItems",)


def test_a_schema_with_an_id_within_stays_open() -> None:
    # A pointer leads elsewhere there.
    inner = {"$id": "http://a/b", "allOf": [{"$ref": "#/$defs/A"}, B], **SHARED}
    state = COMPILER.compile(JsonSchema({"type": "array", "items": inner}, whitespace="none"))
    assert accepts(state, '[{"a":1,"b":2,"c":3}]')
    assert not accepts(state, '[{"b":2}]')


def test_a_long_chain_of_joined_definitions_stays_open() -> None:
    chained = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}, {"properties": {f"p{i}": {}}}]} for i in range(50)}
    schema = {"$ref": "#/$defs/A0", "$defs": {**chained, "A50": B}}
    state = COMPILER.compile(JsonSchema(schema, whitespace="none"))
    assert accepts(state, '{"b":3,"p49":2,"p1":1}')


def test_alternatives_that_closing_alone_tells_apart_are_refused() -> None:
    one_of = {"oneOf": [{**A, "required": ["a"]}, {**B, "required": ["b"]}]}
    with pytest.raises(ConstraintError, match="#/oneOf: "):
        COMPILER.compile(JsonSchema(one_of))
    apart = {"oneOf": [{**part, "additionalProperties": False} for part in one_of["oneOf"]]}
    assert accepts(COMPILER.compile(JsonSchema(apart, whitespace="none")), '{"a":1}')


@pytest.mark.parametrize("more", [{}, {"discriminator": {"propertyName": "type"}}, {"description": "a"}])
def test_alternatives_that_definitions_tell_apart_are_kept_to(more: dict[str, Any]) -> None:
    kinds = {
        kind: {"type": "object", "properties": {"type": {"const": kind}, kind: {}}, "required": ["type"]}
        for kind in ("cat", "dog")
    }
    one_of = {"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds], **more, "$defs": kinds}
    state = COMPILER.compile(JsonSchema(one_of, whitespace="none"))
    assert accepts(state, '{"type":"cat","cat":1}')
    assert not accepts(state, '{"type":"cat","dog":1}')


@pytest.mark.parametrize(
    "wide",
    [
        {"allOf": [{"properties": {f"p{i}": {}}} for i in range(2_000)]},
        {"required": [f"p{i}" for i in range(20_000)]},
    ],
)
def test_many_joined_parts_are_refused_in_a_line(wide: dict[str, Any]) -> None:
    schema = {
        "properties": {f"q{i}": {"$ref": "#/$defs/wide", "properties": {"x": {}}} for i in range(100)},
        "$defs": {"wide": wide},
    }
    with pytest.raises(ConstraintError, match=r"^#/properties/q\d+: "):
        COMPILER.compile(JsonSchema(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "kept", "refused"),
    [
        ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}}, '{"a":null}', '{"c":null}'),
        ({"propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a"], "title": "E"}}}, '{"a":1}', '{"c":1}'),
        ({"propertyNames": {"type": "string", "pattern": "^a"}}, '{"ab":1}', '{"b":1}'),
        ({"propertyNames": {"type": "string"}}, '{"ab":1}', '{"ab":1'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0.1 0.5", "0 0.0 0.6"),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "1.1 1.5", "1 1.0"),
        ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, "-1.5 -1.1", "-1 -1.0"),
        ({"type": "string", "format": "time", "pattern": "^..:..$"}, '"12:30"', '"12:30:00Z"'),
        (
            {
                "$defs": {"N": {"properties": {"n": {"type": "array", "items": {"$ref": "#/$defs/N", "title": "N"}}}}},
                "$ref": "#/$defs/N",
                "description": "a",
            },
            '{"n":[{"n":[]}]}',
            '{"m":1}',
        ),
        (
            {
                "$defs": {"N": {"properties": {"n": {"discriminator": {}, "anyOf": [{"$ref": "#/$defs/N"}]}}}},
                "$ref": "#/$defs/N",
            },
            '{"n":{"n":{}}}',
            '{"m":1}',
        ),
    ],
)
def test_what_the_library_cannot_take_as_it_stands_is_said_otherwise(
    schema: dict[str, Any], kept: str, refused: str
) -> None:
    state = COMPILER.compile(JsonSchema(schema, whitespace="none"))
    assert [answer for answer in kept.split(" ") if not accepts(state, answer)] == []
    assert [answer for answer in refused.split(" ") if accepts(state, answer)] == []
