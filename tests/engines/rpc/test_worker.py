"""The worker: a process for each client, status beside it, and ends that leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from tests.timing import WAIT_S

from paceline.core.errors import InputError
from paceline.engines.llama_cpp import rpc
from paceline.engines.rpc.worker import Worker
from paceline.engines.rpc.workers import ASK, PING, PONG, Watch, ask_worker, check_workers
from paceline.models.embedded import embedded_draft

pytestmark = pytest.mark.skipif(not rpc.has_rpc(), reason="llama-cpp-python was built without RPC")

_HELLO = struct.pack("<BQ24x", 14, 24)
_COUNT_DEVICES = struct.pack("<BQ", 15, 0)

_CLIENT = """
import sys
from pathlib import Path
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine, rpc
from paceline.engines.options import ModelOptions
devices = rpc.add_workers(sys.argv[2:]) or ("none",)
options = ModelOptions(Path(sys.argv[1]), context_length=64, threads=1, devices=devices, flash_attention=False)
engine = LlamaCppEngine(options)
sequence = engine.open()
while True:
    output = engine.forward([Step(sequence, [5, 6, 7], [COMMITTED_END, 0, 1], [2])])
    print(engine.description, "|", output.logits(0, 0)[:8].tolist(), flush=True)
    engine.commit(sequence, [])
    if not sys.stdin.readline():
        break
"""


class Said:
    """What a worker says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, line: str) -> None:
        self._queue.put(line)

    def wait_for(self, part: str) -> str:
        while True:
            line = self._queue.get(timeout=WAIT_S)
            self.lines.append(line)
            if part in line:
                return line


@pytest.fixture(scope="module")
def said() -> Said:
    return Said()


@pytest.fixture(scope="module")
def worker(said: Said) -> Iterator[Worker]:
    worker = Worker("127.0.0.1", 0, threads=1, max_clients=2, say=said)
    yield worker
    worker.close()


@pytest.fixture
def endpoint(worker: Worker) -> str:
    return f"127.0.0.1:{worker.address[1]}"


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Client:
    """A model whose layers are on a worker, in a process."""

    def __init__(self, *endpoints: str) -> None:
        command = [sys.executable, "-c", _CLIENT, str(embedded_draft()), *endpoints]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ask(self) -> str:
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.read()


def serving_processes(pid: int | None = None) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("serve_as_told" in word for word in process.cmdline()):
                found.append(process)
    return found


def test_says_what_it_serves(endpoint: str) -> None:
    (status,) = check_workers([endpoint])
    assert [device.name for device in status.devices] == ["CPU"]
    assert 0 < status.free_bytes <= status.devices[0].total_bytes
    assert (status.threads, status.clients, status.max_clients) == (1, 0, 2)
    assert status.versions == rpc.library_versions()


def test_heartbeats_are_answered_until_the_client_closes(worker: Worker) -> None:
    with socket.create_connection(worker.address, timeout=WAIT_S) as connection:
        lines = connection.makefile("rb")
        connection.sendall(ASK)
        assert json.loads(lines.readline())["threads"] == 1
        for _ in range(3):
            connection.sendall(PING)
            assert lines.readline() == PONG
        connection.sendall(b"pang\n")
        assert lines.readline() == b""


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 9, b"PACELINE nothing\n", b"P" * 999])
def test_a_stranger_is_hung_up_on(worker: Worker, endpoint: str, sent: bytes) -> None:
    with socket.create_connection(worker.address, timeout=WAIT_S) as connection:
        connection.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(99) == b""
    assert ask_worker(endpoint).clients == 0


def test_two_clients_at_once_have_the_numbers_of_this_machine(worker: Worker, endpoint: str, said: Said) -> None:
    with Client() as here, Client(endpoint) as first, Client(endpoint) as second:
        local, *remote = [client.read().split("|") for client in (here, first, second)]
        assert all("RPC0" in description for description, _ in remote)
        assert [logits for _, logits in remote] == [local[1]] * 2
        assert ask_worker(endpoint).clients == 2
        with pytest.raises(InputError, match="2 clients, the most"):
            check_workers([endpoint])
        # One goes, and the other stays.
        said.wait_for("came")
        said.wait_for("came")
        first.process.kill()
        said.wait_for("left")
        assert second.ask().split("|")[1] == local[1]
    said.wait_for("left")
    wait_until(lambda: not ask_worker(endpoint).clients)
    wait_until(lambda: len(serving_processes()) == 1)


def test_a_client_that_breaks_its_process_breaks_no_other(worker: Worker, endpoint: str, said: Said) -> None:
    with Client(endpoint) as client:
        before = client.read()
        said.wait_for("came")
        with socket.create_connection(worker.address, timeout=WAIT_S) as broken:
            broken.sendall(_HELLO + struct.pack("<BQ", 10, 1 << 62))  # a graph that no memory holds
            with contextlib.suppress(ConnectionResetError):
                while broken.recv(1 << 10):
                    pass
        assert client.ask() == before
    said.wait_for("left")


def test_connections_that_only_ask_take_no_new_process(worker: Worker) -> None:
    answers = []
    wait_until(serving_processes)
    for _ in range(20):
        with socket.create_connection(worker.address, timeout=WAIT_S) as connection:
            connection.sendall(_HELLO + _COUNT_DEVICES)
            answer = connection.makefile("rb")
            answer.read(8 + 28)
            answers.append(struct.unpack("<QI", answer.read(12)))
    assert answers == [(4, 1)] * 20
    assert len(serving_processes()) <= 3


def test_a_killed_process_is_told_of(worker: Worker, endpoint: str, said: Said) -> None:
    with Client(endpoint) as client:
        client.read()
        said.wait_for("came")
        for process in serving_processes():
            process.kill()
        assert "status -9" in said.wait_for("was lost")
        client.process.communicate(input="\n" * 3, timeout=WAIT_S)
        assert client.process.returncode == -signal.SIGABRT
    (status,) = check_workers([endpoint])
    assert status.clients == 0


def test_heartbeats_stop_with_the_process_of_a_client(worker: Worker, endpoint: str, said: Said) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Client(endpoint) as client:
        client.read()
        said.wait_for("came")
        Watch([endpoint], told.put)
        for process in serving_processes():
            process.suspend()
        assert told.get(timeout=WAIT_S) == f"the RPC worker at {endpoint} has not answered for 1.5 s"
        # Clients on other machines are answered.
        with socket.create_connection(worker.address, WAIT_S, ("127.0.0.2", 0)) as elsewhere:
            lines = elsewhere.makefile("rb")
            elsewhere.sendall(ASK + PING)
            assert json.loads(lines.readline())["clients"] == 1
            assert lines.readline() == PONG
    said.wait_for("left")
    for process in serving_processes():
        process.resume()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"devices": ["TPU7"]}, "TPU7"), ({"host": "203.0.113.7"}, "cannot listen at 203.0.113.7"), ({}, "in use")],
)
def test_what_cannot_be_served_is_one_line(worker: Worker, changes: dict[str, Any], message: str) -> None:
    options = {"host": "127.0.0.1", "port": 0 if changes else worker.address[1], "threads": 1, **changes}
    with pytest.raises(InputError, match=message):
        Worker(**options)


@contextlib.contextmanager
def command() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process of ``paceline rpc-worker``, and where it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "rpc-worker", "--port", "0", "-t", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        yield process, line.partition(" at ")[2].partition(",")[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_an_end_is_noticed_at_once_and_leaves_no_process(number: signal.Signals) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with command() as (process, endpoint), Client(endpoint) as client:
        client.read()
        watch = Watch([endpoint], told.put, silence_s=WAIT_S)
        serving = serving_processes(process.pid)
        assert serving
        process.send_signal(number)
        assert told.get(timeout=WAIT_S) == f"the RPC worker at {endpoint} ended"
        assert process.wait(WAIT_S) == (-number if number == signal.SIGKILL else 0)
        assert not psutil.wait_procs(serving, timeout=WAIT_S)[1]
        watch.close()


def test_a_stopped_worker_is_noticed() -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with command() as (process, endpoint):
        Watch([endpoint], told.put)
        process.send_signal(signal.SIGSTOP)
        assert told.get(timeout=WAIT_S) == f"the RPC worker at {endpoint} has not answered for 1.5 s"
        process.send_signal(signal.SIGCONT)
