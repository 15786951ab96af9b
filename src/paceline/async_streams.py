"""Answers for consumers in an event loop. A module of its own, as asyncio takes a while to import."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, TypeVar

from paceline.core.errors import ClosedError
from paceline.core.request import Emission, Request
from paceline.core.text import TextSegment
from paceline.runtime.loop_driver import LoopDriver
from paceline.runtime.output_queue import OutputRecord
from paceline.runtime.worker import CLOSED, Worker, wake
from paceline.streams import BaseStream, Generation, Submission

_T = TypeVar("_T")


class LoopOutputQueue(OutputRecord):
    """An output queue for consumers in the event loop that it is made in.

    Args:
        worker: the engine's thread.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._waiting: list[asyncio.Future[None]] = []

    def put(self, emission: Emission | None) -> None:
        """Add a round.

        Raises:
            RuntimeError: the event loop is closed.
        """
        if self._loop.is_closed():
            raise RuntimeError("the event loop of whoever wanted this answer is closed")
        super().put(emission)

    def begin(self) -> None:
        """Note that the request was taken, and wake whoever waits for that."""
        super().begin()
        self._ring()

    async def wait_begun(self) -> None:
        """Wait until the request is taken, or refused."""
        while not self.has_begun and not self.is_over:
            await self._next_ring()

    async def wait(self, rounds: float) -> None:
        """Wait until there are so many rounds, or the end."""
        while True:
            # Published before the check: no lost wake-up, of whoever waits.
            self._wanted = min(self._wanted, rounds)
            if self.has(rounds):
                break
            await self._next_ring()

    def _next_ring(self) -> asyncio.Future[None]:
        """Return what is done with the next ring; nothing that was looked at before is missed, as it rings later."""
        waiting = self._loop.create_future()
        self._waiting.append(waiting)
        return waiting

    def _ring(self) -> None:
        self._worker.wake(self._loop, self._rung)

    def _rung(self) -> None:
        rung, self._waiting = self._waiting, []
        for waiting in rung:
            if not waiting.done():
                waiting.set_result(None)


class AsyncStream(BaseStream):
    """An answer while it is written: iterate with ``async for`` for its text, as it becomes final.

    The event loop never waits for the model. The prompt is read in the engine's thread as well, so what is wrong with
    the prompt is raised by the first wait. Closing it early (``aclose()``, leaving its ``async with`` block, dropping
    it) cancels the request, and so does cancelling the task that waits for it. Of several that iterate, each gets a
    share.

    Args:
        driver: where the answer is decoded.
        submission: what is asked for.
    """

    _outputs: LoopOutputQueue

    def __init__(self, driver: LoopDriver, submission: Submission) -> None:
        super().__init__(driver.worker, submission)
        # What is left of the last round that was read.
        self._unread: deque[TextSegment] = deque()
        self._worker.check()
        self._outputs = LoopOutputQueue(driver.worker)
        self._handle = driver.submit_soon(submission.add, self._outputs, self)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> TextSegment:
        while not self._unread:
            if not await self._has_next():
                raise StopAsyncIteration
            emission = self._next()
            if emission is not None:
                self._unread += emission.segments
        return self._unread.popleft()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def request(self) -> Request | None:
        """The request as the loop carries it, to be looked at; ``None`` until it is taken."""
        return self._handle.request

    @property
    def is_over(self) -> bool:
        """Whether the answer is over, read or not."""
        return self._outputs.is_over

    async def rounds(self) -> AsyncIterator[list[TextSegment]]:
        """Iterate round by round: the text each made final, which may be none (while a long prompt is read).

        Rounds count from the request's start: nothing is yielded while the request waits for others to end.

        Raises:
            PacelineError: the request was refused, or ended by an error.
            BusyError: this is the engine's thread.
            CapabilityError: this process was forked from the one that writes the answer.
        """
        while await self._has_next():
            emission = self._next()
            segments = [*self._unread, *(() if emission is None else emission.segments)]
            self._unread.clear()
            yield segments

    async def emissions(self, every: int = 1, *, keep: bool = True) -> AsyncIterator[Emission | None]:
        """Iterate round by round: all that each added to the answer, token by token too.

        ``None`` is a round that added nothing, as while a long prompt is read. Raises as :meth:`rounds` does.

        Args:
            every: rounds after the first that are waited for together, or the end. Waking an event loop beside a large
                model costs as much as a few hundredths of a round.
            keep: whether the stream goes on to hold what was read, for :meth:`result` and :meth:`so_far`.
        """
        rounds = self._outputs.rounds
        while self._num_read < len(rounds) or await self._has_next(every if self._num_read else 1):
            emission = self._next()
            if not keep:
                self._outputs.rounds[self._num_read - 1] = None
            yield emission

    async def end_reasoning(self) -> bool:
        """Have the answer close the reasoning that it is in; as :meth:`paceline.Stream.end_reasoning`."""
        with contextlib.suppress(ClosedError):  # then it is over
            return await call_on(self._worker, self._handle.end_reasoning)
        return False

    async def admitted(self) -> None:
        """Wait until the request is taken, though it may still wait for its start.

        Raises:
            PacelineError: the request was refused.
        """
        await self._outputs.wait_begun()
        if not self._outputs.has_begun:
            self._raise_error()

    def cancel_soon(self) -> None:
        """Cancel the request if it still runs, without waiting for that; what there is can be read."""
        if not self._outputs.is_over:
            self._handle.cancel_soon()

    async def aclose(self) -> list[TextSegment]:
        """Cancel the request if it still runs, and wait for that; return text that was not read yet."""
        if not self._outputs.is_over and self._worker.is_here:
            self._handle.cancel_soon()
            await self._outputs.wait(math.inf)
        unread = list(self._unread)
        self._unread.clear()
        while self._num_read < len(self._outputs.rounds):
            emission = self._next()
            if emission is not None:
                unread += emission.segments
        return unread

    async def result(self) -> Generation:
        """Return the answer, once it is there.

        Raises:
            PacelineError: the request was refused, or ended by an error.
        """
        await self._wait(math.inf)
        self._raise_error()
        return await self.so_far()

    async def so_far(self) -> Generation:
        """Return the answer as it stands, read or not; ``finish_reason`` is ``None`` while it runs.

        Raises:
            BusyError: this is the engine's thread, and the answer is not over.
            CapabilityError: this process was forked from the one that writes the answer, which is not over.
        """
        if not self._outputs.is_over:
            with contextlib.suppress(ClosedError):  # then it ended meanwhile
                return Generation.of(*await call_on(self._worker, self._record), self._submission)
        return Generation.of(*self._record(), self._submission)

    async def _has_next(self, every: int = 1) -> bool:
        """Wait for the next rounds, and return whether there is one; raise the error that ended the request."""
        while True:
            if self._num_read == len(self._outputs.rounds):
                await self._wait(self._num_read + every)
            # In this order: once it is over, all rounds are there. Another reader may have been first.
            is_over = self._outputs.is_over
            if self._num_read < len(self._outputs.rounds):
                return True
            if is_over:
                self._raise_error()
                return False

    def _next(self) -> Emission | None:
        emission = self._outputs.rounds[self._num_read]
        self._num_read += 1
        return emission

    async def _wait(self, rounds: float) -> None:
        """Wait for so many rounds, or the end."""
        try:
            if not self._outputs.has(rounds):
                self._worker.check()
                await self._outputs.wait(rounds)
        except BaseException:
            self._handle.cancel_soon()
            raise


async def call_on(worker: Worker, function: Callable[[], _T]) -> _T:
    """Run a function on an engine's thread, between rounds, and return what it returns or raise what it raises.

    Functions run in the order in which they were asked for. One whose caller was cancelled before its turn is not run.
    Raises what :meth:`Worker.call <paceline.runtime.worker.Worker.call>` does.
    """
    worker.check()
    call = _Call(function)
    worker.ask(call)
    result: _T = await call.future
    return result


class _Call:
    """A note, and the future of an event loop for what comes of it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()

    def run(self) -> None:
        if self.future.cancelled():
            return
        try:
            value = self._function()
        except BaseException as error:
            self._tell(self.future.set_exception, error)
        else:
            self._tell(self.future.set_result, value)

    def refuse(self) -> None:
        self._tell(self.future.set_exception, ClosedError(CLOSED))

    def _tell(self, settle: Callable[[Any], object], value: object) -> None:
        def tell() -> None:
            if not self.future.done():
                settle(value)

        wake(self._loop, tell)
