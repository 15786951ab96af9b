"""Conversations of all APIs in one form, that of OpenAI's chats: messages, tools, and the fields that go with them."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.chat.messages import LEADING_ROLES, count_leading
from paceline.core.numbers import shown
from paceline.serving.errors import FieldError


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request asks to go on with.

    Attributes:
        messages: in the form of chats.
        tools: in the form of chats; ``None`` where the field was left out.
        given: further fields in the form of chats, in the place of what the body has under these names.
        forms: what the answer is to be, in the form of ``response_format``, by the field that says it.
        called: the field that has the messages, for errors.
        merges: whether messages may be put together where the model's template takes no others.
        warnings: what the client ought to know of what became of its fields.
        own: what else the formatter of that API has to know of the request.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    called: str = "messages"
    merges: bool = False
    warnings: tuple[str, ...] = ()
    own: Any = None


class MessageWriter:
    """Puts messages together from smaller items: what an assistant reasons, says and calls in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_said(self, role: str, texts: Sequence[str]) -> None:
        """Add what somebody says; an assistant goes on with its message."""
        if role != "assistant":
            self.messages.append({"role": role, "content": _content(texts)})
            return
        message = self._assistant
        said = message.get("content")
        before = [part["text"] for part in said] if isinstance(said, list) else [said] if said else []
        message["content"] = _content([*before, *texts])

    def add_reasoning(self, text: str) -> None:
        message = self._assistant
        before = message.get("reasoning_content")
        # As reasoning that a model opens again goes on in a new line.
        message["reasoning_content"] = f"{before}\n{text}" if before else text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant.setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, texts: Sequence[str]) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(texts)})

    @property
    def _assistant(self) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant"})
        return self.messages[-1]


def iter_merged(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield messages as ever more templates take them: in turns of users and assistants.

    What the system says behind its beginning, a user says in the same place. Then what an assistant says between its
    reasoning and its calls becomes a part of the reasoning: gpt-oss takes one of them. At last what a user says behind
    the result of a tool becomes a part of that.
    """
    turns = _merge_users([_without_system(message) for message in messages[count_leading(messages) :]], ("user",))
    thought = [_think_aloud(message) for message in turns]
    leading = [dict(message) for message in messages[: count_leading(messages)]]
    for rest in (turns, thought, _merge_users(turns, ("tool",)), _merge_users(thought, ("tool",))):
        yield [*leading, *rest]


def _without_system(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user" if message["role"] in LEADING_ROLES else message["role"]}


def _merge_users(messages: Sequence[dict[str, Any]], roles: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages in which what a user says is a part of the message before it, where that has one of the roles."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] in roles:
            found[-1] = {**found[-1], "content": _content([*_texts(found[-1]), *_texts(message)])}
        else:
            found.append(message)
    return found


def _think_aloud(message: dict[str, Any]) -> dict[str, Any]:
    if not (message.get("tool_calls") and message.get("reasoning_content") and message.get("content")):
        return message
    thought = "\n".join([message["reasoning_content"], *_texts(message)])
    return {name: value for name, value in message.items() if name != "content"} | {"reasoning_content": thought}


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content") or []
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    # Templates that know no parts join them with a new line.
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def read_texts(content: Any, place: str, kinds: Sequence[str] = ("text",)) -> list[str]:
    """Return the texts of a content, which is a text or a list of parts.

    Args:
        content: of a message, or of a part of one.
        place: of it in the request, for errors.
        kinds: values of ``type`` by which parts are texts.

    Raises:
        FieldError: it is something else.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise FieldError(place, f"{place} is {shown(content)}: give a text or a list of parts")
    found = []
    for number, part in enumerate(content):
        at = f"{place}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in kinds:
            raise FieldError(at, f"{at} is of type {shown(kind)}: only text can be read, of type {' or '.join(kinds)}")
        if not isinstance(part.get("text"), str):
            raise FieldError(f"{at}.text", f"{at}.text is {shown(part.get('text'))}: give a text")
        found.append(part["text"])
    return found


_REASONING: Final = "reasoning_text:"
"""What reasoning begins with that answers carry for the next request."""


def encrypt_reasoning(text: str) -> str:
    """Return reasoning for clients that send back nothing else of it. It is no secret."""
    return _REASONING + base64.b64encode(text.encode("utf-8", "replace")).decode()


def decrypt_reasoning(encrypted: Any) -> str | None:
    """Return the reasoning that an answer of this server carried; ``None`` of another's."""
    if not isinstance(encrypted, str) or not encrypted.startswith(_REASONING):
        return None
    try:
        return base64.b64decode(encrypted.removeprefix(_REASONING), validate=True).decode()
    except ValueError:
        return None
