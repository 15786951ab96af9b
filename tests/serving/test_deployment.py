"""Which sockets a server listens on."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from paceline.core.errors import InputError
from paceline.serving.deployment import listening


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names of this machine, which a test fills: each with its addresses."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def looked_up(host: str, port: int, **hints: Any) -> list[Any]:
        return [found for address in known.get(host, [host]) for found in real(address, port, **hints)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    return known


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback has one address")
def test_all_addresses_of_a_name_are_taken_at_one_port(names: dict[str, list[str]]) -> None:
    names["box"] = ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
    with listening(["box"], 0) as bound:
        assert [each.getsockname()[0] for each in bound] == ["127.0.0.1", "127.0.0.2"]
        assert len({each.getsockname()[1] for each in bound}) == 1


def test_addresses_of_a_name_that_this_machine_does_not_have_now_are_left_out(names: dict[str, list[str]]) -> None:
    names["box"] = ["192.0.2.1", "127.0.0.1"]
    with listening(["box"], 0) as bound:
        assert [each.getsockname()[0] for each in bound] == ["127.0.0.1"]


def test_a_name_of_another_machine_is_refused(names: dict[str, list[str]]) -> None:
    names["other"] = ["192.0.2.1"]
    with pytest.raises(InputError, match=r"^cannot listen on other port 0: "), listening(["other"], 0):
        pass


def test_connections_are_known_to_be_tcp_so_that_asyncio_sends_small_writes_at_once() -> None:
    with listening(["127.0.0.1"], 0) as (bound,):
        assert bound.proto == socket.IPPROTO_TCP
