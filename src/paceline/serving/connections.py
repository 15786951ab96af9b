"""Takes connections, which are counted from their first moment on: where none is left, the longest silent one yields.

asyncio accepts whatever comes, tells of a TLS connection once its handshake is over, and where no file is left reports
that for each connection that waits, thousands of times a second. So connections are accepted here, a few in each turn
of the event loop.

::

    accepted ──handshake──> silent ──> request ──> answer ──> idle ──> request ...
    └── yields first, after a second ┘ └ never ─────────┘     └ yields second
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import ssl
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import uvicorn

from paceline.serving.http_protocol import CarefulProtocol, Claim
from paceline.serving.security import SecuritySettings

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


class AcceptingServer(uvicorn.Server):
    """uvicorn's server, whose connections are accepted here.

    Args:
        config: of uvicorn; its protocol is a :class:`CarefulProtocol`.
        security: how many connections there may be, and how long a handshake may take.
    """

    def __init__(self, config: uvicorn.Config, security: SecuritySettings) -> None:
        super().__init__(config)
        self._security = security

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections at sockets that are bound."""
        await self.lifespan.startup()

        def protocol() -> CarefulProtocol:
            made: CarefulProtocol = self.config.http_protocol_class(  # type: ignore[call-arg, assignment]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        acceptor = Acceptor(sockets or [], protocol, self.config.ssl, self._security)
        # Of asyncio's own, uvicorn asks what the acceptor can do.
        self.servers = [acceptor]  # type: ignore[list-item]
        self.started = True


class Acceptor:
    """Accepts connections at sockets, until it is closed.

    Args:
        listeners: the sockets.
        protocol: makes what speaks to a client.
        tls: with which connections are encrypted; ``None`` for plain ones.
        security: how many there may be.
    """

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
        self._places: dict[Hashable, dict[_Place, None]] = {}
        self._count = 0
        self._opening: dict[_Place, asyncio.Task[None]] = {}
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

    def leave(self, place: _Place) -> None:
        """Forget a connection, which may be forgotten already."""
        places = self._places.get(place.owner, {})
        if place in places:
            del places[place]
            self._count -= 1
            if not places:
                del self._places[place.owner]
            self._freed.set()

    def renew(self, place: _Place) -> None:
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
            place = _Place(self, connection, _owner_key(address), self._protocol())
            self._places.setdefault(place.owner, {})[place] = None
            self._count += 1
            self._opening[place] = asyncio.create_task(self._open(place))

    async def _open(self, place: _Place) -> None:
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
            chosen: _Place | None = None
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


class _Place:
    """One connection, from the moment it is accepted.

    Attributes:
        owner: whose connection it is.
        connection: the socket.
        protocol: speaks to the client, once it may.
        accepted_s: when that was, in the event loop's time.
    """

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
        """Tell that the connection is over."""
        self._acceptor.leave(self)

    def renew(self) -> None:
        """Tell that the connection was of use just now."""
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
