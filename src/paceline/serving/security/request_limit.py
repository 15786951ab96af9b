"""The layer that bounds how many requests are under way."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serving.security.refusals import refuse


class RequestLimit:
    """Refuses a request where as many are under way as may be."""

    def __init__(self, app: ASGIApp, *, most: int) -> None:
        """Put the limit in front of an application.

        Args:
            app: the application.
            most: requests at a time.
        """
        self._app = app
        self._most = most
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if self._running >= self._most:
            text = f"{self._most} requests are under way, and more are not taken: ask again later"
            await refuse(scope, receive, send, 503, text, "unavailable_error", headers=[(b"retry-after", b"1")])
            return
        self._running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
