"""A model of no known family, whose folder says how its calls are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.chat.template import ChatTemplate
from tests.chat.conversing import CHATML
from tests.serving.calling import body, saying, streamed, whole
from tests.serving.hosted import hosted, scripted

SAID = 'Let me see. <call>{"name": "now", "arguments": {}}</call>'
FIELDS: dict[str, Any] = {
    "content": {"content": "text"},
    "tool_calls": {
        "open": "<call>",
        "close": "</call>",
        "content": "json",
        "repeats": True,
        "transform": {"type": "function", "function": "{content}"},
    },
}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ({"start_anchor": "assistant\n", "fields": FIELDS}, ("Let me see.", [("now", {})], "tool_calls")),
        (None, (SAID, [], "stop")),
    ],
)
def test_calls_are_read_as_the_folder_says_and_are_text_without_it(template: Any, expected: Any) -> None:
    written = ChatTemplate(CHATML, origin="a/model", response_template=template)
    with hosted(lambda: replace(scripted(target=saying(SAID)), template=written)) as server:
        assert whole(server, body()) == expected
        assert streamed(server, body()) == expected


def test_a_model_that_must_call_writes_plain_objects_as_nothing_says_how_its_own_are_written() -> None:
    written = ChatTemplate(CHATML, origin="a/model", response_template={"fields": FIELDS})
    with hosted(lambda: replace(scripted(), template=written)) as server:
        content, calls, reason = whole(server, body(tool_choice={"type": "function", "function": {"name": "now"}}))
        assert (content, [name for name, _ in calls], reason) == (None, ["now"], "tool_calls")


def test_one_call_alone_is_read_where_calls_may_not_be_parallel() -> None:
    written = ChatTemplate(CHATML, origin="a/model", response_template={"start_anchor": "a", "fields": FIELDS})
    said = f"{SAID}{SAID.partition('. ')[2]}"
    with hosted(lambda: replace(scripted(target=saying(said)), template=written)) as server:
        for way in (whole, streamed):
            assert way(server, body()) == ("Let me see.", [("now", {})] * 2, "tool_calls")
            assert way(server, body(parallel_tool_calls=False)) == ("Let me see.", [("now", {})], "tool_calls")
