"""``paceline serve`` as a process, with its log and what it tells of itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.server_soak.wire import HOST, Answer, ask, request_bytes
from paceline.core.errors import CapabilityError

_START_S: Final = 180.0
_POLL_S: Final = 0.02


class Serving:
    """A running ``paceline serve``.

    Attributes:
        port: where it listens.
        log: the file with all it wrote.
        tls: what its certificate is checked by, where it speaks TLS.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        port: int,
        log: Path,
        headers: Mapping[str, str],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._process = process
        self._memory = psutil.Process(process.pid)
        self._headers = headers
        self.port = port
        self.log = log
        self.tls = tls

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        flags: Sequence[str],
        log: Path,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> AsyncIterator[Serving]:
        """Start a server and wait until its model is there; leaving kills it if it still runs.

        Args:
            flags: of ``paceline serve``.
            log: takes all that it writes.
            headers: of what is asked here; its key, where it has one.
            tls: what its certificate is checked by, where it speaks TLS.

        Raises:
            CapabilityError: it does not come up.
        """
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        with log.open("wb") as written:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "paceline", "serve", "--port", str(port), *flags,
                stdin=asyncio.subprocess.DEVNULL, stdout=written, stderr=written,
            )  # fmt: skip
        serving = cls(process, port, log, headers or {}, tls)
        try:
            await serving._wait_until_ready()
            yield serving
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _wait_until_ready(self) -> None:
        async def ready() -> None:
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    if (await self._get("/health")).status == 200:
                        return
                if self._process.returncode is not None:
                    raise CapabilityError(f"paceline serve ended as it started: {self.text()[-500:]}")
                await asyncio.sleep(_POLL_S)

        try:
            await asyncio.wait_for(ready(), _START_S)
        except TimeoutError:
            raise CapabilityError(f"paceline serve is not there after {_START_S:g} s") from None

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def text(self) -> str:
        """Return all it wrote so far."""
        return self.log.read_text(errors="replace")

    def resident_bytes(self) -> int:
        """Return the memory that it and its children hold; 0 where it is gone."""
        return sum(process.memory_info().rss for process in self._processes())

    def cpu_s(self) -> float:
        """Return the seconds that it and its children have computed for."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def is_running(self) -> bool:
        """Return whether it lives."""
        return self._process.returncode is None

    def _processes(self) -> list[Any]:
        try:
            return [self._memory, *self._memory.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def metrics(self) -> dict[str, float]:
        """Return what ``/metrics`` says: values by names with labels."""
        answer = await self._get("/metrics")
        lines = (line.rpartition(" ") for line in answer.body.decode().splitlines() if not line.startswith("#"))
        # vLLM's names have the model's name as a label, and nothing is told by it here.
        return {name.partition("{engine=")[0]: float(value) for name, _, value in lines}

    async def slots(self) -> list[dict[str, Any]]:
        """Return what ``/slots`` says."""
        slots: list[dict[str, Any]] = (await self._get("/slots")).json()
        return slots

    async def in_flight(self) -> tuple[int, int, int]:
        """Return how many requests run, how many wait, and how many tokens those have that run."""
        metrics = await self.metrics()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "paceline:tokens_in_flight")
        running, waiting, tokens = (int(metrics[name]) for name in names)
        return running, waiting, tokens

    async def wait_until_idle(self) -> None:
        """Wait until nothing runs and nothing waits."""
        while await self.in_flight() != (0, 0, 0):
            await asyncio.sleep(_POLL_S)

    async def _get(self, path: str) -> Answer:
        return await ask(self.port, request_bytes("GET", path, headers=self._headers), tls=self.tls)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        """Wait for its end, and return its exit status."""
        return await self._process.wait()
