"""Which web pages may use the server: the checks of ``Host`` and ``Origin``, and CORS.

* :class:`HostCheck` is the answer to DNS rebinding. A web page can have the name of its own server resolve to
  127.0.0.1. The browser then takes this server for the page's own, and lets the page read everything. Only the
  ``Host`` header still has the page's name. Starlette's ``TrustedHostMiddleware`` compares texts, so not all of
  127.0.0.0/8 would pass, takes the first of several headers, and answers in plain text.
* :class:`OriginCheck` keeps other pages from acting on a server without keys. A page may send some requests to any
  server, without asking and without being able to read the answer. Such a request would still have the model work.
* :class:`Cors` says which pages may read answers. Starlette's ``CORSMiddleware`` is not used because llama-server's
  clients and tests expect other answers: a preflight of a foreign origin gets status 200 without the header (Starlette:
  400), ``Access-Control-Allow-Headers`` is ``*`` as it was configured (Starlette: what was asked for), every OPTIONS
  request is answered, not the preflights alone, and the names of these headers are looked up with capitals (Starlette:
  ASGI's lower case; uvicorn on h11 keeps what is given).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import InputError
from paceline.serving.errors import RefusedError, shorten


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's loopback: ``localhost``, ``127.0.0.0/8`` or ``::1``.

    Names other than ``localhost`` are not looked up: whoever answers for a name may change the answer.

    Args:
        host: without port. Brackets around an IPv6 address and a dot at the end are allowed.
    """
    name = host.lower().removesuffix(".")
    if name == "localhost":
        return True
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_socket_path(host: str) -> bool:
    """Return whether an address to listen at is a Unix socket, by llama-server's rule: the name ends in ``.sock``."""
    return host.endswith(".sock")


def open_warning(hosts: Iterable[str], has_keys: bool) -> str | None:
    """Return the line that warns of a server without keys that other machines can reach; ``None`` where all is well.

    Args:
        hosts: the addresses that the server listens at.
        has_keys: whether the server asks for a key.
    """
    reachable = [host for host in hosts if not is_socket_path(host) and not is_loopback(host)]
    if has_keys or not reachable:
        return None
    return (
        f"other machines can reach this server at {', '.join(reachable)}, and it asks for no key: "
        "give --api-key or --api-key-file, or listen at 127.0.0.1 (--host)"
    )


ANY_ORIGIN: Final = "*"
"""Origin that stands for all of them."""
LOOPBACK_ORIGINS: Final = "localhost"
"""Origin that stands for every page that was loaded from this machine's loopback, at any port."""
_NO_ORIGIN: Final = "null"
"""What browsers send as the origin of files and sandboxed frames."""
_PREFLIGHT_S: Final = 600
"""Seconds for which a browser may remember the answer to a preflight."""
_READABLE: Final = b"x-request-id, retry-after"
"""Headers of an answer that pages may read beyond those that they always may."""


_METHODS: Final = b"GET, POST, DELETE, OPTIONS"
_ANY_HEADER: Final = b"*"


@dataclass(frozen=True)
class CorsPolicy:
    """Which web pages may read answers. How they may ask is as llama-server has it where nothing is said.

    Attributes:
        origins: ``scheme://host[:port]`` of each page, :data:`ANY_ORIGIN` or :data:`LOOPBACK_ORIGINS`. Empty: no page
            may, and no answer has a header about it.
    """

    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for origin in self.origins:
            if origin not in (ANY_ORIGIN, LOOPBACK_ORIGINS, _NO_ORIGIN) and not _is_origin(origin):
                raise InputError(
                    f"--cors-origins cannot use {origin!r}: write an origin without path, such as "
                    "https://chat.example.org, or 'localhost' or '*'"
                )

    def allows(self, origin: str) -> bool:
        """Return whether a page of this origin may read answers."""
        if ANY_ORIGIN in self.origins or (LOOPBACK_ORIGINS in self.origins and _is_loopback_origin(origin)):
            return True
        return origin != LOOPBACK_ORIGINS and origin.lower() in (listed.lower() for listed in self.origins)

    def warning(self, has_keys: bool) -> str | None:
        """Return the line that warns of a server that every web page may use; ``None`` where all is well.

        Args:
            has_keys: whether the server asks for a key.
        """
        if has_keys or ANY_ORIGIN not in self.origins:
            return None
        return (
            "every web page that is open on this machine may use this server (--cors-origins *), and it asks for no "
            "key: give --api-key, or list the origins"
        )


class Cors:
    """Answers preflights, and tells browsers which pages may read the other answers."""

    def __init__(self, app: ASGIApp, *, policy: CorsPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one preflight, or pass one request on."""
        asking = Headers(scope=scope)
        origin = asking.get("origin")
        shared = [(b"vary", b"Origin")]
        if origin is not None and self._policy.allows(origin):
            # The server reads no cookies; clients of llama-server's may insist on sending some.
            shared += [
                (b"Access-Control-Allow-Origin", origin.encode("latin-1")),
                (b"Access-Control-Allow-Credentials", b"true"),
            ]
        if scope["method"] == "OPTIONS":
            # Browsers send no key with a preflight.
            headers = [*shared, *self._preflight_headers(asking), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        async def send_shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *shared, (b"Access-Control-Expose-Headers", _READABLE)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_shared)

    def _preflight_headers(self, asking: Headers) -> list[tuple[bytes, bytes]]:
        # Where the origins are listed, each header is allowed by its name: no browser has to take ``*`` for
        # ``Authorization``.
        asked = None if ANY_ORIGIN in self._policy.origins else asking.get("access-control-request-headers")
        return [
            (b"Access-Control-Allow-Methods", _METHODS),
            (b"Access-Control-Allow-Headers", asked.encode("latin-1") if asked else _ANY_HEADER),
            (b"Access-Control-Max-Age", str(_PREFLIGHT_S).encode()),
        ]


def _is_origin(text: str) -> bool:
    scheme, separator, rest = text.partition("://")
    return bool(scheme and separator and rest) and text.isprintable() and not any(sign in rest for sign in "/?#@* ")


def _is_loopback_origin(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
        name = parts.hostname
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and name is not None and is_loopback(name)


ANY_HOST: Final = "*"
"""Host name that stands for all of them."""
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@\s]+)(?::[0-9]*)?")


class HostCheck:
    """Refuses requests but to this machine's loopback names, and to names that were allowed, at any port.

    Args:
        allowed_hosts: further names, without port; ``*`` allows every name.
    """

    def __init__(self, allowed_hosts: Iterable[str]) -> None:
        self._allowed = frozenset(plain_name(host) for host in allowed_hosts)

    def __call__(self, scope: Scope) -> None:
        """Check one request."""
        given = Headers(scope=scope).getlist("host")
        if not self._is_allowed(scope, given):
            raise RefusedError(
                403,
                "permission_error",
                f"the host {shorten(', '.join(given))!r} is not a name of this server: use localhost or 127.0.0.1, or "
                "start the server with --allowed-hosts NAME",
            )

    def _is_allowed(self, scope: Scope, given: list[str]) -> bool:
        if ANY_HOST in self._allowed or _is_unix_socket(scope):
            return True
        name = host_name(given[0]) if len(given) == 1 else None
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


_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class OriginCheck:
    """Refuses what a browser sends for a page of another origin, unless the page is allowed to read answers too."""

    def __init__(self, cors: CorsPolicy) -> None:
        self._cors = cors

    def __call__(self, scope: Scope) -> None:
        """Check one request."""
        headers = Headers(scope=scope)
        if scope["method"] in _READING or self._is_allowed(headers):
            return
        raise RefusedError(
            403,
            "permission_error",
            f"a page of {shorten(headers.get('origin') or 'another site')} may not use this server: start the server "
            "with --cors-origins and that origin, or with --api-key",
        )

    def _is_allowed(self, headers: Headers) -> bool:
        # Only the browser itself can write this header.
        site = headers.get("sec-fetch-site")
        if site in ("same-origin", "none"):
            return True
        origin = headers.get("origin")
        if origin is None:
            # Neither header: not a browser.
            return site is None
        return self._cors.allows(origin) or _is_same_host(origin, headers.get("host", ""))


def _is_same_host(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    # What stands in front of this server may have taken TLS off, so the scheme need not agree.
    port = _DEFAULT_PORTS.get(parts.scheme, "")
    return bool(parts.netloc) and parts.netloc.lower().removesuffix(port) == host.lower().removesuffix(port)
