"""What callers give as messages, read as plain data or refused in one line."""

from __future__ import annotations

from collections import UserDict
from enum import StrEnum
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from paceline.chat.messages import plain_data, read_messages
from paceline.core.errors import InputError


class Role(StrEnum):
    USER = "user"


def nested(levels: int) -> Any:
    value: Any = "end"
    for _ in range(levels):
        value = [value]
    return value


def test_a_text_is_what_a_user_says() -> None:
    assert read_messages("hi") == [{"role": "user", "content": "hi"}]
    assert read_messages("") == [{"role": "user", "content": ""}]


def test_messages_are_read_in_order_and_copied() -> None:
    given = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    read = read_messages(given)
    assert read == given
    assert read is not given
    assert read[0] is not given[0]
    assert read_messages(tuple(given)) == given


@pytest.mark.parametrize(
    "message",
    [
        MappingProxyType({"role": "user", "content": "hi"}),
        UserDict(role="user", content="hi"),
        SimpleNamespace(model_dump=lambda: {"role": "user", "content": "hi", "refusal": None}),
        {"role": "user", "content": "hi", "name": None, "tool_calls": None},
    ],
)
def test_messages_may_be_any_mapping_or_a_client_s_object(message: Any) -> None:
    assert read_messages([message]) == [{"role": "user", "content": "hi"}]


def test_fields_that_templates_know_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, 2.5, True, None, ("b",)]}}}
    message: Any = {"role": "assistant", "tool_calls": [call], "name": "n", 5: "number"}
    (read,) = read_messages([message])
    assert read["tool_calls"][0]["function"]["arguments"] == {"a": [1, 2.5, True, None, ["b"]]}
    assert read["name"] == "n"
    assert read["5"] == "number"
    assert "content" not in read


def test_objects_within_messages_are_read_too() -> None:
    call = SimpleNamespace(model_dump=lambda: {"function": {"name": "f"}})
    assert read_messages([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"] == [
        {"function": {"name": "f"}}
    ]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_goes_by_every_name_that_templates_read(field: str) -> None:
    (read,) = read_messages([{"role": "assistant", "content": "4", field: "2+2"}])
    assert read["reasoning_content"] == read["thinking"] == read[field] == "2+2"


def test_reasoning_content_comes_first() -> None:
    (read,) = read_messages([{"role": "assistant", "content": "", "thinking": "b", "reasoning_content": "a"}])
    assert (read["reasoning_content"], read["thinking"]) == ("a", "b")


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_text_are_read(kind: str) -> None:
    part = {"type": kind, "text": "hi", "annotations": []}
    (read,) = read_messages([{"role": "user", "content": [part]}])
    assert read["content"] == [{"type": "text", "text": "hi", "annotations": []}]


def test_a_call_may_have_its_name_beside_its_arguments() -> None:
    calls = [{"name": "f", "arguments": {}}]
    assert read_messages([{"role": "assistant", "tool_calls": calls}])[0]["tool_calls"] == calls
    assert read_messages([{"role": "assistant", "tool_calls": []}])[0]["tool_calls"] == []


def test_contents_may_be_empty() -> None:
    assert read_messages([{"role": "user", "content": []}])[0]["content"] == []
    assert read_messages([{"role": "assistant"}]) == [{"role": "assistant"}]
    assert read_messages([{"role": "assistant", "content": None}]) == [{"role": "assistant"}]


def test_roles_may_be_any_text() -> None:
    assert read_messages([{"role": "ipython", "content": "hi"}])[0]["role"] == "ipython"
    assert read_messages([{"role": Role.USER, "content": "hi"}])[0]["role"] == "user"


def saying(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "messages",
    [
        *([], {"role": "user"}, None, 5, ["hi"]),
        *([{"role": role, "content": "hi"}] for role in (None, "", 5, ["user"])),
        [{"content": "hi"}],
        [{"role": "user"}],
        *map(saying, (None, 5, b"hi", {"text": "a"}, ["a"], [{"text": "a"}], [{"type": "text"}])),
        saying([{"type": "text", "text": 5}]),
        [*saying("a"), *saying([{"type": "image_url", "image_url": "b"}])],
        *([{"role": "assistant", "tool_calls": calls}] for calls in ("a", [1], [{"id": "a"}])),
        [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
        *([{**saying("a")[0], "x": value}] for value in ({1, 2}, [{"y": object()}], nested(200), nested(100_000))),
    ],
)
def test_what_is_no_message_is_refused_in_a_line_that_says_which(messages: Any) -> None:
    with pytest.raises(InputError) as caught:
        read_messages(messages)
    line = str(caught.value)
    assert "\n" not in line
    assert (f"message {len(messages)}" if isinstance(messages, list) and messages else "messages") in line


def test_plain_data_is_what_json_has() -> None:
    value = {"a": [1, 2.5, None, True, "b", {"c": ()}]}
    assert plain_data(value, "x") == {"a": [1, 2.5, None, True, "b", {"c": []}]}
    assert plain_data(nested(100), "x") == nested(100)
    with pytest.raises(InputError, match="more than 100"):
        plain_data(nested(101), "x")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InputError, match="more than 100"):
        plain_data(loop, "x")
