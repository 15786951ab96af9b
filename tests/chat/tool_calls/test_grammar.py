"""The grammar of calls: what the parser reads back is allowed, and what is allowed is read back."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from paceline.chat.tool_calls.base import ToolCallFormat
from paceline.chat.tool_calls.formats import FORMATS
from paceline.chat.tool_calls.grammar import build_calls_source
from paceline.chat.tool_calls.text_patterns import text_pattern
from paceline.constraints import ConstraintCompiler, JsonSchema, Lark
from paceline.core.errors import ConstraintError
from tests.chat.tool_calls.answers import (
    BY_NAME,
    FILE,
    REFERRED,
    TIME,
    TOOLS,
    WEATHER,
    Call,
    added,
    is_referred,
    of_hermes,
    parser_of,
    tool,
    written,
)
from tests.chat.tool_calls.machine import CONTROL_IDS, is_answer, text_of, tokens_of, written_at_random
from tests.constraints.helpers import BYTES
from tests.tiers import by_tier, some_long
from tests.timing import assert_grows_with_length_alone

FAMILIES = list(BY_NAME)


def allows(grammar: str, text: str, *, has_marks: bool) -> bool:
    return is_answer(grammar, tokens_of(text, has_marks=has_marks))


def grammar_of(family: str, tools: Sequence[Mapping[str, Any]] = TOOLS, *, has_marks: bool, **given: bool) -> str:
    ids = CONTROL_IDS if has_marks else {}
    required, parallel = given.get("required", True), given.get("parallel", True)
    return build_calls_source(BY_NAME[family], tools, required=required, parallel=parallel, control_ids=ids).text


MARKS = pytest.mark.parametrize("has_marks", [True, False], ids=["tokens", "text"])
EACH = pytest.mark.parametrize("family", FAMILIES)
SOME = pytest.mark.parametrize("family", some_long(FAMILIES, quick=list(FAMILIES)[::3]))
"""Families, of which a third are tried quickly: for what takes long and is alike in most."""
several = [family for family in FAMILIES if family != "gpt-oss"]


@MARKS
@EACH
def test_calls_that_are_read_back_are_allowed(family: str, has_marks: bool) -> None:
    grammar = grammar_of(family, has_marks=has_marks)
    for calls in ([WEATHER], [FILE], [TIME], [WEATHER, FILE, TIME]):
        if len(calls) > 1 and family == "gpt-oss":
            continue
        text = written(family, *calls)
        assert allows(grammar, text, has_marks=has_marks), text
        parser = parser_of(family)
        assert added([*parser.push(text), *parser.finish()]).called == calls


@MARKS
@EACH
def test_what_is_no_call_of_these_tools_is_refused(family: str, has_marks: bool) -> None:
    grammar = grammar_of(family, has_marks=has_marks)
    whole = written(family, WEATHER)
    unknown = written(family, ("unknown", {}))
    lacking = written(family, ("get_weather", {"days": 1}))
    mistyped = written(family, ("get_weather", {"city": "Bern", "days": "many"}))
    unnamed = written(family, ("get_weather", {"city": "Bern", "zone": "CET"}))
    for text in ("", "Hm.", f"Hm. {whole}", f"{whole} Hm.", whole[:-1], unknown, lacking, mistyped, unnamed):
        assert not allows(grammar, text, has_marks=has_marks), text


@MARKS
@EACH
def test_a_tool_that_is_named_is_the_only_one(family: str, has_marks: bool) -> None:
    grammar = grammar_of(family, TOOLS[:1], has_marks=has_marks)
    assert allows(grammar, written(family, WEATHER), has_marks=has_marks)
    assert not allows(grammar, written(family, TIME), has_marks=has_marks)


@MARKS
@pytest.mark.parametrize("family", several)
def test_one_call_alone(family: str, has_marks: bool) -> None:
    for required in (True, False):
        grammar = grammar_of(family, has_marks=has_marks, parallel=False, required=required)
        assert allows(grammar, written(family, TIME), has_marks=has_marks)
        assert not allows(grammar, written(family, TIME, WEATHER), has_marks=has_marks)


@MARKS
@EACH
def test_text_may_stand_before_a_call_that_is_not_required(family: str, has_marks: bool) -> None:
    grammar = grammar_of(family, has_marks=has_marks, required=False)
    call = written(family, WEATHER)
    told = {
        "llama": "",
        "plain": "",
        "gpt-oss": "<|channel|>commentary<|message|>Let <me> see.<|end|><|start|>assistant",
    }
    plain = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    assert allows(grammar, f"{plain}Hello <b> [c] {{d}}", has_marks=has_marks)
    assert allows(grammar, told.get(family, "Let <me> see.\n") + call, has_marks=has_marks)
    assert allows(grammar, call, has_marks=has_marks)
    for broken in (written(family, ("unknown", {})), written(family, ("get_weather", {}))):
        assert not allows(grammar, told.get(family, "Let <me> see.\n") + broken, has_marks=has_marks), broken


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": {"type": "string"}},
        {"patternProperties": {"^z": {"type": "string"}}},
        {"allOf": [{"properties": {"zone": {"type": "string"}}}]},
        {"required": ["city", "zone"]},
    ],
)
def test_arguments_that_a_schema_allows_in_other_words_are_allowed(more: dict[str, Any]) -> None:
    tools = [tool("get_weather", {"city": {"type": "string"}}, ["city"])]
    text = of_hermes(("get_weather", {"city": "Bern", "zone": "CET"}))
    assert not allows(grammar_of("hermes", tools, has_marks=False), text, has_marks=False)
    tools[0]["function"]["parameters"] |= more
    assert allows(grammar_of("hermes", tools, has_marks=False), text, has_marks=False)


# One property of each type, with what is hard to write.
VARIED = [
    tool(
        "varied.tool-1",
        {
            "kind": {"enum": ["a b", "</c>", 'd"e']},
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": ["number", "null"]},
            "is_on": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "deep": {"$ref": "#/$defs/deep"},
            "fixed": {"type": "integer", "const": 3},
            "free": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
        ["text", "count"],
    ),
    tool("none", {}),
]
VARIED[0]["function"]["parameters"]["$defs"] = {
    "deep": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}
}
# A number that is none for Python.
_TOO_LARGE = re.compile(r"[0-9][eE]\+?[0-9]{3}")
_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "count": (int,),
    "share": (int, float, type(None)),
    "is_on": (bool,),
    "tags": (list,),
    "fixed": (int,),
}


@MARKS
@EACH
def test_whatever_is_allowed_is_read_back_as_calls(family: str, has_marks: bool) -> None:
    """Answers drawn at random from the grammar: each is calls of these tools with arguments of their types."""
    grammar = grammar_of(family, VARIED, has_marks=has_marks)
    rng = random.Random(f"{family} {has_marks}")
    number = by_tier(60, quick=8)
    num_read = num_varied = 0
    for _ in range(number):
        token_ids = written_at_random(grammar, rng, 1500)
        if token_ids is None or _TOO_LARGE.search(text := text_of(token_ids)):
            continue
        parser = parser_of(family, VARIED)
        message = added([*parser.push(text), *parser.finish()])
        assert message.content.strip() in ("", "<|start|>assistant"), text
        assert message.calls, text
        for name, arguments in message.called:
            assert name in ("varied.tool-1", "none")
            if name == "varied.tool-1":
                assert {"text", "count"} <= arguments.keys(), text
                num_varied += 1
            for key, kinds in _KINDS.items():
                assert key not in arguments or type(arguments[key]) in kinds, (key, text)
        num_read += 1
    assert num_read > number // 3
    assert num_varied > number // 8


def test_without_tools_or_a_grammar_there_is_an_error() -> None:
    with pytest.raises(ConstraintError, match="no tools to call"):
        build_calls_source(BY_NAME["hermes"], [], required=True, parallel=True)
    foreign = ToolCallFormat("a/model", {})
    with pytest.raises(ConstraintError, match="how a/model writes calls"):
        build_calls_source(foreign, TOOLS, required=True, parallel=True)


@MARKS
@pytest.mark.parametrize("family", [one.name for one in FORMATS if not one.bare])
def test_an_answer_is_calls_or_what_keeps_to_a_schema(family: str, has_marks: bool) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    ids = CONTROL_IDS if has_marks else {}
    grammar, required = (
        build_calls_source(
            BY_NAME[family], TOOLS, required=must, parallel=True, control_ids=ids, content=JsonSchema(schema)
        ).text
        for must in (False, True)
    )
    plain = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    call = written(family, WEATHER)
    content = f'{plain}{{"name": "Bern"}}'
    assert allows(grammar, call, has_marks=has_marks)
    assert allows(grammar, content, has_marks=has_marks)
    assert allows(required, call, has_marks=has_marks)
    assert not allows(required, content, has_marks=has_marks)
    for text in (f"{plain}Hm.", f"{plain}{{}}", f"Hm. {call}", written(family, ("unknown", {})), content[:-1]):
        assert not allows(grammar, text, has_marks=has_marks), text


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("hermes", name) for name in ("{id}", "of{index}", "<tool_call>", "a.b/c")),
        *(("kimi", name) for name in ("{id}", "of{index}", "a.b/c")),
    ],
)
def test_a_name_is_a_text_whatever_it_spells(family: str, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}}]
    for required in (True, False):
        grammar = grammar_of(family, tools, has_marks=False, required=required)
        assert allows(grammar, written(family, (name, {})), has_marks=False)


@EACH
@pytest.mark.parametrize(
    "schema",
    [
        {"properties": -1e-308, "type": "hiccup", "required": -2},
        {"properties": [1]},
        {"properties": {"a": {"type": 5, "enum": 7}}},
        {"properties": {"a": {"anyOf": 4}}},
        {"properties": {"a": {"oneOf": [{"enum": {}}]}}},
        {"required": 5, "properties": {"a": {}}},
        {"required": [[]]},
        {"type": {}},
    ],
)
def test_what_is_no_schema_is_an_error_with_its_place(family: str, schema: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ConstraintError, match=r"the parameters of function f: #/[a-zA-Z/0-9]+: .+ is no .+: give one"):
        build_calls_source(BY_NAME[family], tools, required=True, parallel=True)


def drawn(family: str, asked: Sequence[dict[str, Any]], *, has_marks: bool, number: int) -> list[Call]:
    """Return calls that are drawn from the grammar of tools, each read back, in answers of one."""
    grammar = build_calls_source(
        BY_NAME[family], asked, required=True, parallel=False, control_ids=CONTROL_IDS if has_marks else {}
    ).text
    rng = random.Random(f"{family} {has_marks}")
    found = []
    for _ in range(number):
        token_ids = written_at_random(grammar, rng, 1500)
        if token_ids is None:
            continue
        parser = parser_of(family, asked)
        text = text_of(token_ids)
        message = added([*parser.push(text), *parser.finish()])
        assert len(message.called) == 1, text
        found += message.called
    assert len(found) > number // 2
    return found


def with_definitions(asked: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    asked["function"]["parameters"]["$defs"] = definitions
    return asked


DAY, CODE = {"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "pattern": "^[A-Z]{2}-\\d+$"}
INNER = {
    "type": "object",
    "properties": {"day": DAY, "code": CODE},
    "required": ["day", "code"],
    "additionalProperties": False,
}
BOUND = {
    "day": DAY,
    "code": CODE,
    "short": {"type": "string", "minLength": 1, "maxLength": 4},
    "several": {"type": "array", "items": DAY, "minItems": 1, "maxItems": 2},
    "inner": INNER,
}
LISTED = {"a": {"enum": ["ab", " c", "d\n"]}, "b": {"const": "x"}, "c": {"enum": ["1", 1, None]}}
# As keywords are called.
CALLED = ("definitions", "$defs", "default", "id", "enum", "properties")
WITHIN = {"type": "object", "properties": {name: {"$ref": "#/$defs/Unit"} for name in CALLED}, "required": [*CALLED]}
ODD = ("library-id", "$filter", "@type", "x.y", "été")
UNIT = ("celsius", "fahrenheit")


def is_bound(arguments: dict[str, Any]) -> bool:
    return (
        all(
            value["day"] in range(10) and re.fullmatch("[A-Z]{2}-[0-9]+", value["code"])
            for value in (arguments, arguments["inner"])
        )
        and arguments["inner"].keys() == {"day", "code"}
        and 1 <= len(arguments["short"]) <= 4
        and 1 <= len(arguments["several"]) <= 2
        and set(arguments["several"]) <= set(range(10))
    )


def oddly_named(name: str) -> tuple[dict[str, Any], Callable[[dict[str, Any]], bool], int]:
    deep = {"type": "object", "properties": {name: {"const": "a"}}, "additionalProperties": False}
    asked = tool("f", {name: {"type": "integer"}, "deep": deep}, [name, "deep"])
    return asked, lambda given: type(given[name]) is int and set(given["deep"]) <= {name}, 3


DRAWN: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], bool], int]] = {
    # a tool, what all arguments of calls of it are, and how many calls are drawn
    "references": (REFERRED, is_referred, by_tier(40, quick=6)),
    "all of it a reference": (
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "$ref": "#/definitions/Asked",
                    "definitions": {"Asked": TOOLS[0]["function"]["parameters"]},
                },
            },
        },
        lambda given: isinstance(given["city"], str),
        4,
    ),
    "listed": (
        tool("f", LISTED, ["a", "b"]),
        lambda given: given["a"] in ("ab", " c", "d\n") and given["b"] == "x" and given.get("c") in ("1", 1, None),
        by_tier(60, quick=10),
    ),
    "bounds": (
        {"type": "function", "function": {**tool("f", BOUND, list(BOUND))["function"], "strict": True}},
        is_bound,
        by_tier(60, quick=10),
    ),
    "keywords": (
        with_definitions(tool("f", {"within": WITHIN}, ["within"]), Unit={"enum": list(UNIT)}),
        lambda given: given["within"].keys() == set(CALLED) and set(given["within"].values()) <= set(UNIT),
        4,
    ),
    **{name: oddly_named(name) for name in ODD},
}


@MARKS
@SOME
@pytest.mark.parametrize("name", DRAWN)
def test_what_a_schema_says_is_kept_to_and_read_back(family: str, name: str, has_marks: bool) -> None:
    asked, is_kept_to, number = DRAWN[name]
    for _, arguments in drawn(family, [asked], has_marks=has_marks, number=number):
        assert is_kept_to(arguments), arguments


def test_a_reference_to_what_allows_all_is_followed() -> None:
    items = {"type": "array", "items": {"$ref": "#/$defs/Any"}, "maxItems": 1}
    assert drawn("glm", [with_definitions(tool("f", {"all": items}, ["all"]), Any=True)], has_marks=False, number=4)


@pytest.mark.parametrize(
    ("family", "function", "parameter", "told"),
    [
        ("gemma", "a b", "x", "function 'a b'"),
        ("deepseek", "a b", "x", "function 'a b'"),
        ("qwen-xml", "f", "a>b", "parameter 'a>b' of function f"),
        ("minimax", "f", 'a"b', "parameter 'a\"b' of function f"),
        ("glm", "f", "a<b", "parameter 'a<b' of function f"),
        ("lfm", "f", "a=b", "parameter 'a=b' of function f"),
    ],
)
def test_a_name_that_could_not_be_read_back_is_refused(family: str, function: str, parameter: str, told: str) -> None:
    with pytest.raises(ConstraintError, match="cannot be read where") as raised:
        build_calls_source(BY_NAME[family], [tool(function, {parameter: {}})], required=True, parallel=True)
    assert f"the name of {told}" in str(raised.value)


def _row(number: int) -> dict[str, Any]:
    """Return definitions each of which has the next as a part."""
    parts = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(number)}
    return {"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": {**parts, f"d{number}": {"type": "string"}}}


OVERSIZED: dict[str, tuple[dict[str, Any], str]] = {
    "a long row": (_row(900), "too many parts lead to one another"),
    "what many have": (
        {
            "properties": {f"p{i}": {"$ref": "#/$defs/Wide"} for i in range(300)},
            "$defs": {"Wide": {"type": "object", "properties": {f"q{i}": {"type": "integer"} for i in range(500)}}},
        },
        "more than 524,288 characters",
    ),
    "many of many": (
        {
            "properties": {f"p{i}": {"type": "string"} for i in range(500)},
            "anyOf": [{"required": [f"p{i}"]} for i in range(50)],
        },
        "more than 20,000 properties",
    ),
    "many joined to many": (
        {
            "properties": {
                "x": {
                    "properties": {f"p{i}": {"type": "string"} for i in range(1_500)},
                    "anyOf": [{"properties": {f"q{i}": {"type": "string"}}} for i in range(200)],
                }
            }
        },
        "join more than 200,000 properties",
    ),
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_a_schema_that_comes_to_too_much_is_refused_in_a_line(name: str) -> None:
    schema, reason = OVERSIZED[name]
    asked = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ConstraintError, match=f"^the parameters of function f: .*{reason}.*"):
        build_calls_source(BY_NAME["glm"], asked, required=True, parallel=False)
    parser = parser_of("glm", asked)
    assert added([*parser.push(written("glm", ("f", {}))), *parser.finish()]).called == [("f", {})]


def test_the_time_for_a_pattern_grows_with_its_length_alone() -> None:
    assert_grows_with_length_alone(lambda length: text_pattern({"pattern": "[" * length}, strict=False), 16_000)


@pytest.mark.parametrize("family", ["gemma", "lfm", "qwen-xml", "hermes"])
def test_a_schema_that_goes_round_in_circles_is_an_error_or_a_grammar(family: str) -> None:
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    circles: list[dict[str, Any]] = [
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "properties": {"x": {"$ref": "#/$defs/a"}}},
        {"$defs": {**doubled, "d30": {}}, "properties": {"x": {"$ref": "#/$defs/d0"}}},
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
    ]
    for schema in circles:
        asked = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        try:
            grammar = build_calls_source(BY_NAME[family], asked, required=True, parallel=False).text
        except ConstraintError as error:
            assert "the parameters of function f" in str(error)  # noqa: PT017
        else:
            assert grammar
        parser = parser_of(family, asked)
        assert added([*parser.push(written(family, ("f", {}))), *parser.finish()]).called == [("f", {})]


# --- as a source: how large it may be, what its errors name, and what of a schema it leaves out -----------------------

KINDS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "properties": {"x": {"type": "string"}}},
]


def compiled(family: str, tools: list[dict[str, Any]]) -> None:
    source = build_calls_source(BY_NAME[family], tools, required=True, parallel=True)
    assert ConstraintCompiler(BYTES).compile(source).mask().any()


@SOME
def test_sixty_tools_with_ten_parameters_each_are_taken(family: str) -> None:
    properties = {f"p{i}": KINDS[i % len(KINDS)] for i in range(10)}
    compiled(family, [tool(f"tool_{i}", properties, ["p0"]) for i in range(60)])


@EACH
def test_the_schema_of_a_function_that_is_not_strict_is_kept_to_as_far_as_possible(family: str) -> None:
    asked = tool("f", {"a": {"type": "array", "uniqueItems": True, "items": {"not": {"type": "null"}}}})
    compiled(family, [asked])
    asked["function"]["strict"] = False
    compiled(family, [asked])


def test_an_error_names_the_function() -> None:
    tools = [tool("f", {}), tool("g", {"a": {"type": "array", "uniqueItems": True}})]
    tools[1]["function"]["strict"] = True
    for family in ("hermes", "qwen-xml", "gemma", "lfm"):
        with pytest.raises(ConstraintError) as raised:
            compiled(family, tools)
        place = "#/uniqueItems" if family == "qwen-xml" else "#/properties/a/uniqueItems"
        assert f"the parameters of function g: {place}: " in str(raised.value)
    tools[1] = tool("g", {"a": {"type": "integer", "multipleOf": 600_001}})
    with pytest.raises(ConstraintError, match=r"^the parameters of function g: #/properties/a/multipleOf: 600001"):
        compiled("hermes", tools)


def test_a_grammar_by_hand_may_not_be_as_long() -> None:
    text = build_calls_source(
        BY_NAME["gemma"], [tool("f", {f"p{i}": {} for i in range(300)})], required=True, parallel=True
    ).text
    with pytest.raises(ConstraintError, match="rules, and the most is 500"):
        ConstraintCompiler(BYTES).compile(Lark(text))
