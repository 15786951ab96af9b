"""Schemas and grammars over HTTP: every field that says one, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.serving.hosted import Hosted

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "OpenAI's schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "schema"),
    "llama-server's schema": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "schema"),
    "json_schema": ({"json_schema": SCHEMA}, "schema"),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, "schema"),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, "schema"),
    "grammar": ({"grammar": 'root ::= "a"{5,5}'}, "aaaaa"),
    "guided_grammar in Lark": ({"guided_grammar": 'start: "ab" | "cd"'}, "ab|cd"),
    "guided_regex": ({"guided_regex": "[a-c]{3}-[0-9]"}, "[a-c]{3}-[0-9]"),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"),
}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "sound"}}, "response_format", "has type 'sound'"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "has no schema"),
    ({"response_format": {"json_schema": {"schema": SCHEMA}}}, "response_format", "has no type and a schema: give it"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format", "has type 'text' and a schema"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format", "'json_object' and a schema"),
    (
        {"json_schema": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!x)"}]}},
        "json_schema",
        "#/anyOf/1/pattern: the pattern has a look-ahead, which is not supported: write it without, leave it out, or",
    ),
    ({"json_schema": {"type": "hiccup"}}, "json_schema", "#/type: Invalid type: hiccup"),
    ({"json_schema": 3}, "json_schema", "the JSON schema is 3: give an object"),
    ({"json_schema": False}, "json_schema", "allows no"),
    ({"grammar": 'root ::= "a" )'}, "grammar", "line 1"),
    ({"grammar": "root ::= root"}, "grammar", "never ends"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar", "json_schema and grammar both constrain"),
    ({"guided_regex": "("}, "guided_regex", "the regular expression cannot be used"),
    ({"guided_choice": []}, "guided_choice", "give one text or more"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "3 is not a text"),
    ({"json_schema": {"pattern": "a" * 600_000}}, "json_schema", "bytes, and the most is"),
    ({"grammar": 'root ::= "a"', "ignore_eos": True}, "ignore_eos", "ends where the grammar ends"),
]


def matches(text: str, wanted: str) -> bool:
    if wanted != "schema":
        return re.fullmatch(wanted, text) is not None
    value = json.loads(text)
    return list(value) == ["name", "age"] and value["name"] in ("Ada", "Bob") and 0 <= value["age"] <= 99


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_keeps_to_what_is_asked(server: Hosted, name: str) -> None:
    fields, wanted = ASKED[name]
    body = {"prompt": "abc ", "max_tokens": 1000, "seed": 5, "temperature": 1.0, **fields}
    answer = server.answer("/completion", body)
    assert answer["stop_type"] == "eos"
    assert matches(answer["content"], wanted)
    assert server.answer("/completion", {**body, "speculative": {"off": True}})["content"] == answer["content"]
    chat = server.answer(
        CHAT, {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1000, "seed": 5, **fields}
    )
    assert matches(chat["choices"][0]["message"]["content"], wanted)


def test_what_is_forced_is_drafted_and_counted(server: Hosted) -> None:
    fields = {"guided_regex": "(abcdefgh){20}", "temperature": 0.0}
    answer = server.answer("/completion", {"prompt": "abc ", "max_tokens": 200, **fields})
    assert answer["content"] == "abcdefgh" * 20
    assert answer["speculative"]["drafters"]["grammar"]["accepted"] > 100


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_cannot_be_kept_to_is_refused(server: Hosted, fields: dict[str, Any], param: str, message: str) -> None:
    response = server.post("/completion", {"prompt": "abc", "max_tokens": 4, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_what_a_schema_that_is_not_strict_has_that_nothing_keeps_to_is_told(server: Hosted) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 3, "maxItems": 5, "uniqueItems": True}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 200, "seed": 1}
    described: dict[str, Any] = {"name": "numbers", "schema": schema}
    error = server.refusal(CHAT, {**body, "response_format": {"type": "json_schema", "json_schema": described}})
    assert '#/uniqueItems: "uniqueItems" is not supported: leave it out, or say strict false' in error["message"]
    lenient = {"type": "json_schema", "json_schema": {**described, "strict": False}}
    answer = server.answer(CHAT, {**body, "response_format": lenient})
    value = json.loads(answer["choices"][0]["message"]["content"])
    assert 3 <= len(value) <= 5
    assert set(value) <= {1, 2}
    assert answer["warnings"] == [
        "response_format is not strict, and nothing keeps the answer to #/uniqueItems: check it"
    ]
    schema = {"properties": {"a": {"type": "string", "pattern": "^(?!x)[ab]$"}}, "required": ["a"]}
    lenient = {"type": "json_schema", "json_schema": {"name": "pattern", "schema": schema, "strict": False}}
    answer = server.answer(CHAT, {**body, "response_format": lenient})
    assert answer["warnings"][0].endswith("nothing keeps the answer to #/properties/a/pattern: check it")
    many = {"properties": {f"p{i}": {"not": {"type": "null"}} for i in range(20)}}
    described = {"name": "many", "schema": many, "strict": False}
    answer = server.answer(CHAT, {**body, "response_format": {"type": "json_schema", "json_schema": described}})
    assert "#/properties/p7/not and 12 more places: check it" in answer["warnings"][0]


def test_the_settings_tell_the_grammar(server: Hosted) -> None:
    grammar = 'root ::= "ab"'
    answer = server.answer("/completion", {"prompt": "abc", "grammar": grammar})
    assert answer["generation_settings"]["grammar"] == grammar
