"""The layer that keeps foreign names away: the answer to DNS rebinding.

A web page can have the name of its own server resolve to 127.0.0.1. The browser then takes this server for the page's
own, and lets the page read everything. Only the ``Host`` header still has the page's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.serving.security.loopback import is_loopback, is_socket_path
from paceline.serving.security.refusals import refuse
from paceline.serving.security.scopes import LONGEST_SHOWN, header_values
from paceline.terminal_text import printable_line

ANY_HOST: Final = "*"
"""Host name that stands for all of them."""
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+)(?::[0-9]*)?")


class HostCheck:
    """Lets through requests to this machine's loopback names, and to names that were allowed, at any port."""

    def __init__(self, app: ASGIApp, *, allowed_hosts: Iterable[str]) -> None:
        """Put the check in front of an application.

        Args:
            app: the application.
            allowed_hosts: further names, without port; ``*`` allows every name.
        """
        self._app = app
        self._allowed = frozenset(plain_name(host) for host in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it for its host."""
        if self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        given = b", ".join(header_values(scope, b"host")).decode("latin-1")
        message = (
            f"the host {printable_line(given)[:LONGEST_SHOWN]!r} is not a name of this server: "
            "use localhost or 127.0.0.1, or start the server with --allowed-hosts NAME"
        )
        await refuse(scope, receive, send, 403, message, "permission_error")

    def _is_allowed(self, scope: Scope) -> bool:
        if ANY_HOST in self._allowed or _is_unix_socket(scope):
            return True
        values = header_values(scope, b"host")
        name = host_name(values[0].decode("latin-1")) if len(values) == 1 else None
        return name is not None and (name in self._allowed or is_loopback(name))


def host_name(value: str) -> str | None:
    """Return the name in a ``Host`` header: lower case, without port; ``None`` where the header is malformed."""
    found = _HOST.fullmatch(value)
    return plain_name(found[1]) if found else None


def plain_name(host: str) -> str:
    """Return a name as names are compared: in lower case, without a dot at the end."""
    return host.lower().removesuffix(".")


def _is_unix_socket(scope: Scope) -> bool:
    # No browser connects to a Unix socket, and clients that do may write anything as the host.
    server = scope.get("server")
    return server is not None and server[1] is None and is_socket_path(server[0])
