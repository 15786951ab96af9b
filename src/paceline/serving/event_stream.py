"""Answers whose client may leave: waited for, or sent while they are written. What is done at their end is always done.

How long a client may leave unread what was sent is the connection's matter (``connections.py``). A limit here would
be a timer for each event, which costs a fifth of what sending it does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from paceline.serving.errors import RefusedError
from paceline.serving.logs import CLIENT_LEFT


class PieceByPiece(StreamingResponse):
    """A long answer in JSON, written while it is sent; ``over`` is called once at the end, whichever it is."""

    def __init__(self, content: AsyncIterator[bytes], *, over: Callable[[], object]) -> None:
        super().__init__(content, media_type="application/json")
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


_HEADERS: Final = {"Cache-Control": "no-store", "Connection": "keep-alive", "X-Accel-Buffering": "no"}
"""The last has nginx hand on events as they come."""


class EventStream(StreamingResponse):
    """A stream of events: ``content`` has so many at a time as are to be one write.

    The status, and ``opening``, are sent with the first of them, or with the first ping. Until then an error gets a
    status of its own, and a gateway can still ask another server: a request that waits is not lost with this one.

    With ``begins_at_once`` whoever listens is told at once that there is something to listen to.

    ``over`` is called once at the end, whichever it is: also where the client left before the first event was asked
    for, and a ``finally`` in ``content`` would never be reached. ``ping`` is sent where nothing else was for
    ``ping_s`` seconds, if that is above 0.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        *,
        over: Callable[[], object],
        ping_s: float,
        ping: bytes,
        opening: bytes = b"",
        begins_at_once: bool = False,
    ) -> None:
        super().__init__(content, headers=_HEADERS, media_type="text/event-stream")
        self._content = content
        self._over = over
        self._ping_s = ping_s
        self._ping = ping
        self._opening = opening
        self._begins_at_once = begins_at_once
        self._sent_s = 0.0
        self._is_sending = False
        self._starting = asyncio.Lock()
        self.has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinging = asyncio.create_task(self._send_pings(send))
        sending = asyncio.create_task(self._send_all(send, pinging))
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        tasks = (sending, pinging, leaving)
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            finally:
                self._over()
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _send_all(self, send: Send, pinging: asyncio.Task[None]) -> None:
        async with contextlib.aclosing(self._content) as content:
            if self._begins_at_once:
                await self._begin(send)
            async for events in content:
                await self._send(send, {"type": "http.response.body", "body": events, "more_body": True})
        # A comment may wait for the client to read.
        pinging.cancel()
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_pings(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        self._sent_s = loop.time()
        while self._ping_s > 0:
            await asyncio.sleep(self._sent_s + self._ping_s - loop.time())
            if loop.time() < self._sent_s + self._ping_s:
                continue
            if self._is_sending:
                # What waits to be read will do.
                self._sent_s = loop.time()
            else:
                await self._send(send, {"type": "http.response.body", "body": self._ping, "more_body": True})

    async def _begin(self, send: Send) -> None:
        async with self._starting:
            if not self.has_begun:
                status, headers = self.status_code, self.raw_headers
                await send({"type": "http.response.start", "status": status, "headers": headers})
                self.has_begun = True
                if self._opening:
                    await send({"type": "http.response.body", "body": self._opening, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        self._is_sending = True
        if not self.has_begun:
            await self._begin(send)
        await send(message)
        self._is_sending = False
        self._sent_s = asyncio.get_running_loop().time()


_T = TypeVar("_T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what work comes to, or cancel it once the client has left. The body of the request has been read.

    What the work does in threads goes on, and nobody hears of it.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RefusedError(CLIENT_LEFT, "client_left", "the client left before its answer was there")
    finally:
        for each in (task, gone):
            each.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
