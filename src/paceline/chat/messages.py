"""Messages of a conversation, as callers give them, as the plain data that templates read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from paceline.core.errors import InputError
from paceline.core.numbers import shown

Message: TypeAlias = Mapping[str, Any]
"""A message in the form of OpenAI's API: ``role``, ``content`` and what else templates know, such as ``tool_calls``."""

REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning goes by; templates read the first, and gpt-oss's the second."""

LEADING_ROLES: Final = ("system", "developer")
"""Roles of what the system says."""

_SCALARS: Final = (str, int, float, bool)
"""Kinds of values that plain data ends in."""
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
"""Values of ``type`` by which the parts of a message are text."""
_MAX_LEVELS: Final = 100
"""Lists and mappings within each other. JSON schemas of tools have about ten."""


def read_messages(messages: str | Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of a conversation as plain data, in which ``None`` is left out.

    Args:
        messages: mappings, or objects with ``model_dump`` as OpenAI's client returns them; a text is what a user says.

    Raises:
        InputError: there are none, or one of them is no message of text.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"the messages are {shown(messages)}; give a list of messages, each with role and content")
    if not messages:
        raise InputError("there are no messages: give one at least, such as {'role': 'user', 'content': 'Hello'}")
    return [_read(message, f"message {number}") for number, message in enumerate(messages, start=1)]


def _read(message: object, called: str) -> dict[str, Any]:
    if hasattr(message, "model_dump"):
        message = message.model_dump()
    if not isinstance(message, Mapping):
        raise InputError(f"{called} is {shown(message)}; give a mapping with role and content")
    read = {str(key): plain_data(value, called) for key, value in message.items() if value is not None}
    role = read.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"the role of {called} is {shown(role)}; give a text, such as 'user'")
    if "content" in read:
        read["content"] = _content(read["content"], called)
    elif role != "assistant":
        raise InputError(f"{called}, of role {role!r}, has no content; give a text")
    if "tool_calls" in read:
        _check_calls(read["tool_calls"], called)
    reasoning = next((read[name] for name in REASONING_FIELDS if name in read), None)
    if reasoning is not None:
        read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
    return read


def _check_calls(calls: object, called: str) -> None:
    """Refuse calls without a name, of which a template makes nothing or an error of its own."""
    if not isinstance(calls, list):
        raise InputError(f"the tool_calls of {called} are {shown(calls)}; give a list of calls")
    for call in calls:
        # Some templates read calls in which name and arguments stand alone.
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InputError(
                f"{called} has the tool call {shown(call)}; give each call a function, with its name and arguments"
            )


def _content(content: object, called: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"the content of {called} is {shown(content)}; give a text or a list of parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InputError(
                f"{called} has a part of type {shown(kind)}: only text can be read, as {{'type': 'text', 'text': ...}}"
            )
    return [{**part, "type": "text"} for part in content]


def plain_data(value: Any, called: str, levels: int = _MAX_LEVELS) -> Any:
    """Return a value made of JSON's kinds alone, so that a template gets hold of nothing else.

    Args:
        value: texts, numbers, ``None``, lists and mappings of such, or objects with ``model_dump``.
        called: what the value belongs to, for messages.
        levels: lists and mappings that may be within each other.
    """
    if value is None or isinstance(value, _SCALARS):
        return value
    if levels == 0:
        raise InputError(f"{called} holds lists or mappings within each other, more than {_MAX_LEVELS}: give fewer")
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, called, levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, called, levels - 1) for item in value]
    raise InputError(f"{called} holds a {type(value).__name__}: give what JSON has, texts, numbers, lists and mappings")


def count_leading(messages: Sequence[Message]) -> int:
    """Return how many messages at a conversation's beginning are what the system says, and stay."""
    return next((place for place, one in enumerate(messages) if one["role"] not in LEADING_ROLES), len(messages))
