"""A worker that serves no layers, and says of itself what it is told to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

from paceline.engines.rpc.workers import ASK, PING, PONG


class StubWorker:
    """Answers questions for its status, and heartbeats.

    Attributes:
        answers: cleared where it is to fall silent.
    """

    def __init__(self, status: dict[str, Any] | bytes) -> None:
        self._status = status if isinstance(status, bytes) else json.dumps(status).encode() + b"\n"
        self.answers = threading.Event()
        self.answers.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> StubWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End at once, as a process that was killed does."""
        for each in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in connection.makefile("rb"):
                if self.answers.is_set():
                    connection.sendall({ASK: self._status, PING: PONG}[line])
