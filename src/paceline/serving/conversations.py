"""Conversations of all APIs in one form, that of OpenAI's chats: messages, tools, and the fields that go with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.core.numbers import shown
from paceline.serving.errors import FieldError


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request asks to go on with.

    Attributes:
        messages: in the form of chats.
        tools: in the form of chats; ``None`` where the field was left out.
        given: further fields in the form of chats, in the place of what the body has under these names.
        called: the field that has the messages, for errors.
        names: of fields of the request by those of a chat, for errors.
        merges: whether messages may be put together where the model's template takes no others.
        warnings: what the client ought to know of what became of its fields.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    called: str = "messages"
    names: Mapping[str, str] = field(default_factory=dict)
    merges: bool = False
    warnings: tuple[str, ...] = ()


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

    What the system says behind its beginning, a user says in the same place. Then also what a user says behind the
    result of a tool becomes a part of that.
    """
    leading = next((n for n, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    for roles in (("user",), ("user", "tool")):
        found = [dict(message) for message in messages[:leading]]
        for message in messages[leading:]:
            message = {**message, "role": "user"} if message["role"] in _SYSTEM else dict(message)
            before = found[-1] if len(found) > leading else None
            if message["role"] == "user" and before is not None and before["role"] in roles:
                found[-1] = {**before, "content": _content([*_texts(before), *_texts(message)])}
            else:
                found.append(message)
        yield found


_SYSTEM: Final = ("system", "developer")


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
