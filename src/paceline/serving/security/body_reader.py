"""The layer that reads the body of a request: whole, within its size, within its time.

Every route needs the whole body before it can begin, so the body is read here, and a route gets it in one piece.
Answers are not touched. Starlette's ``RequestBodyLimitMiddleware`` is not used: it knows no time limit, its answer is a
plain text, and it ends a request by an exception through the application, which the application may catch.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serving.security.refusals import refuse
from paceline.serving.security.scopes import declared_length


class BodyReader:
    """Hands the application whole bodies only."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, body_timeout_s: float) -> None:
        """Put the reader in front of an application.

        Args:
            app: the application.
            max_body_bytes: bytes of a body.
            body_timeout_s: seconds from the end of the headers until the body is there.
        """
        self._app = app
        self._max_bytes = max_body_bytes
        self._timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on with its body, or refuse it."""
        whole = await self._read(scope, receive, send)
        if whole is not None:
            await self._app(scope, whole, send)

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> Receive | None:
        declared = declared_length(scope)
        if declared is not None and declared > self._max_bytes:
            await self._refuse_size(scope, receive, send, f"the body has {declared} bytes")
            return None
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                more = True
                while more and len(body) <= self._max_bytes:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
        except TimeoutError:
            text = (
                f"the body did not arrive within {self._timeout_s:g} s, {len(body)} bytes of it did: send it faster, "
                "or start the server with a longer --timeout"
            )
            # Whoever is this slow is not waited for once more.
            await refuse(scope, receive, send, 408, text, "timeout_error", linger_s=0)
            return None
        if len(body) > self._max_bytes:
            rest = receive if more else _nothing
            await self._refuse_size(scope, rest, send, f"the body has {len(body)} bytes or more")
            return None
        return _Replay(bytes(body), receive)

    async def _refuse_size(self, scope: Scope, receive: Receive, send: Send, what: str) -> None:
        text = (
            f"{what}, and the server takes at most {self._max_bytes}: "
            "send less, or start the server with a larger --max-body"
        )
        await refuse(scope, receive, send, 413, text, "invalid_request_error")


class _Replay:
    """Gives the body once, and then what the connection has to say: that the client has left."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        return await self._receive() if message is None else message


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}
