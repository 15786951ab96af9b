"""The layer that keeps other web pages from acting on a server without keys.

A page may send some requests to any server, without asking and without being able to read the answer. Such a request
would still have the model work.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serving.security.cors import CorsPolicy
from paceline.serving.security.refusals import refuse
from paceline.serving.security.scopes import LONGEST_SHOWN, header
from paceline.terminal_text import printable_line

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class OriginCheck:
    """Refuses what a browser sends for a page of another origin, unless the page is allowed to read answers too."""

    def __init__(self, app: ASGIApp, *, cors: CorsPolicy) -> None:
        """Put the check in front of an application.

        Args:
            app: the application.
            cors: which pages are allowed.
        """
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it for the page it comes from."""
        if scope["method"] in _READING or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        origin = printable_line(header(scope, b"origin") or "another site")[:LONGEST_SHOWN]
        message = (
            f"a page of {origin} may not use this server: start the server with --cors-origins and that origin, "
            "or with --api-key"
        )
        await refuse(scope, receive, send, 403, message, "permission_error")

    def _is_allowed(self, scope: Scope) -> bool:
        # Only the browser itself can write this header.
        site = header(scope, b"sec-fetch-site")
        if site in ("same-origin", "none"):
            return True
        origin = header(scope, b"origin")
        if origin is None:
            # Neither header: not a browser.
            return site is None
        return self._cors.allows(origin) or _is_same_host(origin, header(scope, b"host") or "")


def _is_same_host(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    # What stands in front of this server may have taken TLS off, so the scheme need not agree.
    port = _DEFAULT_PORTS.get(parts.scheme, "")
    return bool(parts.netloc) and parts.netloc.lower().removesuffix(port) == host.lower().removesuffix(port)
