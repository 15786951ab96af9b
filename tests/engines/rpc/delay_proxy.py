"""A TCP proxy that delays what goes through it, as a distance does: ``python -m tests.engines.rpc.delay_proxy``.

Bytes are held back, and none are kept from following: the bandwidth is that of the machine. What is said is the port
that it listens at.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import threading
import time


class DelayProxy:
    """Hands connections to loopback on to another port, each way after so many seconds.

    Attributes:
        port: where it listens.
        delay_s: of one way. May be changed while connections are open.
    """

    def __init__(self, target_port: int, delay_s: float, *, port: int = 0) -> None:
        self.delay_s = delay_s
        self._target_port = target_port
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> DelayProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target_port))
                except OSError:
                    near.close()
                    continue
                self._connections += [near, far]
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pump(near, far)
                self._pump(far, near)

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


def main() -> None:
    parser = argparse.ArgumentParser(description="Delay what goes to a port of this machine.")
    parser.add_argument("target", type=int, help="port to hand connections on to")
    parser.add_argument("delay_ms", type=float, help="milliseconds of one way")
    parser.add_argument("--port", type=int, default=0, help="port to listen at; 0 takes a free one")
    given = parser.parse_args()
    print(DelayProxy(given.target, given.delay_ms / 1e3, port=given.port).port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
