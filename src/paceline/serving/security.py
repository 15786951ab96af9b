"""Who may use the server: API keys, names and web pages, TLS, and how much of it one request may take.

What is set here is held by the layers of ``middleware.py`` and by the connections.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b, scrypt
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.types import Scope

from paceline.core.errors import InputError
from paceline.server_options import ServerOptions

_NAMESPACE_BYTES: Final = 16


class ApiKeys:
    """The keys that open the server; without any it is open. Nothing that a key could be told from is shown or stored.

    All digests are made with a secret of this process: they mean nothing in another one.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        distinct = dict.fromkeys(keys)
        for number, key in enumerate(distinct, start=1):
            # No header can carry control characters.
            if not key or not key.isprintable():
                raise InputError(
                    f"API key {number} of {len(distinct)} is empty or has a control character: "
                    "use letters, digits and punctuation"
                )
        self._digests = tuple(self._digest(b"key", key.encode()) for key in distinct)

    @classmethod
    def from_options(cls, lists: Iterable[str] = (), files: Iterable[Path] = ()) -> ApiKeys:
        """Return the keys of ``--api-key``, with commas between them, and of ``--api-key-file``, one a line.

        A list or file without a key is refused, as it would leave the server open.
        """
        keys: list[str] = []
        for given in lists:
            found = [key.strip() for key in given.split(",") if key.strip()]
            if not found:
                raise InputError("`api_key` holds no key: give one, or leave the option out to serve without keys")
            keys += found
        for path in files:
            found = [line.strip() for line in _read_keys(path).splitlines()]
            found = [line for line in found if line and not line.startswith("#")]
            if not found:
                raise InputError(f"`api_key_file` {path} holds no key: write one a line, or leave the option out")
            keys += found
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self)} keys)"

    def accepts(self, credential: bytes) -> bool:
        """Return whether a credential is one of the keys.

        The time taken tells nothing of the keys: digests are compared in constant time, all of them always.
        """
        digest = self._digest(b"key", credential)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)

    def namespace(self, credential: bytes | None) -> str:
        """Return the namespace of whoever has this key, or none: the same for the same key, while this object lives."""
        kind, value = (b"nobody", b"") if credential is None else (b"somebody", credential)
        return self._digest(kind, value)[:_NAMESPACE_BYTES].hex()

    def _digest(self, purpose: bytes, value: bytes) -> bytes:
        return blake2b(value, key=self._secret, person=purpose, digest_size=32).digest()


CLIENT_HEADER: Final = "x-paceline-client"
"""Says to a model's process for whom its router asks, by :func:`stretch`. It counts beside the router's key alone."""


def stretch(credential: bytes | None) -> bytes:
    """Return what stands for a key on disk and in other processes, the same in each; empty for those without key.

    Takes some 50 ms, so that nobody finds out a key by it.
    """
    if credential is None:
        return b""
    return scrypt(credential, salt=b"paceline", n=1 << 14, r=8, p=1, dklen=32).hex().encode()


def set_namespace(scope: Scope, namespace: str, owner: Callable[[], bytes] = bytes) -> None:
    """Keep the namespace of a request for the routes, and what returns whose it is, as :func:`stretch` has it."""
    state = scope.setdefault("state", {})
    state["namespace"], state["owner"] = namespace, owner


def get_owner(scope: Scope) -> bytes:
    """Return whose a request is; as slow as :func:`stretch`."""
    owner: bytes = scope["state"]["owner"]()
    return owner


def mark_owner(scope: Scope) -> str:
    """Return a mark of whoever asks, which is still theirs when the server starts again; empty for those without key.

    As slow as :func:`stretch`.
    """
    return _mark(get_owner(scope), secrets.token_bytes(16))


def is_owner(scope: Scope, mark: str) -> bool:
    """Return whether a mark is of whoever asks; as slow as :func:`mark_owner`."""
    try:
        return hmac.compare_digest(mark, _mark(get_owner(scope), bytes.fromhex(mark.partition(":")[0])))
    except (ValueError, TypeError):  # no salt, or characters that no mark has
        return False


def _mark(owner: bytes, salt: bytes) -> str:
    if not owner:
        return ""
    return f"{salt.hex()}:{blake2b(owner, salt=salt, person=b'slot file').hexdigest()}"


def get_namespace(scope: Scope, cache_salt: str | None = None) -> str:
    """Return the namespace that a request may share cached prompts and n-gram history within.

    The check of keys has set it. With a salt, requests share only with those of the same key *and* salt.
    """
    namespace: str = scope["state"]["namespace"]
    if cache_salt is None:
        return namespace
    # JSON can spell half a surrogate pair, which plain UTF-8 refuses.
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, key=namespace.encode(), digest_size=_NAMESPACE_BYTES).hexdigest()


def _read_keys(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read `api_key_file` {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"`api_key_file` {path} is not UTF-8: write the keys as plain text, one a line") from None


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's loopback: ``localhost``, ``127.0.0.0/8`` or ``::1``.

    Names other than ``localhost`` are not looked up: whoever answers for a name may change the answer. Brackets around
    an IPv6 address and a dot at the end are allowed.
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


ANY_ORIGIN: Final = "*"
"""Origin that stands for all of them."""
LOOPBACK_ORIGINS: Final = "localhost"
"""Origin that stands for every page that was loaded from this machine's loopback, at any port."""
_NO_ORIGIN: Final = "null"
"""What browsers send as the origin of files and sandboxed frames."""


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
                    f"`cors_origins` cannot use {origin!r}: write an origin without path, such as "
                    "https://chat.example.org, or 'localhost' or '*'"
                )

    def allows(self, origin: str) -> bool:
        """Return whether a page of this origin may read answers."""
        if ANY_ORIGIN in self.origins or (LOOPBACK_ORIGINS in self.origins and _is_loopback_origin(origin)):
            return True
        return origin != LOOPBACK_ORIGINS and origin.lower() in (listed.lower() for listed in self.origins)

    def warning(self, has_keys: bool) -> str | None:
        """Return the line that warns of a server that every web page may use; ``None`` where all is well."""
        if has_keys or ANY_ORIGIN not in self.origins:
            return None
        return (
            "every web page that is open on this machine may use this server (`cors_origins=['*']`), and it asks for "
            "no key: give `api_key`, or list the origins"
        )


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


def host_name(value: str) -> str | None:
    """Return the name in a ``Host`` header: lower case, without port; ``None`` where the header is malformed."""
    found = _HOST.fullmatch(value)
    return plain_name(found[1]) if found else None


def plain_name(host: str) -> str:
    """Return a name as names are compared: in lower case, without a dot at the end."""
    return host.lower().removesuffix(".")


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
        for option, path in (("`ssl_key_file`", self.key), ("`ssl_cert_file`", self.certificate)):
            _check_readable(option, path)
        _check_pair(self.key, self.certificate)

    @classmethod
    def from_options(cls, key: Path | None, certificate: Path | None) -> TlsFiles | None:
        """Return the checked files of ``--ssl-key-file`` and ``--ssl-cert-file``; ``None`` where neither is given."""
        if key is None and certificate is None:
            return None
        if certificate is None:
            raise InputError("`ssl_key_file` needs the certificate too: give `ssl_cert_file`")
        if key is None:
            raise InputError("`ssl_cert_file` needs the private key too: give `ssl_key_file`")
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
            raise InputError(f"`ssl_key_file` {key} has a passphrase: write the key to a file without one") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InputError(f"`ssl_key_file` {key} is not the key of `ssl_cert_file` {certificate}") from None
        reason = (error.reason or "not understood").lower().replace("_", " ")
        raise InputError(
            f"cannot use `ssl_cert_file` {certificate} with `ssl_key_file` {key} ({reason}): "
            "give a certificate and its private key, both in PEM form"
        ) from None


_POSITIVE: Final = (
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
        tls: the files of TLS; ``None`` for plain HTTP.
        max_body_bytes: bytes of a request's body.
        body_timeout_s: seconds from the end of a request's headers until its body is there.
        max_header_bytes: bytes of a request's first line and headers, however they arrive.
        header_timeout_s: seconds until all headers of a request are there.
        read_timeout_s: seconds until a client has to read what waits for it; it counts as one that left afterwards.
        max_connections: requests under way at a time, of which each has a connection of its own; further ones get
            status 503. Of further connections, the longest silent one is closed.
        behind_router: whether the one who has the key is a router, which says by :data:`CLIENT_HEADER` for whom it
            asks, and has bounded what each of these may take.
    """

    hosts: tuple[str, ...] = ("127.0.0.1",)
    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_hosts: tuple[str, ...] = ()
    cors: CorsPolicy = field(default_factory=CorsPolicy)
    tls: TlsFiles | None = None
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0
    max_header_bytes: int = 16 << 10
    header_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_connections: int = 1000
    behind_router: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}: it has to be above 0")
        for host in self.allowed_hosts:
            if host != ANY_HOST and host_name(host) != plain_name(host):
                raise InputError(
                    f"`allowed_hosts` cannot use {host!r}: write a name without port, such as box.lan or [fd00::1]"
                )

    @classmethod
    def from_options(cls, options: ServerOptions) -> SecuritySettings:
        key, certificate, key_file = (
            None if name is None else Path(name)
            for name in (options.ssl_key_file, options.ssl_cert_file, options.api_key_file)
        )
        return cls(
            hosts=options.host,
            keys=ApiKeys.from_options([",".join(options.api_key)] if options.api_key else [], filter(None, [key_file])),
            allowed_hosts=options.allowed_hosts,
            cors=CorsPolicy(options.cors_origins),
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


def open_warning(hosts: Iterable[str], has_keys: bool) -> str | None:
    """Return the line that warns of a server without keys that other machines can reach; ``None`` where all is well."""
    reachable = [host for host in hosts if not is_socket_path(host) and not is_loopback(host)]
    if has_keys or not reachable:
        return None
    return (
        f"other machines can reach this server at {', '.join(reachable)}, and it asks for no key: "
        "give `api_key` or `api_key_file`, or listen at 127.0.0.1 (`host`)"
    )
