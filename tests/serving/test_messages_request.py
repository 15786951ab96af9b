"""What requests of Anthropic's Messages API come to as chats, and what of them is left out, with a word."""

from __future__ import annotations

from typing import Any, Final

import pytest

from paceline.server_options import ServerOptions
from paceline.serving.conversations import Conversation, encrypt_reasoning, iter_merged
from paceline.serving.errors import FieldError
from paceline.serving.messages_request import read_messages
from paceline.serving.schema import MessagesBody, validate_body
from tests.chat.conversing import CHATML
from tests.serving.hosted import hosted, scripted
from tests.serving.messages import BILLING, CALL, CLAUDE_CODE, SCHEMA, THOUGHT, assistant, result, text, user

SEARCH: Final = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def read(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return read_messages(validate_body(MessagesBody, {"messages": list(messages), **fields}))


CALLED: Final = {"id": "a", "type": "function", "function": {"name": "Bash", "arguments": '{"command": "ls ß"}'}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "a"}, [{"role": "user", "content": "a"}]),
        (user(text("a", cache_control={"type": "ephemeral"})), [{"role": "user", "content": "a"}]),
        (user(text("a"), text("b")), [{"role": "user", "content": [text("a"), text("b")]}]),
        ({"role": "system", "content": [text("a")]}, [{"role": "system", "content": "a"}]),
        (assistant(text("a")), [{"role": "assistant", "content": "a"}]),
        (
            assistant(THOUGHT, text("a"), CALL),
            [{"role": "assistant", "reasoning_content": "hm", "content": "a", "tool_calls": [CALLED]}],
        ),
        (user(result(content="1")), [{"role": "tool", "tool_call_id": "a", "content": "1"}]),
        # Templates expect results right behind the calls.
        (
            user(text("b"), result(content=[text("1"), text("2")]), result(of="b"), text("c")),
            [
                {"role": "tool", "tool_call_id": "a", "content": "1\n2"},
                {"role": "tool", "tool_call_id": "b", "content": ""},
                {"role": "user", "content": [text("b"), text("c")]},
            ],
        ),
        (user(result(content="no", is_error=True)), [{"role": "tool", "tool_call_id": "a", "content": "Error: no"}]),
        (
            user(result(content="An error: no", is_error=True)),
            [{"role": "tool", "tool_call_id": "a", "content": "An error: no"}],
        ),
        (
            user(result(content=[{"type": "tool_reference", "tool_name": "Bash"}])),
            [{"role": "tool", "tool_call_id": "a", "content": "Bash"}],
        ),
        (
            user(
                {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}
            ),
            [{"role": "user", "content": "T\na"}],
        ),
        (
            user({"type": "search_result", "source": "s", "title": "T", "content": [text("a"), text("b")]}),
            [{"role": "user", "content": "T\na\nb"}],
        ),
    ],
)
def test_a_message_of_blocks_as_messages_of_a_chat(message: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    conversation = read(message)
    assert list(conversation.messages) == expected
    assert not conversation.warnings


def test_reasoning_that_was_not_shown_comes_back_by_its_signature() -> None:
    hidden = {"type": "thinking", "thinking": "", "signature": encrypt_reasoning("hm ß")}
    assert read(assistant(hidden, text("a"))).messages[0]["reasoning_content"] == "hm ß"
    # What is shown counts, and nobody else can read another's.
    assert read(assistant({**hidden, "thinking": "so"})).messages[0]["reasoning_content"] == "so"
    for signature in ("EqQBCg", "reasoning_text:/w==", 5):
        conversation = read(assistant({**hidden, "signature": signature}, text("a")))
        assert list(conversation.messages) == [{"role": "assistant", "content": "a"}]
        (warning,) = conversation.warnings
        assert "blocks of type thinking without a text were left out" in warning
    assert read(assistant({**hidden, "signature": ""}, text("a"))).warnings == ()


def test_what_an_assistant_says_in_a_row_is_one_message() -> None:
    said = read(user(text("a")), assistant(text("b")), assistant(CALL)).messages
    assert said[1:] == [{"role": "assistant", "content": "b", "tool_calls": [CALLED]}]


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("Be brief.", ["Be brief."]),
        ([text(BILLING), text("a"), text("b")], [[text("a"), text("b")]]),
        (f"{BILLING}\nYou are", ["You are"]),
        (f"Say {BILLING}", [f"Say {BILLING}"]),
        (BILLING, []),
        ("", []),
    ],
)
def test_the_system_without_what_is_no_word_to_the_model(system: Any, expected: list[Any]) -> None:
    assert [message["content"] for message in read(system=system).messages[:-1]] == expected


def test_tools_and_choices() -> None:
    given = read(
        tools=[{"name": "Bash", "input_schema": SCHEMA, "strict": True}, {"name": "Now", "description": "The time."}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ).given
    assert [tool["function"] for tool in given["tools"]] == [
        {"name": "Bash", "description": "", "parameters": SCHEMA, "strict": True},
        {"name": "Now", "description": "The time.", "parameters": {}},
    ]
    assert (given["tool_choice"], given["parallel_tool_calls"]) == ("required", False)
    assert read(tool_choice={"type": "none"}).given == {"tool_choice": "none"}
    named = read(tools=[{"name": "Bash"}], tool_choice={"type": "tool", "name": "Bash"}).given
    assert named["tool_choice"] == {"type": "function", "function": {"name": "Bash"}}


def test_what_only_anthropic_has_is_left_out_with_a_warning() -> None:
    conversation = read(
        assistant({"type": "redacted_thinking", "data": "x"}, {"type": "server_tool_use", "id": "a"}, text("a")),
        assistant({"type": "web_search_tool_result", "content": []}, {"type": "redacted_thinking", "data": "y"}),
        tools=[SEARCH, {"name": "Bash"}],
        context_management={"edits": [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}]},
    )
    assert [tool["function"]["name"] for tool in conversation.tools or ()] == ["Bash"]
    assert list(conversation.messages) == [{"role": "assistant", "content": "a"}]
    assert conversation.warnings == (
        "tools: 'web_search' was left out: only Anthropic's API knows web_search_20250305",
        "context_management: 'clear_tool_uses_20250919' changed nothing: the conversation is read as it was sent",
        "messages: blocks of type redacted_thinking were left out: only Anthropic's API can read them",
        "messages: blocks of type server_tool_use were left out: only Anthropic's API can read them",
        "messages: blocks of type web_search_tool_result were left out: only Anthropic's API can read them",
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        # In the form by which Claude Code knows them, and asks again without.
        (
            {"messages": [user({"type": "image", "source": {}})]},
            r"^messages\[0\]\.content\[0\]\.image: image input is not supported",
        ),
        (
            {"messages": [user(result(content=[{"type": "image"}]))]},
            r"^messages\[0\]\.content\[0\]\.tool_result\.content\[0\]\.image: image input is not supported",
        ),
        ({"messages": [user({"type": "document", "source": {"type": "base64"}})]}, "document input is not supported"),
        ({"messages": [user({"type": "video"})]}, "is of type 'video'"),
        ({"messages": [user(5)]}, r"messages\[0\].content\[0\] is 5"),
        ({"messages": [user(text(5))]}, "text is 5"),  # type: ignore[arg-type]
        ({"messages": [user({"type": "tool_result"})]}, "tool_use_id is None"),
        ({"messages": [assistant({**CALL, "input": "ls"})]}, "input is 'ls': give an object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "role is 'tool': give user, assistant or system"),
        ({"messages": [{"role": "user"}]}, "content is None"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "type is 'function': give custom or nothing"),
        ({"tools": [{}]}, "name is None"),
        ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "only Anthropic's API knows"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type is 'some'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is None"),
        ({"output_config": {"format": {"type": "text"}}}, "give it the type json_schema, and a schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type is any, and there are no tools"),
        ({"tool_choice": {"type": "tool", "name": "Bash"}}, "tool_choice names 'Bash', and there are no tools"),
        ({"thinking": {"type": "enabled", "display": "whole"}}, "display is 'whole': choose from summarized, omitted"),
    ],
)
def test_what_cannot_be_read_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(FieldError, match=words):
        read(*fields.pop("messages", []), **fields)


def test_messages_are_put_together_more_and_more() -> None:
    middle = {"role": "system", "content": "c"}
    thought = {"role": "assistant", "reasoning_content": "hm", "content": "d", "tool_calls": [CALLED]}
    given: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        middle,
        thought,
        {"role": "tool", "tool_call_id": "a", "content": "e"},
        {"role": "user", "content": "f"},
        middle,
    ]
    found = [[(one["role"], one.get("content")) for one in messages[1:]] for messages in iter_merged(given)]
    both, late = [text("b"), text("c")], [text("f"), text("c")]
    behind = [("tool", "e"), ("user", late)]
    within = [("tool", [text("e"), *late])]
    assert found == [
        [("user", both), ("assistant", "d"), *behind],
        [("user", both), ("assistant", None), *behind],
        [("user", both), ("assistant", "d"), *within],
        [("user", both), ("assistant", None), *within],
    ]
    assert [list(iter_merged(given))[1][2]["reasoning_content"]] == ["hm\nd"]
    assert given[2] is middle


BETAS: Final = (
    "claude-code-20250219,interleaved-thinking-2025-05-14,thinking-token-count-2026-05-13,"
    "context-management-2025-06-27,prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24"
)
TURNS: Final = (
    "{% set turn = namespace(number=0) %}{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}"
    "{% if message.role in ('user', 'assistant') %}"
    "{% if (message.role == 'user') != (turn.number % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "{% set turn.number = turn.number + 1 %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.mark.parametrize("template", [CHATML, TURNS])
def test_what_claude_code_sends(template: str) -> None:
    """Also to a server that refuses all that it does not know, and a template that refuses what is no turn."""
    with hosted(lambda: scripted(template), ServerOptions(strict_fields=True)) as server:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": BETAS, "x-app": "cli"}
        answers = [
            server.post("/v1/messages?beta=true", {**CLAUDE_CODE, "stream": stream}, headers=headers)
            for stream in (True, False)
        ]
        assert [answer.status_code for answer in answers] == [200, 200]
        message = answers[1].json()
        # All but what is read again always: the header that differs each time would be in the way.
        assert message["usage"]["input_tokens"] == 1
        warned = message["warnings"]
        assert warned[0] == (
            "output_config.effort changed nothing: the model's chat template does not support levels of reasoning"
        )
        assert warned[1] == "tools: the model's chat template knows none, so the model is told of none"
        assert ["put together" in warning for warning in warned[2:]] == ([] if template == CHATML else [True])
        counted = server.answer("/v1/messages/count_tokens?beta=true", {**CLAUDE_CODE, "max_tokens": None})
        assert counted == {"input_tokens": 1 + message["usage"]["cache_read_input_tokens"], "warnings": warned}
