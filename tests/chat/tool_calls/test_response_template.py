"""Formats that models describe themselves: read like those of the table, and within bounds."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted, ContentDelta
from paceline.chat.tool_calls.parser import ToolCallParser
from paceline.chat.tool_calls.response_template import MAX_REPEATED, find_call_format, parse_response_template
from paceline.core.errors import ModelFileError, ModelWarning
from tests.chat.tool_calls.answers import TOOLS

CALL = {"type": "function", "function": "{content}"}
JSON: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {"content": "text"},
        "tool_calls": {"open": "<call>", "close": "</call>", "content": "json", "repeats": True, "transform": CALL},
    },
}
TAGS = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open_pattern": r"<do (?P<name>[^>\s]+)>\s*",
            "close": "</do>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<p (?P<key>\w+)>(?P<value>.*?)</p>"},
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
ANSWERS = {
    "json": (
        JSON,
        'Let me see. <call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</call>'
        '<call>{"name": "get_weather", "arguments": {"city": "Rome"}}</call>',
    ),
    "tags": (TAGS, "Let me see. <do get_weather>\n<p city>Oslo</p></do>\n<do get_weather><p city>Rome</p></do>"),
}


def read(template: Any, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    call_format = parse_response_template(template, "a/model")
    assert call_format is not None
    parser = ToolCallParser(call_format, TOOLS)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    names = [delta.name for delta in deltas if isinstance(delta, CallStarted)]
    arguments = [
        "".join(delta.text for delta in deltas if isinstance(delta, ArgumentsDelta) and delta.index == index)
        for index in range(len(names))
    ]
    return content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("template", "answer"), ANSWERS.values(), ids=ANSWERS)
def test_calls_are_read_as_the_model_describes_them(template: Any, answer: str) -> None:
    expected = ("Let me see.", [("get_weather", '{"city": "Oslo"}'), ("get_weather", '{"city": "Rome"}')])
    assert read(template, [answer]) == expected
    assert read(template, list(answer)) == expected
    for cut in range(1, len(answer)):
        assert read(template, [answer[:cut], answer[cut:]]) == expected


def test_a_template_without_calls_describes_no_format() -> None:
    assert parse_response_template({"fields": {"content": {"content": "text"}}}, "a/model") is None


@pytest.mark.parametrize("template", [None, "json", [], {}, {"fields": []}, {"fields": None}])
def test_what_is_no_template_is_named(template: Any) -> None:
    with pytest.raises(ModelFileError, match="response template of a/model cannot be used"):
        parse_response_template(template, "a/model")


def with_opening(pattern: str) -> dict[str, Any]:
    region = {"open_pattern": pattern, "close": "</do>", "content": "json", "repeats": True, "transform": CALL}
    return {"fields": {"tool_calls": region, "content": {"content": "text"}}}


@pytest.mark.parametrize(
    ("pattern", "bounded"),
    [
        (r"<do \w+>", r"<do \w{1,256}>"),
        (r"<do .*?>", r"<do .{0,256}?>"),
        (r"<do [^>+*]+>", r"<do [^>+*]{1,256}>"),
        (r"<do []>]*>", r"<do []>]{0,256}>"),
        (r"a\+b\*\[*", r"a\+b\*\[{0,256}"),
        (r"a{3}b{2,4}c{2,}d{300,}", None),
        (r"b{2,4}c{2,}d{300,}", r"b{2,4}c{2,256}d{300,300}"),
        (r"(?P<name>\w+)?x", r"(?P<name>\w{1,256})?x"),
        (r"(a+)+x", None),
        (r"(?:ab){2,9}x", None),
        (r"a+b+c+d+x", None),
        ("a" * 501, None),
    ],
)
def test_patterns_end_soon_or_are_refused(pattern: str, bounded: str | None) -> None:
    if bounded is None:
        with pytest.raises(ModelFileError, match="could take long"):
            parse_response_template(with_opening(pattern), "a/model")
        return
    found = parse_response_template(with_opening(pattern), "a/model")
    assert found is not None
    assert found.template["fields"]["tool_calls"]["open_pattern"] == bounded
    re.compile(bounded)
    assert MAX_REPEATED == 256


def test_a_known_family_goes_before_what_a_model_says_and_what_cannot_be_used_is_warned_of() -> None:
    def found(source: str, response: Any) -> str | None:
        call_format = find_call_format(ChatTemplate(source, origin="a/model", response_template=response))
        return None if call_format is None else call_format.name

    assert found("{{ messages }}", None) is None
    assert found("{{ messages }}", JSON) == "a/model"
    assert found('<tool_call>\n{"name": <function-name>, "arguments": <args>}\n</tool_call>', JSON) == "hermes"
    with pytest.warns(ModelWarning, match="could take long"):
        assert found("{{ messages }}", with_opening("(a+)+")) is None
