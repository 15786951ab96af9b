"""Requests that are made to do harm, beside answers that others read: each is refused, and no text changes by it.

What bounds the time of each source is shown in ``tests/constraints/test_hostile.py``.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

import paceline
from paceline.chat.params import ChatParams
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.serving.model_host import ServedModel
from tests.serving.hosted import Hosted, hosted, json_of
from tests.timing import WAIT_S

pytest.importorskip("llguidance")


CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = [{"role": "user", "content": "abc"}]

SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    },
    "minItems": 3,
    "maxItems": 4,
}
LONG: Final[dict[str, Any]] = {"max_tokens": 150, "ignore_eos": True, "temperature": 1.0}
UNDISTURBED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "text": ("/completion", {"prompt": "abc ", "seed": 1, **LONG}),
    "text without drafts": ("/completion", {"prompt": "abc ", "seed": 2, **LONG, "speculative": {"off": True}}),
    "chat": (CHAT, {"messages": MESSAGES, "seed": 3, **LONG}),
    "schema": ("/completion", {"prompt": "abc ", "seed": 4, "max_tokens": 900, "json_schema": SCHEMA}),
}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "minItems": 10**6, "maxItems": 10**9, "items": schema}
    return schema


def either(index: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"{letter}{index}": {"type": "null"}}} for letter in "ab"]}


def of_type(kind: str, **keywords: Any) -> dict[str, Any]:
    return {"json_schema": {"type": kind, **keywords}}


def tool(parameters: Any = None, **fields: Any) -> dict[str, Any]:
    function = {"name": "f", **({} if parameters is None else {"parameters": parameters}), **fields}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


def embedded(schema: dict[str, Any], times: int = 1) -> str:
    return "start: " + " | ".join([f"%json {json.dumps(schema)}"] * times)


REFUSED: Final[dict[str, tuple[dict[str, Any], str, str]]] = {
    "huge schema": ({"json_schema": {"enum": ["a" * 100] * 6_000}}, "json_schema", "the most is 524,288"),
    "deep text": ({"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000}, "guided_json", "nested too deeply"),
    "no one schema": ({"guided_json": "{}{}"}, "guided_json", "is not JSON: Extra data at line 1, column 3"),
    "no number": ({"guided_json": '{"minimum": NaN}'}, "guided_json", "cannot be written as JSON"),
    "alternation": ({"grammar": "root ::= " + '"a"|' * 10**6 + '"a"'}, "grammar", "the most is 524,288"),
    "$ref to all": ({"json_schema": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}}, "json_schema", "allows no text at all"),
    "joined": ({"json_schema": {"allOf": [either(i) for i in range(12)]}}, "json_schema", "more than 256 alternatives"),
    "hidden multiple": (
        {"json_schema": {"$ref": "#/x", "x": {"type": "integer", "multipleOf": 10**7}}},
        "json_schema",
        "#/x/multipleOf: 1e+07, and the most is",
    ),
    "bounds": (of_type("object", minProperties=3, maxProperties=2), "json_schema", "#/minProperties: Unsatisfiable"),
    "bounds of a property": (
        of_type("object", properties={"a": of_type("integer", minimum=5, maximum=3)["json_schema"]}, required=["a"]),
        "json_schema",
        "#/required: Unsatisfiable schema: required property 'a'",
    ),
    "required and forbidden": (
        of_type("object", required=["a"], additionalProperties=False),
        "json_schema",
        "#/required: Unsatisfiable schema",
    ),
    "pattern of nothing": (of_type("string", pattern="^a$", minLength=5), "json_schema", "#/pattern: "),
    "huge pattern": (of_type("string", pattern="(a|b)?" * 2_000), "json_schema", "more than 8,000 characters"),
    "form": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"uniqueItems": True}}}}},
        "response_format",
        '#/items/uniqueItems: "uniqueItems" is not supported: leave it out',
    ),
    "repetition": ({"grammar": 'root ::= "a"{1000000000}'}, "grammar", "line 1, column 13: 1,000,000,000"),
    "left recursion": ({"grammar": 'root ::= x "a"\nx ::= root "b"'}, "grammar", "the rule root never ends"),
    "missing rule": ({"grammar": 'root ::= "a" nope'}, "grammar", "line 1, column 14: there is no rule named nope"),
    "missing token": ({"grammar": 'root ::= "a" <nope>'}, "grammar", "line 1, column 14: <nope> is not a single token"),
    "regex of nothing": ({"guided_regex": r"[^\x00-\x{10FFFF}]"}, "guided_regex", "allows no text at all"),
    "huge regex": ({"guided_regex": "(x+x+)+y" * 2_000}, "guided_regex", "16,000 bytes, and the most is 8,000"),
    "schema in a grammar": (
        {"guided_grammar": embedded({"type": "integer", "multipleOf": 10**7})},
        "guided_grammar",
        "line 1, column 8: #/multipleOf: 1e+07, and the most is",
    ),
    "schemas in a grammar": (
        {"guided_grammar": embedded({"patternProperties": {f"^{i}$": {} for i in range(40)}}, times=9)},
        "guided_grammar",
        "#: the JSON schema has more than 100 patternProperties",
    ),
    "settings in a grammar": (
        {"guided_grammar": embedded({"x-guidance": {"lenient": True}, "uniqueItems": True})},
        "guided_grammar",
        "line 1, column 8: x-guidance in a JSON schema is not supported",
    ),
    "tool without a function": ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools", "tools[0] is"),
    "tool without a schema": (tool(3), "tools", "tools[0].function.parameters is 3: give a JSON schema"),
    "tool of nothing": (
        tool({"properties": {"a": False}, "required": ["a"]}),
        "tool_choice",
        "the parameters of function f: #/required: Unsatisfiable schema",
    ),
    "strict tool": (
        tool({"properties": {"a": {"type": "array", "uniqueItems": True}}}, strict=True),
        "tool_choice",
        '#/properties/a/uniqueItems: "uniqueItems" is not supported: leave it out',
    ),
    "tool of a large number": (tool({"properties": {"a": {"multipleOf": 10**7}}}), "tool_choice", "#/properties/a/mul"),
    "deep tool": (tool(nested(105)), "tool_choice", "nested more than 100 levels deep"),
}
"""One of each field and of each way to refuse; more are in ``tests/constraints/test_hostile.py``."""
ENDED: Final[dict[str, dict[str, Any]]] = {
    "regex": {"guided_regex": "(a|b)?" * 1_000},
    "pattern": {"json_schema": {"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}},
    "regexes at once": {
        "guided_grammar": "start: A\nA: " + " & ".join(f"/(.*{letter}.*)/" for letter in "abcdefghijklmnop")
    },
}
"""What takes too much in the middle of an answer, which is known there only."""


def text_of(server: Hosted, name: str) -> str:
    path, body = UNDISTURBED[name]
    events = server.chunks(path, body)
    assert not any("error" in event for event in events)
    if path == CHAT:
        return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    return "".join(event["content"] for event in events)


class Streams:
    """Streams that are asked for again and again.

    Args:
        server: asked.
    """

    def __init__(self, server: Hosted) -> None:
        self._server = server
        self._over = threading.Event()
        self.texts: dict[str, list[str]] = {name: [] for name in UNDISTURBED}
        self._pool = ThreadPoolExecutor(len(UNDISTURBED))
        self._running = [self._pool.submit(self._ask, name) for name in UNDISTURBED]

    def end(self) -> None:
        """Let each come to its end, and raise what any of them raised."""
        self._over.set()
        for running in self._running:
            running.result(WAIT_S)
        self._pool.shutdown()

    def _ask(self, name: str) -> None:
        while not self._over.is_set():
            self.texts[name].append(text_of(self._server, name))


def asked(server: Hosted, fields: dict[str, Any]) -> httpx.Response:
    path, prompt = (CHAT, {"messages": MESSAGES}) if "tools" in fields else ("/completion", {"prompt": "abc"})
    return server.post(path, {**prompt, "max_tokens": 100, "seed": 1, "temperature": 1.0, "stream": True, **fields})


def test_hostile_requests_are_refused_and_the_answers_beside_them_stay_as_they_are(writing: Hosted) -> None:
    alone = {name: text_of(writing, name) for name in UNDISTURBED}
    assert len(json.loads(alone["schema"])) in (3, 4)
    streams = Streams(writing)
    for fields, param, message in REFUSED.values():
        response = asked(writing, fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert message in error["message"]
        assert "\n" not in error["message"]
        assert len(error["message"]) < 400
    for fields in ENDED.values():
        response = asked(writing, fields)
        assert response.status_code == 200
        error = json_of(response.text.strip().rpartition("data: ")[2])["error"]
        assert "takes too much time or memory at this place of the answer" in error["message"]
        assert error["code"] == 400
    streams.end()
    for name, texts in streams.texts.items():
        assert texts == [alone[name]] * len(texts)
        assert texts
    writing.wait_for_nothing()


def lettered() -> ServedModel:
    """Return a model that has two letters and an end."""
    options = ModelOptions(embedded_draft(), context_length=512)
    engine = ScriptedEngine(
        random_model(3, seed=1), ScriptedVocabulary([b"a", b"b", b"<end>"], [2]), context_length=512, max_sequences=4
    )
    model = paceline.Model(engine, [], NO_SPECULATION, target_options=options)
    return ServedModel(model, None, ("lettered",), policy="plain", template=None, chat=ChatParams())


def test_what_a_vocabulary_cannot_spell_is_refused() -> None:
    with hosted(lettered) as server:
        error = server.refusal("/completion", {"prompt": "ab", "json_schema": {"type": "object"}})
        assert error["param"] == "json_schema"
        assert (
            "cannot spell the JSON schema: no token may come first, and a text would begin with '{'" in error["message"]
        )
        assert server.answer("/completion", {"prompt": "ab", "guided_regex": "[ab]{9}"})["tokens_predicted"] == 10
