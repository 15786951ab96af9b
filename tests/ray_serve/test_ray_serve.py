"""The example for Ray Serve: deployed by the command of its guide, in an environment of its own, and asked as users do.

``make test-ray`` installs Ray. Only the address and the times after which Ray scales differ from the example's file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml
from benchmarks.load.asking import Reply

import paceline
from paceline.models.embedded import embedded_draft, embedded_target
from tests.gateway.test_gateway import body, free_port, replies_to
from tests.serving.processes import UNMEASURED, poll
from tests.timing import WAIT_S

EXAMPLES = Path(__file__).parents[2] / "examples"
AT_ONCE = 2
TOKEN = "0123456789abcdef" * 2
PROMPT = "def fibonacci(n):\n"
STARTS = 3
"""Times that Ray is started: it gives itself 30 s, which are too few where a machine has much else to do."""
LONG = 1500
"""Tokens of answers that still run when Ray has seen that there are too many replicas."""


@dataclass
class Deployed:
    """The application, as Ray runs it.

    Attributes:
        url: where it is.
        dashboard: where Ray tells of it.
    """

    url: str
    dashboard: str

    def replicas(self) -> dict[str, dict[str, Any]]:
        """Return what Ray says of each replica that there is, by its name."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        told = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=WAIT_S).json()
        listed = told["applications"]["paceline"]["deployments"]["Replica"]["replicas"]
        return {each["replica_id"]: each for each in listed}

    def running(self) -> set[str]:
        return {name for name, replica in self.replicas().items() if replica["state"] == "RUNNING"}

    def ask(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return which replica answered, and what."""
        response = httpx.post(f"{self.url}/v1/completions", json={**asked, "stream": False}, timeout=WAIT_S)
        assert response.status_code == 200, response.text
        return response.headers["x-replica"], response.json()


@pytest.fixture(scope="module")
def deployed(ray_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    config = yaml.safe_load((EXAMPLES / "ray_serve.yaml").read_text())
    config["http_options"]["port"] = port = free_port()
    (application,) = config["applications"]
    application["args"]["flags"] = " ".join([*UNMEASURED, "-np", str(AT_ONCE), "-t", "1", "--grace", "120"])
    (replica,) = application["deployments"]
    replica["autoscaling_config"] |= {"upscale_delay_s": 1, "look_back_period_s": 11, "downscale_delay_s": 4}
    replica["ray_actor_options"] = {"num_cpus": 0.1}
    folder = tmp_path_factory.mktemp("ray")
    file, log = folder / "ray_serve.yaml", folder / "log"
    file.write_text(yaml.safe_dump(config))
    with tempfile.TemporaryDirectory() as short:  # for names of sockets, which may not be long
        environment = {
            **os.environ,
            "RAY_ADDRESS": "local",
            "RAY_TMPDIR": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
        }
        environment.pop("PYTHONPATH", None)
        command = [str(ray_folder / "bin" / "serve"), "run", str(file)]
        url = f"http://127.0.0.1:{port}"
        process = _start(command, environment, log, url)
        for _ in range(STARTS - 1):
            if process.poll() is not None:
                assert "timed out during startup" in log.read_text(), log.read_text()
                process = _start(command, environment, log, url)
        assert process.poll() is None, log.read_text()
        try:
            found = re.search(r"dashboard at \S*?(http://[\d.:]+)", log.read_text())
            assert found, log.read_text()
            yield Deployed(url, found[1])
        finally:
            _end(process)
    assert process.returncode == 0, log.read_text()


def _start(command: list[str], environment: dict[str, str], log: Path, url: str) -> subprocess.Popen[bytes]:
    """Return the process of an application that answers, or has ended."""
    with log.open("wb") as said:
        process = subprocess.Popen(command, cwd=EXAMPLES, env=environment, stdout=said, stderr=said)

    def is_settled() -> bool:
        if process.poll() is not None:
            return True
        try:
            return httpx.get(f"{url}/v1/models", timeout=WAIT_S).is_success
        except httpx.TransportError:
            return False

    try:
        poll(is_settled)
    except BaseException:
        _end(process)
        raise
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop the application as a user does, and leave no process behind."""
    if process.poll() is not None:
        return
    parts = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(WAIT_S)
        _, left = psutil.wait_procs(parts, WAIT_S / 10)
        assert not left, left
    finally:
        for each in parts:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()


def test_a_stream_has_the_text_that_the_library_gives(deployed: Deployed) -> None:
    with paceline.load(
        paceline.ModelOptions(embedded_target(), context_length=2048, flash_attention=False),
        draft=paceline.ModelOptions(embedded_draft(), context_length=2048, flash_attention=False),
        policy=paceline.FixedPolicy(3),
    ) as model:
        expected = model.generate(PROMPT, max_tokens=64, temperature=0.0, ignore_end=True)
    with openai.OpenAI(base_url=f"{deployed.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:
        (listed,) = client.models.list()
        stream = client.completions.create(
            model=listed.id, prompt=PROMPT, max_tokens=64, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        parts = [choice.text for chunk in stream for choice in chunk.choices]
    assert "".join(parts) == expected.text
    assert len(parts) > 8


def test_a_client_that_leaves_ends_its_answer(deployed: Deployed) -> None:
    asked = {**body(0, max_tokens=LONG), "stream": True}
    with httpx.stream("POST", f"{deployed.url}/v1/completions", json=asked, timeout=WAIT_S) as response:
        assert next(response.iter_lines()).startswith("data: ")
    poll(lambda: httpx.get(f"{deployed.url}/load", timeout=WAIT_S).json()["server_load"] == 0)


def test_replicas_are_added_under_load_keep_prefixes_and_are_drained(deployed: Deployed) -> None:
    assert len(deployed.running()) == 1
    over = threading.Event()

    async def load() -> list[Reply]:
        """Keep more requests under way than one replica is meant to have."""
        replies: list[Reply] = []
        while not over.is_set():
            numbers = range(len(replies), len(replies) + 16)
            replies += await replies_to(deployed.url, [body(number, max_tokens=64) for number in numbers])
        return replies

    found: list[Reply] = []
    loading = threading.Thread(target=lambda: found.extend(asyncio.run(load())))
    loading.start()
    try:
        poll(lambda: len(deployed.running()) == 2)
    finally:
        over.set()
        loading.join(WAIT_S)
    assert found
    assert [reply.errors for reply in found if reply.errors] == []

    # Ray tells who has two replicas in a while.
    of_prefix: dict[int, str] = {}

    def both_answer() -> bool:
        of_prefix.update({number: deployed.ask(body(number, max_tokens=1))[0] for number in range(8)})
        return len(set(of_prefix.values())) == 2

    poll(both_answer)
    for number, replica in of_prefix.items():
        again, answer = deployed.ask(body(number + 8, max_tokens=1))
        assert again == replica
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"]
    print(f"prefixes of each replica: {sorted(Counter(of_prefix.values()).values())}")

    # An answer of each of the two is under way when Ray takes one of them away.
    one_of_each = {replica: number for number, replica in of_prefix.items()}
    bodies = [body(number, max_tokens=LONG) for number in one_of_each.values()]

    async def outlast() -> list[list[Reply]]:
        asking = [asyncio.create_task(replies_to(deployed.url, [each])) for each in bodies]
        while not any(replica["state"] == "STOPPING" for replica in deployed.replicas().values()):
            assert not all(each.done() for each in asking), "the answers were over before Ray stopped a replica"
            await asyncio.sleep(0.05)
        assert not any(each.done() for each in asking)
        return await asyncio.gather(*asking)

    assert [reply.errors for (reply,) in asyncio.run(outlast())] == [[]] * len(bodies)
    poll(lambda: len(deployed.replicas()) == 1)
    assert deployed.ask(body(0, max_tokens=1))[0] in deployed.running()


@pytest.mark.parametrize("killed", ["the server", "the replica"])
def test_a_replica_that_is_lost_ends_streams_in_one_error_and_is_replaced(deployed: Deployed, killed: str) -> None:
    poll(lambda: len(deployed.running()) == 1)
    (name,) = deployed.running()
    asked = {**body(0, max_tokens=LONG), "stream": True}
    said: list[str] = []
    with httpx.stream("POST", f"{deployed.url}/v1/completions", json=asked, timeout=WAIT_S) as response:
        replica = psutil.Process(deployed.replicas()[name]["pid"])
        (server,) = [each for each in replica.children(recursive=True) if "serve" in each.cmdline()]
        for line in filter(None, response.iter_lines()):
            if not said:
                (server if killed == "the server" else replica).kill()
            said.append(line)
    assert "error" in json.loads(said[-1].removeprefix("data: "))
    assert sum('"error"' in line for line in said) == 1
    _, left = psutil.wait_procs([server], WAIT_S)
    assert not left, "the server goes on without anybody to ask it"
    poll(lambda: deployed.running() - {name})
    assert deployed.ask(body(0, max_tokens=1))[0] != name
