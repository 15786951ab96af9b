"""Who may use the server, and the layers that a request passes between the socket and the routes.

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
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import InputError
from paceline.server_options import ServerOptions
from paceline.serving.auth import ApiKeys, KeyCheck
from paceline.serving.errors import RefusedError, error_response
from paceline.serving.http_protocol import LINGER_S, protocol_with_limits
from paceline.serving.limits import BodyReader, RequestLimit, declared_length
from paceline.serving.logs import RequestLog
from paceline.serving.origins import (
    ANY_HOST,
    Cors,
    CorsPolicy,
    HostCheck,
    OriginCheck,
    host_name,
    is_loopback,
    is_socket_path,
    open_warning,
    plain_name,
)
from paceline.serving.page import page_paths

Refused: TypeAlias = Callable[[int, str], None]
"""Hears of a refusal: its status, and the type of error in its body."""
Check: TypeAlias = Callable[[Scope], None]
"""Raises a :class:`RefusedError` for a request that may not pass."""

HEALTH_PATHS: Final = frozenset({"/health", "/v1/health"})
"""Paths that may be read without a key: whatever watches over servers asks here."""
POLLED_PATHS: Final = HEALTH_PATHS | {"/models", "/v1/models", "/props", "/metrics", "/slots"}
"""Paths that whatever watches over servers asks for again and again."""

_LIMITS: Final = (
    "max_body_bytes", "body_timeout_s", "max_header_bytes", "header_timeout_s", "read_timeout_s", "max_connections"
)  # fmt: skip


@dataclass(frozen=True)
class SecuritySettings:
    """Who may use the server, from where, and how much of it one request may take.

    Attributes:
        hosts: the addresses that the server listens at; those that end in ``.sock`` are Unix sockets.
        keys: the API keys; none of them leaves the server open to all that reach it.
        allowed_hosts: names by which the server may be asked for beyond the loopback's; ``*`` for any. Where some are
            given, the names are checked at any address and with keys too.
        cors: which web pages may read answers; by default none.
        public_paths: may be read without a key.
        quiet_paths: are logged at level DEBUG.
        tls: the files of TLS; ``None`` for plain HTTP.
        max_body_bytes: bytes of a request's body.
        body_timeout_s: seconds from the end of a request's headers until its body is there.
        max_header_bytes: bytes of a request's first line and headers, however they arrive.
        header_timeout_s: seconds until all headers of a request are there.
        read_timeout_s: seconds until a client has to read what waits for it; it counts as one that left afterwards.
        max_connections: requests under way at a time, of which each has a connection of its own; further ones get
            status 503. Of further connections, the longest silent one is closed.
    """

    hosts: tuple[str, ...] = ("127.0.0.1",)
    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_hosts: tuple[str, ...] = ()
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    public_paths: frozenset[str] = HEALTH_PATHS
    quiet_paths: frozenset[str] = POLLED_PATHS
    tls: TlsFiles | None = None
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0
    max_header_bytes: int = 16 << 10
    header_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_connections: int = 1000

    def __post_init__(self) -> None:
        for name in _LIMITS:
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}: it has to be above 0")
        for host in self.allowed_hosts:
            if host != ANY_HOST and host_name(host) != plain_name(host):
                raise InputError(
                    f"--allowed-hosts cannot use {host!r}: write a name without port, such as box.lan or [fd00::1]"
                )

    @classmethod
    def from_options(cls, options: ServerOptions) -> SecuritySettings:
        """Return what the options of a server come to.

        Raises:
            InputError: a file cannot be read, or a value cannot be used.
        """
        key, certificate, key_file = (
            None if name is None else Path(name)
            for name in (options.ssl_key_file, options.ssl_cert_file, options.api_key_file)
        )
        return cls(
            hosts=options.host,
            keys=ApiKeys.from_options([",".join(options.api_key)] if options.api_key else [], filter(None, [key_file])),
            allowed_hosts=options.allowed_hosts,
            cors=CorsPolicy(options.cors_origins),
            public_paths=frozenset(f"{options.prefix}{path}" for path in (*HEALTH_PATHS, *page_paths())),
            quiet_paths=frozenset(f"{options.prefix}{path}" for path in POLLED_PATHS),
            tls=TlsFiles.from_options(key, certificate),
            max_body_bytes=options.max_body << 20,
            body_timeout_s=options.read_s,
            read_timeout_s=options.read_s,
        )

    def warnings(self) -> list[str]:
        """Return the lines that warn of a server that more can use than one may think."""
        has_keys = bool(self.keys)
        found = (open_warning(self.hosts, has_keys), self.cors.warning(has_keys))
        return [warning for warning in found if warning is not None]

    @property
    def checks_hosts(self) -> bool:
        """Whether the ``Host`` of each request is checked."""
        if self.allowed_hosts:
            return True
        listening = [host for host in self.hosts if not is_socket_path(host)]
        return not self.keys and all(is_loopback(host) for host in listening)


@dataclass(frozen=True)
class TlsFiles:
    """A private key and its certificate, which were found to belong together.

    Attributes:
        key: PEM file of the private key, without a passphrase.
        certificate: PEM file of the certificate, followed by those that vouch for it.
    """

    key: Path
    certificate: Path

    def __post_init__(self) -> None:
        for option, path in (("--ssl-key-file", self.key), ("--ssl-cert-file", self.certificate)):
            _check_readable(option, path)
        _check_pair(self.key, self.certificate)

    @classmethod
    def from_options(cls, key: Path | None, certificate: Path | None) -> TlsFiles | None:
        """Return the checked files of ``--ssl-key-file`` and ``--ssl-cert-file``; ``None`` where neither is given.

        Raises:
            InputError: one is missing, cannot be read or is of another kind, or they do not belong together.
        """
        if key is None and certificate is None:
            return None
        if certificate is None:
            raise InputError("--ssl-key-file needs the certificate too: give --ssl-cert-file")
        if key is None:
            raise InputError("--ssl-cert-file needs the private key too: give --ssl-key-file")
        return cls(key, certificate)


def _check_readable(option: str, path: Path) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {option} {path}: {error.strerror}") from None
    if b"-----BEGIN " not in text:
        raise InputError(f"{option} {path} is not in PEM form: its text has to have a line '-----BEGIN ...-----'")


def _check_pair(key: Path, certificate: Path) -> None:
    encrypted = False

    def no_passphrase() -> str:
        # Without this, OpenSSL would ask at the terminal, and a server has nobody to answer.
        nonlocal encrypted
        encrypted = True
        return ""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        if encrypted:
            raise InputError(f"--ssl-key-file {key} has a passphrase: write the key to a file without one") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"--ssl-key-file {key} is not the key of --ssl-cert-file {certificate}") from None
        reason = (error.reason or "not understood").lower().replace("_", " ")
        raise InputError(
            f"cannot use --ssl-cert-file {certificate} with --ssl-key-file {key} ({reason}): "
            "give a certificate and its private key, both in PEM form"
        ) from None


def with_security(app: ASGIApp, settings: SecuritySettings, refused: Refused | None = None) -> ASGIApp:
    """Return an application behind everything that a request has to pass.

    Args:
        app: the routes.
        settings: who may use them.
        refused: hears of each request that no route sees.
    """
    routes = app
    keys_differ = bool(settings.keys)
    app = RequestLimit(app, most=settings.max_connections, keys_differ=keys_differ)
    app = BodyReader(
        app,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        keys_differ=keys_differ,
    )
    checks: list[Check] = [KeyCheck(settings.keys, settings.public_paths)]
    if not settings.keys:
        checks.insert(0, OriginCheck(settings.cors))
    if settings.checks_hosts:
        checks.insert(0, HostCheck(settings.allowed_hosts))
    app = Gate(app, checks, refused)
    if settings.cors.origins:
        app = Cors(app, policy=settings.cors)
    requests = RequestLog(app, quiet_paths=settings.quiet_paths)

    async def front(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            # None of the checks knows them.
            await send({"type": "websocket.close", "code": 1008, "reason": "this server has no websockets"})
        else:
            await (requests if scope["type"] == "http" else routes)(scope, receive, send)

    return front


class Gate:
    """Lets through what passes all checks, and answers what these or the layers behind them refuse.

    Starlette's handlers of exceptions know nothing of a body that nobody read.

    Args:
        app: the application; a :class:`RefusedError` of it comes before it has answered.
        checks: raise a :class:`RefusedError` for a request that may not pass.
        refused: hears of each refusal.
    """

    def __init__(self, app: ASGIApp, checks: Sequence[Check], refused: Refused | None) -> None:
        self._app = app
        self._checks = checks
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or answer it with its refusal."""
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
            answer = error_response(error)
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


def socket_options(settings: SecuritySettings) -> dict[str, Any]:
    """Return what :class:`uvicorn.Config` has to be given beside the application and the address."""
    options: dict[str, Any] = {
        "http": protocol_with_limits(settings.max_header_bytes, settings.header_timeout_s, settings.read_timeout_s),
        "ws": "none",
        # Of headers the protocol tells first; this is for what else may be incomplete, as trailers.
        "h11_max_incomplete_event_size": settings.max_header_bytes,
        # uvicorn's own log has query strings, and with them keys.
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
    }
    if settings.tls is not None:
        options |= {"ssl_keyfile": str(settings.tls.key), "ssl_certfile": str(settings.tls.certificate)}
    return options
