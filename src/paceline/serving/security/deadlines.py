"""uvicorn's HTTP/1.1 protocol with two time limits that uvicorn itself does not have: for headers, and for readers.

It is the one on h11, whatever else is installed: uvicorn's other one, on httptools, does not tell of headers before
they are all there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from paceline.serving.security.careful_protocol import CarefulProtocol


class DeadlineProtocol(CarefulProtocol):
    """Closes a connection whose next request does not have all its headers in time, or whose client does not read.

    The time for headers begins with the connection, and for a further request with its first byte. Until that byte
    uvicorn's own keep-alive time counts. The time to read begins when the connection's buffer is full, and ends when
    the client has read most of it. A client that reads nothing is then one that has left: its request is cancelled.
    """

    header_timeout_s: ClassVar[float]
    """Seconds until all headers of a request have to be there."""
    read_timeout_s: ClassVar[float]
    """Seconds until a client has to read what the connection's buffer holds."""

    _headers_due: asyncio.TimerHandle | None = None
    _reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin with a connection."""
        super().connection_made(transport)
        self._headers_due = self._after(self.header_timeout_s, transport.close)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a client."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_headers()
        elif self._headers_due is None:
            self._headers_due = self._after(self.header_timeout_s, self.transport.close)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        # Closing would first wait until the buffer is read.
        self._reading_due = self._after(self.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on, for the client has read."""
        self._cancel_reading()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._cancel_headers()
        self._cancel_reading()
        super().connection_lost(exc)

    def _after(self, delay_s: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(delay_s, then)

    def _cancel_headers(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _cancel_reading(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None


def protocol_with_limits(
    max_header_bytes: int, header_timeout_s: float, read_timeout_s: float
) -> type[DeadlineProtocol]:
    """Return the protocol class for :class:`uvicorn.Config`'s ``http``.

    Args:
        max_header_bytes: bytes of a request's first line and headers.
        header_timeout_s: seconds until all headers of a request have to be there.
        read_timeout_s: seconds until a client has to read what the connection's buffer holds.
    """
    limits = {
        "max_header_bytes": max_header_bytes,
        "header_timeout_s": header_timeout_s,
        "read_timeout_s": read_timeout_s,
    }
    return type("DeadlineProtocol", (DeadlineProtocol,), limits)
