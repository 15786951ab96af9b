"""Two servers behind a gateway that others made: what is read, what is said, and what is lost when one of them ends.

``make test-gateway`` installs the gateway. The commands of docs/guides/many-replicas.md are those here, and its figures
are what these tests print.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.load.asking import APIS, Asked, Reply, ask_all
from benchmarks.load.traffic import least_read

from tests.serving.processes import Process, poll, served
from tests.timing import WAIT_S

AT_ONCE = 2
REPLICA = ("-np", str(AT_ONCE), "-t", "1", "--metrics", "--grace", str(WAIT_S))
MODEL = "target-q8_0"
COMPLETIONS = APIS["completions"]
NUM_PREFIXES = 8
FIRST, LATER = range(24), range(24, 32)
TOKENS = 150


def prefix(number: int) -> str:
    return f"# The file of part {number}.\n" + "".join(f"def step_{number}_{line}(value):\n" for line in range(20))


def body(number: int, *, max_tokens: int) -> dict[str, Any]:
    return {
        **COMPLETIONS.asks(f"{prefix(number % NUM_PREFIXES)}# question {number}:", max_tokens),
        "model": MODEL,
        "ignore_eos": True,
        "seed": number,
        "temperature": 0.8,
        "stream": True,
    }


async def replies_to(url: str, bodies: Sequence[dict[str, Any]], *, clients: int | None = None) -> list[Reply]:
    requests = [Asked(url, each) for each in bodies]
    await ask_all(COMPLETIONS, requests, clients=clients, silent_s=WAIT_S)
    return [each.reply for each in requests]


def tokens_of(replica: Process, text: str) -> list[int]:
    said = httpx.post(f"{replica.url}/tokenize", json={"content": text, "add_special": True}, timeout=WAIT_S)
    return [int(token) for token in said.raise_for_status().json()["tokens"]]


def in_flight(replica: Process) -> tuple[int, int]:
    """Return how many requests run at a replica, and how many wait there."""
    said = httpx.get(f"{replica.url}/metrics", timeout=WAIT_S).raise_for_status().text
    found = dict(re.findall(r"^vllm:num_requests_(running|waiting)\{.*\} (\S+)$", said, re.MULTILINE))
    return int(float(found["running"])), int(float(found["waiting"]))


def is_idle(replica: Process) -> bool:
    return in_flight(replica) == (0, 0)


class Streams:
    """Clients that ask all at once, in a thread of their own.

    Attributes:
        replies: to all of them.
        over: those that have ended, whole or not.
    """

    def __init__(self, thread: ThreadPoolExecutor, url: str, numbers: range) -> None:
        requests = [Asked(url, body(number, max_tokens=TOKENS)) for number in numbers]
        self.replies = [each.reply for each in requests]
        self.over: list[Reply] = []
        self._ending: Future[float] = thread.submit(
            lambda: asyncio.run(ask_all(COMPLETIONS, requests, silent_s=WAIT_S, when_over=self.over.append))
        )

    @property
    def open(self) -> list[Reply]:
        over = set(map(id, self.over))
        return [reply for reply in self.replies if id(reply) not in over]

    def lost(self) -> list[Reply]:
        """Wait for the end, and return what is not whole."""
        self._ending.result(WAIT_S)
        return [reply for reply in self.replies if reply.errors]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def gateway(program: str, log: Path, replicas: Sequence[Process]) -> Iterator[str]:
    """Yield the address of a gateway once it hands on requests."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [program, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warn"]
    command += ["--health-check-interval-secs", "2", "--disable-worker-overload-protection"]
    command += ["--worker-urls", *(each.url for each in replicas)]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, cwd=log.parent)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            listed = httpx.get(f"{url}/workers", timeout=WAIT_S).json()["workers"]
            return len(listed) == len(replicas) and all(each["is_healthy"] for each in listed)
        except (httpx.TransportError, ValueError):
            return False

    try:
        poll(is_ready)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def clients() -> Iterator[ThreadPoolExecutor]:
    """Threads that end once servers and gateway are gone, whatever a test came to."""
    with ThreadPoolExecutor() as threads:
        yield threads


def wait_for_a_queue(replicas: Sequence[Process]) -> tuple[Process, Process]:
    """Wait until a replica runs all it can and has more waiting; return it and the other one.

    One of them comes to that, however the gateway spreads what is more than both can run.
    """
    found: list[tuple[Process, Process]] = []

    def look() -> object:
        for replica, other in (replicas, replicas[::-1]):
            running, waiting = in_flight(replica)
            if running == AT_ONCE and waiting:
                found.append((replica, other))
        return found

    poll(look)
    return found[0]


def test_each_prefix_is_read_once_and_texts_are_those_of_one_server(gateway_program: str, tmp_path: Path) -> None:
    bodies = [body(number, max_tokens=16) for number in range(64)]
    with served(*REPLICA) as first, served(*REPLICA) as second:
        least = least_read(tokens_of(first, each["prompt"]) for each in bodies)
        with gateway(gateway_program, tmp_path / "log", [first, second]) as url:
            replies = asyncio.run(replies_to(url, bodies, clients=8))
    with served(*REPLICA) as alone:
        expected = asyncio.run(replies_to(alone.url, bodies, clients=8))
    assert not any(reply.errors for reply in replies + expected)
    read = sum(reply.prompt_tokens - (reply.cached_tokens or 0) for reply in replies)
    print(f"{read} tokens of prompts were read, and {least} are the least possible")
    assert read <= 1.2 * least
    same = sum(reply.text == other.text for reply, other in zip(replies, expected, strict=True))
    print(f"{same} of {len(bodies)} texts are those of one server")
    # Who shares a pass is not the same, and near-ties may turn; --exact reads prompts anew.
    assert same >= len(bodies) - 4


def test_a_server_that_is_drained_loses_nothing(
    clients: ThreadPoolExecutor, gateway_program: str, tmp_path: Path
) -> None:
    with (
        served(*REPLICA) as first,
        served(*REPLICA) as second,
        gateway(gateway_program, tmp_path / "log", [first, second]) as url,
    ):
        streams = Streams(clients, url, FIRST)
        drained, other = wait_for_a_queue([first, second])
        drained.signal(signal.SIGTERM)
        meanwhile = Streams(clients, url, LATER)
        assert drained.status() == 0
        afterwards = Streams(clients, url, LATER)
        for each in (streams, meanwhile, afterwards):
            assert [reply.errors for reply in each.lost()] == []
            assert all(reply.tokens == TOKENS for reply in each.replies)
        assert other.process.poll() is None
    print(f"{len(FIRST)} requests, {len(LATER)} meanwhile and {len(LATER)} afterwards: 0 lost")


def test_of_a_server_that_is_killed_only_streams_that_had_begun_are_lost(
    clients: ThreadPoolExecutor, gateway_program: str, tmp_path: Path
) -> None:
    with (
        served(*REPLICA) as first,
        served(*REPLICA) as second,
        gateway(gateway_program, tmp_path / "log", [first, second]) as url,
    ):
        streams = Streams(clients, url, FIRST)
        while True:
            killed, other = wait_for_a_queue([first, second])
            # While it stands still the other one comes to an end of all it has: what is open then is of this one.
            killed.signal(signal.SIGSTOP)
            poll(partial(is_idle, other))
            begun = [reply for reply in streams.open if reply.arrivals]
            waiting = [reply for reply in streams.open if not reply.arrivals]
            if begun and waiting:
                break
            # It was between two streams.
            killed.signal(signal.SIGCONT)
        killed.signal(signal.SIGKILL)
        lost = streams.lost()
        assert 0 < len(lost) <= AT_ONCE
        for reply in lost:
            assert reply in begun
            assert (reply.status, bool(reply.text)) == (200, True)
            # One event, which is the last.
            assert reply.errors == [reply.last["error"]["message"]]
        assert all(reply.tokens == TOKENS for reply in streams.replies if reply not in lost)
        afterwards = Streams(clients, url, LATER)
        assert [reply.errors for reply in afterwards.lost()] == []
    print(f"{len(begun)} ran there, {len(lost)} lost: {lost[0].errors[0]!r}; {len(waiting)} waited there, 0 lost")
