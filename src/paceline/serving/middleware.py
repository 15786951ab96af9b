"""The layers that a request passes between the socket and the routes.

::

    socket       uvicorn: TLS, size and time of headers, time to read; who yields where there are too many connections
      RequestLog    one line for each request, refused ones included; id of the request, nosniff
      Cors          preflights; which pages may read answers and refusals
      Gate          answers what is refused here and below
        HostCheck     names of this server
        OriginCheck   no foreign pages
        KeyCheck      API keys; namespace of the request
      BodyReader    size and time of the body, which nobody without a key gets read
      RequestLimit  how many are under way, bodies on their way not counted
    routes

Why these are not those of Starlette and FastAPI:

* ``TrustedHostMiddleware`` compares texts, so not all of 127.0.0.0/8 would pass, takes the first of several headers,
  and answers in plain text.
* ``CORSMiddleware`` answers otherwise than llama-server's clients and tests expect: a preflight of a foreign origin
  gets status 200 without the header (Starlette: 400), ``Access-Control-Allow-Headers`` is ``*`` as it was configured
  (Starlette: what was asked for), every OPTIONS request is answered, not the preflights alone, and the names of these
  headers are looked up with capitals (Starlette: ASGI's lower case; uvicorn on h11 keeps what is given).
* ``RequestBodyLimitMiddleware`` knows no time limit, answers in plain text, and ends a request by an exception through
  the application, which the application may catch.
* FastAPI's ``HTTPBearer`` and ``APIKeyHeader`` are asked by routes: behind the body, and only where there is a path.
* Starlette's handlers of exceptions know nothing of a body that nobody read.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serving.connections import LINGER_S
from paceline.serving.errors import RefusedError, error_response, shorten
from paceline.serving.json_bodies import MAX_VALUES
from paceline.serving.logs import RequestLog
from paceline.serving.security import (
    ANY_HOST,
    ANY_ORIGIN,
    CLIENT_HEADER,
    ApiKeys,
    CorsPolicy,
    SecuritySettings,
    get_namespace,
    host_name,
    is_loopback,
    is_socket_path,
    plain_name,
    set_namespace,
    stretch,
)
from paceline.serving.work import Shares

Refused: TypeAlias = Callable[[int, str], None]
"""Hears of a refusal: its status, and the type of error in its body."""
Check: TypeAlias = Callable[[Scope], None]
"""Raises a :class:`RefusedError` for a request that may not pass."""


def with_security(
    app: ASGIApp,
    settings: SecuritySettings,
    refused: Refused | None = None,
    *,
    public_paths: frozenset[str] = frozenset(),
    quiet_paths: frozenset[str] = frozenset(),
) -> ASGIApp:
    """Return an application behind everything that a request has to pass.

    Args:
        app: the routes.
        settings: who may use them.
        refused: hears of each request that no route sees.
        public_paths: may be read without a key.
        quiet_paths: are logged at level DEBUG.
    """
    routes = app
    app = Limits(app, settings)
    checks: list[Check] = [KeyCheck(settings.keys, public_paths, behind_router=settings.behind_router)]
    if not settings.keys:
        checks.insert(0, OriginCheck(settings.cors))
    if settings.checks_hosts:
        checks.insert(0, HostCheck(settings.allowed_hosts))
    app = Gate(app, checks, refused)
    if settings.cors.origins:
        app = Cors(app, policy=settings.cors)
    requests = RequestLog(app, quiet_paths=quiet_paths)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # None of the checks knows them.
            await send({"type": "websocket.close", "code": 1008, "reason": "this server has no websockets"})
        else:
            await (requests if scope["type"] == "http" else routes)(scope, receive, send)

    return front


_PREFLIGHT_S: Final = 600
"""Seconds for which a browser may remember the answer to a preflight."""
_READABLE: Final = b"x-request-id, request-id, retry-after"
"""Headers of an answer that pages may read beyond those that they always may."""


_METHODS: Final = b"GET, POST, DELETE, OPTIONS"
_ANY_HEADER: Final = b"*"


class Cors:
    """Answers preflights, and tells browsers which pages may read the other answers."""

    def __init__(self, app: ASGIApp, *, policy: CorsPolicy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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


class Gate:
    """Lets through what passes all checks, and answers what these or the layers behind them refuse.

    A :class:`RefusedError` of the application comes before it has answered.
    """

    def __init__(self, app: ASGIApp, checks: Sequence[Check], refused: Refused | None) -> None:
        self._app = app
        self._checks = checks
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        is_unread = bool(declared_length(headers)) or "transfer-encoding" in headers

        async def receive_watched() -> Message:
            nonlocal is_unread
            message = await receive()
            is_unread = message.get("more_body", False)
            return message

        try:
            for check in self._checks:
                check(scope)
            await self._app(scope, receive_watched, send)
            return
        except RefusedError as error:
            answer = error_response(error, scope)
            if self._refused is not None:
                self._refused(error.status, error.kind)
        # With the error went what its frames held of a body, which others may need the memory for.
        closing = [(b"connection", b"close")] if is_unread else []
        await send(
            {"type": "http.response.start", "status": answer.status_code, "headers": [*answer.raw_headers, *closing]}
        )
        await send({"type": "http.response.body", "body": answer.body, "more_body": is_unread})
        if not is_unread:
            return
        if answer.status_code != 408:
            # Whoever was too slow is not waited for once more.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while is_unread:
                        await receive_watched()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class HostCheck:
    """Refuses requests but to this machine's loopback names, and to names that were allowed, at any port.

    This is the answer to DNS rebinding. A web page can have the name of its own server resolve to 127.0.0.1. The
    browser then takes this server for the page's own, and lets the page read everything. Only the ``Host`` header still
    has the page's name.
    """

    def __init__(self, allowed_hosts: Iterable[str]) -> None:
        self._allowed = frozenset(plain_name(host) for host in allowed_hosts)

    def __call__(self, scope: Scope) -> None:
        given = Headers(scope=scope).getlist("host")
        if not self._is_allowed(scope, given):
            raise RefusedError(
                403,
                "permission_error",
                f"the host {shorten(', '.join(given))!r} is not a name of this server: use localhost or 127.0.0.1, or "
                "start the server with `allowed_hosts` NAME",
            )

    def _is_allowed(self, scope: Scope, given: list[str]) -> bool:
        if ANY_HOST in self._allowed or _is_unix_socket(scope):
            return True
        name = host_name(given[0]) if len(given) == 1 else None
        return name is not None and (name in self._allowed or is_loopback(name))


def _is_unix_socket(scope: Scope) -> bool:
    # No browser connects to a Unix socket, and clients that do may write anything as the host.
    server = scope.get("server")
    return server is not None and server[1] is None and is_socket_path(server[0])


_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


class OriginCheck:
    """Refuses what a browser sends for a page of another origin, unless the page is allowed to read answers too.

    It keeps such pages from acting on a server without keys. A page may send some requests to any server, without
    asking and without being able to read the answer. Such a request would still have the model work.
    """

    def __init__(self, cors: CorsPolicy) -> None:
        self._cors = cors

    def __call__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if scope["method"] in _READING or self._is_allowed(headers):
            return
        raise RefusedError(
            403,
            "permission_error",
            f"a page of {shorten(headers.get('origin') or 'another site')} may not use this server: start the server "
            "with `cors_origins` and that origin, or with `api_key`",
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


_SCHEME: Final = b"bearer "


class KeyCheck:
    """Refuses what has no key and needs one, and gives each request its namespace.

    Without keys everything is let through. ``public_paths`` may be read (GET, HEAD) without a key.
    """

    def __init__(self, keys: ApiKeys, public_paths: frozenset[str], *, behind_router: bool = False) -> None:
        self._keys = keys
        self._public_paths = public_paths
        self._behind_router = behind_router

    def __call__(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        credentials = _credentials(headers)
        accepted = [credential for credential in credentials if self._keys.accepts(credential)]
        if not (accepted or not self._keys or self._is_public(scope)):
            what = "the key of this request is not known here" if credentials else "this request has no key"
            message = f"Invalid API Key: {what}; send 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'"
            raise RefusedError(401, "authentication_error", message)
        whose = accepted[0] if accepted else None
        owner: Callable[[], bytes] = functools.partial(stretch, whose)
        if self._behind_router:
            client = headers.get(CLIENT_HEADER, "").encode("latin-1") if accepted else b""
            whose, owner = client or None, lambda: client
        set_namespace(scope, self._keys.namespace(whose), owner)

    def _is_public(self, scope: Scope) -> bool:
        return scope["method"] in ("GET", "HEAD") and scope["path"] in self._public_paths


def _credentials(headers: Headers) -> list[bytes]:
    """Return what may be a key, the one of ``Authorization`` first.

    llama-server takes a key without the word Bearer too.
    """
    values = [value.encode("latin-1") for name in ("authorization", "x-api-key") for value in headers.getlist(name)]
    keys = [value[len(_SCHEME) :] if value[: len(_SCHEME)].lower() == _SCHEME else value for value in values]
    return [key.strip() for key in keys if key.strip()]


_BYTES_OF_MEMORY: Final = 4
"""Bytes of memory that a byte of a body comes to, at most about: it is held as it came, and as texts."""
_MARK_BYTES: Final = 128
"""Bytes of memory that a value comes to, at most about, beside those of texts. Commas and brackets tell of values."""
_HEAVIEST: Final = 3
"""Heaviest bodies that there is memory for at a time."""


class Limits:
    """Hands the application whole bodies only, and as many requests at a time as may be: in all, and of one key.

    Every route needs the whole body before it can begin. What a body comes to in memory is counted as it arrives, and
    until its request is over. Requests count as under way once their bodies are there.
    """

    def __init__(self, app: ASGIApp, settings: SecuritySettings) -> None:
        self._app = app
        self._max_bytes = settings.max_body_bytes
        self._timeout_s = settings.body_timeout_s
        heaviest = self._max_bytes * _BYTES_OF_MEMORY + min(self._max_bytes, MAX_VALUES) * _MARK_BYTES
        # Without keys one client is as another.
        keys_differ = bool(settings.keys) and not settings.behind_router
        self._memory = Shares(_HEAVIEST * heaviest, keys_differ=keys_differ)
        self._requests = Shares(settings.max_connections, keys_differ=keys_differ)
        self._whose = ", of each key half of what others leave" if keys_differ else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = get_namespace(scope)
        held = _Held(self._memory, key)
        try:
            body = await self._read(declared_length(Headers(scope=scope)), receive, held)
            if body is None:
                return
            if not self._requests.take(key, 1):
                raise RefusedError(
                    503,
                    "unavailable_error",
                    f"{self._requests.most} requests may be under way{self._whose}, and more are not taken: ask again "
                    "later",
                )
            try:
                await self._app(scope, _Replay(body, receive), send)
            finally:
                self._requests.give_back(key, 1)
        finally:
            held.give_back()

    async def _read(self, declared: int | None, receive: Receive, held: _Held) -> bytes | None:
        """Return the body; ``None`` where the client left."""
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
                "or start the server with a longer `read_s`",
            ) from None
        if size > self._max_bytes:
            raise self._too_large(f"the body has {size} bytes or more")
        if not has_room:
            raise RefusedError(
                429,
                "rate_limit_error",
                f"the server holds {self._memory.most >> 20} MiB of bodies at most{self._whose}, and this one has no "
                "room: send it once others are answered, or start the server with a larger `max_body`",
            )
        return b"".join(parts)

    def _too_large(self, what: str) -> RefusedError:
        return RefusedError(
            413,
            "invalid_request_error",
            f"{what}, and the server takes at most {self._max_bytes}: "
            "send less, or start the server with a larger `max_body`",
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
        """Return whether there is room for a further part; if so, it is held."""
        # What has more values is not read.
        marks = min(part.count(b",") + part.count(b"[") + part.count(b"{"), MAX_VALUES - self._marks)
        more = len(part) * _BYTES_OF_MEMORY + marks * _MARK_BYTES
        if not self._room.take(self._key, more):
            return False
        self._marks += marks
        self._held += more
        return True

    def give_back(self) -> None:
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
