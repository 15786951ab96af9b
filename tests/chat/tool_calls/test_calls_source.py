"""The grammar of calls as a source: how large it may be, what its errors name, and what of a schema it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("llguidance")

from paceline.chat.tool_calls.formats import FORMATS
from paceline.chat.tool_calls.grammar import build_calls_source
from paceline.constraints import ConstraintCompiler, Lark
from paceline.core.errors import ConstraintError
from tests.chat.tool_calls.answers import BY_NAME, tool
from tests.constraints.helpers import BYTES

FAMILIES = [one.name for one in FORMATS]
KINDS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "object", "properties": {"x": {"type": "string"}}},
]


def compiled(family: str, tools: list[dict[str, Any]]) -> None:
    source = build_calls_source(BY_NAME[family], tools, required=True, parallel=True)
    assert ConstraintCompiler(BYTES).compile(source).mask().any()


@pytest.mark.parametrize("family", FAMILIES)
def test_sixty_tools_with_ten_parameters_each_are_taken(family: str) -> None:
    properties = {f"p{i}": KINDS[i % len(KINDS)] for i in range(10)}
    compiled(family, [tool(f"tool_{i}", properties, ["p0"]) for i in range(60)])


@pytest.mark.parametrize("family", FAMILIES)
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
        said = str(raised.value).removeprefix("the grammar of the tools' calls cannot be used: ")
        assert said.startswith(f"the parameters of function g: {place}: ")
    tools[1] = tool("g", {"a": {"type": "integer", "multipleOf": 600_001}})
    with pytest.raises(ConstraintError, match=r"^the parameters of function g: #/properties/a/multipleOf: 600001"):
        compiled("hermes", tools)


def test_a_grammar_by_hand_may_not_be_as_long() -> None:
    text = build_calls_source(
        BY_NAME["gemma"], [tool("f", {f"p{i}": {} for i in range(300)})], required=True, parallel=True
    ).text
    with pytest.raises(ConstraintError, match="rules, and the most is 500"):
        ConstraintCompiler(BYTES).compile(Lark(text))
