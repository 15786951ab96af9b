"""Bodies of the Messages API."""

from __future__ import annotations

from typing import Any, Final

import anthropic

BILLING: Final = "x-anthropic-billing-header: cc_version=2.1.197.19e; cc_entrypoint=sdk-cli; cch=a5145;"

SCHEMA: Final[dict[str, Any]] = {"type": "object", "properties": {"command": {"type": "string"}}}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def result(*, of: str = "a", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": of, **fields}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content)}


CALL: Final = {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls ß"}}

THOUGHT: Final = {"type": "thinking", "thinking": "hm", "signature": "x"}

CLAUDE_CODE: Final[dict[str, Any]] = {
    "model": "scripted",
    "max_tokens": 9,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"0"}'},
    "system": [
        text(BILLING),
        text("You are an agent.", cache_control={"type": "ephemeral", "ttl": "1h"}),
        text("Use the tools.\n" * 100, cache_control={"type": "ephemeral"}),
    ],
    "tools": [
        {"name": f"Tool{number}", "description": "Does it. " * 9, "input_schema": SCHEMA, "eager_input_streaming": True}
        for number in range(24)
    ],
    "messages": [
        user(text("<system-reminder>Today is today.</system-reminder>"), text("List the files.")),
        {"role": "system", "content": "Available agent types: none"},
        assistant(THOUGHT, text("I look."), CALL),
        user(
            result(content="a.py", is_error=False, cache_control={"type": "ephemeral"}),
            text("<system-reminder>Be careful.</system-reminder>"),
        ),
        {"role": "system", "content": "<total_tokens>5000 tokens left</total_tokens>"},
    ],
}
"""A request in the form that Claude Code 2.1 has."""


def said(message: Any) -> list[dict[str, Any]]:
    """Return the blocks of a message, but for ids that are drawn."""
    return [block.to_dict() | ({"id": ""} if block.type == "tool_use" else {}) for block in message.content]


def streamed(client: anthropic.Anthropic, **asked: Any) -> Any:
    """Return what the client makes of a stream; every block is begun at the next number and closed."""
    indices, opened = [], None
    with client.messages.stream(**asked) as stream:
        for event in stream:
            if event.type == "content_block_start":
                assert opened is None
                opened = event.index
                indices.append(opened)
            elif event.type == "content_block_delta":
                assert event.index == opened
            elif event.type == "content_block_stop":
                assert event.index == opened
                opened = None
        assert opened is None
        assert indices == list(range(len(indices)))
        return stream.get_final_message()
