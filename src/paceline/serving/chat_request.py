"""The fields of chats: how the conversation is written, and the tools that the model may call.

Many clients send their settings of reasoning always, whatever the model is. A setting that changes nothing for the
model is taken without a word. One that the model cannot follow is left out, and the answer's ``warnings`` say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline.chat.params import ChatParams
from paceline.chat.prompt_builder import (
    convert_level_to_switch,
    find_unsupported_options,
    is_reasoning_model,
    refuses_level,
)
from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.base import ToolCallFormat
from paceline.chat.tool_calls.formats import PLAIN_CALLS, control_marks
from paceline.chat.tool_calls.grammar import build_calls_source
from paceline.constraints import JsonObject, JsonSchema
from paceline.core.errors import ConstraintError
from paceline.core.numbers import shown
from paceline.core.vocabulary import Vocabulary
from paceline.serving.constraint_fields import Named
from paceline.serving.errors import FieldError, in_names_of
from paceline.serving.schema import ChatSettings, as_whole

_MAX_VARIABLES: Final = 1000

_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "thinking": ("type", "budget_tokens"),
    "reasoning": ("enabled", "effort", "max_tokens"),
}
"""Fields that hold several settings of reasoning, and those of them that are read."""

_TYPES: Final[Mapping[str, str]] = {
    "enabled": "on",
    "disabled": "off",
    "adaptive": "auto",
    "auto": "auto",
    "between_tools": "auto",
}
"""What ``thinking.type`` may be."""

_TRUNCATES: Final[Mapping[str | None, bool]] = {"auto": True, "disabled": False}


def read_chat_params(body: ChatSettings, defaults: ChatParams) -> tuple[ChatParams, dict[str, str]]:
    """Return how a conversation is written, and the names of the fields that say so, by the option.

    Args:
        body: of the request.
        defaults: of a request that says nothing else.

    Raises:
        FieldError: a field cannot be used.
    """
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, option, value in _iter_settings(body):
        if value is not None:
            given[option], names[option] = value, name
    if variables := given.get("template_variables"):
        given["template_variables"] = {**defaults.template_variables, **variables}
    with in_names_of(names):
        return replace(defaults, **given), names


def unread_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what nothing reads of the fields that hold several settings of reasoning, by names with a dot.

    Args:
        given: fields of a request.
    """
    return {
        f"{name}.{inner}": value
        for name, known in _SETTINGS.items()
        if isinstance(given.get(name), dict)
        for inner, value in given[name].items()
        if inner not in known
    }


def _iter_settings(body: ChatSettings) -> Iterator[tuple[str, str, Any]]:
    """Yield fields that say how a conversation is written, each with its option and value; later ones count."""
    variables = body.chat_template_kwargs or {}
    if len(variables) > _MAX_VARIABLES:
        raise FieldError(
            "chat_template_kwargs",
            f"chat_template_kwargs has {len(variables)} variables: at most {_MAX_VARIABLES} are accepted",
        )
    variables = dict(variables)
    yield (
        "chat_template_kwargs",
        "reasoning",
        _read_switch(variables.pop("enable_thinking", None), "chat_template_kwargs", "enable_thinking"),
    )
    yield "chat_template_kwargs", "template_variables", variables or None
    yield "enable_thinking", "reasoning", _read_switch(body.enable_thinking, "enable_thinking")
    yield from _iter_nested_settings("thinking", body.thinking)
    yield from _iter_nested_settings("reasoning", body.reasoning)
    # As in llama-server, an empty word says nothing.
    yield "reasoning_effort", "reasoning_effort", body.reasoning_effort or None
    # of Anthropic's API
    output_config = getattr(body, "output_config", None) or {}
    yield "output_config.effort", "reasoning_effort", output_config.get("effort") or None
    yield "reasoning_budget_tokens", "reasoning_budget", body.reasoning_budget_tokens
    yield "thinking_budget_tokens", "reasoning_budget", body.thinking_budget_tokens
    # Of the Responses API.
    yield "truncation", "forget", _TRUNCATES.get(getattr(body, "truncation", None))
    for name in ("reasoning_format", "add_generation_prompt", "continue_final_message"):
        yield name, name, getattr(body, name, None)


def _iter_nested_settings(name: str, given: dict[str, Any] | bool | None) -> Iterator[tuple[str, str, Any]]:
    """Yield the settings in ``thinking`` or ``reasoning``."""
    if not isinstance(given, dict):
        yield name, "reasoning", _read_switch(given, name)
        return
    kind = given.get("type") if name == "thinking" else None
    if kind is not None and not (isinstance(kind, str) and kind in _TYPES):
        raise FieldError("thinking.type", f"thinking.type is {shown(kind)}: choose from {', '.join(_TYPES)}")
    yield "thinking.type", "reasoning", _TYPES.get(kind) if kind is not None else None
    if name == "thinking":
        yield "thinking.budget_tokens", "reasoning_budget", as_whole(given.get("budget_tokens"))
        return
    yield "reasoning.enabled", "reasoning", _read_switch(given.get("enabled"), "reasoning.enabled")
    yield "reasoning.effort", "reasoning_effort", given.get("effort") or None
    yield "reasoning.max_tokens", "reasoning_budget", as_whole(given.get("max_tokens"))


def _read_switch(value: Any, param: str, called: str = "") -> str | None:
    if value is None or isinstance(value, bool):
        return None if value is None else "on" if value else "off"
    raise FieldError(param, f"{called or param} is {shown(value)}: give true or false")


def drop_unfollowed(
    params: ChatParams, names: Mapping[str, str], template: ChatTemplate
) -> tuple[ChatParams, tuple[str, ...]]:
    """Return what of its options a model follows, and what the client ought to know of those that it cannot.

    Args:
        params: as they were asked for.
        names: of the fields that set options, by the option; of others, which are the server's, nothing is said.
        template: of the model.
    """
    params = convert_level_to_switch(params, template)
    unused = {name: f"does not support {what}" for name, what in find_unsupported_options(params, template).items()}
    if refuses_level(params, template):
        unused["reasoning_effort"] = f"refuses the level {shown(params.reasoning_effort)}"
    # A model that does not reason does no less than was asked, and its reasoning is of no length.
    quiet = not is_reasoning_model(template)
    warnings = [
        f"{names[name]} changed nothing: the model's chat template {why}"
        for name, why in unused.items()
        if name in names and not (quiet and (name == "reasoning_budget" or params.reasoning == "off"))
    ]
    left_out: dict[str, Any] = {name: getattr(ChatParams(), name) for name in unused}
    return replace(params, **left_out), tuple(warnings)


_MAX_TOOLS: Final = 128
"""Tools of a request, as many as OpenAI's API takes."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools of a request.

    Attributes:
        tools: that the model is told of and may call, in the form of OpenAI's API.
        only: name of the one that has to be called; empty for any.
        required: whether one has to be called.
        parallel: whether there may be several calls. One that has to be is made once, unless several were asked for: a
            model that has to go on says the same again.
        restricted: whether they are some of those that were sent. A history may tell the model of the others.
    """

    tools: Sequence[Mapping[str, Any]]
    only: str = ""
    required: bool = False
    parallel: bool = True
    restricted: bool = False

    @property
    def several(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel and not self.only

    @property
    def is_strict(self) -> bool:
        """Whether calls have to keep to the schemas of their functions."""
        return self.required or any(tool["function"].get("strict") for tool in self.tools)


def read_tools(given: Mapping[str, Any]) -> OfferedTools | None:
    """Return the tools of a request; ``None`` where there are none, or none may be called.

    Args:
        given: fields of the request that are not ``None``.

    Raises:
        FieldError: a field cannot be used.
    """
    tools = given.get("tools") or []
    _check_tools(tools)
    choice, allowed = _read_allowed_tools(given.get("tool_choice", "auto"))
    only = _read_forced_tool(choice)
    names = [tool["function"]["name"] for tool in tools]
    if choice == "none" or (choice == "auto" and not tools and allowed is None):
        return None
    if not tools:
        raise FieldError(
            "tool_choice", f"tool_choice is {_describe_choice(choice)}, and there are no tools: send some in tools"
        )
    for name in allowed or ([only] if only else []):
        if name not in names:
            raise FieldError("tool_choice", f"tool_choice names {shown(name)}, and the tools are {', '.join(names)}")
    if allowed is not None:
        may_be_called = set(allowed)
        tools = [tool for tool in tools if tool["function"]["name"] in may_be_called]
    is_auto = choice == "auto"
    parallel = given.get("parallel_tool_calls", is_auto)
    return OfferedTools(tools, only, not is_auto, parallel, restricted=allowed is not None)


def tools_for_template(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools as templates are told of them; ``None`` where there are none.

    Templates read description and parameters of each, and were made without the field ``strict`` of OpenAI's API.

    Args:
        tools: of a request.

    Raises:
        FieldError: one of them cannot be used.
    """
    _check_tools(tools or [])
    return [_tool_for_template(tool) for tool in tools or []] or None


def _tool_for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    usual = {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {},
    }
    more = {name: value for name, value in function.items() if name not in usual and name != "strict"}
    return {"type": "function", "function": usual | more}


def choose_call_format(offered: OfferedTools | None, known: ToolCallFormat | None) -> ToolCallFormat | None:
    """Return how an answer has calls; ``None`` where none are looked for.

    Args:
        offered: of the request.
        known: how the model writes calls; ``None`` where that is not known. Then a model that has to call writes plain
            objects, as one whose format is described for reading alone, and one that need not makes no calls that
            anybody could tell from content.
    """
    if offered is None:
        return None
    has_grammar = known is not None and known.written is not None
    return PLAIN_CALLS if offered.required and not has_grammar else known


def constrain_calls(
    offered: OfferedTools, content: Named | None, call_format: ToolCallFormat | None, vocabulary: Vocabulary
) -> Named | None:
    """Return what an answer keeps to, calls and all; ``None`` where nobody asked for anything.

    Args:
        offered: of the request.
        content: what an answer without calls keeps to.
        call_format: how the answer has calls; ``None`` where none are looked for.
        vocabulary: the target's.

    Raises:
        FieldError: it cannot be had.
    """
    if call_format is None:
        return content
    # Of a format that is described for reading alone, the reader sees to it that there is one.
    needs_grammar = (offered.restricted or not offered.several) and call_format.written is not None
    if not (offered.is_strict or needs_grammar or content is not None):
        return content
    schema = _content_schema(content, call_format, required=offered.required)
    field = "tool_choice" if offered.required else "tools"
    tools = [tool for tool in offered.tools if offered.only in ("", tool["function"]["name"])]
    try:
        source = build_calls_source(
            call_format,
            tools,
            required=offered.required,
            parallel=offered.several,
            control_ids=control_marks(call_format, vocabulary),
            content=schema,
        )
        return Named(field, source)
    except ConstraintError as error:
        raise FieldError(field, str(error)) from None


def _content_schema(
    content: Named | None, call_format: ToolCallFormat, *, required: bool
) -> JsonSchema | JsonObject | None:
    """Return what content keeps to, as a part of a grammar that has calls too."""
    if content is None:
        return None
    source = content.source
    if not isinstance(source, JsonSchema | JsonObject):
        raise FieldError(
            content.field,
            f"{content.field} beside tools would need a schema, as in response_format: leave one out, or send "
            "tool_choice none",
        )
    if call_format.bare and not required:
        raise FieldError(
            content.field,
            f"{content.field} beside tools: this model writes calls as JSON too, and no mark tells them apart: leave "
            "one out, or send tool_choice required or none",
        )
    return source


def _check_tools(tools: Sequence[Any]) -> None:
    for number, tool in enumerate(tools):
        _check_tool(tool, f"tools[{number}]")
    if len(tools) > _MAX_TOOLS:
        raise FieldError("tools", f"{len(tools)} tools: at most {_MAX_TOOLS} are accepted")


def _check_tool(tool: Any, place: str) -> None:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise FieldError("tools", f"{place} is not a function: give it the type function, and a function with a name")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise FieldError("tools", f"{place}.function has no name: give one")
    if not isinstance(function.get("parameters", {}), dict | None):
        raise FieldError(
            "tools", f"{place}.function.parameters is {shown(function['parameters'])}: give a JSON schema, or nothing"
        )


def _read_allowed_tools(choice: Any) -> tuple[Any, list[str] | None]:
    """Return a choice without its list of tools, and the names in that; ``None`` where any tool may be called."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return choice, None
    # The Responses API has mode and tools beside the type.
    inner = choice.get("allowed_tools", choice)
    mode, tools = (inner.get(name) if isinstance(inner, dict) else None for name in ("mode", "tools"))
    if mode not in ("auto", "required"):
        raise FieldError("tool_choice", f"tool_choice.allowed_tools has mode {shown(mode)}: give auto or required")
    functions = [_function_in(tool) for tool in tools] if isinstance(tools, list) else []
    names = [function["name"] for function in functions if function is not None]
    if not names or len(names) < len(functions):
        raise FieldError("tool_choice", "tool_choice.allowed_tools needs tools: a list of functions with their names")
    return mode, names


def _function_in(tool: Any) -> Mapping[str, Any] | None:
    """Return what names a function; ``None`` where nothing does. The Responses API has the name beside the type."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return None
    function = tool.get("function", tool)
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def _describe_choice(choice: Any) -> str:
    """Return a choice as a message shows it: of an object its type."""
    return f"of type {shown(choice.get('type', 'function'))}" if isinstance(choice, dict) else shown(choice)


def _read_forced_tool(choice: Any) -> str:
    """Return the name of the function that has to be called; empty where none is named."""
    if choice in ("none", "auto", "required"):
        return ""
    function = _function_in(choice)
    if function is None or not function["name"]:
        raise FieldError(
            "tool_choice",
            f"tool_choice is {_describe_choice(choice)}: give none, auto, required, a function with its name, or "
            "allowed_tools",
        )
    return str(function["name"])
