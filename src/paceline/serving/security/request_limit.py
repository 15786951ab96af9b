"""The layer that bounds how many requests are under way."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serving.security.api_keys import namespace_of
from paceline.serving.security.refusals import refuse
from paceline.serving.shares import Shares


class RequestLimit:
    """Refuses a request where as many are under way as may be: in all, and of its key."""

    def __init__(self, app: ASGIApp, *, most: int, keys_differ: bool) -> None:
        """Put the limit in front of an application.

        Args:
            app: the application.
            most: requests at a time.
            keys_differ: whether there are keys, none of which may have all of them.
        """
        self._app = app
        self._room = Shares(most, keys_differ=keys_differ)
        self._whose = ", of each key half of what others leave" if keys_differ else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        key = namespace_of(scope)
        if not self._room.take(key, 1):
            text = f"{self._room.most} requests may be under way{self._whose}, and more are not taken: ask again later"
            await refuse(scope, receive, send, 503, text, "unavailable_error", headers=[(b"retry-after", b"1")])
            return
        try:
            await self._app(scope, receive, send)
        finally:
            self._room.give_back(key, 1)
