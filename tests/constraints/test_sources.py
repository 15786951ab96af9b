from __future__ import annotations

import pytest

from paceline.constraints import Choice, Gbnf, JsonObject, JsonSchema, Lark, Regex, Source
from paceline.core.errors import ConstraintError

HOLDS_ITSELF: dict[str, object] = {}
HOLDS_ITSELF["items"] = HOLDS_ITSELF


def test_a_schema_is_its_json_however_it_is_given() -> None:
    given = JsonSchema({"type": "object", "properties": {"b": {}, "a": {"const": "é"}}})
    assert given.text == '{"type":"object","properties":{"b":{},"a":{"const":"é"}}}'
    assert given == JsonSchema('{ "type": "object",\n "properties": {"b": {}, "a": {"const": "\\u00e9"}} }')
    assert given.digest == JsonSchema(given.text).digest
    assert JsonSchema(True).text == "true"


def test_what_says_another_thing_has_another_digest() -> None:
    sources: list[Source] = [
        JsonSchema({}),
        JsonSchema({}, whitespace="single"),
        JsonSchema({"type": "object"}),
        # The order of properties is that of the answer.
        JsonSchema({"properties": {"a": {}, "b": {}}}),
        JsonSchema({"properties": {"b": {}, "a": {}}}),
        JsonObject(),
        JsonObject(whitespace="none"),
        Gbnf("a"),
        Lark("a"),
        Regex("a"),
        Choice(["a"]),
        Choice(["a", "b"]),
        Choice(["b", "a"]),
    ]
    assert len({source.digest for source in sources}) == len(sources)
    assert len(set(sources)) == len(sources)


def test_sizes_are_in_bytes() -> None:
    assert Regex("é").num_bytes == 2


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{}{}", "the JSON schema is not JSON: Extra data at line 1, column 3"),
        ("", "the JSON schema is not JSON: Expecting value at line 1, column 1"),
        ('{"minimum": NaN}', "cannot be written as JSON"),
        ('{"minimum": 1e999}', "cannot be written as JSON"),
        ({"const": float("inf")}, "cannot be written as JSON"),
        ({"const": {1, 2}}, "cannot be written as JSON"),
        ({"const": "\ud800"}, "half of a surrogate pair at character 10"),
        ('{"items":' * 100_000 + "true" + "}" * 100_000, "nested too deeply"),
        ('{"minimum": ' + "1" * 10_000 + "}", "cannot be written as JSON"),
        (HOLDS_ITSELF, "cannot be written as JSON: Circular reference detected"),
    ],
)
def test_what_is_no_json_is_refused_in_a_line(schema: str | dict[str, object], message: str) -> None:
    with pytest.raises(ConstraintError, match=message) as raised:
        JsonSchema(schema)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_other_values_are_checked() -> None:
    with pytest.raises(ConstraintError, match="whitespace is 'much': say one of any, short, single, none"):
        JsonObject(whitespace="much")  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match="the choice of texts has none"):
        Choice([])
    with pytest.raises(ConstraintError, match="half of a surrogate pair"):
        Gbnf("\udfff")
