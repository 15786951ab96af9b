"""A model's conversations as prompts: which messages, which of the template's variables, which tokens."""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from paceline.chat.call_history import CallForm, check_arguments, convert_calls, find_call_form
from paceline.chat.continuation import add_beginning, is_continued
from paceline.chat.marked_text import MarkedText, trailing_template_text
from paceline.chat.messages import Message, count_leading, plain_data, read_messages
from paceline.chat.params import UNLIMITED, ChatParams
from paceline.chat.prompts import ChatPrompt, expect_calls, tokenize_rendered
from paceline.chat.reasoning import ReasoningMarkers, build_budget, find_markers, opens_reasoning, preserved_ids
from paceline.chat.template import ChatTemplate
from paceline.chat.tool_calls.base import ExpectedCalls
from paceline.chat.tool_calls.response_template import find_call_format
from paceline.core.errors import ContextLengthError, InputError, ModelFileError, longer_context
from paceline.core.vocabulary import Vocabulary
from paceline.vocabularies.length import most_tokens

if TYPE_CHECKING:
    from paceline.options import GenerateOptions

_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which templates have reasoning switched."""
_EFFORT: Final = "reasoning_effort"

_NO_EFFORT: Final = "none"
"""OpenAI's level for no reasoning at all."""

_HELLO: Final[Sequence[Message]] = ({"role": "user", "content": "Hello"},)

_ANYTHING: Final = "probed content"

_ROOM_FOR_ANSWERS: Final = 4
"""A conversation leaves this part of the context to its answer, if that may be so long."""


class _RenderedPrompt(NamedTuple):
    text: MarkedText
    token_ids: list[int]
    begun: bool


class ChatPromptBuilder:
    """Makes prompts of conversations for one model, which was made for ``trained`` tokens. Any thread may use it."""

    def __init__(
        self, template: ChatTemplate, vocabulary: Vocabulary, context_length: int, *, trained: int | None = None
    ) -> None:
        self.template = template
        self.markers: ReasoningMarkers | None = find_markers(template.source)
        self._vocabulary = vocabulary
        self._context_length = context_length
        self._trained = trained

    def prompt(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        params: ChatParams,
        max_tokens: int,
    ) -> ChatPrompt:
        """Return what a conversation comes to. With 0 ``max_tokens`` it is only looked at, and may be of any length.

        Raises:
            InputError: the messages cannot be used, or the template knows nothing of an option.
            ContextLengthError: they leave no room for an answer.
            ModelFileError: the template does what it must not.
        """
        self._refuse_unsupported(params)
        params = convert_level_to_switch(params, self.template)
        read = [self._adapt_message(message) for message in read_messages(messages)]
        reasoning = self._reasoning_variables(params)
        variables = {**params.template_variables, **reasoning}
        continues = is_continued(read, params)
        is_open = continues or params.add_generation_prompt is not False

        def write_out(conversation: Sequence[Message]) -> MarkedText:
            some = self._empty_tools if tools is None else tools
            try:
                return self.template.render(conversation, tools=some, add_generation_prompt=is_open, **variables)
            except InputError as error:
                check_arguments(conversation)
                # A template says why it refuses a conversation, and only trying tells what it takes.
                for field, others in (
                    ("template_variables", {"tools": some, **reasoning}),
                    ("tools", {"tools": self._empty_tools, **variables}),
                ):
                    with contextlib.suppress(InputError, ModelFileError):
                        self.template.render(conversation, add_generation_prompt=is_open, **others)
                        error.field = error.field or field
                raise

        begins = read[:-1] if continues else read
        in_form = next(
            (form for form in (list, _join_system) if not _drops_system(form(begins), write_out)), _merge_system
        )

        def render(conversation: Sequence[Message]) -> MarkedText:
            return write_out(in_form(conversation))

        def begin(conversation: Sequence[Message]) -> tuple[MarkedText, bool]:
            if not continues:
                text = render(conversation)
                # Behind all that others wrote, who may spell markers too.
                ending = trailing_template_text(text)
                return text, self.markers is not None and opens_reasoning(ending, self.markers)
            opening = render(conversation[:-1])
            return add_beginning(opening, conversation[-1], self.markers, origin=self.template.origin)

        # The oldest turns are left out, so how many messages there are tells which.
        begun_by: dict[int, tuple[MarkedText, bool]] = {}
        written: dict[int, _RenderedPrompt] = {}

        def begin_once(conversation: Sequence[Message]) -> tuple[MarkedText, bool]:
            if len(conversation) not in begun_by:
                begun_by[len(conversation)] = begin(conversation)
            return begun_by[len(conversation)]

        def write(conversation: Sequence[Message]) -> _RenderedPrompt:
            if len(conversation) not in written:
                text, begun = begin_once(conversation)
                token_ids = tokenize_rendered(text, self._vocabulary, adds_opening=self.template.adds_opening)
                written[len(conversation)] = _RenderedPrompt(text, token_ids, begun)
            return written[len(conversation)]

        def count(conversation: Sequence[Message]) -> int:
            """Return the tokens of a conversation, or how many it has at least where these are too many."""
            least = self._fewest_tokens(begin_once(conversation)[0])
            return least if least > room else len(write(conversation).token_ids)

        self._check_roles(read, lambda conversation: begin(conversation)[0])
        kept: Sequence[Message] = read
        room = self._context_length - min(max_tokens, self._context_length // _ROOM_FOR_ANSWERS)
        if params.forget:
            kept = drop_oldest_turns(read, count, most=room, aim=room * 3 // 4)
        least = self._fewest_tokens(begin_once(kept)[0]) if max_tokens else 0
        if least >= self._context_length:
            raise self._too_long(least, forgets=params.forget, is_least=True)
        text, token_ids, begun = write(kept)
        if max_tokens and len(token_ids) >= self._context_length:
            raise self._too_long(len(token_ids), forgets=params.forget)
        return ChatPrompt(
            text=str.__str__(text),
            token_ids=token_ids,
            messages=kept,
            num_left_out=len(read) - len(kept),
            markers=self.markers,
            begun=begun,
            continued=continues and any(kept[-1].get(name) for name in ("content", "reasoning_content")),
            options=self._options(params, begun),
        )

    def reading_calls(self, prompt: ChatPrompt, tools: Sequence[Mapping[str, Any]] | None) -> ChatPrompt:
        """Return a prompt of whose answer calls are read, if there are tools and their format is known."""
        call_format = find_call_format(self.template) if tools else None
        if call_format is None:
            return prompt
        return expect_calls(prompt, ExpectedCalls(call_format, plain_data(tools, "'tools'")), self._vocabulary)

    def _fewest_tokens(self, text: MarkedText) -> int:
        """Return how many tokens a text has at least, if that may be too many: it is told in far less time."""
        if most_tokens(text) < self._context_length:
            return 0
        return self._vocabulary.fewest_tokens(str.__str__(text))

    def _too_long(self, num_tokens: int, *, forgets: bool, is_least: bool = False) -> ContextLengthError:
        what = "the last turn of the conversation" if forgets else "the conversation"
        way_out = "shorten it" if forgets else "start a new one, let it forget (`forget=True`)"
        longer = longer_context(self._context_length, self._trained, "raise the context length (`context_length`)")
        return ContextLengthError(
            f"{what} has {'at least ' if is_least else ''}{num_tokens} tokens and the context holds "
            f"{self._context_length}, answer included: {way_out}, or {longer}"
        ).with_lengths(num_tokens, self._context_length, is_least=is_least)

    def _adapt_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in roles that the template knows, with calls in the form that it reads."""
        if message["role"] == "developer" and "developer" not in self.template.source:
            return {**message, "role": "system"}
        if "tool_calls" in message:
            message = convert_calls(message, self._call_form)
        # Nothing said and no call made: some templates put texts beside a content that has to be one.
        return message if "content" in message or "tool_calls" in message else {**message, "content": ""}

    @functools.cached_property
    def _call_form(self) -> CallForm:
        return find_call_form(self.template)

    @functools.cached_property
    def _empty_tools(self) -> list[Mapping[str, Any]] | None:
        """What stands for no tools: a template that is made for conversations with tools may need a list."""
        choices: tuple[list[Mapping[str, Any]] | None, ...] = (None, [])
        for tools in choices:
            with contextlib.suppress(InputError):
                self.template.render(_HELLO, tools=tools)
                return tools
        return None

    def _check_roles(self, messages: Sequence[Message], render: Callable[[Sequence[Message]], MarkedText]) -> None:
        """Refuse messages that the template leaves out without a word, as many do with roles they do not know."""
        # Of one message of the system at the beginning it is known that it has a place, or was merged.
        start = 1 if count_leading(messages) == 1 < len(messages) else 0
        said = [number for number, message in enumerate(messages) if number >= start and _has_text(message)]
        for role in {messages[number]["role"] for number in said} - {"user", "assistant"}:
            of_role = [number for number in said if messages[number]["role"] == role]
            # Many read what the system says at the beginning, and there alone.
            for group in [of_role[:1], of_role[1:]] if role == "system" and not start else [of_role]:
                if group and self._drops_messages(messages, group, render):
                    raise self._lost(messages, group[0])
        # Some write one message of the system in the place of all of them.
        of_system = [number for number, one in enumerate(messages) if one["role"] == "system" and _has_text(one)]
        for number in self._missing(messages, of_system, render) if len(of_system) > 1 else ():
            if self._drops_messages(messages, [number], render):
                raise self._lost(messages, number)

    def _lost(self, messages: Sequence[Message], number: int) -> InputError:
        return InputError(
            f"the chat template of {self.template.origin} leaves out message {number + 1}: it does not know the role "
            f"{messages[number]['role']!r} there; use another, such as 'user'"
        )

    def _drops_messages(
        self, messages: Sequence[Message], numbers: Sequence[int], render: Callable[[Sequence[Message]], MarkedText]
    ) -> bool:
        """Return whether the template writes the same whatever is said in some of the messages."""
        others = _with_contents(messages, dict.fromkeys(numbers, _ANYTHING))
        try:
            return render(others) == render(messages)
        except InputError:
            # What it says of the whole conversation comes later, if anything.
            return False

    def _missing(
        self, messages: Sequence[Message], numbers: Sequence[int], render: Callable[[Sequence[Message]], MarkedText]
    ) -> list[int]:
        """Return which of some messages do not stand in what the template writes as they are; it may change texts."""
        probes = {number: f"{_ANYTHING} {number}." for number in numbers}
        try:
            text = str.__str__(render(_with_contents(messages, probes)))
        except InputError:
            return []
        return [number for number, probe in probes.items() if probe not in text]

    def _reasoning_variables(self, params: ChatParams) -> dict[str, Any]:
        variables: dict[str, Any] = {}
        if params.reasoning != "auto":
            variables.update(dict.fromkeys(_find_switches(self.template), params.reasoning == "on"))
        if params.reasoning_effort is not None:
            variables[_EFFORT] = params.reasoning_effort
        return variables

    def _options(self, params: ChatParams, begun: bool) -> GenerateOptions:
        """Return what a request needs so that its reasoning can be told and bounded."""
        markers = self.markers
        budget = params.reasoning_budget
        if params.reasoning == "off" and not _find_switches(self.template):
            # A template without a switch; the model is made to say that it is done.
            budget = 0
        if markers is None:
            return {}
        message = params.reasoning_budget_message
        return {
            "preserved_ids": preserved_ids(markers, self._vocabulary),
            "reasoning_budget": build_budget(markers, self._vocabulary, budget, begun=begun, message=message),
        }

    def _refuse_unsupported(self, params: ChatParams) -> None:
        for name, what in find_unsupported_options(
            convert_level_to_switch(params, self.template), self.template
        ).items():
            asked = _EFFORT if params.reasoning_effort == _NO_EFFORT and name == "reasoning" else name
            raise InputError(
                f"the chat template of {self.template.origin} does not support {what}: leave out "
                f"`{asked}={getattr(params, asked)!r}`",
                field=asked,
            )


def convert_level_to_switch(params: ChatParams, template: ChatTemplate) -> ChatParams:
    """Return options in which the level ``"none"`` switches reasoning off, which few templates know as a level."""
    if params.reasoning_effort != _NO_EFFORT:
        return params
    has_markers = find_markers(template.source) is not None
    has_level = _EFFORT in template.variables and not _find_switches(template)
    if has_level and not has_markers:
        # Nothing else is known of it.
        return params
    has_level = has_level and any(f"{quote}{_NO_EFFORT}{quote}" in template.source for quote in "'\"")
    return replace(params, reasoning="off", reasoning_effort=_NO_EFFORT if has_level else None)


def find_unsupported_options(params: ChatParams, template: ChatTemplate) -> dict[str, str]:
    """Return the options of reasoning that a template knows nothing of: by name, what it knows nothing of."""
    found = {}
    if params.reasoning != "auto" and not is_reasoning_model(template):
        found["reasoning"] = "reasoning"
    if params.reasoning_effort is not None and _EFFORT not in template.variables:
        found["reasoning_effort"] = "levels of reasoning"
    if params.reasoning_budget != UNLIMITED and find_markers(template.source) is None:
        found["reasoning_budget"] = "reasoning"
    return found


def is_reasoning_model(template: ChatTemplate) -> bool:
    return find_markers(template.source) is not None or bool(_find_switches(template))


def refuses_level(params: ChatParams, template: ChatTemplate) -> bool:
    """Return whether a template refuses every conversation with a level of reasoning, and takes one without it."""
    level = params.reasoning_effort
    if level is None or _EFFORT not in template.variables:
        return False

    def is_taken(variables: Mapping[str, Any]) -> bool:
        try:
            template.render(_HELLO, **variables)
        except InputError:
            return False
        return True

    return not is_taken({_EFFORT: level}) and is_taken({})


def _find_switches(template: ChatTemplate) -> list[str]:
    return [name for name in _SWITCHES if name in template.variables]


def drop_oldest_turns(
    messages: Sequence[Message], count_tokens: Callable[[Sequence[Message]], int], *, most: int, aim: int
) -> list[Message]:
    """Return the conversation without as many of its oldest turns as have to go.

    What the system says at the beginning stays, and so does the last turn, however long it is. A turn begins with a
    user's message.

    Args:
        messages: of the conversation.
        count_tokens: returns the tokens that messages come to.
        most: tokens that fit. A conversation with no more is returned whole.
        aim: tokens to come down to, fewer than ``most``: a beginning that changes with every turn would have to be read
            anew with every turn.
    """
    if count_tokens(messages) <= most:
        return list(messages)
    leading = count_leading(messages)
    turns = [place for place in range(leading, len(messages)) if messages[place]["role"] == "user"]
    later = [place for place in turns if place > leading]

    def without(first: int) -> list[Message]:
        return [*messages[:leading], *messages[first:]]

    # Fewer turns have fewer tokens, so the first that fits is found by halving.
    found = bisect.bisect_left(later, True, key=lambda first: count_tokens(without(first)) <= aim)
    return without(later[min(found, len(later) - 1)] if later else leading)


def _drops_system(messages: Sequence[Message], render: Callable[[Sequence[Message]], MarkedText]) -> bool:
    """Return whether a template has no place for some of what the system says at the beginning of a conversation.

    Of some it depends on the conversation: they write it beside tools alone, or before the last message if that is a
    user's.
    """
    first = count_leading(messages)
    if not 0 < first < len(messages):
        return False
    try:
        text = render(messages)
    except InputError:
        return True
    for number in range(first):
        if _has_text(messages[number]):
            with contextlib.suppress(InputError):
                if text == render([*messages[:number], *messages[number + 1 :]]):
                    return True
    return False


def _join_system(messages: Sequence[Message]) -> Sequence[Message]:
    first = count_leading(messages)
    return [_join(messages[:first], messages[0]), *messages[first:]] if first > 1 else messages


def _merge_system(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages with what the system says at the beginning of the first turn, as llama.cpp does."""
    first = count_leading(messages)
    if not 0 < first < len(messages):
        return messages
    return [_join(messages[: first + 1], messages[first]), *messages[first + 1 :]]


def _join(messages: Sequence[Message], into: Message) -> dict[str, Any]:
    parts = [part for message in messages for part in _content_parts(message)]
    content: Any = parts
    if isinstance(into.get("content", ""), str):
        content = "\n".join(part["text"] for part in parts)
    return {**into, "content": content}


def _content_parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content") or []
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_contents(messages: Sequence[Message], contents: Mapping[int, str]) -> list[Message]:
    return [
        {**message, "content": contents[number]} if number in contents else message
        for number, message in enumerate(messages)
    ]


def _has_text(message: Message) -> bool:
    """Return whether a message has a text; one without may be left out."""
    content = message.get("content", "")
    return bool(content.strip() if isinstance(content, str) else content)
