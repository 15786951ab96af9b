"""Two servers behind a gateway that others made: what is read, and what is said.

``make test-gateway`` installs the gateway. The commands of docs/guides/many-replicas.md are those here.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.serving.processes import Process, poll, served
from tests.timing import WAIT_S

REPLICA = ("-np", "2", "-t", "1")
MODEL = "target-q8_0"
NUM_PREFIXES = 8
NO_CONNECTION_TWICE = httpx.Limits(max_keepalive_connections=0)


@dataclass
class Answer:
    """What a client saw: status, text, counts of tokens, the error, and whether the stream came to its own end."""

    status: int = 0
    text: str = ""
    read: int = 0
    error: str = ""
    is_whole: bool = False


def prefix(number: int) -> str:
    return f"# The file of part {number}.\n" + "".join(f"def step_{number}_{line}(value):\n" for line in range(20))


def body(number: int, *, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": f"{prefix(number % NUM_PREFIXES)}# question {number}:",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
        "temperature": 0.8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def least_read(url: str, bodies: Sequence[dict[str, Any]]) -> int:
    """Return the tokens of prompts that one server reads that keeps all it has read."""
    seen: set[tuple[int, ...]] = set()
    total = 0
    for each in bodies:
        said = httpx.post(f"{url}/tokenize", json={"content": each["prompt"], "add_special": True}, timeout=WAIT_S)
        ids = tuple(said.json()["tokens"])
        beginnings = {ids[:length] for length in range(1, len(ids) + 1)}
        total += len(beginnings - seen)
        seen |= beginnings
    return total


async def ask(web: httpx.AsyncClient, url: str, asked: dict[str, Any]) -> Answer:
    answer = Answer()
    try:
        async with web.stream("POST", f"{url}/v1/completions", json=asked) as response:
            answer.status = response.status_code
            if not response.is_success:
                answer.error = (await response.aread()).decode()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    answer.is_whole = not answer.error
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    assert not answer.error
                    answer.error = event["error"]["message"]
                if event.get("usage"):
                    usage = event["usage"]
                    answer.read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
                answer.text += "".join(choice["text"] for choice in event.get("choices", ()))
    except httpx.HTTPError as error:
        answer.error = repr(error)
    return answer


async def ask_all(url: str, bodies: Sequence[dict[str, Any]], *, clients: int) -> list[Answer]:
    free = asyncio.Semaphore(clients)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=NO_CONNECTION_TWICE, trust_env=False) as web:

        async def one(each: dict[str, Any]) -> Answer:
            async with free:
                return await ask(web, url, each)

        return await asyncio.gather(*map(one, bodies))


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
    command += ["--health-check-interval-secs", "2", "--worker-urls", *(each.url for each in replicas)]
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


def test_each_prefix_is_read_once_and_texts_are_those_of_one_server(gateway_program: str, tmp_path: Path) -> None:
    bodies = [body(number, max_tokens=16) for number in range(64)]
    with served(*REPLICA) as first, served(*REPLICA) as second:
        least = least_read(first.url, bodies)
        with gateway(gateway_program, tmp_path / "log", [first, second]) as url:
            answers = asyncio.run(ask_all(url, bodies, clients=8))
    with served(*REPLICA) as alone:
        expected = asyncio.run(ask_all(alone.url, bodies, clients=8))
    assert all(answer.is_whole for answer in answers + expected)
    read = sum(answer.read for answer in answers)
    print(f"{read} tokens of prompts were read, and {least} are the least possible")
    assert read <= 1.2 * least
    same = sum(answer.text == other.text for answer, other in zip(answers, expected, strict=True))
    print(f"{same} of {len(bodies)} texts are those of one server")
    # Who shares a pass is not the same, and near-ties may turn; --exact reads prompts anew.
    assert same >= len(bodies) - 4
