"""Answers for consumers in an event loop. A module of its own, as asyncio takes a while to import."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Emission
from paceline.core.text import TextSegment
from paceline.runtime.driving import Drive
from paceline.runtime.outbox import Record
from paceline.streams import Ask, Generation


class LoopOutbox(Record):
    """An outbox for consumers in the event loop that it is made in."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._bell = asyncio.Event()

    def put(self, emission: Emission | None) -> None:
        """Add a round.

        Raises:
            RuntimeError: the event loop is closed.
        """
        if self._loop.is_closed():
            raise RuntimeError("the event loop of whoever wanted this answer is closed")
        super().put(emission)

    async def wait(self, rounds: float) -> None:
        """Wait until there are so many rounds, or the end."""
        while True:
            # Said before the look, so that what comes after that rings, and everybody who waits hears that.
            self._wanted = min(self._wanted, rounds)
            if self.has(rounds):
                break
            self._bell.clear()
            await self._bell.wait()

    def _ring(self) -> None:
        self._loop.call_soon_threadsafe(self._bell.set)


class AsyncStream:
    """An answer while it is written: iterate with ``async for`` for its text, as it becomes final.

    The event loop never waits for the model. The prompt is read in the engine's thread as well, so what is wrong with
    the prompt is raised by the first wait. Closing it early (``aclose()``, leaving its ``async with`` block, dropping
    it) cancels the request, and so does cancelling the task that waits for it.

    Args:
        drive: where the answer is decoded.
        ask: what is asked for.
    """

    def __init__(self, drive: Drive, ask: Ask) -> None:
        self._ask = ask
        self._num_read = 0
        self._unread: deque[TextSegment] = deque()
        self._outbox = LoopOutbox()
        self._worker = drive.worker
        self._worker.check()
        self._ticket = drive.submit_soon(ask.add, self._outbox, self)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> TextSegment:
        while not self._unread:
            await self._wait(self._num_read + 1)
            # In this order: once it is over, all rounds are there.
            if self._outbox.is_over and self._num_read == len(self._outbox.rounds):
                self._raise_error()
                raise StopAsyncIteration
            self._read()
        return self._unread.popleft()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens of the prompt; empty until the first wait is over."""
        return self._ticket.prompt_ids

    @property
    def params(self) -> SamplingParams:
        """How the answer is sampled."""
        return self._ask.params

    @property
    def rules(self) -> StopRules:
        """When it ends."""
        return self._ask.rules

    @property
    def speculation(self) -> SpeculationParams:
        """How it is sped up."""
        return self._ask.speculation

    async def aclose(self) -> list[TextSegment]:
        """Cancel the request if it still runs, and wait for that; return text that was not read yet."""
        if not self._outbox.is_over and self._worker.is_here:
            self._ticket.cancel_soon()
            await self._outbox.wait(math.inf)
        self._read()
        unread = list(self._unread)
        self._unread.clear()
        return unread

    async def result(self) -> Generation:
        """Return the answer, once it is there.

        Raises:
            PacelineError: the request was refused, or ended by an error.
        """
        await self._wait(math.inf)
        self._raise_error()
        ending = self._outbox.ending
        assert ending is not None
        return Generation.of(self._outbox.rounds, ending, ending.stats, self._ask)

    async def _wait(self, rounds: float) -> None:
        """Wait for so many rounds, or the end."""
        try:
            if not self._outbox.has(rounds):
                self._worker.check()
                await self._outbox.wait(rounds)
        except BaseException:
            self._ticket.cancel_soon()
            raise

    def _read(self) -> None:
        """Take what arrived and was not read yet."""
        first, self._num_read = self._num_read, len(self._outbox.rounds)
        for emission in self._outbox.rounds[first : self._num_read]:
            if emission is not None:
                self._unread += emission.segments

    def _raise_error(self) -> None:
        if self._outbox.ending is not None:
            self._outbox.ending.raise_error()
