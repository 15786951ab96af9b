"""Cross-origin requests: which web pages may read the answers.

Starlette's ``CORSMiddleware`` is not used because llama-server's clients and tests expect other answers: a preflight of
a foreign origin gets status 200 without the header (Starlette: 400), ``Access-Control-Allow-Headers`` is ``*`` as it
was configured (Starlette: what was asked for), every OPTIONS request is answered, not the preflights alone, and the
names of these headers are looked up with capitals (Starlette: ASGI's lower case; uvicorn on h11 keeps what is given).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import InputError
from paceline.serving.security.loopback import is_loopback
from paceline.serving.security.scopes import header

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

    @classmethod
    def from_list(cls, value: str) -> CorsPolicy:
        """Return the policy for origins with commas between them, as ``--cors-origins`` has them.

        Raises:
            InputError: one of them is not an origin.
        """
        return cls(tuple(origin.strip() for origin in value.split(",") if origin.strip()))

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
        """Put the headers in front of an application.

        Args:
            app: the application.
            policy: who may read answers.
        """
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one preflight, or pass one request on."""
        origin = header(scope, b"origin")
        shared = [(b"vary", b"Origin")]
        if origin is not None and self._policy.allows(origin):
            # The server reads no cookies; clients of llama-server's may insist on sending some.
            shared += [
                (b"Access-Control-Allow-Origin", origin.encode("latin-1")),
                (b"Access-Control-Allow-Credentials", b"true"),
            ]
        if scope["method"] == "OPTIONS":
            # Browsers send no key with a preflight.
            headers = [*shared, *self._preflight_headers(scope), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        async def send_shared(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), *shared, (b"Access-Control-Expose-Headers", _READABLE)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_shared)

    def _preflight_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        # Where the origins are listed, each header is allowed by its name: no browser has to take ``*`` for
        # ``Authorization``.
        asked = None if ANY_ORIGIN in self._policy.origins else header(scope, b"access-control-request-headers")
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
