"""Answers to conversations: events while they are written, and the message that they are in the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from paceline.chat.assembler import AnswerAssembler, AnswerEvent
from paceline.chat.params import ChatParams
from paceline.chat.prompts import ChatPrompt
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

    @classmethod
    def of(cls, generation: Generation, prompt: ChatPrompt, assembler: AnswerAssembler) -> Reply:
        """Return the reply that an answer is, finished or not."""
        return cls({"role": "assistant", **assembler.read(generation.text)}, prompt, generation)

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


class ReplyStream:
    """An answer to a conversation while it is written: iterate for its parts. Else as :class:`~paceline.Stream`.

    A part is an :class:`~paceline.AnswerPart` of reasoning or content. Where there are tools, calls come as
    :class:`~paceline.CallStarted` and :class:`~paceline.ArgumentsDelta`, each call once it has closed: one that is
    broken or cut off is content.

    Args:
        prompt: what the conversation came to.
        stream: the answer.
        params: how reasoning comes back.
    """

    def __init__(self, prompt: ChatPrompt, stream: Stream, params: ChatParams) -> None:
        self.prompt = prompt
        self.stream = stream
        self._assembler = AnswerAssembler(prompt, params.reasoning_format)

    def __iter__(self) -> Iterator[AnswerEvent]:
        for parts in self.rounds():
            yield from parts

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stream.close()

    def rounds(self) -> Iterator[list[AnswerEvent]]:
        """Iterate round by round: the parts each made final, which may be none.

        Raises:
            PacelineError: as :meth:`paceline.Stream.rounds` does.
        """
        for segments in self.stream.rounds():
            yield self._assembler.push(segments)
        yield self._assembler.finish()

    def end_reasoning(self) -> bool:
        """Have the answer close the reasoning that it is in; as :meth:`paceline.Stream.end_reasoning`.

        A model that is not known to reason is in none.
        """
        return self.stream.end_reasoning()

    def close(self) -> list[AnswerEvent]:
        """Cancel the answer if it still runs, and wait for that; return parts that were not read yet."""
        return self._assembler.finish(self.stream.close())

    def result(self) -> Reply:
        """Return the answer, once it is there. Raises as :meth:`paceline.Stream.result` does."""
        return Reply.of(self.stream.result(), self.prompt, self._assembler)

    def so_far(self) -> Reply:
        """Return the answer as it stands."""
        return Reply.of(self.stream.so_far(), self.prompt, self._assembler)
