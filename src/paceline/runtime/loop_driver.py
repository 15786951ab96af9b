"""Drives a loop on a worker's thread: takes requests from any thread, makes rounds, and hands out what they gain."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from collections.abc import Callable, Sequence

from paceline.core.errors import ClosedError
from paceline.core.request import Emission, Request
from paceline.core.stats import RequestStats
from paceline.runtime.loop import DecodingLoop
from paceline.runtime.output_queue import Ending, OutputQueue
from paceline.runtime.worker import CLOSED, OnCollect, Worker

_log = logging.getLogger(__name__)


class RequestHandle:
    """One request at a loop driver.

    Attributes:
        prompt_ids: empty until the request was admitted.
        request: of the engine's thread alone; ``None`` until it was admitted.
        cancel_on_collect: ends the request once nobody has its owner, while it runs.
    """

    __slots__ = ("cancel_on_collect", "driver", "outputs", "prompt_ids", "request")

    def __init__(self, driver: LoopDriver, outputs: OutputQueue, owner: object) -> None:
        self.driver = driver
        self.outputs = outputs
        self.prompt_ids: Sequence[int] = ()
        self.request: Request | None = None
        self.cancel_on_collect: OnCollect | None = driver.worker.on_collect(
            owner, functools.partial(driver.cancel, self)
        )

    def cancel(self) -> None:
        """End the request, unless it is over, and wait until it is; on the engine's thread, without waiting."""
        worker = self.driver.worker
        with contextlib.suppress(ClosedError):  # then it is over
            if worker.is_current:
                self.cancel_soon()
            elif worker.is_here:
                worker.call(functools.partial(self.driver.cancel, self))

    def cancel_soon(self) -> None:
        """End the request between two rounds, unless it is over, without waiting."""
        self.driver.worker.post(functools.partial(self.driver.cancel, self))

    def end_reasoning(self) -> bool:
        """Have the request close the reasoning that it is in, and return whether it is in one; on the engine's thread.

        It is called between two rounds. A request that is over is in none.
        """
        return self.request is not None and self.driver.loop.end_reasoning(self.request)

    def stats(self) -> RequestStats:
        """Return a copy of the counts and times so far; on the engine's thread only."""
        return RequestStats() if self.request is None else copy.deepcopy(self.request.stats)


class _Admission:
    """A note that admits a request without anybody waiting."""

    def __init__(self, handle: RequestHandle, add: Callable[[], Request]) -> None:
        self._handle = handle
        self._add = add

    def run(self) -> None:
        try:
            self._handle.driver.admit(self._handle, self._add)
        except BaseException as error:
            self._fail(error)

    def refuse(self) -> None:
        self._fail(ClosedError(CLOSED))

    def _fail(self, error: BaseException) -> None:
        self._handle.cancel_on_collect = None
        with contextlib.suppress(Exception):
            self._handle.outputs.end(Ending("error", RequestStats(), error))


class LoopDriver:
    """A loop whose rounds a worker makes; several that share a worker have a round in turn.

    The loop is touched by the worker's thread only, from the first request on.
    """

    def __init__(self, worker: Worker, loop: DecodingLoop) -> None:
        self.worker = worker
        self.loop = loop
        worker.end_first()
        # Requests that are not over, by their ids.
        self._handles: dict[int, RequestHandle] = {}

    # --- from any thread ----------------------------------------------------------------------------------------------

    def submit(self, add: Callable[[], Request], outputs: OutputQueue, owner: object) -> RequestHandle:
        """Have a request admitted, and wait for that.

        Args:
            add: adds it to the loop, on the engine's thread. It must not hold the owner.
            outputs: where what becomes of it goes. It must not hold the owner either.
            owner: once this is collected, the request is cancelled.

        Raises:
            PacelineError: whatever ``add`` raises.
            ClosedError: the worker has ended.
            BusyError: this is the engine's thread.
        """
        handle = RequestHandle(self, outputs, owner)
        try:
            self.worker.call(functools.partial(self.admit, handle, add))
        except BaseException:
            # An interrupt ends the wait, and the request may be admitted all the same.
            handle.cancel_soon()
            raise
        return handle

    def submit_soon(self, add: Callable[[], Request], outputs: OutputQueue, owner: object) -> RequestHandle:
        """Have a request admitted, without waiting; an error of that goes to ``outputs``. Else as :meth:`submit`."""
        handle = RequestHandle(self, outputs, owner)
        self.worker.ask(_Admission(handle, add))
        return handle

    # --- on the engine's thread ---------------------------------------------------------------------------------------

    def admit(self, handle: RequestHandle, add: Callable[[], Request]) -> None:
        request = add()
        handle.request = request
        handle.prompt_ids = request.token_ids[: request.num_prompt]
        self._handles[request.id] = handle
        self.worker.start_rounds(self)
        handle.outputs.begin()

    def make_round(self) -> None:
        """Make a round, and hand out what came of it.

        A request that runs and gained nothing is told of the round as well. One that waits for its start is told
        nothing: many may wait, and each would wake its consumer. An error ends the requests that took part in the
        round and are not over by it, and no others.
        """
        # No local variables: an error's traceback keeps this frame alive, and the outputs keep the error.
        self._tell(self._running(), *self._step())

    def _tell(self, before: Sequence[int], emissions: Sequence[Emission], error: BaseException | None) -> None:
        """Hand out what came of a round; ``before`` are ids of the requests that ran before it."""
        running = self._running()
        gained = {emission.request.id for emission in emissions}
        for emission in emissions:
            if emission.request.id in self._handles:
                self._hand_out(self._handles[emission.request.id], emission)
        if error is not None:
            took_part = dict.fromkeys([*before, *running])
            if not took_part and not emissions:
                # Nothing runs and nothing starts: every further round would fail like this one.
                took_part = dict.fromkeys(self._handles)
            self._fail_all([request_id for request_id in took_part if request_id in self._handles], error)
            return
        for request_id in running:
            if request_id not in gained:
                self._hand_out(self._handles[request_id], None)

    def _running(self) -> list[int]:
        return [
            request_id
            for request_id, handle in self._handles.items()
            if handle.request is not None and handle.request.sequence >= 0
        ]

    def _step(self) -> tuple[Sequence[Emission], BaseException | None]:
        try:
            return self.loop.step(), None
        except BaseException as error:
            # An observer may have failed after a round that stands.
            return self.loop.take_emissions(), error

    def _fail_all(self, request_ids: Sequence[int], error: BaseException) -> None:
        for request_id in request_ids:
            self._fail(self._handles[request_id], error)
        if not request_ids:
            _log.error("a round failed after all requests that took part in it had ended", exc_info=error)

    def cancel(self, handle: RequestHandle) -> None:
        """End a request, unless it is over."""
        request = handle.request
        if request is None or request.id not in self._handles:
            return
        try:
            emission = self.loop.cancel(request)
        except BaseException as error:
            self._fail(handle, error)
        else:
            self._end(handle, Ending("cancelled", request.stats), emission)

    def cancel_all(self) -> None:
        for handle in list(self._handles.values()):
            self.cancel(handle)

    def _hand_out(self, handle: RequestHandle, emission: Emission | None) -> None:
        if emission is not None and emission.finish_reason is not None:
            request = emission.request
            self._end(handle, Ending(emission.finish_reason, request.stats, request.error), emission)
            return
        try:
            handle.outputs.put(emission)
        except Exception:
            # The consumer is gone, as where its event loop is closed.
            self.cancel(handle)

    def _fail(self, handle: RequestHandle, error: BaseException) -> None:
        request = handle.request
        assert request is not None
        emission = None
        with contextlib.suppress(Exception):
            # Its last text, if the loop can still give it.
            emission = self.loop.cancel(request)
        self._end(handle, Ending("error", request.stats, error), emission)

    def _end(self, handle: RequestHandle, ending: Ending, emission: Emission | None) -> None:
        assert handle.request is not None
        del self._handles[handle.request.id]
        handle.cancel_on_collect = None
        if not self._handles:
            self.worker.stop_rounds(self)
        with contextlib.suppress(Exception):
            handle.outputs.end(ending, emission)
