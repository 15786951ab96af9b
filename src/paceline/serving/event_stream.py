"""Answers that are sent while they are written: what is done at their end is done however they end.

How long a client may leave unread what was sent is the connection's matter (``security/deadlines``). A limit here would
be a timer for each event, which costs a fifth of what sending it does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class PieceByPiece(StreamingResponse):
    """A long answer in JSON, written while it is sent.

    Args:
        content: the pieces of the answer.
        over: called once at the end, whichever it is.
    """

    def __init__(self, content: AsyncIterator[bytes], *, over: Callable[[], object]) -> None:
        super().__init__(content, media_type="application/json")
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


class EventStream(EventSourceResponse):
    """A stream of events that were written before.

    Args:
        content: the events.
        over: called once at the end, whichever it is: also where the client left before the first event was asked for,
            and a ``finally`` in ``content`` would never be reached.
        ping_s: seconds between comments while nothing else is sent; 0 for none.
    """

    def __init__(self, content: AsyncIterator[bytes], *, over: Callable[[], object], ping_s: float) -> None:
        super().__init__(
            content,
            ping=ping_s,
            ping_message_factory=lambda: ServerSentEvent(comment="", sep="\n"),
            sep="\n",
        )
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()
