"""What OpenAI's completions and chat completions have in common: what all parts have, ends, and counts."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import Any, ClassVar

from paceline.chat.assembler import TokenEvent
from paceline.serving.answering import Answer, Choice, Ended, Event, Progress, Round
from paceline.serving.model_host import BUILD
from paceline.serving.response_formats.base import ResponseFormatter
from paceline.serving.response_formats.native import NativeFormatter, num_said


class OpenAiFormatter(ResponseFormatter):
    """An API of OpenAI's whose answers are ``choices``."""

    ends_with_done: ClassVar = True
    whole_object = ""
    chunk_object = ""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._opened: set[int] = set()
        self._num_ended = 0

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return one finished answer."""

    @abstractmethod
    def nothing(self, choice: Choice) -> dict[str, Any]:
        """Return what ``choices`` of a chunk has where nothing was said."""

    def waiting(self, choice: Choice) -> dict[str, Any]:
        """Return what ``choices`` of a chunk has while the prompt is read."""
        return self.nothing(choice)

    @abstractmethod
    def token_chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        """Return what a stream says of a token."""

    @abstractmethod
    def end_fields(self, choice: Choice) -> dict[str, Any]:
        """Return what stands beside ``choices`` in the chunk that says why an answer ended."""

    def add_beside(self, chunk: dict[str, Any], choice: Choice, event: TokenEvent) -> None:
        """Put beside the text of a token what else was asked for."""
        if self.request.return_token_ids:
            chunk["choices"][0]["token_ids"] = list(event.token_ids)
        if event.sources:
            chunk["sources"] = list(event.sources)
        if self.request.timings_per_token:
            chunk["timings"] = self.running_timings(choice)

    @functools.cached_property
    def native(self) -> NativeFormatter:
        """Writes the same answer as llama-server does, for those who want all that is known."""
        return NativeFormatter(self.answer)

    def head(self, *, in_stream: bool) -> dict[str, Any]:
        return {
            "id": self.answer.id,
            "object": self.chunk_object if in_stream else self.whole_object,
            "created": self.answer.created,
            "model": self.answer.served.id,
            "system_fingerprint": BUILD,
        }

    def chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self.head(in_stream=True), "choices": list(choices)}

    def finish_reason(self, choice: Choice) -> str:
        """Return why an answer ended, in OpenAI's words."""
        if choice.is_cut_off:
            return "length"
        return "tool_calls" if choice.assembler.num_calls else "stop"

    def usage(self) -> dict[str, Any]:
        """Return the counts of tokens of all answers. A prompt counts once, however many answers it has."""
        choices = self.answer.choices
        completion = sum(map(self.num_output, choices))
        firsts = {id(choice.prompt): choice for choice in reversed(choices)}.values()
        prompt = sum(choice.num_prompt for choice in firsts)
        return {
            "completion_tokens": completion,
            "prompt_tokens": prompt,
            "total_tokens": completion + prompt,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in firsts)},
            "completion_tokens_details": self.output_details("reasoning_tokens"),
        }

    def token_ids(self, choice: Choice) -> list[int]:
        return [] if self.request.reads_only else choice.assembler.token_ids

    def _running_usage(self, choice: Choice, event: Event) -> dict[str, Any]:
        """Return the counts of one answer so far, as vLLM does."""
        said = 0 if self.request.reads_only else num_said(choice, event)
        return {"prompt_tokens": choice.num_prompt, "completion_tokens": said, "total_tokens": choice.num_prompt + said}

    def whole(self) -> Any:
        choices = [self.choice(choice) for choice in self.answer.choices]
        if len(choices) > 1:
            # Each has its own times; beside the list stand those of the first.
            for found, choice in zip(choices, self.answer.choices, strict=True):
                found |= self.times(choice)
        found = {
            **self.head(in_stream=False),
            "choices": choices,
            "usage": self.usage(),
            **self.beside(self.answer.choices[0]),
        }
        if self.request.verbose:
            found["__verbose"] = self.native.finished(self.answer.choices[0])
        return found

    def chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        found = [*self.before(choice, event), *self._chunks(choice, event)]
        if self.request.continuous_usage:
            found = [{**chunk, "usage": chunk.get("usage") or self._running_usage(choice, event)} for chunk in found]
        return found

    @abstractmethod
    def before(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        """Return what a stream says before an event."""

    def _chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Ended):
            return self._end(choice)
        if isinstance(event, Progress):
            return [{**self.chunk(self.waiting(choice)), "prompt_progress": self.progress(choice, event)}]
        if self.request.reads_only:
            return []
        if isinstance(event, Round):
            return [{**self.chunk(self.nothing(choice)), "round": self.round(event)}]
        return self.token_chunks(choice, event)

    def _end(self, choice: Choice) -> list[dict[str, Any]]:
        ended = {**self.nothing(choice), "finish_reason": self.finish_reason(choice)}
        found = [{**self.chunk(ended), **self.end_fields(choice)}]
        self._num_ended += 1
        if self._num_ended == len(self.answer.choices) and self.request.include_usage:
            found.append({**self.chunk(), "usage": self.usage(), **self.beside(choice)})
        return found
