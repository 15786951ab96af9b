"""Answers to conversations: text with its reasoning apart, while it is written and once it is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from paceline.chat.params import ChatParams
from paceline.chat.prompts import ChatPrompt
from paceline.chat.reasoning import AnswerPart, ReasoningSplitter, build_message
from paceline.core.request import SOURCE_TARGET
from paceline.core.text import TextSegment
from paceline.streams import Generation, Stream


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer to a conversation.

    Attributes:
        message: the answer as a message, to be put at the end of the conversation. Of a message that was continued it
            is what was added.
        prompt: what the conversation came to.
        generation: the answer as it was generated, with its tokens and figures.
    """

    message: dict[str, Any]
    prompt: ChatPrompt
    generation: Generation

    @property
    def text(self) -> str:
        """What the answer says, without its reasoning and calls of tools."""
        return self.message["content"] or ""

    @property
    def tool_calls(self) -> Sequence[Mapping[str, Any]]:
        """Calls of tools, in the form of OpenAI's API; none where it is not known how the model writes them."""
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls", ())
        return calls

    @property
    def reasoning(self) -> str | None:
        """What the model thought before; ``None`` where it did not, or where it is left in the text."""
        return self.message.get("reasoning_content")


class ReplyParts:
    """Makes parts of an answer's text while it arrives, and a reply of what was generated.

    Args:
        prompt: what the conversation came to.
        params: how reasoning comes back.
    """

    def __init__(self, prompt: ChatPrompt, params: ChatParams) -> None:
        self._prompt = prompt
        self._format = params.reasoning_format
        markers = None if self._format == "none" else prompt.markers
        self._splitter = ReasoningSplitter(markers, begun=prompt.begun, continued=prompt.continued)
        # What the prompt has of an answer that keeps its markers.
        self._opening: list[AnswerPart] = []
        if self._format == "none" and prompt.begun and prompt.markers is not None and not prompt.continued:
            self._opening = [AnswerPart("content", TextSegment(prompt.markers.start, SOURCE_TARGET))]

    def push(self, segments: Sequence[TextSegment]) -> list[AnswerPart]:
        """Add text and return the parts that became final."""
        opening, self._opening = self._opening, []
        return [*opening, *self._splitter.push(segments)]

    def finish(self, segments: Sequence[TextSegment] = ()) -> list[AnswerPart]:
        """Add the last text and return all parts that are left."""
        return [*self.push(segments), *self._splitter.finish()]

    def reply(self, generation: Generation) -> Reply:
        """Return the reply that an answer is, finished or not."""
        prompt = self._prompt
        message = build_message(
            generation.text,
            prompt.markers,
            begun=prompt.begun,
            continued=prompt.continued,
            reasoning_format=self._format,
        )
        calls = {} if prompt.calls is None else prompt.calls.read(message["content"])
        return Reply({"role": "assistant", **message, **calls}, prompt, generation)


class ReplyStream:
    """An answer to a conversation while it is written: iterate for its parts. Else as :class:`~paceline.Stream`.

    Calls of tools are text in the parts, as the model writes them, and read in :meth:`result`.

    Args:
        prompt: what the conversation came to.
        stream: the answer.
        params: how reasoning comes back.
    """

    def __init__(self, prompt: ChatPrompt, stream: Stream, params: ChatParams) -> None:
        self.prompt = prompt
        self.stream = stream
        self._parts = ReplyParts(prompt, params)

    def __iter__(self) -> Iterator[AnswerPart]:
        for parts in self.rounds():
            yield from parts

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()

    def rounds(self) -> Iterator[list[AnswerPart]]:
        """Iterate round by round: the parts each made final, which may be none.

        Raises:
            PacelineError: as :meth:`paceline.Stream.rounds` does.
        """
        for segments in self.stream.rounds():
            yield self._parts.push(segments)
        yield self._parts.finish()

    def end_reasoning(self) -> bool:
        """Have the answer close the reasoning that it is in; as :meth:`paceline.Stream.end_reasoning`.

        A model that is not known to reason is in none.
        """
        return self.stream.end_reasoning()

    def close(self) -> list[AnswerPart]:
        """Cancel the answer if it still runs, and wait for that; return parts that were not read yet."""
        return self._parts.finish(self.stream.close())

    def result(self) -> Reply:
        """Return the answer, once it is there. Raises as :meth:`paceline.Stream.result` does."""
        return self._parts.reply(self.stream.result())

    def so_far(self) -> Reply:
        """Return the answer as it stands."""
        return self._parts.reply(self.stream.so_far())
