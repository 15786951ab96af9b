"""The end of a JSON value, and a spelling of its strings in which no mark stands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.chat.tool_calls.values import JsonValue

plain = st.none() | st.booleans() | st.integers() | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)
objects = st.dictionaries(st.text(), values) | st.lists(values)


@given(objects, st.booleans(), st.sampled_from((None, 2)), st.sampled_from(("", " ", "\n\t")))
def test_a_value_ends_with_its_last_bracket_and_keeps_its_meaning(
    value: Any, is_ascii: bool, indent: int | None, spaces: str
) -> None:
    read = JsonValue()
    text = spaces + json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    for character in text[:-1]:
        read.push(character)
        assert not read.is_complete
        assert not read.is_refused
    read.push(text[-1])
    assert read.is_complete
    assert json.loads(read.take()) == value
    assert read.take() == ""


def test_no_mark_stands_in_a_string() -> None:
    read = JsonValue()
    for character in '{"</a>": "[X] <|b|>\n\\"\\\\"}':
        read.push(character)
    assert read.is_complete
    text = read.take()
    assert not any(mark in text for mark in ("<", ">", "[", "|", "\n"))
    assert json.loads(text) == {"</a>": '[X] <|b|>\n"\\'}


@pytest.mark.parametrize("text", ["x", '"', "1", "}", "  n"])
def test_what_is_no_object_or_array_is_refused(text: str) -> None:
    read = JsonValue()
    for character in text:
        read.push(character)
    assert read.is_refused
    assert not read.is_complete
