"""Tokens in, events out: an answer to a prompt while it is written, with its reasoning and calls of tools apart.

::

    Emission ──text of each token──> ReasoningSplitter ──reasoning──────────────────────────> AnswerPart
                                            └──content──> ToolCallParser ──content──────────> AnswerPart
                                                                └──call that has closed──> CallStarted, ArgumentsDelta

Streams in threads and event loops, whole replies and the server's choices are heads on it: they wait for emissions, and
say in their own form what comes of them.

There are two ways in. ``take`` is for emissions: tokens with their text, of which it makes a ``TokenEvent`` each, with
counts, ids and log-probabilities. ``push`` is for segments of text alone, and gives the parts that became final;
``take`` calls it for the text of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from paceline.chat.prompts import ChatPrompt
from paceline.chat.reasoning import AnswerPart, PartKind, ReasoningFormat, ReasoningSplitter
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted, ContentDelta, ParsedDelta
from paceline.chat.tool_calls.parser import ToolCallParser, random_id
from paceline.core.logprobs import TokenLogprob
from paceline.core.request import SOURCE_TARGET, Emission
from paceline.core.text import TextSegment

AnswerEvent: TypeAlias = AnswerPart | CallStarted | ArgumentsDelta
"""More of an answer: of its reasoning or content, or of a call of a tool."""


class TokenEvent(NamedTuple):
    """One token of an answer, with those before it that no text came of.

    Attributes:
        parts: what became final.
        token_ids: the tokens.
        logprobs: of each of them; none where they were not asked for.
        num_tokens: tokens of the answer up to here.
        sources: of each of the tokens the drafter it came from, or ``target``; none where they were not asked for.
    """

    parts: Sequence[AnswerEvent]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob]
    num_tokens: int
    sources: Sequence[str] = ()

    @property
    def num_listed(self) -> int:
        """Probabilities that come with the tokens."""
        return sum(1 + each.num_top for each in self.logprobs)

    @property
    def text(self) -> str:
        return "".join(part.segment.text for part in self.parts if isinstance(part, AnswerPart))


@dataclass(slots=True)
class AnswerBlock:
    """What an answer has in a row of one kind: reasoning, content, or one call of a tool.

    Attributes:
        kind: of its text.
        texts: its text, of a call the arguments, as it came.
        logprobs: of content, those of the tokens that ended in it, where they were asked for.
        call_id: of a call.
        name: of the function that is called.
    """

    kind: PartKind | Literal["call"]
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class AnswerAssembler:
    """Makes events of an answer; what they come to does not depend on how the answer was cut into emissions.

    Args:
        prompt: of a conversation; ``None`` of a completion, whose text is all content.
        reasoning_format: where reasoning goes.
        prefix: stands before the answer, and is no part of what the model wrote.
        keeps: whether tokens, text and message are kept.
        with_sources: whether events say where their tokens came from.
        call_ids: of calls that the model gave no id, in their order; further ones are added.

    Attributes:
        num_tokens: tokens that were taken.
        num_reasoning: how many of them are reasoning.
        num_calls: calls so far.
        token_ids: that were taken; empty unless kept.
        logprobs: log-probabilities of the tokens, where they were asked for; empty unless kept.
        blocks: what the answer has, in its order; empty unless kept.
    """

    def __init__(
        self,
        prompt: ChatPrompt | None,
        reasoning_format: ReasoningFormat = "auto",
        *,
        prefix: Sequence[AnswerPart] = (),
        keeps: bool = False,
        with_sources: bool = False,
        call_ids: list[str] | None = None,
    ) -> None:
        self.num_tokens = 0
        self.num_reasoning = 0
        self.num_calls = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._prompt = prompt
        self._format = reasoning_format
        self._keeps = keeps
        self._with_sources = with_sources
        self._call_ids = [] if call_ids is None else call_ids
        self._unsent_ids: list[int] = []
        self._unsent_logprobs: list[TokenLogprob] = []
        self._unsent_sources: list[str] = []
        self._written: list[str] = []
        self.blocks: list[AnswerBlock] = []
        self._prefix = self._unsent_prefix = prefix
        self._opening: Sequence[AnswerPart] = ()
        self._splitter: ReasoningSplitter | None = None
        self._parser: ToolCallParser | None = None
        self._last_source = SOURCE_TARGET
        if prompt is None:
            return
        markers = None if reasoning_format == "none" else prompt.markers
        self._splitter = ReasoningSplitter(markers, begun=prompt.begun, continued=prompt.continued)
        if reasoning_format == "none":
            self._opening = [AnswerPart("content", TextSegment(text, SOURCE_TARGET)) for text in self._opened_marker]
        if (calls := prompt.calls) is not None:
            self._parser = ToolCallParser(
                calls.call_format,
                calls.tools,
                required=calls.required,
                several=calls.several,
                new_id=_number_ids(self._call_ids, calls.call_format.id_length),
            )

    @property
    def written(self) -> str:
        """The text as the model wrote it, markers and calls included."""
        return "".join(self._written)

    @property
    def message(self) -> dict[str, Any]:
        """What a finished answer is: the fields of an assistant's message, in the form of OpenAI's API."""
        content = self._said("content")
        if self._format == "deepseek-legacy":
            content = self._with_reasoning(content)
        calls = [
            {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
            for block in self._calls
        ]
        message: dict[str, Any] = {"content": content or (None if calls else "")}
        if reasoning := self._said("reasoning"):
            message["reasoning_content"] = reasoning
        return message | {"tool_calls": calls} if calls else message

    def take(self, emission: Emission) -> list[TokenEvent]:
        """Add what a round brought, and return an event for each token that says something."""
        events: list[TokenEvent] = []
        if self._keeps:
            self.token_ids += emission.token_ids
            self.logprobs += emission.logprobs
        start = 0
        for place, end in enumerate(emission.segment_ends):
            self.num_tokens += 1
            self._unsent_ids.append(emission.token_ids[place])
            if emission.logprobs:
                self._unsent_logprobs.append(emission.logprobs[place])
            if self._with_sources:
                self._unsent_sources.append(emission.sources[place])
            if parts := self.push(emission.segments[start:end]):
                events.append(self._event(parts))
            self.num_reasoning += self._splitter is not None and self._splitter.is_inside
            start = end
        if emission.finish_reason is not None:
            parts = self.finish(emission.segments[start:])
            if parts or self._unsent_ids:
                events.append(self._event(parts))
        return events

    def push(self, segments: Sequence[TextSegment], *, is_last: bool = False) -> list[AnswerEvent]:
        """Add text, and return what became final; with the last of the answer all that is left."""
        parts: list[AnswerEvent]
        if self._splitter is None:
            parts = [AnswerPart("content", segment) for segment in segments]
        else:
            parts = [*self._opening, *self._splitter.push(segments)]
            self._opening = ()
            if is_last:
                parts += self._splitter.finish()
        if self._parser is not None:
            parts = self._read_calls(parts, self._parser, is_last=is_last)
        if self._unsent_prefix and (parts or is_last):
            parts[:0], self._unsent_prefix = self._unsent_prefix, ()
        if self._keeps:
            self._keep(segments, parts)
        return parts

    def finish(self, segments: Sequence[TextSegment] = ()) -> list[AnswerEvent]:
        """Add the last text, and return all that is left."""
        return self.push(segments, is_last=True)

    def read(self, text: str) -> dict[str, Any]:
        """Return the message that a whole text comes to; its calls have the ids that events gave them."""
        whole = AnswerAssembler(self._prompt, self._format, keeps=True, call_ids=self._call_ids)
        whole.finish([TextSegment(text, SOURCE_TARGET)] if text else [])
        return whole.message

    @property
    def _calls(self) -> list[AnswerBlock]:
        return [block for block in self.blocks if block.kind == "call"]

    def _said(self, kind: PartKind) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def _opened_marker(self) -> list[str]:
        """The marker of reasoning that stands in the prompt, for an answer that keeps its markers."""
        prompt = self._prompt
        is_open = prompt is not None and prompt.begun and not prompt.continued
        return [prompt.markers.start] if prompt is not None and is_open and prompt.markers is not None else []

    def _with_reasoning(self, content: str) -> str:
        """Return content with the reasoning in it, both as they were written; calls behind the reasoning stay out."""
        before = [part.segment.text for part in self._prefix if part.kind == "content"]
        written = "".join((*before, *self._opened_marker, self.written))
        prompt = self._prompt
        if not self._calls:
            return written
        if prompt is None or prompt.markers is None or prompt.markers.end not in written or not self._said("reasoning"):
            return content
        reasoning, end, answer = written.partition(prompt.markers.end)
        whole = AnswerAssembler(replace(prompt, markers=None), "none", keeps=True)
        whole.finish([TextSegment(answer, SOURCE_TARGET)])
        return f"{reasoning}{end}{whole.message['content'] or ''}"

    def _read_calls(self, parts: Sequence[AnswerEvent], parser: ToolCallParser, *, is_last: bool) -> list[AnswerEvent]:
        """Return parts with the calls in their content read out."""
        found: list[AnswerEvent] = []
        for part in parts:
            if isinstance(part, AnswerPart) and part.kind == "content":
                self._last_source = part.segment.source
                found += self._convert(parser.push(part.segment.text))
            else:
                found.append(part)
        if is_last:
            found += self._convert(parser.finish())
        self.num_calls = parser.num_calls
        return found

    def _convert(self, deltas: Sequence[ParsedDelta]) -> Iterator[AnswerEvent]:
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                # Some of it may have been withheld: its source is that of the token which made it final.
                yield AnswerPart("content", TextSegment(delta.text, self._last_source))
            else:
                yield replace(delta, source=self._last_source)

    def _keep(self, segments: Sequence[TextSegment], parts: Sequence[AnswerEvent]) -> None:
        self._written += [segment.text for segment in segments]
        ends_in: AnswerBlock | None = None
        for part in parts:
            if isinstance(part, CallStarted):
                self.blocks.append(AnswerBlock("call", call_id=part.call_id, name=part.name))
            elif isinstance(part, AnswerPart):
                if not self.blocks or self.blocks[-1].kind != part.kind:
                    self.blocks.append(AnswerBlock(part.kind))
                self.blocks[-1].texts.append(part.segment.text)
                ends_in = self.blocks[-1] if part.kind == "content" else ends_in
            else:
                self._calls[part.index].texts.append(part.text)
        if ends_in is not None:
            ends_in.logprobs += self._unsent_logprobs

    def _event(self, parts: Sequence[AnswerEvent]) -> TokenEvent:
        event = TokenEvent(parts, self._unsent_ids, self._unsent_logprobs, self.num_tokens, self._unsent_sources)
        self._unsent_ids, self._unsent_logprobs, self._unsent_sources = [], [], []
        return event


def _number_ids(ids: list[str], length: int) -> Callable[[], str]:
    """Return what gives one id after the other, and makes those that are not there yet."""
    num_given = 0

    def next_id() -> str:
        nonlocal num_given
        if num_given == len(ids):
            ids.append(random_id(length))
        num_given += 1
        return ids[num_given - 1]

    return next_id
