"""Answers as server-sent events: what is done at their end is done however they end."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send


class EventStream(EventSourceResponse):
    """A stream of events that were written before.

    Args:
        content: the events.
        over: called once at the end, whichever it is: also where the client left before the first event was asked for,
            and a ``finally`` in ``content`` would never be reached.
        ping_s: seconds between comments while nothing else is sent; 0 for none.
        read_s: seconds in which the client has to take what was sent.
    """

    def __init__(
        self, content: AsyncIterator[bytes], *, over: Callable[[], object], ping_s: float, read_s: float
    ) -> None:
        super().__init__(
            content,
            ping=ping_s,
            ping_message_factory=lambda: ServerSentEvent(comment="", sep="\n"),
            sep="\n",
            send_timeout=read_s,
        )
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            # A client that reads nothing has left, and that is no error.
            with contextlib.suppress(SendTimeoutError):
                await super().__call__(scope, receive, send)
        finally:
            self._over()
