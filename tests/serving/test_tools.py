"""Tools over HTTP: calls that a model writes by itself, calls that it is made to write, and what is refused."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.serving.calling import CALLED, CHAT, NOW, SAID, TEMPLATE, TOOLS, WEATHER, body, saying, streamed, whole
from tests.serving.hosted import Hosted, hosted, scripted
from tests.tiers import by_tier

ILL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "f", "parameters": {"type": "hiccup"}}}
NAMED: Final = {"type": "function", "function": {"name": "weather"}}


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    """Return a choice among some of the tools, as OpenAI's API has it."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("speculative", [{}, {"off": True}])
@pytest.mark.parametrize("way", [whole, streamed])
def test_calls_are_read_out_of_an_answer(calling: Hosted, way: Any, speculative: dict[str, Any]) -> None:
    assert way(calling, body(temperature=0.0, speculative=speculative)) == ("Let me see.", CALLED, "tool_calls")


def test_where_no_tool_may_be_called_the_text_stays_as_it_is(calling: Hosted) -> None:
    asked: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for fields in asked:
        assert whole(calling, body(temperature=0.0, **fields)) == (SAID, [], "stop")


def test_an_answer_without_calls_is_content(writing: Hosted) -> None:
    content, calls, reason = whole(writing, body())
    assert (content, calls, reason) == streamed(writing, body())
    assert content
    assert (calls, reason) == ([], "stop")
    # Nobody asked for calls that keep to a schema, so the text is the model's own.
    assert "grammar" not in writing.answer(CHAT, body())["speculative"]["drafters"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": NAMED},
        {"tool_choice": {"type": "function", "name": "weather"}},
    ],
)
def test_a_model_that_has_to_call_calls(writing: Hosted, fields: dict[str, Any]) -> None:
    for seed in range(4):
        asked = body(**fields, seed=seed, temperature=1.2)
        content, calls, reason = whole(writing, asked)
        # A model that says anything at random would go on calling for as long as it may.
        assert (content, len(calls), reason) == (None, 1, "tool_calls")
        for name, arguments in calls:
            assert name == "now" or (arguments["city"] in ("Paris", "Rome") and 0 <= arguments["days"] <= 9)
        if isinstance(fields["tool_choice"], dict):
            assert calls[0][0] == "weather"
        assert streamed(writing, {**asked, "speculative": {"off": True}}) == (content, calls, reason)


@pytest.mark.parametrize("way", [whole, streamed])
def test_some_of_the_tools_may_be_allowed(calling: Hosted, writing: Hosted, way: Any) -> None:
    by_name = {"type": "function", "function": {"name": "weather"}}
    flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    for choice in (allowed("auto", by_name), flat):
        # What is not allowed is not called, whatever the model would say.
        calls = way(calling, body(temperature=0.0, tool_choice=choice))[1]
        assert (calls[0], {name for name, _ in calls}) == (CALLED[0], {"weather"})
    assert way(calling, body(temperature=0.0, tool_choice=allowed("auto", WEATHER, NOW)))[1] == CALLED
    for seed in range(4):
        asked = body(temperature=1.2, seed=seed, parallel_tool_calls=False, tool_choice=allowed("required", by_name))
        content, calls, reason = way(writing, asked)
        assert (content, [name for name, _ in calls], reason) == (None, ["weather"], "tool_calls")
    # The model is told of no others.
    assert (
        calling.answer(CHAT, body(tool_choice=allowed("auto", NOW), verbose=True, max_tokens=1))["__verbose"][
            "prompt"
        ].count("weather")
        == 0
    )


@pytest.mark.parametrize("way", [whole, streamed])
def test_a_call_that_is_cut_off_is_left_out_behind_one_that_had_to_be_made(calling: Hosted, way: Any) -> None:
    # The model goes on calling for as long as it may.
    asked = body(tool_choice="required", parallel_tool_calls=True, temperature=0.0)
    num_calls = set()
    for most in range(30, 300, by_tier(9, quick=18)):
        content, calls, reason = way(calling, {**asked, "max_tokens": most})
        assert {name for name, _ in calls} <= {"now"}
        assert reason == "length"
        # What has no call before it is not lost.
        assert content is None if calls else content.lstrip().startswith("<tool_call>")
        num_calls.add(len(calls))
    assert {0, 1, 2} <= num_calls


@pytest.mark.parametrize("speculative", [{}, {"off": True}])
@pytest.mark.parametrize("way", [whole, streamed])
def test_one_call_alone_is_made_where_calls_may_not_be_parallel(
    calling: Hosted, way: Any, speculative: dict[str, Any]
) -> None:
    asked = body(temperature=0.0, parallel_tool_calls=False, speculative=speculative)
    content, calls, reason = way(calling, asked)
    assert (content, calls, reason) == ("Let me see.", CALLED[:1], "tool_calls")


@pytest.mark.parametrize("way", [whole, streamed])
def test_an_answer_with_a_schema_is_calls_or_keeps_to_it(writing: Hosted, way: Any) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": [1, 2]}}, "required": ["answer"]}
    kind = {"type": "json_schema", "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}}}
    num_calls = 0
    for seed in range(12):
        fields = {"response_format": kind, "seed": seed, "temperature": 2.0, "parallel_tool_calls": False}
        content, calls, reason = way(writing, body(**fields))
        if calls:
            assert (content, len(calls), reason) == (None, 1, "tool_calls")
            num_calls += 1
        else:
            assert json.loads(content) in ({"answer": 1}, {"answer": 2})
            assert reason == "stop"
    assert 0 < num_calls < 12
    # An answer that has to be calls has no content that could keep to anything.
    assert way(writing, body(response_format=kind, tool_choice=NAMED))[0] is None


def test_a_strict_function_is_called_by_its_schema() -> None:
    strict = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}, NOW]
    asked = body(temperature=0.0, tools=strict)
    with hosted(lambda: scripted(TEMPLATE, target=saying(SAID))) as server:
        assert whole(server, asked) == ("Let me see.", CALLED, "tool_calls")
    with hosted(lambda: scripted(TEMPLATE, target=saying(SAID.replace('"days": 3', '"days": 12')))) as server:
        # A day too many: the model is kept from writing its second digit.
        assert whole(server, asked)[1][0] == ("weather", {"city": "Rome", "days": 1})
        assert whole(server, body(temperature=0.0))[1][0] == ("weather", {"city": "Rome", "days": 12})


TAGGED: Final = TEMPLATE.replace(
    '<tool_call>\n{"name": name, "arguments": arguments}\n</tool_call>',
    "<tool_call>\n<function=name>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call>",
)


@pytest.mark.parametrize("way", [whole, streamed])
def test_types_are_looked_up_behind_references(way: Any) -> None:
    parameters = {
        "$defs": {"Unit": {"enum": ["celsius", "kelvin"], "type": "string"}, "N": {"type": "integer", "maximum": 9}},
        "properties": {
            "unit": {"$ref": "#/$defs/Unit"},
            "n": {"$ref": "#/$defs/N"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]},
        },
        "required": ["unit", "n", "maybe"],
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    given = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("unit", "kelvin"), ("n", 3), ("maybe", "null"))
    )
    said = f"<tool_call>\n<function=f>\n{given}</function>\n</tool_call>"
    expected = (None, [("f", {"unit": "kelvin", "n": 3, "maybe": None})], "tool_calls")
    with hosted(lambda: scripted(TAGGED, target=saying(said))) as server:
        for choice in ("auto", "required"):
            assert way(server, body(temperature=0.0, tools=tools, tool_choice=choice)) == expected
        error = server.refusal(CHAT, body(tool_choice="required", tools=[_with_name("a>b")]))
        assert error["param"] == "tool_choice"
        assert "the name of parameter 'a>b' of function f cannot be read" in error["message"]


def _with_name(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": {name: {}}}}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "tools[0] is not a function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "tools[0].function has no name"),
        ({"tools": [{**NOW, "type": "web"}]}, "tools", "tools[0] is not a function"),
        ({"tools": [NOW] * 129}, "tools", "129 tools: at most 128"),
        ({"tool_choice": "often"}, "tool_choice", "tool_choice is 'often'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"function": {"name": "f"}}}, "tool_choice", "names 'f', and the tools are weather, now"),
        (
            {"tool_choice": {"type": "custom", "custom": {"name": "shell", "description": "d" * 200}}},
            "tool_choice",
            "tool_choice is of type 'custom': give none, auto, required, a function with its name, or allowed_tools",
        ),
        ({"tool_choice": {"type": "tool", "name": "now"}}, "tool_choice", "tool_choice is of type 'tool': give none"),
        ({"tool_choice": {"type": "function", "name": ""}}, "tool_choice", "a function with its name"),
        ({"tool_choice": {"type": "hosted"}, "tools": []}, "tool_choice", "tool_choice is of type 'hosted': give none"),
        ({"tool_choice": allowed("sometimes", NOW)}, "tool_choice", "mode 'sometimes': give auto or required"),
        ({"tool_choice": allowed("auto")}, "tool_choice", "needs tools"),
        ({"tool_choice": allowed("auto", {"type": "mcp", "server_label": "a"})}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": 5}}, "tool_choice", "mode None"),
        ({"tool_choice": allowed("auto", ILL)}, "tool_choice", "names 'f', and the tools are weather, now"),
        ({"tool_choice": allowed("auto", NOW), "tools": []}, "tool_choice", "there are no tools"),
        ({"grammar": 'root ::= "a"'}, "grammar", "grammar beside tools would need a schema"),
        ({"json_schema": {"type": "hiccup"}}, "json_schema", "hiccup"),
        ({"tool_choice": "required", "tools": [ILL]}, "tool_choice", "hiccup"),
    ],
)
def test_what_cannot_be_called_is_refused(writing: Hosted, fields: dict[str, Any], param: str, message: str) -> None:
    error = writing.refusal(CHAT, body(**fields))
    assert error["param"] == param
    assert message in error["message"]


def test_calls_without_a_mark_cannot_be_told_from_json() -> None:
    template = f'{{# "{{"name": function name, "parameters": ...}}" <|start_header_id|> #}}{TEMPLATE}'
    template = template.replace("<tool_call>", "")
    schema = {"json_schema": {"type": "object"}}
    with hosted(lambda: scripted(template)) as server:
        assert "no mark tells them apart" in server.refusal(CHAT, body(**schema))["message"]
        assert whole(server, body(**schema, tool_choice=NAMED, temperature=1.2))[1][0][0] == "weather"


def test_what_nothing_keeps_the_arguments_of_a_call_to_is_told_or_refused(writing: Hosted) -> None:
    price = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!x)"}]}
    function = {"name": "buy", "parameters": {"type": "object", "properties": {"price": price}, "required": ["price"]}}
    asked = body(tool_choice="required", tools=[NOW, {"type": "function", "function": function}])
    assert writing.answer(CHAT, asked)["warnings"] == [
        "function buy is not strict, and nothing keeps its arguments to #/properties/price/anyOf/1/pattern: check them"
    ]
    strict = body(tool_choice="required", tools=[{"type": "function", "function": {**function, "strict": True}}])
    message = writing.refusal(CHAT, strict)["message"]
    assert "function buy: #/properties/price/anyOf/1/pattern: the pattern has a look-ahead" in message
    assert "leave it out, or say strict false" in message


@pytest.mark.parametrize("way", [whole, streamed])
def test_a_model_whose_calls_nobody_knows_calls_if_it_has_to(way: Any) -> None:
    strict = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]
    with hosted(lambda: scripted()) as server:
        for choice in ("required", NAMED):
            content, calls, reason = way(server, body(tool_choice=choice, parallel_tool_calls=False, temperature=1.2))
            assert (content, len(calls), reason) == (None, 1, "tool_calls")
            assert calls[0][0] == "weather" or choice == "required"
        for tools in (TOOLS, strict):
            assert way(server, body(tools=tools))[1:] == ([], "stop")


def test_the_template_tells_of_tools_that_may_not_be_called(calling: Hosted) -> None:
    def num_prompt(**fields: Any) -> int:
        return int(calling.answer(CHAT, body(max_tokens=1, **fields))["usage"]["prompt_tokens"])

    assert num_prompt(tool_choice="none") == num_prompt() > num_prompt(tools=[]) == num_prompt(tools=None)


def test_the_template_is_told_of_tools_as_templates_know_them(calling: Hosted) -> None:
    messages = [{"role": "user", "content": "abc"}]
    function = {"strict": True, "return": {"type": "string"}, "name": "f"}
    prompt = calling.answer("/apply-template", {"messages": messages, "tools": [{"function": function}]})["prompt"]
    told = {"name": "f", "description": "", "parameters": {}, "return": {"type": "string"}}
    assert json.dumps([{"type": "function", "function": told}]) in prompt
    error = calling.refusal("/apply-template", {"messages": messages, "tools": [{"type": "web"}]})
    assert (error["param"], "tools[0] is not a function" in error["message"]) == ("tools", True)
