"""Calls functions on an engine's thread from an event loop, which goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.core.errors import ClosedError
from paceline.runtime.worker import CLOSED, Worker, wake

_T = TypeVar("_T")


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
