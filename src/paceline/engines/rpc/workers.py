"""What a client asks of its workers: who they are before anything is loaded, and whether they live while it runs.

A worker answers this at the port that llama.cpp's RPC goes to::

    client                      worker
    PACELINE status      ──>
                         <──    its versions, devices and clients, as one line of JSON
    ping                 ──>
                         <──    pong
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import CapabilityError, InputError
from paceline.engines.rpc.addresses import Address, parse_addresses
from paceline.terminal_text import printable_line

ASK: Final = b"PACELINE status\n"
"""What a client begins with. Its first byte tells it from llama.cpp's RPC."""
PING: Final = b"ping\n"
"""What a client asks from then on, to know that the worker lives."""
PONG: Final = b"pong\n"
"""How a worker answers a ping."""

_CONNECT_S: Final = 2.0
"""Seconds in which a worker has to answer."""
_PINGS: Final = 3
"""Round trips of which the shortest counts."""
_BEAT_S: Final = 0.2
"""Seconds between two heartbeats."""
_LONGEST_STATUS: Final = 1 << 16
"""Most bytes of what a worker says of itself."""


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """A device that a worker serves."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What a worker says of itself.

    Attributes:
        endpoint: where it is, as ``"host:port"``.
        versions: of what both ends need the same version of.
        round_trip_s: seconds from asking to the answer.
    """

    endpoint: str
    paceline: str
    versions: Mapping[str, str]
    devices: tuple[WorkerDevice, ...]
    threads: int
    clients: int
    max_clients: int
    round_trip_s: float

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on all of its devices."""
        return sum(device.free_bytes for device in self.devices)


def check_workers(endpoints: Sequence[str]) -> tuple[WorkerStatus, ...]:
    """Ask workers who they are.

    Raises:
        InputError: one cannot be reached, is no worker, or takes no more clients.
        CapabilityError: one is of another version, or llama.cpp has no RPC here.
    """
    from paceline.engines.llama_cpp import rpc

    rpc.check_rpc()
    ours = rpc.library_versions()
    found = []
    for address in parse_addresses(endpoints):
        with _Connection(address) as connection:
            status = connection.ask()
        _check_versions(status, ours)
        if status.clients >= status.max_clients:
            raise InputError(
                f"the RPC worker at {address} (`rpc`) has {status.clients} clients, the most it takes: "
                "raise its --max-clients, or end one of them",
                field="rpc",
            )
        found.append(status)
    return tuple(found)


def ask_worker(endpoint: str) -> WorkerStatus:
    """Return what a worker says of itself, whatever its version."""
    (address,) = parse_addresses([endpoint])
    with _Connection(address) as connection:
        return connection.ask()


def _check_versions(status: WorkerStatus, ours: Mapping[str, str]) -> None:
    if dict(status.versions) == dict(ours):
        return
    theirs, here = _list_versions(status.versions), _list_versions(ours)
    raise CapabilityError(
        f"the RPC worker at {status.endpoint} has {theirs}, and this machine has {here}: llama.cpp's RPC takes the "
        "same on both, so install one version of paceline and llama-cpp-python on both",
        field="rpc",
    )


def _list_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


class _Connection:
    """A connection to a worker's status. Each wait is bounded."""

    def __init__(self, address: Address) -> None:
        self.address = address
        try:
            self.socket = socket.create_connection((address.host, address.port), timeout=_CONNECT_S)
        except OSError as error:
            raise self._unreachable(error) from None
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self) -> WorkerStatus:
        """Return who is there, and how far away."""
        said = self._exchange(ASK)
        round_trips_s = []
        for _ in range(_PINGS):
            begun = time.perf_counter()
            if self._exchange(PING) != PONG:
                raise self._no_worker()
            round_trips_s.append(time.perf_counter() - begun)
        try:
            return _read_status(self.address, json.loads(said), min(round_trips_s))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise self._no_worker() from None

    def _exchange(self, sent: bytes) -> bytes:
        """Send something, and return the line that it is answered by."""
        deadline = time.monotonic() + _CONNECT_S
        try:
            self.socket.sendall(sent)
            while b"\n" not in self._received:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = self.socket.recv(1 << 14)
                if not piece or len(self._received) > _LONGEST_STATUS:
                    raise self._no_worker()
                self._received += piece
        except OSError:
            raise self._no_worker() from None
        line, _, self._received = self._received.partition(b"\n")
        return line + b"\n"

    def _unreachable(self, error: OSError) -> InputError:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return InputError(
            f"the RPC worker at {self.address} (`rpc`) cannot be reached ({why}): start paceline rpc-worker there, or "
            "see that the address is right and no firewall is between",
            field="rpc",
        )

    def _no_worker(self) -> InputError:
        return InputError(
            f"what is at {self.address} (`rpc`) does not answer as a worker within {_CONNECT_S:g} s: start paceline "
            "rpc-worker there (llama.cpp's rpc-server does not do)",
            field="rpc",
        )


def _read_status(address: Address, said: Any, round_trip_s: float) -> WorkerStatus:
    def text(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return printable_line(value)

    return WorkerStatus(
        endpoint=str(address),
        paceline=text(said["paceline"]),
        versions={text(name): text(version) for name, version in said["versions"].items()},
        devices=tuple(
            WorkerDevice(
                text(device["name"]),
                text(device["description"]),
                int(device["free_bytes"]),
                int(device["total_bytes"]),
            )
            for device in said["devices"]
        ),
        threads=int(said["threads"]),
        clients=int(said["clients"]),
        max_clients=int(said["max_clients"]),
        round_trip_s=round_trip_s,
    )


class Watch:
    """Notices that a worker ended or answers no more, by a connection to each and a thread.

    Args:
        on_trouble: is called once, by the thread, with what happened in one line.
        silence_s: seconds without an answer that are trouble. May be set while it watches: weights on their way fill
            the wire.

    Raises:
        InputError: a worker cannot be reached.
    """

    def __init__(self, endpoints: Sequence[str], on_trouble: Callable[[str], None], *, silence_s: float = 1.5) -> None:
        self.silence_s = silence_s
        self._on_trouble = on_trouble
        self._selector = selectors.DefaultSelector()
        self._heard: dict[_Connection, float] = {}
        self._ended, self._end = os.pipe()
        self._lock = threading.Lock()
        self._is_closed = False
        try:
            for address in parse_addresses(endpoints):
                connection = _Connection(address)
                self._heard[connection] = time.monotonic()
                connection.socket.settimeout(0)
                connection.socket.send(ASK)
                self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._selector.register(self._ended, selectors.EVENT_READ)
        except BaseException:
            self._clean_up()
            raise
        threading.Thread(target=self._run, name="rpc-heartbeats", daemon=True).start()

    def close(self) -> None:
        """Stop watching. Trouble that is just being told may still be."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._end)

    def _run(self) -> None:
        trouble = self._watch()
        if trouble is not None and not self._is_closed:
            self._on_trouble(trouble)
        self._clean_up()

    def _watch(self) -> str | None:
        """Return what happened; ``None`` where :meth:`close` was called."""
        looked = time.monotonic()
        beat = looked
        while True:
            ready = [key for key, _ in self._selector.select(max(beat - time.monotonic(), 0))]
            now = time.monotonic()
            for connection in self._heard:
                # Time that this process did not run, as a suspended one does not, is no silence of theirs.
                self._heard[connection] += max(now - looked - 2 * _BEAT_S, 0)
            looked = now
            if any(key.data is None for key in ready):
                return None
            for key in ready:
                connection = key.data
                try:
                    said = connection.socket.recv(1 << 14)
                except BlockingIOError:
                    continue
                except OSError:
                    said = b""
                if not said:
                    return f"the RPC worker at {connection.address} ended"
                self._heard[connection] = now
            for connection, heard in self._heard.items():
                if now - heard > self.silence_s:
                    return f"the RPC worker at {connection.address} has not answered for {self.silence_s:g} s"
            if now >= beat:
                beat = now + _BEAT_S
                for connection in self._heard:
                    with contextlib.suppress(OSError):  # reading says what it is
                        connection.socket.send(PING)

    def _clean_up(self) -> None:
        self._selector.close()
        for connection in self._heard:
            connection.socket.close()
        os.close(self._ended)
        self.close()
