"""Addresses of workers, and who reaches an address."""

from __future__ import annotations

import pytest

from paceline.core.errors import InputError
from paceline.engines.rpc.addresses import DEFAULT_PORT, MAX_WORKERS, Address, is_public, parse_address, parse_addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.2:50060", Address("10.0.0.2", 50060)),
        (" 10.0.0.2 ", Address("10.0.0.2", DEFAULT_PORT)),
        ("big-box.local:1", Address("big-box.local", 1)),
    ],
)
def test_port_is_optional(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", ":50052", "a:b", "a:0", "a:65536", "a b:1", "user@a:1", "tcp://a:1", "a:1:2"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="not the address of a worker") as caught:
        parse_address(text)
    assert caught.value.field == "rpc"


@pytest.mark.parametrize("text", ["::1", "[::1]", "[fd00::2]:50052"])
def test_ipv6_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(InputError, match="IPv4 alone"):
        parse_address(text)


def test_a_worker_is_named_once_and_no_more_than_llama_cpp_takes() -> None:
    with pytest.raises(InputError, match="twice"):
        parse_addresses(["a:50052", "b", "a"])
    assert len(parse_addresses([f"a:{port}" for port in range(1, MAX_WORKERS + 1)])) == MAX_WORKERS
    with pytest.raises(InputError, match=str(MAX_WORKERS + 1)):
        parse_addresses([f"a:{port}" for port in range(1, MAX_WORKERS + 2)])


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0.0.0.0", True),
        ("::", True),
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("224.0.0.1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("172.32.0.1", True),
        ("192.168.1.5", False),
        ("169.254.3.4", False),
        ("100.64.0.1", False),
        ("fd00::1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected
