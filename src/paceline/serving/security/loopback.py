"""Which addresses only this machine can reach, and what to say of the others."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable


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
