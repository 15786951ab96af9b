"""How much requests may take: the size, time and memory of a body, and how many are under way.

Every route needs the whole body before it can begin, so the body is read here, and a route gets it in one piece.
Answers are not touched. Starlette's ``RequestBodyLimitMiddleware`` is not used: it knows no time limit, its answer is a
plain text, and it ends a request by an exception through the application, which the application may catch.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import QueueFullError
from paceline.serving.auth import get_namespace
from paceline.serving.errors import RefusedError
from paceline.serving.json_bodies import MAX_VALUES


class Shares:
    """Room of which each key may have half of what the other keys leave.

    So whoever comes next finds some, however much the others ask for. All of it belongs to the event loop.

    Args:
        most: all of the room.
        keys_differ: whether there are keys; without, one client is as another, and all of them have all of the room.
    """

    def __init__(self, most: int, *, keys_differ: bool = True) -> None:
        self.most = most
        self._parts = 2 if keys_differ else 1
        self._held: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[object]] = defaultdict(deque)
        self._changed = asyncio.Event()

    def take(self, key: str, amount: int) -> bool:
        """Return whether a key may have so much more; if so, it has it."""
        others = self._held.total() - self._held[key]
        # Others may have come since this key took what it has, and it may go on with that.
        if amount and self._held[key] + amount > (self.most - others) // self._parts:
            return False
        self._held[key] += amount
        return True

    async def take_in_turn(self, key: str, amount: int, most_waiting: int) -> None:
        """Wait until a key may have so much more. Of a key, whoever came first is first.

        Args:
            key: who asks.
            amount: how much.
            most_waiting: of this key.

        Raises:
            QueueFullError: too many of this key wait.
        """
        waiting = self._waiting[key]
        if not waiting and self.take(key, amount):
            return
        if len(waiting) >= most_waiting:
            raise QueueFullError(f"{len(waiting)} requests of this client wait for room, and no more may")
        turn = object()
        waiting.append(turn)
        try:
            while waiting[0] is not turn or not self.take(key, amount):
                await self._changed.wait()
        finally:
            waiting.remove(turn)
            self._tell()

    def give_back(self, key: str, amount: int) -> None:
        """Take note that a key has so much less."""
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]
        self._tell()

    def _tell(self) -> None:
        """Wake all that wait now."""
        self._changed.set()
        self._changed.clear()


class RequestLimit:
    """Refuses a request where as many are under way as may be: in all, and of its key.

    Args:
        app: the application.
        most: requests at a time.
        keys_differ: whether there are keys, none of which may have all of them.
    """

    def __init__(self, app: ASGIApp, *, most: int, keys_differ: bool) -> None:
        self._app = app
        self._room = Shares(most, keys_differ=keys_differ)
        self._whose = ", of each key half of what others leave" if keys_differ else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        key = get_namespace(scope)
        if not self._room.take(key, 1):
            raise RefusedError(
                503,
                "unavailable_error",
                f"{self._room.most} requests may be under way{self._whose}, and more are not taken: ask again later",
            )
        try:
            await self._app(scope, receive, send)
        finally:
            self._room.give_back(key, 1)


_BYTES_OF_MEMORY: Final = 4
"""Bytes of memory that a byte of a body comes to, at most about: it is held as it came, and as texts."""
_MARK_BYTES: Final = 128
"""Bytes of memory that a value comes to, at most about, beside those of texts. Commas and brackets tell of values."""
_HEAVIEST: Final = 3
"""Heaviest bodies that there is memory for at a time."""


class BodyReader:
    """Hands the application whole bodies only.

    What a body comes to in memory is counted as it arrives, and until its request is over.

    Args:
        app: the application.
        max_body_bytes: bytes of a body.
        body_timeout_s: seconds from the end of the headers until the body is there.
        keys_differ: whether there are keys, none of which may take all of the memory.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_timeout_s: float, keys_differ: bool) -> None:
        self._app = app
        self._max_bytes = max_body_bytes
        self._timeout_s = body_timeout_s
        heaviest = max_body_bytes * _BYTES_OF_MEMORY + min(max_body_bytes, MAX_VALUES) * _MARK_BYTES
        self._room = Shares(_HEAVIEST * heaviest, keys_differ=keys_differ)
        self._whose = ", of each key half of what others leave" if keys_differ else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        held = _Held(self._room, get_namespace(scope))
        try:
            body = await self._read(declared_length(Headers(scope=scope)), receive, held)
            if body is not None:
                await self._app(scope, _Replay(body, receive), send)
        finally:
            held.give_back()

    async def _read(self, declared: int | None, receive: Receive, held: _Held) -> bytes | None:
        """Return the body; ``None`` where the client left.

        Raises:
            RefusedError: it is too large, takes too long, or has no room in memory.
        """
        if declared is not None and declared > self._max_bytes:
            raise self._too_large(f"the body has {declared} bytes")
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                more = has_room = True
                while more and has_room and size <= self._max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    has_room = held.take(part)
                    parts.append(part)
                    size += len(part)
                    more = message.get("more_body", False)
        except TimeoutError:
            raise RefusedError(
                408,
                "timeout_error",
                f"the body did not arrive within {self._timeout_s:g} s, {size} bytes of it did: send it faster, "
                "or start the server with a longer --timeout",
            ) from None
        if size > self._max_bytes:
            raise self._too_large(f"the body has {size} bytes or more")
        if not has_room:
            raise RefusedError(
                429,
                "rate_limit_error",
                f"the server holds {self._room.most >> 20} MiB of bodies at most{self._whose}, and this one has no "
                "room: send it once others are answered, or start the server with a larger --max-body",
            )
        return b"".join(parts)

    def _too_large(self, what: str) -> RefusedError:
        return RefusedError(
            413,
            "invalid_request_error",
            f"{what}, and the server takes at most {self._max_bytes}: "
            "send less, or start the server with a larger --max-body",
        )


def declared_length(headers: Headers) -> int | None:
    """Return the bytes of the body that a request announces; ``None`` where it announces no number."""
    value = headers.get("content-length", "")
    return int(value) if value.isascii() and value.isdigit() else None


class _Held:
    """What the body of one request comes to in memory."""

    def __init__(self, room: Shares, key: str) -> None:
        self._room, self._key = room, key
        self._marks = self._held = 0

    def take(self, part: bytes) -> bool:
        """Return whether there is room for a further part."""
        # What has more values is not read.
        marks = min(part.count(b",") + part.count(b"[") + part.count(b"{"), MAX_VALUES - self._marks)
        more = len(part) * _BYTES_OF_MEMORY + marks * _MARK_BYTES
        if not self._room.take(self._key, more):
            return False
        self._marks += marks
        self._held += more
        return True

    def give_back(self) -> None:
        """Take note that the request is over."""
        self._room.give_back(self._key, self._held)
        self._held = 0


class _Replay:
    """Gives the body once, and then what the connection has to say: that the client has left."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        return await self._receive() if message is None else message
