"""How a request is refused before a route sees the request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from starlette.types import Receive, Scope, Send

from paceline.serving.error_bodies import error_body
from paceline.serving.security.scopes import has_body, state_of

Refused: TypeAlias = Callable[[int, str], None]
"""Hears of a refusal: its status, and the type of error in its body."""

_REFUSED: Final = "paceline_refused"

LINGER_S: Final = 2.0
"""Seconds for which the rest of a refused body is read and dropped. A connection that closes on unread bytes is reset,
and the client may then lose the answer that says why."""


def tell_refusals(scope: Scope, refused: Refused) -> None:
    """Have somebody hear if this request is refused before a route sees it."""
    state_of(scope)[_REFUSED] = refused


async def refuse(
    scope: Scope,
    receive: Receive,
    send: Send,
    status: int,
    message: str,
    kind: str,
    *,
    headers: Sequence[tuple[bytes, bytes]] = (),
    linger_s: float = LINGER_S,
) -> None:
    """Answer a request with an error.

    Args:
        scope: of the request.
        receive: gives what is left of the body, which is dropped.
        send: takes the answer.
        status: the HTTP status.
        message: one line: the value, the limit, the way out.
        kind: the type of the error in its body.
        headers: further headers of the answer.
        linger_s: seconds for which the rest of the body is read. The connection closes afterwards.
    """
    body = json.dumps(error_body(status, message, kind)).encode()
    refused = state_of(scope).get(_REFUSED)
    if refused is not None:
        refused(status, kind)
    unread = has_body(scope)
    fixed = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    closing = [(b"connection", b"close")] if unread else []
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers, *closing]})
    await send({"type": "http.response.body", "body": body, "more_body": unread})
    if not unread:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(linger_s):
            while (await receive()).get("more_body", False):
                pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
