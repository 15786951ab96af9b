"""Applications to put the layers in front of, and ways to ask them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import httpx
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serving.deployment import bind
from paceline.serving.middleware import with_security
from paceline.serving.security import SecuritySettings, get_namespace
from tests.serving.starting import in_thread
from tests.timing import WAIT_S

T = TypeVar("T")

HOST = "127.0.0.1"
HOME = f"http://{HOST}:8080"


@dataclass
class Echo:
    """Answers with what reached it; keeps the requests."""

    scopes: list[Scope] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert not message["more_body"]
        self.scopes.append(scope)
        self.bodies.append(message["body"])
        facts = {"namespace": get_namespace(scope), "id": scope["state"]["request_id"], "bytes": len(message["body"])}
        await answer(send, json.dumps(facts).encode())


async def answer(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def ask(
    settings: SecuritySettings,
    method: str = "POST",
    url: str = "/v1/completions",
    *,
    app: ASGIApp | None = None,
    public_paths: frozenset[str] = frozenset(),
    **request: Any,
) -> httpx.Response:
    """Ask an application behind the layers, without a socket."""
    asked = with_security(app or Echo(), settings, public_paths=public_paths)
    return run(lambda: _ask(asked, method, url, request))


async def _ask(app: ASGIApp, method: str, url: str, request: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOME) as client:
        return await client.request(method, url, **request)


def run(begin: Callable[[], Awaitable[T]]) -> T:
    async def within_time() -> T:
        async with asyncio.timeout(WAIT_S):
            return await begin()

    return asyncio.run(within_time())


def http_scope(path: str = "/v1/completions", *, method: str = "POST", **headers: str) -> dict[str, Any]:
    """Return the scope of a request; in the names of headers ``_`` stands for ``-``."""
    pairs = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8080"), *pairs],
        "server": ("127.0.0.1", 8080),
    }


def feed(*messages: Message) -> Receive:
    """Return a connection that says these things, and nothing more."""
    waiting = list(messages)

    async def receive() -> Message:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    return receive


def body_part(body: bytes, *, more: bool) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


class Sent(list[Message]):
    """Keeps what was answered."""

    async def __call__(self, message: Message) -> None:
        self.append(message)

    @property
    def status(self) -> int:
        status: int = self[0]["status"]
        return status

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self[1:]).decode()


def call(app: ASGIApp, scope: Scope, *messages: Message) -> Sent:
    """Return what an application answers to a request whose connection says these things."""
    sent = Sent()
    run(lambda: app(scope, feed(*messages), sent))
    return sent


class Socket:
    """A raw connection to a server, closed at the end of a ``with``."""

    def __init__(self, port: int, source: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S, source_address=(source, 0))

    def send(self, *lines: str, body: bytes = b"") -> None:
        self._socket.sendall("".join(f"{line}\r\n" for line in lines).encode() + body)

    def send_pieces(self, data: bytes, size: int) -> None:
        """Send bytes in pieces of a size, each in a packet of its own; the server may have stopped to listen."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            self._socket.sendall(data[start : start + size])

    def skip_body(self) -> None:
        """Read over the headers and the body of an answer whose first line was read."""
        length = 0
        while line := self.line():
            name, _, value = line.partition(":")
            length = int(value) if name.lower() == "content-length" else length
        while length:
            length -= len(self._socket.recv(length))

    def rest(self) -> str:
        """Return all that is answered until the server closes the connection."""
        parts = iter(lambda: self._socket.recv(1 << 16), b"")
        return b"".join(parts).decode()

    def line(self) -> str:
        """Return the first line of the answer."""
        return self.until(b"\r\n").strip()

    def until(self, end: bytes) -> str:
        """Return what is answered up to some bytes."""
        text = b""
        while not text.endswith(end):
            more = self._socket.recv(1)
            assert more, text
            text += more
        return text.decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@contextmanager
def serving(app: ASGIApp, settings: SecuritySettings) -> Iterator[int]:
    """Serve an application on a free port of the loopback; gives the port."""
    (listener,) = bind([HOST], 0)
    with in_thread(with_security(app, settings), settings, listener):
        yield listener.getsockname()[1]
