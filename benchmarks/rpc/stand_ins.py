"""What stands between a client and a worker, or in a worker's place: a distance, and one that serves no layers.

As a program, ``python -m benchmarks.rpc.stand_ins``, each says where it listens, and ends with its standard input::

    ... delay HOST:PORT MS     delays what goes there and back; a line of input is another number of milliseconds
    ... worker HOST:PORT       says that it is of another version
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import socket
import sys
import threading
import time
from typing import Any, Final, Self

from paceline.engines.rpc.addresses import parse_address
from paceline.engines.rpc.workers import ASK, PING, PONG

ANOTHER_VERSION: Final = "0.0.1"


class _Listener:
    """Listens at an IPv4 address, and attends to whoever comes.

    Attributes:
        endpoint: where, as ``"host:port"``.
    """

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.create_server((host, port))
        self._connections: list[socket.socket] = []
        self._is_closed = False
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End at once, as a process that was killed does."""
        self._is_closed = True
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._hold(connection)
                self._attend(connection)

    def _hold(self, connection: socket.socket) -> None:
        self._connections.append(connection)
        if self._is_closed:  # perhaps after `close` went through them
            connection.close()
            raise ConnectionAbortedError
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _attend(self, connection: socket.socket) -> None:
        raise NotImplementedError


class DelayProxy(_Listener):
    """Hands connections on, each way after so many seconds, as a distance does.

    Bytes are held back, and none are kept from following: the bandwidth is that of the machine.

    Args:
        target: where they are handed on to, as ``"host:port"``.

    Attributes:
        delay_s: of one way. May be changed while connections are open.
    """

    def __init__(self, target: str, delay_s: float) -> None:
        self.delay_s = delay_s
        self._target = parse_address(target)
        super().__init__("127.0.0.1", 0)

    def _attend(self, connection: socket.socket) -> None:
        try:
            far = socket.create_connection((self._target.host, self._target.port))
        except OSError:
            connection.close()
            return
        self._hold(far)
        self._pump(connection, far)
        self._pump(far, connection)

    def _pump(self, source: socket.socket, destination: socket.socket) -> None:
        held: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def receive() -> None:
            piece = b"more"
            while piece:
                try:
                    piece = source.recv(1 << 20)
                except OSError:
                    piece = b""
                held.put((time.monotonic() + self.delay_s, piece))

        def send() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due, piece = held.get()
                    time.sleep(max(due - time.monotonic(), 0))
                    if not piece:
                        destination.shutdown(socket.SHUT_WR)
                        return
                    destination.sendall(piece)

        for each in (receive, send):
            threading.Thread(target=each, daemon=True).start()


class StubWorker(_Listener):
    """Answers questions for a worker's status, and heartbeats.

    Args:
        status: what it says of itself.

    Attributes:
        answers: cleared where it is to fall silent.
    """

    def __init__(self, status: dict[str, Any] | bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        self._status = status if isinstance(status, bytes) else json.dumps(status).encode() + b"\n"
        self.answers = threading.Event()
        self.answers.set()
        super().__init__(host, port)

    def _attend(self, connection: socket.socket) -> None:
        threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in connection.makefile("rb"):
                if self.answers.is_set():
                    connection.sendall({ASK: self._status, PING: PONG}[line])


def status_of_another_version() -> dict[str, Any]:
    versions = {"llama-cpp-python": ANOTHER_VERSION, "ggml": ANOTHER_VERSION}
    device = {"name": "CPU", "description": "a processor", "free_bytes": 1 << 34, "total_bytes": 1 << 34}
    said = {"paceline": ANOTHER_VERSION, "versions": versions, "devices": [device]}
    return {**said, "threads": 1, "clients": 0, "max_clients": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description="Stand between a client and a worker, or in a worker's place.")
    parser.add_argument("what", choices=("delay", "worker"))
    parser.add_argument("address", help="what to hand connections on to, or where to listen", metavar="HOST:PORT")
    parser.add_argument("delay_ms", type=float, nargs="?", default=0.0, help="milliseconds of one way")
    given = parser.parse_args()
    if given.what == "worker":
        at = parse_address(given.address)
        print(StubWorker(status_of_another_version(), at.host, at.port).endpoint, flush=True)
        sys.stdin.read()
        return
    proxy = DelayProxy(given.address, given.delay_ms / 1e3)
    print(proxy.endpoint, flush=True)
    for line in sys.stdin:
        proxy.delay_s = float(line) / 1e3
        print(proxy.delay_s, flush=True)


if __name__ == "__main__":
    main()
