"""Where workers are, as ``host:port``, and who can reach an address.

llama.cpp's RPC goes over IPv4 alone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import InputError
from paceline.core.numbers import shown

DEFAULT_PORT: Final = 50052
"""That of llama.cpp's own ``rpc-server``."""
MAX_WORKERS: Final = 16
"""``GGML_RPC_MAX_SERVERS``: most workers that llama.cpp takes."""

_HOST_AND_PORT: Final = re.compile(r"([^\s:/@\[\]]+)(?::(\d{1,5}))?")

_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")
"""Addresses of providers' and overlay networks: neither private nor public by their registration."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker is. As a text it is what llama.cpp calls an endpoint."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Read ``host`` or ``host:port``.

    Raises ``InputError`` for what is none, and for IPv6.
    """
    found = _HOST_AND_PORT.fullmatch(text.strip())
    if found is not None and (port := int(found[2] or DEFAULT_PORT)) in range(1, 1 << 16):
        return Address(found[1], port)
    if _is_ipv6(text):
        raise InputError(
            f"{text} (`rpc`) is an IPv6 address, and llama.cpp's RPC knows IPv4 alone: name the worker's IPv4 address, "
            "or forward a port of this machine to it (ssh -L)",
            field="rpc",
        )
    raise InputError(
        f"{shown(text)} (`rpc`) is not the address of a worker: write HOST:PORT, such as 10.0.0.2:{DEFAULT_PORT}",
        field="rpc",
    )


def parse_addresses(texts: Sequence[str]) -> tuple[Address, ...]:
    """Read the addresses of some workers, each of which may be named once."""
    addresses = tuple(parse_address(text) for text in texts)
    for number, address in enumerate(addresses):
        if address in addresses[:number]:
            raise InputError(
                f"the worker {address} (`rpc`) is named twice: it has all its devices already", field="rpc"
            )
    if len(addresses) > MAX_WORKERS:
        raise InputError(f"{len(addresses)} workers (`rpc`) are too many: llama.cpp takes {MAX_WORKERS}", field="rpc")
    return addresses


def is_public(address: str) -> bool:
    """Return whether an IP address stands for all of this machine's, or may be reached from the internet."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified or parsed.is_multicast:
        return True
    return not (parsed.is_private or (parsed.version == 4 and parsed in _SHARED))


def is_loopback(address: str) -> bool:
    """Return whether an IP address is reached from this machine alone."""
    return ipaddress.ip_address(address).is_loopback


def _is_ipv6(text: str) -> bool:
    name, _, _ = text.strip().removeprefix("[").partition("]")
    try:
        return ipaddress.ip_address(name).version == 6
    except ValueError:
        return False
