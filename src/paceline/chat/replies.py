"""Answers to conversations: events while they are written, and the message that they are in the end.

Nothing here imports asyncio, which takes a while.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.chat.assembler import AnswerAssembler, AnswerEvent
from paceline.chat.params import ChatParams
from paceline.chat.prompts import ChatPrompt
from paceline.core.request import Emission
from paceline.streams import Generation, Stream

if TYPE_CHECKING:
    from paceline.async_streams import AsyncStream


@dataclass(frozen=True, slots=True, repr=False)
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

    def __repr__(self) -> str:
        calls = f", {len(self.tool_calls)} tool calls" if self.tool_calls else ""
        return f"<Reply {reprlib.repr(self.text)}{calls}: {self.generation.stats.summarize()}>"

    def _repr_html_(self) -> str:
        return self.generation._repr_html_()

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


class ReplyRound(NamedTuple):
    """What one round added to an answer.

    Attributes:
        emission: token by token; ``None`` where it added nothing.
        parts: that it made final, which may be of text that came before.
    """

    emission: Emission | None
    parts: list[AnswerEvent]


class AsyncReplyStream:
    """An answer to a conversation while it is written: iterate with ``async for`` for its parts.

    Parts are those of :class:`~paceline.ReplyStream`. Else as :class:`~paceline.AsyncStream`.

    Args:
        prompt: what the conversation came to.
        stream: the answer.
        params: how reasoning comes back.
    """

    def __init__(self, prompt: ChatPrompt, stream: AsyncStream, params: ChatParams) -> None:
        self.prompt = prompt
        self.stream = stream
        self._assembler = AnswerAssembler(prompt, params.reasoning_format)
        self._unread: deque[AnswerEvent] = deque()

    def __aiter__(self) -> AsyncReplyStream:
        return self

    async def __anext__(self) -> AnswerEvent:
        while not self._unread:
            try:
                segment = await anext(self.stream)
            except StopAsyncIteration:
                self._unread += self._assembler.finish()
                if not self._unread:
                    raise
            else:
                self._unread += self._assembler.push([segment])
        return self._unread.popleft()

    async def __aenter__(self) -> AsyncReplyStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stream.aclose()

    async def rounds(self) -> AsyncIterator[list[AnswerEvent]]:
        """Iterate round by round: the parts each made final, which may be none (while a long prompt is read).

        Raises:
            PacelineError: as :meth:`paceline.AsyncStream.rounds` does.
        """
        async for segments in self.stream.rounds():
            yield self._assembler.push(segments)
        yield self._assembler.finish()

    async def emissions(self) -> AsyncIterator[ReplyRound]:
        """Iterate round by round: the tokens each added, and the parts it made final. Raises as :meth:`rounds` does.

        Text that is withheld until the end comes with the last tokens.
        """
        async for emission in self.stream.emissions():
            segments = () if emission is None else emission.segments
            is_last = emission is not None and emission.finish_reason is not None
            yield ReplyRound(emission, self._assembler.finish(segments) if is_last else self._assembler.push(segments))

    async def end_reasoning(self) -> bool:
        """Have the answer close the reasoning that it is in; as :meth:`paceline.ReplyStream.end_reasoning`."""
        return await self.stream.end_reasoning()

    async def aclose(self) -> list[AnswerEvent]:
        """Cancel the answer if it still runs, and wait for that; return parts that were not read yet."""
        unread = [*self._unread, *self._assembler.finish(await self.stream.aclose())]
        self._unread.clear()
        return unread

    async def result(self) -> Reply:
        """Return the answer, once it is there. Raises as :meth:`paceline.AsyncStream.result` does."""
        return Reply.of(await self.stream.result(), self.prompt, self._assembler)

    async def so_far(self) -> Reply:
        """Return the answer as it stands."""
        return Reply.of(await self.stream.so_far(), self.prompt, self._assembler)
