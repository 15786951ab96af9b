"""How a conversation is written: the fields of chats, read into :class:`~paceline.chat.params.ChatParams`.

Many clients send their settings of reasoning always, whatever the model is. A setting that changes nothing for the
model is taken without a word. One that the model cannot follow is left out, and the answer's ``warnings`` say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from paceline.chat.params import ChatParams
from paceline.chat.reader import reasons, refuses_level, unfollowed, with_level_as_switch
from paceline.chat.template import ChatTemplate
from paceline.core.errors import InputError
from paceline.core.numbers import shown
from paceline.serving.bodies import ChatBody, TemplateBody, whole_of
from paceline.serving.fields import FieldError

_MOST_VARIABLES: Final = 1000

_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "thinking": ("type", "budget_tokens"),
    "reasoning": ("enabled", "effort", "max_tokens"),
}
"""Fields that hold several settings of reasoning, and those of them that are read."""

_TYPES: Final[Mapping[str, str]] = {"enabled": "on", "disabled": "off", "adaptive": "auto", "auto": "auto"}
"""What ``thinking.type`` may be."""


def chat_params_of(body: ChatBody | TemplateBody, defaults: ChatParams) -> tuple[ChatParams, dict[str, str]]:
    """Return how a conversation is written, and the names of the fields that say so, by the option.

    Args:
        body: of the request.
        defaults: of a request that says nothing else.

    Raises:
        FieldError: a field cannot be used.
    """
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, option, value in _settings_of(body):
        if value is not None:
            given[option], names[option] = value, name
    if variables := given.get("template_variables"):
        given["template_variables"] = {**defaults.template_variables, **variables}
    try:
        return replace(defaults, **given), names
    except InputError as error:
        raise FieldError(_first_at_fault(given, names, defaults), str(error)) from error


def further_settings(given: Mapping[str, Any]) -> dict[str, Any]:
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


def _settings_of(body: ChatBody | TemplateBody) -> Iterator[tuple[str, str, Any]]:
    """Yield fields that say how a conversation is written, each with its option and value; later ones count."""
    variables = body.chat_template_kwargs or {}
    if len(variables) > _MOST_VARIABLES:
        raise FieldError(
            "chat_template_kwargs",
            f"chat_template_kwargs has {len(variables)} variables: at most {_MOST_VARIABLES} are taken",
        )
    variables = dict(variables)
    yield (
        "chat_template_kwargs",
        "reasoning",
        _switch(variables.pop("enable_thinking", None), "chat_template_kwargs", "enable_thinking"),
    )
    yield "chat_template_kwargs", "template_variables", variables or None
    yield "enable_thinking", "reasoning", _switch(body.enable_thinking, "enable_thinking")
    yield from _settings_in("thinking", body.thinking)
    yield from _settings_in("reasoning", body.reasoning)
    # As in llama-server, an empty word says nothing.
    yield "reasoning_effort", "reasoning_effort", body.reasoning_effort or None
    yield "reasoning_budget_tokens", "reasoning_budget", body.reasoning_budget_tokens
    yield "thinking_budget_tokens", "reasoning_budget", body.thinking_budget_tokens
    for name in ("reasoning_format", "add_generation_prompt", "continue_final_message"):
        yield name, name, getattr(body, name, None)


def _settings_in(name: str, given: dict[str, Any] | bool | None) -> Iterator[tuple[str, str, Any]]:
    """Yield the settings in ``thinking`` or ``reasoning``."""
    if not isinstance(given, dict):
        yield name, "reasoning", _switch(given, name)
        return
    kind = given.get("type") if name == "thinking" else None
    if kind is not None and not (isinstance(kind, str) and kind in _TYPES):
        raise FieldError("thinking.type", f"thinking.type is {shown(kind)}: choose from {', '.join(_TYPES)}")
    yield "thinking.type", "reasoning", _TYPES.get(kind) if kind is not None else None
    if name == "thinking":
        yield "thinking.budget_tokens", "reasoning_budget", whole_of(given.get("budget_tokens"))
        return
    yield "reasoning.enabled", "reasoning", _switch(given.get("enabled"), "reasoning.enabled")
    yield "reasoning.effort", "reasoning_effort", given.get("effort") or None
    yield "reasoning.max_tokens", "reasoning_budget", whole_of(given.get("max_tokens"))


def _switch(value: Any, param: str, called: str = "") -> str | None:
    if value is None or isinstance(value, bool):
        return None if value is None else "on" if value else "off"
    raise FieldError(param, f"{called or param} is {shown(value)}: give true or false")


def followed(
    params: ChatParams, names: Mapping[str, str], template: ChatTemplate
) -> tuple[ChatParams, tuple[str, ...]]:
    """Return what of its options a model follows, and what the client ought to know of those that it cannot.

    Args:
        params: as they were asked for.
        names: of the fields that set options, by the option; of others, which are the server's, nothing is said.
        template: of the model.
    """
    params = with_level_as_switch(params, template)
    unused = {name: f"knows nothing of {what}" for name, what in unfollowed(params, template).items()}
    if refuses_level(params, template):
        unused["reasoning_effort"] = f"refuses the level {shown(params.reasoning_effort)}"
    # A model that does not reason does no less than was asked, and its reasoning is of no length.
    quiet = not reasons(template)
    warnings = [
        f"{names[name]} changed nothing: the model's chat template {why}"
        for name, why in unused.items()
        if name in names and not (quiet and (name == "reasoning_budget" or params.reasoning == "off"))
    ]
    left_out: dict[str, Any] = {name: getattr(ChatParams(), name) for name in unused}
    return replace(params, **left_out), tuple(warnings)


def _first_at_fault(given: Mapping[str, Any], names: Mapping[str, str], defaults: ChatParams) -> str:
    """Return the name of the first field that cannot be used by itself; else that of the last, which fits no other."""
    for option, value in given.items():
        try:
            replace(defaults, **{option: value})
        except InputError:
            return names[option]
    return names[list(given)[-1]]
