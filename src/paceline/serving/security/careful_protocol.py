"""uvicorn's HTTP/1.1 protocol, mended where clients break off, send nonsense late, or never finish what they send."""

from __future__ import annotations

import asyncio
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST_REFUSED: Final = 64
"""Connections beyond the most that are told so; further ones are dropped, or files would run out."""

_MOST_AHEAD: Final = 1 << 16
"""Bytes of later requests that are taken while one is answered."""


class CarefulProtocol(H11Protocol):
    """Notices clients that leave, answers nonsense at most once, and ends without waiting for halves of requests."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Begin with a connection, unless there are too many even to say so."""
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency + _MOST_REFUSED:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a client."""
        super().data_received(data)
        if self._is_answering and self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MOST_AHEAD:
            # uvicorn reads nothing more once a further request is there, and would not see that the client leaves.
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun, which cannot be taken back."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            super().send_400_response(msg)
            return
        if cycle.response_started:
            self.transport.close()
        else:
            super().send_400_response(msg)
        # Whatever answers the request now has nobody to answer: h11 would refuse a second answer.
        cycle.disconnected = True
        cycle.message_event.set()

    def shutdown(self) -> None:
        """Take no more requests; what is answered now may be answered, and a request that is not there yet is not."""
        super().shutdown()
        if self._is_answering and self.cycle is not None and self.cycle.more_body:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete
