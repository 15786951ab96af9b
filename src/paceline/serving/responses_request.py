"""The Responses API's requests: items of a conversation, and tools, in the form of chats.

Nothing is stored, so the whole conversation comes with each request, as Codex and others send it. The reasoning of
earlier answers comes back with it. Clients that send no ``content`` of a reasoning item send its
``encrypted_content``, which is that text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from paceline.core.numbers import shown
from paceline.serving.conversations import Conversation, MessageWriter, decrypt_reasoning, read_texts
from paceline.serving.errors import FieldError
from paceline.serving.schema import ResponsesBody

_ROLES: Final = ("user", "assistant", "system", "developer")
_SAID: Final = ("input_text", "output_text", "text")

_OF_BUILT_IN_TOOLS: Final = frozenset(
    {
        *("web_search_call", "file_search_call", "computer_call", "computer_call_output", "code_interpreter_call"),
        *("image_generation_call", "local_shell_call", "local_shell_call_output", "shell_call", "shell_call_output"),
        *("apply_patch_call", "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_call"),
        *("mcp_approval_response", "tool_search_call", "tool_search_output", "program", "program_output"),
        *("compaction", "compaction_summary", "compaction_trigger", "configuration_update"),
    }
)
"""Items of what runs at OpenAI. A conversation that began there may have them."""

_INCLUDED: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")
_NOTHING_TO_INCLUDE: Final = (
    *("web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs"),
    *("computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url"),
)

_MAX_NAMED: Final = 16
"""Things of one kind that warnings name."""

_INPUT: Final = "input"

_ONE_TEXT: Final = {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]}
"""Parameters of a custom tool, which takes a text, as a function."""


class SentTool(NamedTuple):
    """A tool as the client named it."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """What answers say of their request.

    Attributes:
        repeated: fields that stand in an answer as they were sent.
        tools: those that may be called, by the names that the model knows.
        encrypts: whether reasoning items have ``encrypted_content``.
    """

    repeated: Mapping[str, Any]
    tools: Mapping[str, SentTool]
    encrypts: bool


_REPEATED: Final = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "parallel_tool_calls", "reasoning", "text"),
    *("tool_choice", "top_logprobs", "truncation"),
    # which nothing else reads
    *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"),
)

_NOT_STORED: Final = "nothing is stored here: send the whole conversation in input"


def read_response_request(body: ResponsesBody) -> Conversation:
    """Return what a request has to be answered.

    Raises:
        FieldError: a field cannot be used.
    """
    _check_stateless(body)
    warnings: list[str] = []
    tools, sent = _read_tools(body.tools or [], warnings)
    writer = MessageWriter()
    if body.instructions:
        writer.add_said("system", [body.instructions])
    if isinstance(body.input, str):
        writer.add_said("user", [body.input])
    elif isinstance(body.input, list):
        left_out: dict[str, str] = {}
        for number, item in enumerate(body.input):
            _read_item(item, f"input[{number}]", writer, left_out)
        warnings += [
            f"{place} was left out: this server has no items of type {kind}" for kind, place in left_out.items()
        ]
    else:
        raise FieldError("input", f"input is {shown(body.input)}: give a text or a list of items")
    if not writer.messages:
        raise FieldError("input", "input is empty: give a text, or one item at least")
    include = body.include or []
    warnings += [
        f"include names {shown(name)}, which this server does not have"
        for name in dict.fromkeys(include)
        if name not in (*_INCLUDED, *_NOTHING_TO_INCLUDE)
    ][:_MAX_NAMED]
    given: dict[str, Any] = {"tools": tools}
    if _INCLUDED[0] in include:
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    elif body.top_logprobs:
        given["top_logprobs"] = 0
        warnings.append(f"top_logprobs changed nothing: include does not name {_INCLUDED[0]}")
    if body.tool_choice is not None:
        known = {(tool.name, tool.namespace): name for name, tool in sent.items()}
        given["tool_choice"] = _in_names_of_model(body.tool_choice, known)
    extra = body.model_extra or {}
    repeated = {name: getattr(body, name, extra.get(name)) for name in _REPEATED}
    repeated["tools"] = [tool for tool in body.tools or [] if tool.get("type") in _TOOLS]
    facts = ResponseFacts(repeated, sent, _INCLUDED[1] in include)
    return Conversation(
        writer.messages,
        tools or None,
        given,
        forms=_read_format(body.text or {}),
        called="input",
        # Codex has messages of the system anywhere, and several of a user in a row.
        merges=True,
        warnings=tuple(warnings),
        own=facts,
    )


def _read_format(text: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what the answer is to be, in the form of chats."""
    described = text.get("format")
    if described is None:
        return {}
    if not isinstance(described, dict):
        raise FieldError("text.format", f"text.format is {shown(described)}: give an object with a type")
    has_schema = "schema" in described
    return {"text.format": {"type": described.get("type"), "json_schema": described} if has_schema else described}


def _check_stateless(body: ResponsesBody) -> None:
    if body.previous_response_id:
        raise FieldError(
            "previous_response_id",
            f"previous_response_id is {shown(body.previous_response_id)}: {_NOT_STORED}",
            # Copilot then asks again with the whole conversation.
            code="previous_response_not_found",
        )
    if body.conversation is not None:
        raise FieldError("conversation", f"conversation is {shown(body.conversation)}: {_NOT_STORED}")
    if body.prompt is not None:
        raise FieldError("prompt", "prompt names a stored prompt: there are none here; send input and instructions")
    if body.background:
        raise FieldError("background", "background is true: nothing is stored here to be fetched later; use stream")


def _read_item(item: Any, place: str, writer: MessageWriter, left_out: dict[str, str]) -> None:
    """Add what an item says; of types that are left out the first place is noted."""
    if not isinstance(item, dict):
        raise FieldError(place, f"{place} is {shown(item)}: give an object, such as a message with role and content")
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise FieldError(f"{place}.role", f"{place}.role is {shown(role)}: choose from {', '.join(_ROLES)}")
        writer.add_said(role, _read_said(item.get("content"), f"{place}.content"))
    elif kind == "reasoning":
        if text := _read_reasoning(item, place):
            writer.add_reasoning(text)
    elif kind in ("function_call", "custom_tool_call"):
        call_id, name = _text(item, "call_id", place), _text(item, "name", place)
        namespace = item.get("namespace")
        name = _join_name(namespace, name) if isinstance(namespace, str) and namespace else name
        if kind == "function_call":
            arguments = _text(item, "arguments", place)
        else:
            arguments = json.dumps({_INPUT: _text(item, "input", place)}, ensure_ascii=False)
        writer.add_call(call_id, name, arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        writer.add_result(_text(item, "call_id", place), _read_said(item.get("output"), f"{place}.output"))
    elif kind == "item_reference":
        raise FieldError(place, f"{place} refers to an item: {_NOT_STORED}")
    elif isinstance(kind, str) and kind in _OF_BUILT_IN_TOOLS:
        left_out.setdefault(kind, place)
    else:
        raise FieldError(
            f"{place}.type",
            f"{place}.type is {shown(kind)}: give message, reasoning, function_call, function_call_output, "
            "custom_tool_call or custom_tool_call_output",
        )


def _read_said(content: Any, place: str) -> list[str]:
    if isinstance(content, list):
        # What a model would not say is a part of its own.
        content = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, dict) and part.get("type") == "refusal"
            else part
            for part in content
        ]
    return read_texts(content, place, _SAID)


def _text(item: Mapping[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise FieldError(f"{place}.{name}", f"{place}.{name} is {shown(value)}: give a text")
    return value


def _read_reasoning(item: Mapping[str, Any], place: str) -> str:
    """Return the reasoning of an item; of one that OpenAI's models wrote its summary, which is all that can be read."""
    if item.get("content"):
        return "\n".join(read_texts(item["content"], f"{place}.content", ("reasoning_text", "text")))
    if (text := decrypt_reasoning(item.get("encrypted_content"))) is not None:
        return text
    return "\n".join(read_texts(item.get("summary") or [], f"{place}.summary", ("summary_text",)))


_TOOLS: Final = ("function", "custom", "namespace")


def _read_tools(given: Sequence[Any], warnings: list[str]) -> tuple[list[dict[str, Any]], dict[str, SentTool]]:
    """Return tools in the form of chats, and as they were sent by the names that the model knows."""
    tools: list[dict[str, Any]] = []
    sent: dict[str, SentTool] = {}
    left_out: dict[str, None] = {}
    for function, tool in _iter_tools(given, left_out):
        sent[function["name"]] = tool
        tools.append({"type": "function", "function": function})
    warnings += [
        f"tools of type {kind} were left out: the model calls functions alone" for kind in [*left_out][:_MAX_NAMED]
    ]
    return tools, sent


def _iter_tools(given: Sequence[Any], left_out: dict[str, None]) -> Iterator[tuple[dict[str, Any], SentTool]]:
    for number, tool in enumerate(given):
        place = f"tools[{number}]"
        if tool.get("type") != "namespace":
            yield from _iter_tool(tool, place, "", left_out)
            continue
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise FieldError("tools", f"{place}.tools is {shown(inner)}: give a list of tools")
        for inner_number, inner_tool in enumerate(inner):
            yield from _iter_tool(inner_tool, f"{place}.tools[{inner_number}]", _text(tool, "name", place), left_out)


def _iter_tool(
    tool: Any, place: str, namespace: str, left_out: dict[str, None]
) -> Iterator[tuple[dict[str, Any], SentTool]]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise FieldError("tools", f"{place} has no type: give it the type function, a name and parameters")
    kind = tool["type"]
    if kind not in ("function", "custom"):
        left_out[shown(kind)] = None
        return
    # As chats have it, in a field of its own.
    described = tool["function"] if isinstance(tool.get("function"), dict) else tool
    name = described.get("name")
    if not isinstance(name, str) or not name:
        raise FieldError("tools", f"{place} has no name: give one")
    sent = SentTool(name, namespace, kind == "custom")
    function: dict[str, Any] = {
        "name": _join_name(namespace, name) if namespace else name,
        "description": _describe(described),
    }
    if kind == "custom":
        function["parameters"] = _ONE_TEXT
    else:
        parameters = described.get("parameters")
        if not isinstance(parameters, dict | None):
            raise FieldError("tools", f"{place}.parameters is {shown(parameters)}: give a JSON schema, or nothing")
        function["parameters"] = parameters
    if described.get("strict"):
        function["strict"] = True
    yield function, sent


def _describe(tool: Mapping[str, Any]) -> str:
    """Return what a model is told of a tool: of a custom one the grammar of its input, too."""
    description = tool.get("description")
    said = description if isinstance(description, str) else ""
    described = tool.get("format")
    definition = described.get("definition") if isinstance(described, dict) else None
    return f"{said}\n\nThe input keeps to this grammar:\n{definition}" if isinstance(definition, str) else said


def _join_name(namespace: str, name: str) -> str:
    """Return a name for the model, of whose kind MCP clients make theirs."""
    return f"{namespace.removesuffix('__')}__{name}"


def _in_names_of_model(choice: Any, known: Mapping[tuple[str, str], str]) -> Any:
    """Return a choice of tools in which they have the names that the model knows."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return {**choice, "tools": [_in_names_of_model(tool, known) for tool in choice["tools"]]}
    if choice.get("type") not in ("function", "custom") or not isinstance(choice.get("name"), str):
        return choice
    namespace = choice.get("namespace")
    named = choice["name"], namespace if isinstance(namespace, str) else ""
    return {"type": "function", "name": known.get(named, choice["name"])}
