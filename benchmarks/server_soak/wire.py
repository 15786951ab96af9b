"""HTTP as bytes on a socket, so that a client can break off, stall and lie at any place."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Head:
    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    head: Head
    body: bytes

    @property
    def status(self) -> int:
        return self.head.status

    def json(self) -> Any:
        return json.loads(self.body)


def request_bytes(
    method: str, path: str, body: bytes = b"", *, length: int | None = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return a request.

    Args:
        method: of the request.
        path: of the request.
        body: what follows the headers; less than ``length`` where the rest comes later or never.
        length: bytes that are announced; by default those of the body.
        headers: further ones.
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body) if length is None else length}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def post_bytes(path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None) -> bytes:
    content = json.dumps(body).encode()
    return request_bytes("POST", path, content, headers={"Content-Type": "application/json", **(headers or {})})


class Connection:
    """A connection to a server.

    Use as ``async with await Connection.open(port)``. Leaving closes it.
    """

    def __init__(self, own: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._own = own
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(
        cls, port: int, *, receive_bytes: int | None = None, tls: ssl.SSLContext | None = None
    ) -> Connection:
        own = socket.socket()
        own.setblocking(False)
        if receive_bytes is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(own, (HOST, port))
            # A small limit, or asyncio would read ahead for a reader that is slow on purpose.
            limit = 1 << (16 if receive_bytes is None else 10)
            name = None if tls is None else "localhost"
            reader, writer = await asyncio.open_connection(sock=own, limit=limit, ssl=tls, server_hostname=name)
        except BaseException:
            own.close()
            raise
        return cls(own, reader, writer)

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.writer.close()

    async def leave(self) -> None:
        """Close the connection, and wait until it is closed: that takes a turn of the event loop."""
        self.writer.close()
        with contextlib.suppress(OSError):  # the server was faster
            await self.writer.wait_closed()

    def reset(self) -> None:
        """Drop the connection, without the usual farewell."""
        with contextlib.suppress(OSError):  # the server was faster
            self._own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Head:
        """Read the beginning of an answer."""
        try:
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.IncompleteReadError as error:
            raise ConnectionResetError(f"the connection ended after {len(error.partial)} bytes of an answer") from None
        status = int(lines[0].split(" ")[1])
        pairs = [line.partition(":") for line in lines[1:] if line]
        return Head(status, {name.strip().lower(): value.strip() for name, _, value in pairs})

    async def chunks(self, head: Head) -> AsyncIterator[bytes]:
        """Yield the pieces of an answer's body as they come, to its end."""
        if head.headers.get("transfer-encoding") != "chunked":
            length = head.headers.get("content-length")
            yield await (self.reader.readexactly(int(length)) if length is not None else self.reader.read(-1))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def answer(self) -> Answer:
        head = await self.head()
        return Answer(head, b"".join([chunk async for chunk in self.chunks(head)]))


async def ask(port: int, request: bytes, *, tls: ssl.SSLContext | None = None) -> Answer:
    """Return the answer to one request on a connection of its own."""
    async with await Connection.open(port, tls=tls) as connection:
        await connection.send(request)
        return await connection.answer()
