"""What a client asks of workers, with workers that only say something."""

from __future__ import annotations

import queue
import socket
from typing import Any

import pytest
from benchmarks.rpc.stand_ins import DelayProxy, StubWorker
from tests.timing import WAIT_S

from paceline.core.errors import CapabilityError, InputError
from paceline.engines.llama_cpp import rpc
from paceline.engines.rpc import workers
from paceline.engines.rpc.workers import Watch, check_workers


@pytest.fixture(autouse=True)
def with_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the library for one that has RPC: nothing is loaded."""
    monkeypatch.setattr(rpc, "check_rpc", lambda: None)


def status(**changes: Any) -> dict[str, Any]:
    device = {"name": "CPU", "description": "some\x1b[31m processor", "free_bytes": 7, "total_bytes": 9}
    said = {"paceline": "0.1.0", "versions": rpc.library_versions(), "devices": [device, device], "threads": 3}
    return {**said, "clients": 1, "max_clients": 2, **changes}


def test_says_what_a_worker_has() -> None:
    with StubWorker(status()) as worker:
        (found,) = check_workers([worker.endpoint])
    assert (found.endpoint, found.threads, found.clients, found.free_bytes) == (worker.endpoint, 3, 1, 14)
    assert "\x1b" not in found.devices[0].description


def test_measures_the_round_trip() -> None:
    with StubWorker(status()) as worker, DelayProxy(worker.endpoint, 0.02) as proxy:
        (found,) = check_workers([proxy.endpoint])
    assert found.round_trip_s >= 0.04


def test_another_version_is_refused_with_both() -> None:
    versions = {"llama-cpp-python": "0.9.9", "ggml": "0.1"}
    with StubWorker(status(versions=versions)) as worker, pytest.raises(CapabilityError) as caught:
        check_workers([worker.endpoint])
    message = str(caught.value)
    assert "\n" not in message
    for part in (worker.endpoint, "0.9.9", rpc.library_versions()["llama-cpp-python"]):
        assert part in message


def test_a_worker_that_is_full_is_refused() -> None:
    with StubWorker(status(clients=2)) as worker, pytest.raises(InputError, match="2 clients"):
        check_workers([worker.endpoint])


def test_unreachable_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(InputError, match=rf"127\.0\.0\.1:{port} .*cannot be reached") as caught:
        check_workers([f"127.0.0.1:{port}"])
    assert caught.value.field == "rpc"


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\n", b"[]\n", b"{}\n", b"[" * 5000 + b"\n", b"x" * 200_000])
def test_a_stranger_is_no_worker(said: bytes) -> None:
    with StubWorker(said) as stranger, pytest.raises(InputError, match="does not answer as a worker"):
        check_workers([stranger.endpoint])


def test_one_that_says_nothing_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(InputError, match="does not answer"):
        check_workers([f"127.0.0.1:{silent.getsockname()[1]}"])


def test_an_end_is_told_once_with_the_worker() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with StubWorker(status()) as lasting, StubWorker(status()) as ending:
        Watch([lasting.endpoint, ending.endpoint], told.put)
        ending.close()
        assert told.get(timeout=WAIT_S) == f"the RPC worker at {ending.endpoint} ended"
    assert told.empty()


def test_silence_is_told_and_patience_may_change() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with StubWorker(status()) as worker:
        watch = Watch([worker.endpoint], told.put, silence_s=WAIT_S)
        worker.answers.clear()
        with pytest.raises(queue.Empty):
            told.get(timeout=0.5)
        watch.silence_s = 0.5
        assert told.get(timeout=WAIT_S) == f"the RPC worker at {worker.endpoint} has not answered for 0.5 s"


def test_nothing_is_told_after_the_end_of_watching() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with StubWorker(status()) as worker:
        watch = Watch([worker.endpoint], told.put)
        watch.close()
        watch.close()
    with pytest.raises(queue.Empty):
        told.get(timeout=0.3)


def test_watching_one_that_is_gone_is_refused() -> None:
    with StubWorker(status()) as worker:
        pass
    with pytest.raises(InputError, match="cannot be reached"):
        Watch([worker.endpoint], lambda line: None)
