"""Connections: who gets one and for how long, and uvicorn's HTTP/1.1 on it, mended.

asyncio accepts whatever comes, tells of a TLS connection once its handshake is over, and where no file is left reports
that for each connection that waits, thousands of times a second. So connections are accepted here, a few in each turn
of the event loop, and counted from their first moment on: where none is left, the longest silent one yields.

::

    accepted ──handshake──> silent ──> request ──> answer ──> idle ──> request ...
    └── yields first, after a second ┘ └ never ─────────┘     └ yields second

uvicorn's protocol is mended where clients break off, send nonsense or too much, never finish, or do not read. It is the
one on h11, whatever else is installed: uvicorn's other one, on httptools, does not tell of headers before they are all
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import re
import socket
import ssl
from collections.abc import Callable, Hashable, Sequence
from enum import IntEnum
from typing import Any, Final, Literal, TypeAlias

import h11
import uvicorn
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from paceline.serving.errors import error_body
from paceline.serving.security import SecuritySettings

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


SPARE_PLACES: Final = 64
"""Connections beyond those that may have a request under way: of clients that are to be told so."""

_MAX_HANDSHAKES: Final = 256
"""TLS handshakes at a time. asyncio takes a quarter of a MiB for each."""

_YOUNG_S: Final = 1.0
"""Seconds for which a new connection does not yield before idle ones: its request is on its way."""

_AT_ONCE: Final = 4
"""Connections that are accepted before the event loop does something else. Sixteen TLS handshakes take it 40 ms."""

_RETRY_S: Final = 1.0
"""Seconds until a connection is accepted again where the system had no room for it and none of ours ended."""

_LOGGER: Final = logging.getLogger("paceline.serving.connections")


def socket_options(settings: SecuritySettings) -> dict[str, Any]:
    """Return what :class:`uvicorn.Config` has to be given beside the application and the address."""
    options: dict[str, Any] = {
        # What it is for is made by :class:`AcceptingServer`.
        "http": "h11",
        "ws": "none",
        # uvicorn's own log has query strings, and with them keys.
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
    }
    if settings.tls is not None:
        options |= {"ssl_keyfile": str(settings.tls.key), "ssl_certfile": str(settings.tls.certificate)}
    return options


class AcceptingServer(uvicorn.Server):
    """uvicorn's server, whose connections are accepted here."""

    def __init__(self, config: uvicorn.Config, security: SecuritySettings) -> None:
        super().__init__(config)
        self._security = security

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()

        def protocol() -> CarefulProtocol:
            return CarefulProtocol(self._security, self.config, self.server_state, self.lifespan.state)

        acceptor = Acceptor(sockets or [], protocol, self.config.ssl, self._security)
        # Of asyncio's own, uvicorn asks what the acceptor can do.
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True


class Acceptor:
    """Accepts connections at sockets, until it is closed; each is spoken to by a protocol of its own."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        protocol: Callable[[], CarefulProtocol],
        tls: ssl.SSLContext | None,
        security: SecuritySettings,
    ) -> None:
        self._protocol = protocol
        self._tls = tls
        self._handshake_s = security.header_timeout_s
        self._most = security.max_connections + SPARE_PLACES
        self._places: dict[Hashable, dict[Place, None]] = {}
        self._count = 0
        self._opening: dict[Place, asyncio.Task[None]] = {}
        self._freed = asyncio.Event()
        self._listeners = listeners
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in listeners]

    def close(self) -> None:
        """Accept no more, and drop those that did not get as far as a protocol."""
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            with contextlib.suppress(NotImplementedError):
                loop.remove_reader(listener)
        for task in self._accepting:
            task.cancel()
        for place in list(self._opening):
            place.drop()

    async def wait_closed(self) -> None:
        """Wait until nothing is accepted any more."""
        await asyncio.wait([*self._accepting, *self._opening.values()])

    def leave(self, place: Place) -> None:
        """Forget a connection, which may be forgotten already."""
        places = self._places.get(place.owner, {})
        if place in places:
            del places[place]
            self._count -= 1
            if not places:
                del self._places[place.owner]
            self._freed.set()

    def renew(self, place: Place) -> None:
        """Count a connection as the newest of its owner."""
        places = self._places.get(place.owner, {})
        if place in places:
            del places[place]
            places[place] = None

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        for number in itertools.count(1):
            if number % _AT_ONCE == 0:
                # Where more are waiting, the next one is there at once.
                await asyncio.sleep(0)
            self._freed.clear()
            try:
                connection, address = await _accept_one(listener)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                _LOGGER.warning("cannot accept a connection: %s", error.strerror or error)
                self._drop_one(Claim.UNFINISHED)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._freed.wait(), _RETRY_S)
                continue
            if self._count >= self._most and not self._drop_one(Claim.UNFINISHED):
                connection.close()
                continue
            if len(self._opening) >= _MAX_HANDSHAKES:
                self._drop_one(Claim.SILENT)
            place = Place(self, connection, _owner_key(address), self._protocol())
            self._places.setdefault(place.owner, {})[place] = None
            self._count += 1
            self._opening[place] = asyncio.create_task(self._open(place))

    async def _open(self, place: Place) -> None:
        handshake_s = None if self._tls is None else self._handshake_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: place.protocol, place.connection, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:
            # The client's own affair: it left, is too slow, or speaks no TLS. The traceback would keep its buffers.
            error.with_traceback(None)
        finally:
            del self._opening[place]
            if place.protocol.scheme is None:
                self.leave(place)

    def _drop_one(self, most: Claim) -> bool:
        """Drop a connection with at most such a claim; returns whether there was one.

        The owner that has the most gives up one, so that nobody keeps others out by connecting often.
        """
        now_s = asyncio.get_running_loop().time()
        for places in sorted(self._places.values(), key=len, reverse=True):
            chosen: Place | None = None
            least = most + 1
            # From the one that was of use longest ago to the newest.
            for place in places:
                claim = place.protocol.claim
                is_silent = claim is Claim.SILENT
                if is_silent and most is not Claim.SILENT and now_s - place.accepted_s < _YOUNG_S:
                    claim = Claim.IDLE
                if claim < least:
                    chosen, least = place, claim
                if is_silent:
                    break
            if chosen is not None:
                chosen.drop()
                return True
        return False


async def _accept_one(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Wait for a connection, and return it with the client's address.

    asyncio's ``sock_accept`` loses a connection that comes in the moment in which the wait is given up, and logs a
    traceback of it.
    """
    loop = asyncio.get_running_loop()

    def tell() -> None:
        loop.remove_reader(listener)
        if not comes.done():
            comes.set_result(None)

    while True:
        try:
            connection, address = listener.accept()
        except (BlockingIOError, InterruptedError):
            comes = loop.create_future()
        else:
            connection.setblocking(False)
            return connection, address
        try:
            loop.add_reader(listener, tell)
        except NotImplementedError:
            # Windows has no readers.
            return await loop.sock_accept(listener)
        await comes


class Place:
    """One connection, from the moment it is accepted. It is spoken to once its handshake is over."""

    def __init__(
        self, acceptor: Acceptor, connection: socket.socket, owner: Hashable, protocol: CarefulProtocol
    ) -> None:
        self.owner = owner
        self.connection = connection
        self.protocol = protocol
        self.accepted_s = asyncio.get_running_loop().time()
        self._acceptor = acceptor
        protocol.place = self

    def leave(self) -> None:
        self._acceptor.leave(self)

    def renew(self) -> None:
        self._acceptor.renew(self)

    def drop(self) -> None:
        """End the connection at once."""
        self.leave()
        if self.protocol.scheme is not None:
            self.protocol.transport.abort()
            return
        # The protocol knows no transport before the handshake is over, which sees by this that its client left.
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _owner_key(address: object) -> Hashable:
    """Return whom a connection belongs to: an address, of IPv6 a network; all of a Unix socket to one."""
    host = address[0] if isinstance(address, tuple) else ""
    return socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8] if ":" in host else host


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


_Timer: TypeAlias = Literal["headers", "reading", "probe"]


class CarefulProtocol(H11Protocol):
    """Notices clients that leave, answers nonsense at most once, and waits for neither halves of requests nor readers.

    What a proxy in front may read in another way than h11 is refused: where the two disagree on where a request ends,
    one client's bytes become the beginning of another's request.

    A client that closes its connection for writing only, as ``nc -N`` does, waits for its answer; one that closes it
    altogether has left. Both say the same: that nothing more will come. Bytes that are sent to the latter are answered
    by a reset. So a byte is sent that begins the answer in any case, and in a while another one.

    h11 bounds what is incomplete: headers that arrive in one piece may be of any size, and in small pieces how large
    they may be depends on the pieces. So the headers are measured here.

    The time for headers begins with the connection, and for a further request with its first byte. Until that byte
    uvicorn's own keep-alive time counts. The time to read begins when the connection's buffer is full, and ends when
    the client has read most of it. A client that reads nothing is then one that has left: its request is cancelled.
    """

    place: Place
    """Keeps count of the connection."""

    conn: _CarefulConnection

    def __init__(self, security: SecuritySettings, *uvicorn_state: Any) -> None:
        super().__init__(*uvicorn_state)
        self._security = security
        # Of headers the protocol tells first; this limit is for what else may be incomplete, as trailers.
        self.conn = _CarefulConnection(security.max_header_bytes)
        self._timers: dict[_Timer, asyncio.TimerHandle] = {}
        self._sends_no_more = False
        # Whether the connection's last answer is given, and the rest of what the client sends is dropped.
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._start("headers", self._security.header_timeout_s, transport.close)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if not self._is_answering:
            if "headers" not in self._timers:
                self._start("headers", self._security.header_timeout_s, self.transport.close)
            return
        self._cancel("headers")
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MAX_AHEAD:
            # uvicorn reads nothing more once a further request is there, and would not see that the client leaves.
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing would first wait until the buffer is read.
        self._start("reading", self._security.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel("reading")
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.place.leave()
        self._cancel("probe", "headers", "reading")
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.place.renew()
        self._cancel("probe")
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
            self._start("probe", delay_s, self._send_ahead, delay_s * 5, left - 1)

    def _start(self, timer: _Timer, delay_s: float, then: Callable[..., object], *args: Any) -> None:
        self._timers[timer] = self.loop.call_later(delay_s, then, *args)

    def _cancel(self, *timers: _Timer) -> None:
        for timer in timers:
            if timer in self._timers:
                self._timers.pop(timer).cancel()

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
            most = self._security.max_header_bytes
            if (len(head) if end is None else end.end()) > most:
                self._refuse(
                    431,
                    f"the first line and the headers of the request have more than {most} bytes: send fewer, and texts "
                    "in the body",
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
