"""What stands between the socket and the routes, in values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline.core.errors import InputError
from paceline.serving.security.api_keys import ApiKeys
from paceline.serving.security.cors import CorsPolicy
from paceline.serving.security.host_check import ANY_HOST, host_name, plain_name
from paceline.serving.security.loopback import is_loopback, is_socket_path, open_warning
from paceline.serving.security.tls import TlsFiles

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
