"""Calls in a conversation's history, by templates that read them in different forms."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.chat.call_history import CallForm, convert_calls, find_call_form
from paceline.chat.messages import Message
from paceline.chat.params import ChatParams
from paceline.chat.prompt_builder import ChatPromptBuilder
from paceline.chat.template import ChatTemplate
from paceline.core.errors import InputError
from tests.chat.conversing import ControlledBytes

CALLS = "{% for call in message.tool_calls %}[{{ call.function.name }}: ARGUMENTS]{% endfor %}"
MESSAGES = "{% for message in messages %}EACH{% endfor %}"
EACH = "{{ message.content }}" + CALLS
TEXT, AS_JSON = "{{ call.function.arguments }}", "{{ call.function.arguments | tojson }}"
TAGS = "{% for name, value in call.function.arguments.items() %}<{{ name }}>{{ value }}{% endfor %}"
IS_TEXT = "{% if call.function.arguments is string %}" + TEXT + "{% else %}"
EITHER, SAME = (IS_TEXT + other + "{% endif %}" for other in (TAGS, AS_JSON))
BY_NONE = "{% if message.content is none %}" + CALLS + "{% else %}{{ message.content }}{% endif %}"
ADDED = "{{ '' + message.content }}" + CALLS
FORMS = [
    (EACH.replace("ARGUMENTS", TEXT), CallForm()),
    (EACH.replace("ARGUMENTS", AS_JSON), CallForm(objects=True)),
    (EACH.replace("ARGUMENTS", TAGS), CallForm(objects=True)),
    (BY_NONE.replace("ARGUMENTS", TEXT), CallForm(content=None)),
    (BY_NONE.replace("ARGUMENTS", AS_JSON), CallForm(True, None)),
    (ADDED.replace("ARGUMENTS", TAGS), CallForm(True, "")),
    (EACH.replace("ARGUMENTS", EITHER), CallForm(objects=True)),
    (EACH.replace("ARGUMENTS", SAME), CallForm()),
    ("{{ message.role }}", CallForm()),
    # These leave calls out, and need a content.
    ("{{ message.content | tojson }}", CallForm(content="")),
    ("{{ '' + message.content }}", CallForm(content="")),
]
ARGUMENTS = {"city": "Rome", "days": 3}


def template_of(each: str) -> ChatTemplate:
    return ChatTemplate(MESSAGES.replace("EACH", each), origin="a test")


def text_of(each: str, *messages: Message) -> str:
    reader = ChatPromptBuilder(template_of(each), ControlledBytes(), 4096)
    return reader.prompt(messages, tools=None, params=ChatParams(forget=False), max_tokens=0).text


USER: Message = {"role": "user", "content": "Hello"}


def calling(arguments: object, **fields: object) -> Message:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **fields}


@pytest.mark.parametrize(("each", "form"), FORMS)
def test_the_form_is_the_one_that_a_template_writes(each: str, form: CallForm) -> None:
    assert find_call_form(template_of(each)) == form


@pytest.mark.parametrize("each", [each for each, _ in FORMS[:-3]])
@pytest.mark.parametrize("given", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
def test_calls_are_written_whichever_way_they_are_given(each: str, given: object) -> None:
    result: Message = {"role": "tool", "tool_call_id": "a", "content": "sunny"}
    text = text_of(each, USER, calling(given, content=None), result, USER)
    assert "[f: " in text
    assert "city" in text
    assert '\\"' not in text


def test_what_is_no_object_stays_as_it_is() -> None:
    for arguments in ('{"city": "Ro', "[1]", "[" * 100_000, '{"a":' * 101 + "1" + "}" * 101):
        message = calling(arguments)
        assert convert_calls(message, CallForm(objects=True)) == message
    odd = {"role": "assistant", "tool_calls": [3, {"function": 4}], "content": "a"}
    assert convert_calls(odd, CallForm(True, None)) == odd


@pytest.mark.parametrize("arguments", ["", " ", None])
def test_no_arguments_are_an_empty_object(arguments: object) -> None:
    assert convert_calls(calling(arguments), CallForm(objects=True)) == calling({})
    assert convert_calls(calling(arguments), CallForm()) == calling("{}")


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", 3, "[" * 100_000])
def test_arguments_that_the_template_cannot_write_are_told_as_such(arguments: object) -> None:
    with pytest.raises(InputError, match=r"^message 2 has a call of 'f' with the arguments "):
        text_of(EACH.replace("ARGUMENTS", TAGS), USER, calling(arguments), USER)
    assert str(arguments) in text_of(EACH.replace("ARGUMENTS", TEXT), USER, calling(arguments), USER)


@pytest.mark.parametrize("fields", [{}, {"content": None}, {"content": None, "tool_calls": []}])
def test_an_assistant_that_says_nothing_has_an_empty_text(fields: dict[str, object]) -> None:
    said: Message = {"role": "assistant", **fields}
    assert text_of("[{{ 'said ' + message.content }}]", said, USER) == "[said ][said Hello]"


def test_a_content_is_kept() -> None:
    assert convert_calls(calling("{}", content="Let me see."), CallForm(content=None))["content"] == "Let me see."
    without: tuple[dict[str, Any], ...] = ({}, {"tool_calls": []})
    for calls in without:
        assert convert_calls({"role": "assistant", "content": "a", **calls}, CallForm(content="")) == {
            "role": "assistant",
            "content": "a",
        }
