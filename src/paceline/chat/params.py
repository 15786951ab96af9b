"""What is asked of a chat template and of reasoning: the options (fields made by ``setting()``) of chats."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from paceline.chat.known_templates import KNOWN_TEMPLATES
from paceline.chat.reasoning import REASONING_FORMATS, ReasoningFormat
from paceline.core.errors import InputError
from paceline.core.fields import Flag, Option, described, same, setting, take_values
from paceline.core.numbers import shown

Reasoning: TypeAlias = Literal["on", "off", "auto"]

_OWN_VARIABLES: Final = ("messages", "tools", "add_generation_prompt", "self", "template")
"""Variables that a template has of the conversation and its options, or of jinja2."""

UNLIMITED: Final = -1
"""The reasoning budget of a model that may reason as long as it likes."""

_CHAT = functools.partial(Flag, panel="Chat")


def _parse_variables(texts: Sequence[str]) -> dict[str, Any]:
    try:
        variables = json.loads(texts[-1])
    except ValueError as error:
        raise InputError(f"`template_variables` {shown(texts[-1])} is not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise InputError(f'`template_variables` {shown(texts[-1])} is not a JSON object, such as {{"name": 1}}')
    return variables


@dataclass(frozen=True, slots=True)
class ChatParams:
    """How messages become a prompt, and an answer a message.

    Attributes:
        template: a chat template to use instead of the model's own, as its text or by llama.cpp's name for it
            (:data:`~paceline.chat.known_templates.KNOWN_TEMPLATES`).
        template_file: a chat template to use instead of the model's own.
        template_variables: variables of the template besides those that are named here.
        reasoning: whether the model is to reason before it answers; ``"auto"`` leaves it to the template.
        reasoning_effort: how much, in a word that the template knows, such as ``"high"``.
        reasoning_budget: most tokens of reasoning; 0 ends it at once, -1 is for any number.
        reasoning_budget_message: said at the end of reasoning that the budget cut off.
        reasoning_format: how reasoning comes back: ``"deepseek"``, which is ``"auto"``, keeps it apart from the
            content; ``"none"`` leaves it there with its marks; ``"deepseek-legacy"`` does both.
        forget: leave out the oldest turns of a conversation that is longer than the context, instead of refusing it.
        continue_final_message: go on with the last message, an assistant's, instead of answering it; ``None`` does so
            where the last message is an assistant's.
        add_generation_prompt: end the prompt with the beginning of a new message; ``None`` does so unless the last
            message is continued.

    Raises:
        InputError: a value cannot be used, or the last message is to be continued and a new one begun.
    """

    template: str | None = setting(
        None,
        Option("other", optional=True, variable="CHAT_TEMPLATE"),
        _CHAT(
            "--chat-template",
            f"Chat template to use instead of the model's own: its text, or {', '.join(KNOWN_TEMPLATES)}.",
            metavar="NAME|TEXT",
        ),
    )
    template_file: str | Path | None = setting(
        None,
        Option("other", variable="CHAT_TEMPLATE_FILE"),
        _CHAT("--chat-template-file", "File with the chat template to use instead of the model's own.", metavar="FILE"),
    )
    template_variables: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=described(
            Option("other", parse=_parse_variables, variable="CHAT_TEMPLATE_KWARGS", json=("chat_template_kwargs",)),
            _CHAT(
                "--chat-template-kwargs",
                "Additional variables for the chat template, as a JSON object.",
                metavar="JSON",
            ),
        ),
    )
    reasoning: Reasoning = setting(
        "auto",
        Option("choice", words=same(("on", "off", "auto"))),
        _CHAT("--reasoning -rea", "Whether to reason before the answer; auto leaves it to the chat template."),
    )
    reasoning_effort: str | None = setting(
        None,
        Option("other", optional=True),
        _CHAT(
            "--reasoning-effort",
            "Reasoning effort, in a word the chat template knows, such as low or high.",
            metavar="LEVEL",
        ),
    )
    reasoning_budget: int = setting(
        UNLIMITED,
        Option(
            "whole", called="reasoning budget", low=UNLIMITED, way_out="-1 is no limit and 0 ends reasoning at once"
        ),
        _CHAT("--reasoning-budget", "Maximum reasoning tokens; -1 for no limit."),
    )
    reasoning_budget_message: str = setting(
        "",
        Option("other"),
        _CHAT("--reasoning-budget-message", "Text inserted where the budget ends the reasoning.", metavar="TEXT"),
    )
    reasoning_format: ReasoningFormat = setting(
        "auto",
        Option("choice", words=same(REASONING_FORMATS)),
        _CHAT("--reasoning-format", "Where reasoning is returned: apart from the answer, within it (none), or both."),
    )
    forget: bool = setting(
        True,
        Option("truth"),
        _CHAT(
            "--no-forget",
            "Reject conversations longer than the context instead of dropping their oldest turns.",
            negated=True,
        ),
    )
    continue_final_message: bool | None = setting(None, Option("truth", optional=True, variable=None))
    add_generation_prompt: bool | None = setting(None, Option("truth", optional=True, variable=None))

    def __post_init__(self) -> None:
        take_values(self)
        if self.template is not None and self.template_file is not None:
            raise InputError(
                "`template` and `template_file` both give a chat template: leave out one of them", field="template_file"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InputError(
                "continue_final_message and add_generation_prompt are both true, and a prompt ends with one message: "
                "leave out one of them",
                field="continue_final_message",
            )
        if self.reasoning_effort is not None and not isinstance(self.reasoning_effort, str):
            raise InputError(
                f"the reasoning effort is {shown(self.reasoning_effort)}: give a word, such as 'high'",
                field="reasoning_effort",
            )
        if not isinstance(self.reasoning_budget_message, str):
            raise InputError(
                f"the message of the reasoning budget is {shown(self.reasoning_budget_message)}: give a text",
                field="reasoning_budget_message",
            )
        if not isinstance(self.template_variables, Mapping):
            raise InputError(
                f"the template's variables are {shown(self.template_variables)}: give a mapping",
                field="template_variables",
            )
        for name in self.template_variables:
            if not isinstance(name, str) or name in _OWN_VARIABLES:
                raise InputError(
                    f"the template's variables have {shown(name)}, which cannot be set: give texts as names, but for "
                    f"{', '.join(_OWN_VARIABLES)} (`template_variables`)",
                    field="template_variables",
                )

    @property
    def replaced_by(self) -> str | Path | None:
        """The template that stands in for the model's own: its text, or the path of its file; ``None`` for the own."""
        if self.template is not None:
            return KNOWN_TEMPLATES.get(self.template, self.template)
        return None if self.template_file is None else Path(self.template_file)
