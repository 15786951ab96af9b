"""uvicorn's HTTP/1.1 protocol with a time limit for the headers, which uvicorn itself does not have.

The one on h11 is used because h11 limits the size of headers (``h11_max_incomplete_event_size``). uvicorn's other
one, on httptools, takes headers of any size.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol


class HeaderDeadlineProtocol(H11Protocol):
    """Closes a connection whose next request does not have all its headers in time.

    The time begins with the connection, and for a further request with its first byte. Until that byte uvicorn's own
    keep-alive time counts.
    """

    header_timeout_s: ClassVar[float]
    """Seconds until all headers of a request have to be there."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin with a connection."""
        super().connection_made(transport)
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a client."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._begin()
        else:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._end()
        super().connection_lost(exc)

    def _begin(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def protocol_with_deadline(header_timeout_s: float) -> type[HeaderDeadlineProtocol]:
    """Return the protocol class for :class:`uvicorn.Config`'s ``http``.

    Args:
        header_timeout_s: seconds until all headers of a request have to be there.
    """
    return type("HeaderDeadlineProtocol", (HeaderDeadlineProtocol,), {"header_timeout_s": header_timeout_s})
