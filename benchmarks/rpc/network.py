"""Workers that are so far away: each in a network namespace of its own, or on loopback, and behind a delay.

::

    this process ──> proxy at 127.0.0.1 ── delay ──> veth ──> namespace: paceline rpc-worker

A namespace is a machine of its own as far as the network goes: it has its own loopback, and one cable, which can be
pulled. To make one needs root, on Linux.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from paceline.core.errors import CapabilityError, EngineError
from paceline.engines.rpc.addresses import DEFAULT_PORT

_ROOT: Final = Path(__file__).parents[2]
_ADDRESSES: Final = ipaddress.ip_network("198.18.0.0/15")
"""Kept for benchmarks of networks (RFC 2544): no network that people use has these."""
_EACH: Final = 4
"""Addresses of one cable: the network's own, one at each end, and broadcast."""
_START_S: Final = 120.0
_LOOPBACK: Final = "127.0.0.1"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Site:
    """Where a worker runs.

    Attributes:
        host: its address.
        namespace: its network namespace; ``None`` on loopback.
        cable: this end of what leads there.
    """

    host: str
    port: int
    namespace: str | None = None
    cable: str | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def command(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs there."""
        return list(command) if self.namespace is None else ["ip", "netns", "exec", self.namespace, *command]

    def plug(self, *, is_in: bool) -> None:
        """Plug the cable in, or pull it."""
        if self.cable is not None:
            _ip("link", "set", self.cable, "up" if is_in else "down")


@contextlib.contextmanager
def sites(count: int, *, in_namespaces: bool) -> Iterator[list[Site]]:
    """Yield places for workers; namespaces are gone afterwards.

    Raises ``CapabilityError`` where namespaces cannot be made.
    """
    if not in_namespaces:
        yield [Site(_LOOPBACK, _free_port()) for _ in range(count)]
        return
    if sys.platform != "linux" or shutil.which("ip") is None or os.geteuid() != 0:
        raise CapabilityError(
            "network namespaces take Linux, root and the program ip (iproute2): run it as root, or give --loopback to "
            "have the workers on this machine's loopback"
        )
    with ExitStack() as stack:
        yield [stack.enter_context(_namespace(next(_numbers))) for _ in range(count)]


@contextlib.contextmanager
def _namespace(number: int) -> Iterator[Site]:
    name, cable = f"paceline-{os.getpid()}-{number}", f"pl{os.getpid()}n{number}"
    place = _EACH * (os.getpid() * 16 + number) % _ADDRESSES.num_addresses
    near, far = (str(_ADDRESSES[place + end]) for end in (1, 2))
    _ip("netns", "add", name)
    try:
        _ip("link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", name)
        for words in (
            ("addr", "add", f"{near}/30", "dev", cable),
            ("link", "set", cable, "up"),
            ("-n", name, "addr", "add", f"{far}/30", "dev", "cable"),
            ("-n", name, "link", "set", "cable", "up"),
            ("-n", name, "link", "set", "lo", "up"),
        ):
            _ip(*words)
        yield Site(far, DEFAULT_PORT, name, cable)
    finally:
        # The cable goes with it; at once, where this end of it is not gone with the namespace's last process.
        with contextlib.suppress(CapabilityError):
            _ip("link", "del", cable)
        _ip("netns", "del", name)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise CapabilityError(
            f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}; give --loopback where namespaces cannot "
            "be made"
        )


class Network:
    """Workers, each behind a proxy at loopback: ``with Network(2, in_namespaces=True) as network``.

    Attributes:
        endpoints: where workers are reached, by way of the proxies.
        sites: where they run.
    """

    def __init__(self, count: int, *, in_namespaces: bool, threads: int) -> None:
        self._count = count
        self._in_namespaces = in_namespaces
        self._threads = threads
        self._running: dict[int, Process] = {}
        self._proxies: list[Process] = []

    def __enter__(self) -> Network:
        with ExitStack() as stack:
            self.sites = stack.enter_context(sites(self._count, in_namespaces=self._in_namespaces))
            stack.callback(self._end_all)
            for number, site in enumerate(self.sites):
                self.start(number)
                self._proxies.append(Process(_stand_in("delay", site.endpoint)))
            self.endpoints = tuple(proxy.wait_for(_LOOPBACK) for proxy in self._proxies)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_all(self) -> None:
        for process in (*self._running.values(), *self._proxies):
            process.end()

    def set_round_trip(self, milliseconds: float) -> None:
        """Put all workers so far away."""
        for proxy in self._proxies:
            proxy.tell(str(milliseconds / 2))

    def start(self, number: int) -> None:
        """Start a worker where there is none."""
        site = self.sites[number]
        program = [sys.executable, "-m", "paceline", "rpc-worker", "--host", site.host, "--port", str(site.port)]
        self._run(number, [*program, "-t", str(self._threads)], "serving ")

    def start_another_version(self, number: int) -> None:
        """Have what is at a worker's address say that it is of another version."""
        self._run(number, _stand_in("worker", self.sites[number].endpoint), self.sites[number].host)

    def _run(self, number: int, command: Sequence[str], ready: str) -> None:
        self._running[number] = Process(self.sites[number].command(command))
        self._running[number].wait_for(ready)

    def kill(self, number: int) -> None:
        """End a worker at once, and all that it runs, where there is one."""
        if number in self._running:
            self._running.pop(number).end()

    def stop(self, number: int) -> None:
        """Have a worker, and all that it runs, do nothing more."""
        self._running[number].signal(signal.SIGSTOP)


def _stand_in(what: str, endpoint: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.rpc.stand_ins", what, endpoint]


class Process:
    """A process, and what it says, line by line."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=_ROOT,
            env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout:
                self._said.put(line.strip())
        self._said.put("")

    def wait_for(self, beginning: str) -> str:
        """Return the first line that begins so."""
        last = "it says nothing"
        while line := self._said.get(timeout=_START_S):
            if line.startswith(beginning):
                return line
            last = line
        raise EngineError(f"{' '.join(map(str, self._process.args))} ended: {last}")  # type: ignore[arg-type]

    def tell(self, line: str) -> None:
        """Say something, and wait for what comes of it."""
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        self._said.get(timeout=_START_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it runs."""
        for each in (self._process, *psutil.Process(self._process.pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.send_signal(number)

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_LOOPBACK, 0))
        return int(free.getsockname()[1])
