"""A server as a process of its own, and the client that measurements ask it by.

What is to break off, stall or lie asks by :mod:`benchmarks.server_soak.wire` instead.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from paceline.core.errors import CapabilityError

HOST: Final = "127.0.0.1"
PACELINE: Final = (sys.executable, "-m", "paceline", "serve")
_START_S: Final = 600.0
"""Longest that loading may take, with what is measured when a model is first loaded."""
_ANSWER_S: Final = 3600.0
_TOLD_S: Final = 15.0
"""Longest that a server may take to say how it is."""
_END_S: Final = 10.0
_POLL_S: Final = 0.02


class Server:
    """A running ``paceline serve``, or a server that takes the same flags; ``web`` asks it.

    Use as ``with Server.start(...)``, which ends it.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, web: httpx.Client, log: Path) -> None:
        self._process = process
        self._memory = psutil.Process(process.pid)
        self.port, self.web, self.log = port, web, log

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        flags: Sequence[str],
        log: Path,
        *,
        program: Sequence[str] = PACELINE,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Iterator[Server]:
        """Start a server and wait until its model is there."""
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = int(free.getsockname()[1])
        command = [*program, "--host", HOST, "--port", str(port), *flags]
        with log.open("wb") as written:
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=written, stderr=written)
            except OSError as error:
                raise CapabilityError(f"{program[0]} does not run ({error}): give the path of llama-server") from None
        url = f"http://{HOST}:{port}" if tls is None else f"https://localhost:{port}"
        web = httpx.Client(base_url=url, headers=headers, verify=tls or True, timeout=_TOLD_S, trust_env=False)
        with web:
            try:
                server = cls(process, port, web, log)
                server._wait_until_ready(" ".join(program))
                yield server
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            finally:
                process.kill()
                process.wait()

    def _wait_until_ready(self, name: str) -> None:
        give_up_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.web.get("/health", timeout=5.0).is_success:
                    return
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                raise CapabilityError(f"{name} does not come up: {self.text().strip()[-500:] or 'it says nothing'}")
            time.sleep(_POLL_S)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self.web.post(path, json=body, timeout=_ANSWER_S).raise_for_status().json()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def resident_bytes(self) -> int:
        """Return the memory that it and its children hold; 0 where it is gone."""
        return sum(process.memory_info().rss for process in self._processes())

    def cpu_s(self) -> float:
        """Return the seconds that it and its children have computed for."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def _processes(self) -> list[Any]:
        try:
            return [self._memory, *self._memory.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def metrics(self) -> dict[str, float]:
        """Return what ``/metrics`` says: values by names with labels."""
        lines = (line.rpartition(" ") for line in self.web.get("/metrics").text.splitlines() if line[:1] != "#")
        # vLLM's names have the model's name as a label, and nothing is told by it here.
        return {name.partition("{engine=")[0]: float(value) for name, _, value in lines}

    def in_flight(self) -> tuple[int, int, int]:
        """Return how many requests run, how many wait, and how many tokens those have that run."""
        metrics = self.metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "paceline:tokens_in_flight")
        running, waiting, tokens = (int(metrics[name]) for name in names)
        return running, waiting, tokens

    def wait_until_idle(self, within_s: float) -> None:
        """Wait until nothing runs and nothing waits."""
        give_up_s = time.monotonic() + within_s
        while self.in_flight() != (0, 0, 0):
            if time.monotonic() > give_up_s:
                raise TimeoutError
            time.sleep(_POLL_S)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def ended(self, within_s: float) -> int:
        return self._process.wait(within_s)
