"""Streams of events: comments while they are silent, and none behind their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

import h11
import pytest
from starlette.types import Message

from paceline.serving.connections import _CarefulConnection
from paceline.serving.event_stream import EventStream
from tests.timing import WAIT_S

SCOPE: Final[dict[str, Any]] = {"type": "http", "method": "POST"}
COMMENT: Final = b": \n\n"


async def nobody_leaves() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_silent_stream_says_that_it_is_there() -> None:
    sent: list[bytes] = []

    commented = asyncio.Event()

    async def content() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await commented.wait()
        yield b"second"

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent.count(COMMENT) >= 2:
            commented.set()

    over: list[bool] = []
    async with asyncio.timeout(WAIT_S):
        await EventStream(content(), over=lambda: over.append(True), ping_s=0.001, ping=b": \n\n")(
            SCOPE, nobody_leaves, send
        )
    assert over == [True]
    assert [body for body in sent if body != COMMENT] == [b"", b"first", b"second", b""]
    assert sent[-2:] == [b"second", b""]


async def test_a_comment_that_waits_to_be_read_does_not_come_after_the_end() -> None:
    written: list[bytes] = []

    waiting, never = asyncio.Event(), asyncio.Event()

    async def content() -> AsyncGenerator[bytes, None]:
        await waiting.wait()
        yield b"last"

    async def send(message: Message) -> None:
        if message.get("body") == COMMENT:
            waiting.set()
            await never.wait()
        written.append(message.get("body", b""))

    async with asyncio.timeout(WAIT_S):
        await EventStream(content(), over=lambda: None, ping_s=0.001, ping=b": \n\n")(SCOPE, nobody_leaves, send)
    assert written == [b"", b"last", b""]


async def test_an_error_of_whoever_sends_ends_a_stream() -> None:
    closed: list[bool] = []

    async def content() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"more"
        finally:
            closed.append(True)

    async def send(message: Message) -> None:
        if message.get("body"):
            raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        await EventStream(content(), over=lambda: closed.append(False), ping_s=0, ping=b": \n\n")(
            SCOPE, nobody_leaves, send
        )
    assert closed == [True, False]


async def test_the_status_waits_for_the_first_event() -> None:
    sent: list[str] = []

    async def content() -> AsyncGenerator[bytes, None]:
        assert sent == []
        yield b"first"
        assert sent == ["http.response.start", "http.response.body"]

    async def send(message: Message) -> None:
        sent.append(message["type"])

    stream = EventStream(content(), over=lambda: None, ping_s=0, ping=COMMENT)
    await stream(SCOPE, nobody_leaves, send)
    assert sent.count("http.response.start") == 1


async def test_what_fails_before_its_first_event_sends_nothing() -> None:
    sent: list[Message] = []

    async def content() -> AsyncGenerator[bytes, None]:
        if not sent:
            raise OSError("no place")
        yield b""

    async def send(message: Message) -> None:
        sent.append(message)

    stream = EventStream(content(), over=lambda: None, ping_s=0, ping=COMMENT)
    with pytest.raises(OSError, match="no place"):
        await stream(SCOPE, nobody_leaves, send)
    assert sent == []
    assert not stream.has_begun


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("headers", [[], [("content-length", "300008")]])
def test_a_body_is_written_as_h11_writes_it(version: bytes, headers: list[tuple[str, str]]) -> None:
    def sent(connection: Any) -> list[bytes]:
        connection.receive_data(b"GET / HTTP/%b\r\nHost: a\r\n\r\n" % version)
        while connection.next_event() is not h11.NEED_DATA and connection.their_state is not h11.DONE:
            pass
        bodies = [h11.Data(data=data) for data in (b"a", b"", b"1234567", b"b" * 300_000)]
        events = [h11.Response(status_code=200, headers=headers), *bodies, h11.EndOfMessage()]
        return [connection.send(event) for event in events]

    assert sent(_CarefulConnection(1000)) == sent(h11.Connection(h11.SERVER, 1000))
