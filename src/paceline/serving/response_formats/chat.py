"""OpenAI's chat completions, with reasoning apart as llama-server and DeepSeek have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from paceline.chat.assembler import AnswerEvent, TokenEvent
from paceline.chat.reasoning import AnswerPart, PartKind
from paceline.chat.tool_calls.base import CallStarted
from paceline.core.logprobs import TokenLogprob
from paceline.serving.answering import Choice, Event, Progress
from paceline.serving.response_formats.openai import OpenAiFormatter

_FIELDS: Final = {"content": "content", "reasoning": "reasoning_content"}
"""Fields of a message by the kind of a part."""


class ChatFormatter(OpenAiFormatter):
    """OpenAI's chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, choice: Choice) -> dict[str, Any]:
        found = {
            "index": choice.number,
            "message": {"role": "assistant", **choice.assembler.message},
            "finish_reason": self.finish_reason(choice),
            "logprobs": self._logprobs(choice.assembler.logprobs),
        }
        return found | {"token_ids": self.token_ids(choice)} if self.request.return_token_ids else found

    def whole(self) -> Any:
        found, first = super().whole(), self.answer.choices[0]
        if self.request.num_prompt_logprobs is not None:
            found["prompt_logprobs"] = self.prompt_probabilities(first)
        if self.request.return_token_ids:
            found["prompt_token_ids"] = list(first.prompt.token_ids)
        return found

    def nothing(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {})

    def waiting(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, {"role": "assistant", "content": None})

    def before(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        """Return whose answer it is, before all that it says."""
        if choice.number in self._opened or isinstance(event, Progress):
            return []
        self._opened.add(choice.number)
        first = self.chunk(self.waiting(choice))
        if self.request.return_token_ids:
            first["prompt_token_ids"] = list(choice.prompt.token_ids)
        return [first]

    def token_chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        """Return the chunks of a token: one for each kind of text that it ends."""
        found = [self.chunk(self._delta(choice, _part_delta(part))) for part in event.parts]
        if not found and (event.logprobs or event.sources or self.request.return_token_ids):
            # The end of the answer, which adds no text.
            found = [self.chunk(self.nothing(choice))]
        if not found:
            return []
        if event.logprobs:
            found[-1]["choices"][0]["logprobs"] = self._logprobs(event.logprobs)
        self.add_beside(found[-1], choice, event)
        return found

    def end_fields(self, choice: Choice) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.request.verbose:
            found["__verbose"] = self.native.finished(choice, in_stream=True)
        if not self.request.include_usage or len(self.answer.choices) > 1:
            # Else it stands beside the counts, which come next.
            found |= self.beside(choice)
        return found

    def _texts(self, event: TokenEvent) -> list[tuple[PartKind, str]] | None:
        texts = [(part.kind, part.segment.text) for part in event.parts if isinstance(part, AnswerPart)]
        return texts if len(texts) == len(event.parts) else None

    def _delta(self, choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": choice.number, "delta": delta, "finish_reason": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None or self.request.reads_only or not logprobs:
            return None
        return {"content": self.probabilities(logprobs), "refusal": None}


def _part_delta(part: AnswerEvent) -> dict[str, Any]:
    if isinstance(part, AnswerPart):
        return {_FIELDS[part.kind]: part.segment.text}
    if isinstance(part, CallStarted):
        function = {"name": part.name, "arguments": ""}
        return {"tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
