"""What a request of Anthropic's Messages API asks to go on with, in the form of a chat.

Of its own in this API are blocks in place of messages of tools, and fields of other names. What its clients send beside
and only Anthropic's servers have a use for is left out, and the answer's ``warnings`` say so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from paceline.core.numbers import shown
from paceline.serving.conversations import Conversation, MessageWriter, decrypt_reasoning, read_texts
from paceline.serving.errors import FieldError
from paceline.serving.schema import MessagesBody

_BILLING: Final = re.compile(r"x-anthropic-billing-header:(\s*[\w-]+=[^;\n]*;)+\s*")
"""What Claude Code puts before all that the system says. It changes with each request, and nothing behind it could be
found in the cache."""

_DATED: Final = re.compile(r".+_\d{8}|mcp_toolset")
"""Types of tools that Anthropic defines: it runs them, or its models know their parameters."""

_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""Types of a choice of tools, and what chats call them."""

_DISPLAYS: Final = (None, "summarized", "omitted")

_HARMLESS_EDIT: Final = "clear_thinking_"
"""Of a conversation's earlier turns, chat templates leave out by themselves what was thought."""

_SERVED: Final = ("server_tool_use", "mcp_tool_use", "container_upload")
"""Types of blocks that tell what Anthropic's servers did; further ones end in _tool_result."""


def read_messages(body: MessagesBody) -> Conversation:
    """Return what a request asks to go on with.

    Args:
        body: as it was sent, each field of its kind.

    Raises:
        FieldError: a field cannot be used.
    """
    # 0 asks for nothing here, and there for the tokens of the prompt alone.
    # 0 asks for nothing, but of a prompt for its tokens alone.
    asked = {"n_probs": body.n_probs, "logprobs": body.logprobs, "prompt_logprobs": body.prompt_logprobs is not None}
    for name in filter(asked.get, asked):
        raise FieldError(name, f"{name}: messages have no place for them; ask /v1/chat/completions, or leave it out")
    tools, left_out = _read_tools(body.tools)
    given: dict[str, Any] = {"tools": tools, **_read_choice(body.tool_choice, tools, left_out)}
    forms = {"output_format": body.output_format, "output_config.format": (body.output_config or {}).get("format")}
    reader = _MessageReader()
    reader.read_system(body.system)
    for number, message in enumerate(body.messages):
        reader.read(message, f"messages[{number}]")
    if not body.messages:
        # llama-server answers this too.
        reader.written.add_said("user", [""])
    return Conversation(
        reader.written.messages,
        tools,
        given={name: value for name, value in given.items() if value is not None},
        forms={name: _read_format(name, form) for name, form in forms.items() if form is not None},
        merges=True,
        warnings=(
            *(
                f"tools: {shown(name)} was left out: only Anthropic's API knows {kind}"
                for name, kind in left_out.items()
            ),
            *_warn_of_edits(body.context_management),
            *reader.warnings,
        ),
        own=_read_display(body.thinking) == "omitted",
    )


class _MessageReader:
    """Reads messages of blocks into messages of a chat."""

    def __init__(self) -> None:
        self.written = MessageWriter()
        # What is said once, however often it holds.
        self.warnings: dict[str, None] = {}

    def read_system(self, given: Any) -> None:
        texts = [_BILLING.sub("", text, 1) if _BILLING.match(text) else text for text in _read_said(given, "system")]
        if texts := [text for text in texts if text]:
            self.written.add_said("system", texts)

    def read(self, message: Mapping[str, Any], place: str) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            self._read_assistant(content, place)
        elif role == "user":
            self._read_user(content, place)
        elif role == "system":
            self.written.add_said("system", _read_said(content, f"{place}.content"))
        else:
            raise FieldError("messages", f"{place}.role is {shown(role)}: give user, assistant or system")

    def _read_user(self, content: Any, place: str) -> None:
        """Read what a user says, behind the results of tools: templates expect these right behind the calls."""
        said: list[str] = []
        has_results = False
        for block, at in _iter_blocks(content, f"{place}.content"):
            if block.get("type") != "tool_result":
                said += _read_block(block, at)
                continue
            has_results = True
            text = "\n".join(_read_said(block.get("content", ""), f"{at}.tool_result.content"))
            if block.get("is_error") and "error" not in text[:64].lower():
                # Chats have no field for it.
                text = f"Error: {text}"
            self.written.add_result(_text_in(block, "tool_use_id", at), [text])
        if said or not has_results:
            self.written.add_said("user", said)

    def _read_assistant(self, content: Any, place: str) -> None:
        for block, at in _iter_blocks(content, f"{place}.content"):
            kind = block.get("type")
            if kind == "thinking":
                signature = block.get("signature")
                if text := _text_in(block, "thinking", at) or decrypt_reasoning(signature):
                    self.written.add_reasoning(text)
                elif signature:
                    self._leave_out("thinking without a text")
            elif kind == "tool_use":
                given = block.get("input", {})
                if not isinstance(given, dict):
                    raise FieldError("messages", f"{at}.input is {shown(given)}: give an object")
                name = _text_in(block, "name", at)
                self.written.add_call(_text_in(block, "id", at), name, json.dumps(given, ensure_ascii=False))
            elif kind == "redacted_thinking" or kind in _SERVED or str(kind).endswith("_tool_result"):
                self._leave_out(kind)
            else:
                self.written.add_said("assistant", _read_block(block, at))

    def _leave_out(self, kind: Any) -> None:
        self.warnings[f"messages: blocks of type {kind} were left out: only Anthropic's API can read them"] = None


def _iter_blocks(content: Any, place: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the blocks of a content with their places; a text is one block."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, place
        return
    if not isinstance(content, list):
        raise FieldError("messages", f"{place} is {shown(content)}: give a text or a list of blocks")
    for number, block in enumerate(content):
        at = f"{place}[{number}]"
        if not isinstance(block, dict):
            raise FieldError(
                "messages", f"{at} is {shown(block)}: give a block, such as {{'type': 'text', 'text': ...}}"
            )
        yield block, at


def _read_said(content: Any, place: str) -> list[str]:
    if content is None:
        return []
    return [text for block, at in _iter_blocks(content, place) for text in _read_block(block, at)]


def _read_block(block: Mapping[str, Any], place: str) -> list[str]:
    """Return the texts of a block that somebody says or that a tool gives."""
    kind = block.get("type")
    if kind == "text":
        return [_text_in(block, "text", place)]
    if kind == "tool_reference":
        return [_text_in(block, "tool_name", place)]
    about = [text for name in ("title", "context") if isinstance(text := block.get(name), str) and text]
    if kind == "search_result":
        return ["\n".join((*about, *read_texts(block.get("content"), f"{place}.content")))]
    source = block.get("source")
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        name = "data" if source["type"] == "text" else "content"
        return ["\n".join((*about, *read_texts(source.get(name), f"{place}.source.{name}")))]
    if kind in ("image", "document"):
        # The place in this form has Claude Code leave it out and ask again.
        raise FieldError(
            "messages", f"{place}.{kind}: {kind} input is not supported, as this model reads text alone: leave it out"
        )
    raise FieldError("messages", f"{place} is of type {shown(kind)}, which is not supported here: give text")


def _text_in(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise FieldError("messages", f"{place}.{name} is {shown(value)}: give a text")
    return value


def _read_tools(given: Iterable[Mapping[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, dict[str, str]]:
    """Return tools in the form of chats, and those that are none: their types by their names."""
    if given is None:
        return None, {}
    found: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for number, tool in enumerate(given):
        name, kind = tool.get("name"), tool.get("type")
        if isinstance(kind, str) and "input_schema" not in tool and _DATED.fullmatch(kind):
            left_out[str(name or kind)] = kind
            continue
        if kind not in (None, "custom"):
            raise FieldError(
                "tools", f"tools[{number}].type is {shown(kind)}: give custom or nothing, with name and input_schema"
            )
        if not isinstance(name, str) or not name:
            raise FieldError("tools", f"tools[{number}].name is {shown(name)}: give a name")
        schema = tool.get("input_schema")
        if schema is not None and not isinstance(schema, dict):
            raise FieldError("tools", f"tools[{number}].input_schema is {shown(schema)}: give a JSON schema")
        about = {"description": tool.get("description") or "", "parameters": schema or {}}
        strict = {"strict": True} if tool.get("strict") else {}
        found.append({"type": "function", "function": {"name": name, **about, **strict}})
    return found, left_out


def _read_choice(choice: Any, tools: Sequence[Any] | None, left_out: Mapping[str, str]) -> dict[str, Any]:
    """Return what chats say of a choice of tools."""
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    parallel = (
        {"parallel_tool_calls": False} if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") else {}
    )
    if kind == "any" and not tools:
        raise FieldError("tool_choice", "tool_choice.type is any, and there are no tools: send some in tools")
    if isinstance(kind, str) and kind in _CHOICES:
        return {"tool_choice": _CHOICES[kind], **parallel}
    if kind != "tool":
        raise FieldError("tool_choice", f"tool_choice.type is {shown(kind)}: give auto, any, none, or tool with a name")
    name = choice.get("name")
    if not isinstance(name, str) or not name:
        raise FieldError("tool_choice", f"tool_choice.name is {shown(name)}: give the name of a tool")
    if name in left_out:
        raise FieldError(
            "tool_choice",
            f"tool_choice names {shown(name)}, and only Anthropic's API knows {left_out[name]}: offer a tool with an "
            "input_schema that the client runs",
        )
    if not tools:
        raise FieldError("tool_choice", f"tool_choice names {shown(name)}, and there are no tools: send some in tools")
    return {"tool_choice": {"type": "function", "function": {"name": name}}, **parallel}


def _read_format(name: str, given: Any) -> dict[str, Any]:
    """Return what chats say of the form of an answer."""
    if not isinstance(given, dict) or given.get("type") != "json_schema" or given.get("schema") is None:
        raise FieldError(name, f"{name} is {shown(given)}: give it the type json_schema, and a schema")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _read_display(thinking: Any) -> str | None:
    """Return how reasoning is shown; ``None`` where that is not said."""
    display = thinking.get("display") if isinstance(thinking, dict) else None
    if display not in _DISPLAYS:
        raise FieldError("thinking.display", f"thinking.display is {shown(display)}: choose from summarized, omitted")
    return display


def _warn_of_edits(given: Mapping[str, Any] | None) -> Iterator[str]:
    edits = (given or {}).get("edits")
    for edit in edits if isinstance(edits, list) else ():
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not str(kind).startswith(_HARMLESS_EDIT):
            yield f"context_management: {shown(kind)} changed nothing: the conversation is read as it was sent"
