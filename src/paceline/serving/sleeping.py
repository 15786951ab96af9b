"""A model that nobody asks is freed, and loaded again by the next request: ``--sleep-idle-seconds``."""

from __future__ import annotations

import asyncio
import gc
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import PacelineError
from paceline.engines.memory import give_back_freed
from paceline.serving.errors import error_response
from paceline.serving.server import Server

_WATCHING: Final = ("GET", "HEAD", "OPTIONS")
"""Requests that ask about the server and not the model: they neither wake it nor count. So llama-server has it."""


class SleepWhenIdle:
    """Wakes the model before a request goes on, and has it sleep once none was under way for so long."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server
        self._under_way = 0
        self._timer: asyncio.TimerHandle | None = None
        self._falling: asyncio.Task[None] | None = None
        server.on_ready = self._wait_for_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _WATCHING:
            await self._app(scope, receive, send)
            return
        self._under_way += 1
        try:
            if self._server.host.asleep is not None:
                try:
                    await self._server.host.wake()
                except PacelineError as error:
                    await error_response(error, scope)(scope, receive, send)
                    return
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1
            self._wait_for_requests()

    def _wait_for_requests(self) -> None:
        """Count the seconds from now on."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._server.options.sleep_idle_s, self._be_idle)

    def _be_idle(self) -> None:
        if self._server.host.state != "ready" or self._server.host.asleep is not None:
            return
        if self._under_way or not self._server.is_idle:
            self._wait_for_requests()
        else:
            self._falling = asyncio.create_task(self._fall_asleep())

    async def _fall_asleep(self) -> None:
        if self._under_way:
            # It came in between.
            return
        await self._server.sleep()
        # What stayed with the model was taken out of the collector's sight.
        gc.unfreeze()
        gc.collect()
        give_back_freed()
