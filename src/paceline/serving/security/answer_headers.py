"""The layer that gives every answer its id, and the headers that keep browsers from reading more into an answer."""

from __future__ import annotations

import re
import secrets
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serving.security.scopes import header, state_of

_REQUEST_ID: Final = "request_id"
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_FIXED: Final = (
    # A text that the model wrote is never taken for a page or a script.
    (b"x-content-type-options", b"nosniff"),
    # No page of another origin can load an answer as an image or a script. Pages that CORS allows are not affected.
    (b"cross-origin-resource-policy", b"same-origin"),
)


class AnswerHeaders:
    """Names each request by an id: the client's own where that is a short plain word, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        """Put the headers in front of an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and name its answer."""
        given = header(scope, b"x-request-id") or ""
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        state_of(scope)[_REQUEST_ID] = request_id
        added = [(b"x-request-id", request_id.encode()), *_FIXED]

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        await self._app(scope, receive, send_named)


def request_id_of(scope: Scope) -> str:
    """Return the id of a request, which its answer has as ``x-request-id``."""
    request_id: str = state_of(scope)[_REQUEST_ID]
    return request_id
