"""The sockets a server listens on, bound before anything takes long, so that a port that is taken is told at once."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import InputError
from paceline.serving.security.loopback import is_socket_path

BACKLOG: Final = 256
"""Connections that the kernel takes before us."""


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return sockets bound to addresses, ready to be listened on.

    Args:
        hosts: names, of which all addresses are taken, addresses, or paths of Unix sockets, which end in ``.sock``.
        port: TCP port; 0 takes a free one, the same for all addresses.

    Raises:
        InputError: an address cannot be used, or the port is taken.
    """
    bound: list[socket.socket] = []
    try:
        for host in hosts:
            if is_socket_path(host):
                bound.append(_bind_path(host))
                continue
            for found in _addresses_of(host, port):
                bound.append(_bind_address(host, port, found))
                port = bound[-1].getsockname()[1]
    except BaseException:
        for each in bound:
            each.close()
        raise
    return bound


@contextlib.contextmanager
def listening(hosts: Sequence[str], port: int) -> Iterator[list[socket.socket]]:
    """Yield sockets bound to addresses; they are closed afterwards, and the paths of Unix sockets removed.

    Args:
        hosts: as for :func:`bind`.
        port: as for :func:`bind`.

    Raises:
        InputError: as for :func:`bind`.
    """
    bound = bind(hosts, port)
    try:
        yield bound
    finally:
        for each in bound:
            each.close()
        for host in filter(is_socket_path, hosts):
            Path(host).unlink(missing_ok=True)


def url_of(bound: socket.socket, *, has_tls: bool, prefix: str) -> str:
    """Return where clients find a server.

    Args:
        bound: one of its sockets.
        has_tls: whether clients speak TLS.
        prefix: path before every route.
    """
    name = bound.getsockname()
    if bound.family == getattr(socket, "AF_UNIX", None):
        return f"unix:{name}{prefix}"
    host = f"[{name[0]}]" if bound.family == socket.AF_INET6 else name[0]
    return f"{'https' if has_tls else 'http'}://{host}:{name[1]}{prefix}"


def _addresses_of(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return what a name stands for here, as ``getaddrinfo`` has it: ``localhost`` may be two addresses."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InputError(f"--host {host} is no address of this machine: {error.strerror or error}") from None
    # A file of names may say a thing twice, and name what is switched off, as IPv6 often is.
    return [each for each in dict.fromkeys(found) if _is_here(each)] or found[:1]


def _is_here(found: tuple[Any, ...]) -> bool:
    """Return whether this machine has the address now."""
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _bind_address(host: str, port: int, found: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, address = found
    address = (address[0], port, *address[2:])
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; end what uses it, or take another port "
            "(--port, 0 takes a free one)"
        ) from None
    return bound


def _bind_path(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise InputError(f"--host {path}: this system has no Unix sockets; give an address")
    if Path(path).is_socket():
        # Left over, or in use: only one that nobody answers may be taken.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                Path(path).unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise InputError(
            f"cannot listen on {path}: {error.strerror or error}; end what uses it, or name another"
        ) from None
    return bound
