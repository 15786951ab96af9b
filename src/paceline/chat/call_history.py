"""Calls of tools in a conversation's history, in the form that a template reads.

OpenAI's clients send the arguments of a call as JSON text, and no content beside it. Templates differ: some write that
text out, some take an object apart or write it as JSON, which a text would stand in as a text in quotes; some know a
call by a content that is ``None``. Which of these a template does is seen from what it makes of a call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.chat.messages import Message, plain_data
from paceline.chat.template import ChatTemplate
from paceline.core.errors import InputError, ModelFileError
from paceline.core.numbers import shown

_FUNCTION: Final = "probed_function"
_ARGUMENT: Final = "probed_argument"
_ID: Final = "probed000"
_ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template reads calls.

    Attributes:
        objects: whether arguments are objects; else they are JSON texts.
        content: what stands where a message has no content beside its calls; ``"absent"`` for nothing.
    """

    objects: bool = False
    content: str | None = _ABSENT


# A content that is ``None`` some templates write as a word.
_CALLS_LEFT_OUT: Final = (CallForm(), CallForm(content=""), CallForm(content=None))


def find_call_form(template: ChatTemplate) -> CallForm:
    """Return the form in which a template writes calls; where it writes none, one in which it does not fail on them."""
    for content in (_ABSENT, None, ""):
        as_text, as_object = (_render_probe(template, CallForm(objects, content)) for objects in (False, True))
        # Where both come to the same, the text is what the client had: another spelling would be read anew.
        if _shows_call(as_object):
            return CallForm(as_object != as_text, content)
        if _shows_call(as_text):
            return CallForm(False, content)
    return next((form for form in _CALLS_LEFT_OUT if _render_probe(template, form) is not None), CallForm())


def convert_calls(message: Message, form: CallForm) -> dict[str, Any]:
    """Return a message with its calls, if it has any, in the form that a template reads."""
    calls = message.get("tool_calls")
    if calls == []:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    if not isinstance(calls, list):
        return {**message}
    found = {**message, "tool_calls": [_convert_arguments(call, objects=form.objects) for call in calls]}
    if found.get("content") is None and form.content != _ABSENT:
        found["content"] = form.content
    return found


def check_arguments(messages: Sequence[Message]) -> None:
    """Refuse calls whose arguments are no object, of which most templates make nothing or an error of their own."""
    for number, message in enumerate(messages, start=1):
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                arguments = _parse_arguments(arguments)
            if not isinstance(arguments, dict):
                raise InputError(
                    f"message {number} has a call of {shown(function['name'])} with the arguments {shown(arguments)}, "
                    "which the chat template cannot write: give a JSON object"
                )


def _convert_arguments(call: Any, *, objects: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        # Of a function without parameters models and clients write nothing, which no template expects.
        arguments = {} if objects else "{}"
    if objects and isinstance(arguments, str):
        read = _parse_arguments(arguments)
        if isinstance(read, dict):
            arguments = read
    elif not objects and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _parse_arguments(arguments: str) -> Any:
    """Return what arguments are that a text holds; the text itself where it is no JSON, as one that was cut off."""
    try:
        return plain_data(json.loads(arguments), "the arguments of a call")
    except (ValueError, RecursionError, InputError):  # of too many levels: the parser's own, or those of messages
        return arguments


def _render_probe(template: ChatTemplate, form: CallForm) -> str | None:
    """Return what a template writes of a call in this form; ``None`` where it fails."""
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "other", "description": "", "parameters": parameters}}
    try:
        return str(template.render([convert_calls(message, form) for message in _iter_probe()], tools=[tool]))
    except (InputError, ModelFileError):
        return None


def _shows_call(text: str | None) -> bool:
    """Return whether a call stands in a text: its name, and its argument as one and not as a text."""
    if text is None:
        return False
    # An object that is written out as it is, is written in Python's notation.
    return f"'{_ARGUMENT}'" not in text and _FUNCTION in text and _ARGUMENT in text and f'\\"{_ARGUMENT}' not in text


def _iter_probe() -> Iterator[Message]:
    arguments = json.dumps({_ARGUMENT: "a"})
    call = {"id": _ID, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}
    yield {"role": "user", "content": "Hello"}
    yield {"role": "assistant", "tool_calls": [call]}
    yield {"role": "tool", "tool_call_id": _ID, "name": _FUNCTION, "content": "b"}
