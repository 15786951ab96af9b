"""Anthropic's messages: an answer is a list of blocks, and a stream opens and closes one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from paceline.chat.assembler import AnswerBlock, AnswerEvent, TokenEvent
from paceline.chat.reasoning import AnswerPart, PartKind
from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted
from paceline.serving.answering import Answer, Choice, Ended, Event, Progress, Round
from paceline.serving.conversations import encrypt_reasoning
from paceline.serving.errors import anthropic_body
from paceline.serving.json_output import as_events
from paceline.serving.response_formats.base import ResponseFormatter
from paceline.serving.response_formats.native import NativeFormatter

_TEXTS: Final[dict[PartKind, tuple[str, str]]] = {"content": ("text", "text"), "reasoning": ("thinking", "thinking")}
"""Types of blocks by the kind of a part, and the field that has their text."""

_PING: Final = {"type": "ping"}


class MessagesFormatter(ResponseFormatter):
    """Anthropic's messages. There is one answer to each request."""

    id_prefix: ClassVar = "msg_"
    names_events: ClassVar = True
    ping: ClassVar = as_events([_PING], named=True)

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._index = -1
        self._open: PartKind | str = ""
        conversation = self.request.conversation
        self._omits_thinking = conversation is not None and bool(conversation.own)
        # Of a stream, which keeps nothing else of it.
        self._omitted: list[str] = []

    def whole(self) -> Any:
        (choice,) = self.answer.choices
        blocks = [] if self.request.reads_only else choice.assembler.blocks
        return {
            **self._head(),
            "content": [self._block(block) for block in blocks],
            **_end(choice),
            "usage": self._usage(choice),
            **self.beside(choice),
        }

    def opening(self) -> list[dict[str, Any]]:
        (choice,) = self.answer.choices
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": {**message, "usage": self._usage(choice)}}, _PING]

    def chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Ended):
            ended = {"type": "message_delta", "delta": _end(choice), "usage": self._usage(choice)}
            return [*self._close(), {**ended, **self.beside(choice)}, {"type": "message_stop"}]
        # What Anthropic's API has no event for is told beside an event that its clients skip.
        if isinstance(event, Progress):
            return [{**_PING, "prompt_progress": self.progress(choice, event)}]
        if self.request.reads_only:
            return []
        if isinstance(event, Round):
            return [{**_PING, "round": self.round(event)}]
        found = [chunk for part in event.parts for chunk in self._said(part)]
        beside: dict[str, Any] = {"sources": list(event.sources)} if event.sources else {}
        if self.request.timings_per_token:
            beside["timings"] = self.running_timings(choice)
        return [*found, {**_PING, **beside}] if beside else found

    def failed(self, error: Exception) -> list[dict[str, Any]]:
        return [anthropic_body(error)[1]]

    def beside(self, choice: Choice) -> dict[str, Any]:
        """As llama-server does, answers of this API have no ``timings`` unasked."""
        found = super().beside(choice)
        if not self.request.timings_per_token:
            del found["timings"]
        if self.request.verbose:
            found["__verbose"] = NativeFormatter(self.answer).finished(choice, in_stream=self.request.stream)
        return found

    def _texts(self, event: TokenEvent) -> list[tuple[PartKind, str]] | None:
        texts = [
            (part.kind, part.segment.text)
            for part in event.parts
            if isinstance(part, AnswerPart) and part.kind == self._open and not self._omits(part.kind)
        ]
        return texts if len(texts) == len(event.parts) else None

    def _omits(self, kind: PartKind) -> bool:
        """Whether texts of a kind are not shown."""
        return kind == "reasoning" and self._omits_thinking

    def _head(self) -> dict[str, Any]:
        return {"id": self.answer.id, "type": "message", "role": "assistant", "model": self.answer.served.id}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """Return the counts of tokens; those of the input add up to the prompt."""
        return {
            "input_tokens": choice.num_prompt - choice.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached,
            "output_tokens": self.num_output(choice),
            "output_tokens_details": self.output_details("thinking_tokens"),
        }

    def _said(self, part: AnswerEvent) -> Iterator[dict[str, Any]]:
        if isinstance(part, CallStarted):
            yield from self._begin("call", _call(part.call_id, part.name, {}))
        elif isinstance(part, ArgumentsDelta):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        else:
            kind, name = _TEXTS[part.kind]
            if self._open != part.kind:
                yield from self._begin(part.kind, _text(part.kind, ""))
            if self._omits(part.kind):
                self._omitted.append(part.segment.text)
            else:
                yield self._delta({"type": f"{kind}_delta", name: part.segment.text})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = kind
        self._index += 1
        # They have the number of a block.
        self._frames.clear()
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": self._sign("".join(self._omitted))})
            self._omitted.clear()
        if self._open:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = ""

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _block(self, block: AnswerBlock) -> dict[str, Any]:
        if block.kind == "call":
            return _call(block.call_id, block.name, json.loads(block.text or "{}"))
        found = _text(block.kind, "" if self._omits(block.kind) else block.text)
        return found | {"signature": self._sign(block.text)} if block.kind == "reasoning" else found

    def _sign(self, thought: str) -> str:
        """Return the signature of reasoning: nothing, as none but Anthropic can sign, or what is not shown of it."""
        return encrypt_reasoning(thought) if self._omits_thinking else ""


def _end(choice: Choice) -> dict[str, Any]:
    return {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stopping_word or None}


def _stop_reason(choice: Choice) -> str:
    if choice.truncated:
        return "model_context_window_exceeded"
    if choice.is_cut_off:
        return "max_tokens"
    if choice.assembler.num_calls:
        return "tool_use"
    return "stop_sequence" if choice.stop_type == "word" else "end_turn"


def _text(kind: PartKind, text: str) -> dict[str, Any]:
    type_, name = _TEXTS[kind]
    # Clients look for the field.
    return {"type": type_, name: text, **({"signature": ""} if kind == "reasoning" else {})}


def _call(call_id: str, name: str, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}
