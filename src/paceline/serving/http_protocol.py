"""uvicorn's HTTP/1.1 protocol, mended where clients break off, send nonsense or too much, never finish, or do not read.

It is the one on h11, whatever else is installed: uvicorn's other one, on httptools, does not tell of headers before
they are all there.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, Final, Protocol

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from paceline.serving.errors import error_body

LINGER_S: Final = 2.0
"""Seconds for which the rest of a refused body is read and dropped. A connection that closes on unread bytes is reset,
and the client may then lose the answer that says why."""

_MAX_AHEAD: Final = 1 << 16
"""Bytes of later requests that are taken while one is answered."""

_HEAD_END: Final = re.compile(rb"\n\r?\n")
"""What ends the headers of a request, as h11 has it."""

_LOOSE_LINE: Final = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""An end of a line, or one that goes on in the next, of which h11 and a proxy in front of it may think differently."""

_FRAMING: Final = re.compile(rb"(?i)\n(?:content-length|(transfer-encoding))[ \t]*:([^\r\n]*)")
"""A header that says how long the body is."""


_STATUS_LINE: Final = b"HTTP/1.1 "
"""What every answer begins with."""

_PROBE_S: Final = 0.01
"""Seconds from the first byte that shows whether a client is still there to the second; five times as many to each
further one."""


class _StrictLines(ReceiveBuffer):
    """What came of a connection, of which lines end in one way only: those of headers, chunks and trailers."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """Return the lines up to an empty one, once that is there."""
        end = None if self._data.startswith(b"\r\n") else _HEAD_END.search(self._data)
        if self._data.startswith(b"\n") or (end and _LOOSE_LINE.search(self._data, 0, end.end())):
            raise h11.LocalProtocolError("a line ends without \\r\\n, or goes on in the next line")
        return super().maybe_extract_lines()

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line of a chunk's length, once it is there."""
        line = super().maybe_extract_next_line()
        if line is not None and b"\r" in line[:-2]:
            raise h11.LocalProtocolError("a line has a \\r within it")
        return line


class _CarefulConnection(h11.Connection):
    """A connection that is read strictly, and may have sent a few bytes ahead: of an answer, or zeros before a chunk.

    Attributes:
        ahead: bytes of the next output that were sent.
        is_chunked: whether the answer is sent in chunks.
    """

    ahead = 0
    is_chunked = False

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self._receive_buffer = _StrictLines()

    def send(self, event: Any) -> Any:
        """Return the bytes that an event is sent as, but for those that were."""
        if type(event) is h11.Data and event.data and self.is_chunked and self.our_state is h11.SEND_BODY:
            # What h11 comes to, which takes longer over it than all else takes over a token.
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        data = super().send(event)
        if isinstance(event, h11.Response):
            self.is_chunked = data is not None and b"\r\ntransfer-encoding: chunked\r\n" in data.lower()
        if data:
            data, self.ahead = data[self.ahead :], 0
        return data


class Claim(IntEnum):
    """What a connection is kept for: where there are too many, the least goes first."""

    SILENT = 0
    """The headers of its first request are not there."""
    IDLE = 1
    """Its requests are answered."""
    UNFINISHED = 2
    """The body of its request is not there, or its client has not read the answer."""
    ANSWERING = 3
    """Its request is being answered: never dropped."""


class Place(Protocol):
    """What keeps count of a connection."""

    def leave(self) -> None:
        """Hear that the connection is over."""

    def renew(self) -> None:
        """Hear that the connection was of use just now."""


class CarefulProtocol(H11Protocol):
    """Notices clients that leave, answers nonsense at most once, and ends without waiting for halves of requests.

    What a proxy in front may read in another way than h11 is refused: where the two disagree on where a request ends,
    one client's bytes become the beginning of another's request.

    A client that closes its connection for writing only, as ``nc -N`` does, waits for its answer; one that closes it
    altogether has left. Both say the same: that nothing more will come. Bytes that are sent to the latter are answered
    by a reset. So a byte is sent that begins the answer in any case, and in a while another one.

    h11 bounds what is incomplete: headers that arrive in one piece may be of any size, and in small pieces how large
    they may be depends on the pieces. So the headers are measured here.
    """

    max_header_bytes: ClassVar[int]
    """Bytes of a request's first line and headers, the empty line at their end included."""

    place: Place
    """Keeps count of the connection."""

    conn: _CarefulConnection

    _sends_no_more = False
    """Whether the client closed the connection for writing."""
    _probe: asyncio.TimerHandle | None = None

    _is_refused = False
    """Whether the connection's last answer is given, and the rest of what the client sends is dropped."""

    def __init__(self, config: uvicorn.Config, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.conn = _CarefulConnection(self.max_header_bytes)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a client."""
        if self._is_refused:
            return
        super().data_received(data)
        if self._is_answering and self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MAX_AHEAD:
            # uvicorn reads nothing more once a further request is there, and would not see that the client leaves.
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self.place.leave()
        self._cancel_probe()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Go on after an answer."""
        self.place.renew()
        self._cancel_probe()
        super().on_response_complete()
        if self._sends_no_more and not self._goes_on():
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
        """Hear that nothing more will come; returns whether the client may still read."""
        # asyncio closes a TLS connection then, whatever is returned.
        self._sends_no_more = self.scheme == "http"
        return self._sends_no_more and self._goes_on()

    def _goes_on(self) -> bool:
        """Return whether a client that sends no more has a whole request to be answered, and see if it is there."""
        if not self._is_answering or self.cycle.more_body:
            return False
        self._send_ahead(_PROBE_S, len(_STATUS_LINE))
        return True

    def _send_ahead(self, delay_s: float, left: int) -> None:
        """Send a byte of what comes next in any case, which a client that left answers by a reset."""
        if self.cycle.response_started:
            # The length of a chunk may begin with zeros. Nothing is known of an answer without chunks.
            self.transport.write(b"0" if self.conn.is_chunked and self.scope["method"] != "HEAD" else b"")
        else:
            self.transport.write(_STATUS_LINE[self.conn.ahead : self.conn.ahead + 1])
            self.conn.ahead += 1
        if left > 1:
            self._probe = self.loop.call_later(delay_s, self._send_ahead, delay_s * 5, left - 1)

    def _cancel_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    @property
    def claim(self) -> Claim:
        """What the connection is kept for."""
        if self.cycle is None or self._is_refused:
            return Claim.SILENT
        if self._is_answering:
            return Claim.UNFINISHED if self.cycle.more_body else Claim.ANSWERING
        return Claim.UNFINISHED if self.transport.get_write_buffer_size() else Claim.IDLE

    def handle_events(self) -> None:
        """Go on with what came, unless its headers are too large."""
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0]
            end = _HEAD_END.search(head)
            if (len(head) if end is None else end.end()) > self.max_header_bytes:
                self._refuse(
                    431,
                    f"the first line and the headers of the request have more than {self.max_header_bytes} bytes: send "
                    "fewer, and texts in the body",
                )
                return
            if end is not None and (fault := _ambiguity(head[: end.end()])) is not None:
                self._refuse(400, fault)
                return
        super().handle_events()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, unless an answer has begun, which cannot be taken back."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._refuse(400, msg)
            return
        if cycle.response_started:
            self.transport.close()
        else:
            self._refuse(400, msg)
        # Whatever answers the request now has nobody to answer: h11 would refuse a second answer.
        cycle.disconnected = True
        cycle.message_event.set()

    def _refuse(self, status: int, message: str) -> None:
        """Give the connection its last answer, and drop what the client still sends.

        A connection that closes on unread bytes is reset, and the client may then lose the answer that says why.
        """
        body = json.dumps(error_body(status, message, "invalid_request_error")).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self._is_refused = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def shutdown(self) -> None:
        """Take no more requests; what is answered now may be answered, and a request that is not there yet is not."""
        if self._is_refused:
            self.transport.close()
            return
        super().shutdown()
        if self._is_answering and self.cycle is not None and self.cycle.more_body:
            self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def _ambiguity(head: bytes) -> str | None:
    """Return what a proxy may read in another way in a request's first line and headers; ``None`` for nothing."""
    if _LOOSE_LINE.search(head):
        return "a line of the headers ends without \\r\\n, or goes on in the next line: end each line with \\r\\n"
    framing = _FRAMING.findall(head)
    if len(framing) > 1 or any(b"," in value and not encoding for encoding, value in framing):
        return (
            "the request says more than once how long its body is (Content-Length, Transfer-Encoding): say it once, in "
            "one header"
        )
    if framing and framing[0][0] and not head.partition(b"\r\n")[0].endswith(b"HTTP/1.1"):
        return "the request has a Transfer-Encoding, which is of HTTP/1.1 alone: send Content-Length, or speak HTTP/1.1"
    return None


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
