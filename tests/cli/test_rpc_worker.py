"""``paceline rpc-worker``: which addresses it refuses, and what it warns of."""

from __future__ import annotations

import pytest

from paceline.cli import rpc_worker
from paceline.engines.llama_cpp import rpc
from tests.cli.invoking import Invoke, invoke

__all__ = ["invoke"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--host", "0.0.0.0"), ("0.0.0.0", "ssh -L", "--allow-public")),
        (("--host", "8.8.8.8"), ("public address", "WireGuard", "--allow-public")),
        (("--host", "::1"), ("IPv4 alone",)),
        (("--host", "[::]"), ("IPv4 alone",)),
        (("--host", "no..where"), ("no..where",)),
        (("--port", "65536"), ("65536",)),
        (("-t", "0"), ("--threads 0",)),
        (("--max-clients", "0"), ("--max-clients 0",)),
    ],
)
def test_refuses_in_one_line(invoke: Invoke, options: tuple[str, ...], parts: tuple[str, ...]) -> None:
    status, out, err = invoke("rpc-worker", *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert all(part in err for part in parts)


@pytest.mark.parametrize(
    ("address", "may_be_public", "is_warned_of"),
    [("127.0.0.1", False, False), ("10.0.0.2", False, True), ("8.8.8.8", True, True), ("0.0.0.0", True, True)],
)
def test_warns_of_whoever_reaches_it(address: str, may_be_public: bool, is_warned_of: bool) -> None:
    warning = rpc_worker._check_reach(address, address, allow_public=may_be_public)
    assert (warning is not None) == is_warned_of


def test_says_how_to_get_rpc_where_the_library_has_none(invoke: Invoke) -> None:
    if rpc.has_rpc():
        pytest.skip("llama-cpp-python was built with RPC")
    status, _, err = invoke("rpc-worker", "--port", "0")
    assert (status, err.count("\n")) == (2, 1)
    assert 'CMAKE_ARGS="-DGGML_RPC=on"' in err
