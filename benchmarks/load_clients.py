"""Clients of a server, in a process of their own: each asks one request after the other, and reads its stream.

They are to take as little as can be of the cores that the server computes on. So one thread reads all sockets, and
while anything is read nothing is parsed: the clients note when bytes came, and how many events began in them. What the
events say is read once all answers are there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

_EVENT: Final = b"\ndata: "
"""Begins an event. Inside of JSON there is no line's end."""
_END: Final = b"\r\n0\r\n\r\n"
"""Ends a body that is sent in chunks."""
_TAIL: Final = max(len(_EVENT), len(_END)) - 1
_RECEIVED: Final = 1 << 16
_STATUS: Final = b"HTTP/1.1 200"
_LONGEST_SHOWN: Final = 500
_SILENT_S: Final = 600.0
_WORDS_S: Final = 1.0
"""Seconds to wait for the rest of a refusal."""


class _Client:
    """Asks one request after the other, each on a connection of its own: llama-server closes it after a stream."""

    def __init__(self, selector: selectors.BaseSelector, port: int, bodies: Sequence[dict[str, Any]]) -> None:
        self._selector = selector
        self._port = port
        self._connection: socket.socket | None = None
        self._waiting = [_request(port, body) for body in reversed(bodies)]
        self.raw: list[list[bytes]] = []
        self.sent_s: list[float] = []
        self.arrivals: list[list[tuple[float, int]]] = []
        self._tail = b""

    def ask(self) -> bool:
        """Send the next request, and return whether there was one."""
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        if not self._waiting:
            return False
        connection = self._connection = socket.create_connection(("127.0.0.1", self._port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, self)
        self.raw.append([])
        self.arrivals.append([])
        self._tail = b""
        self.sent_s.append(time.perf_counter())
        connection.sendall(self._waiting.pop())
        return True

    def read(self) -> bool:
        """Take what has come, and return whether the answer is there.

        Raises:
            ValueError: it is a refusal.
        """
        assert self._connection is not None
        data = self._connection.recv(_RECEIVED)
        now_s = time.perf_counter()
        if not self.raw[-1] and not _STATUS.startswith(data[: len(_STATUS)]):
            raise ValueError(_refusal(self._connection, data))
        self.raw[-1].append(data)
        seen = self._tail + data
        count = seen.count(_EVENT)
        if count:
            self.arrivals[-1].append((now_s, count))
        self._tail = seen[-_TAIL:]
        # Without a byte, the server has closed the connection.
        return not data or seen.endswith(_END)


def _refusal(connection: socket.socket, data: bytes) -> str:
    """Return the end of what the server says, which it may go on saying after its first bytes."""
    connection.settimeout(_WORDS_S)
    with contextlib.suppress(OSError):
        while more := connection.recv(_RECEIVED):
            data += more
    return data.decode("utf-8", "replace")[-_LONGEST_SHOWN:]


def _request(port: int, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def _read(client: _Client) -> list[dict[str, Any]]:
    """Return what a client's answers say, now that there is time.

    Raises:
        ValueError: the server ended one by an error.
    """
    found = []
    for sent_s, pieces, arrivals in zip(client.sent_s, client.raw, client.arrivals, strict=True):
        head, _, body = b"".join(pieces).partition(b"\r\n\r\n")
        events = [
            json.loads(line.removeprefix(b"data: ")) for line in _whole(body).split(b"\n") if line.startswith(b"data: ")
        ]
        if not events or not events[-1].get("stop"):
            raise ValueError((body or head).decode("utf-8", "replace")[-_LONGEST_SHOWN:])
        # The last event brings no token.
        at_s, count = arrivals.pop()
        if count > 1:
            arrivals.append((at_s, count - 1))
        text = "".join(event["content"] for event in events)
        found.append({"sent_s": sent_s, "arrivals": arrivals, "text": text, "last": events[-1]})
    return found


def _whole(body: bytes) -> bytes:
    """Return a body without the borders of its chunks."""
    found = []
    while body:
        size, _, body = body.partition(b"\r\n")
        try:
            length = int(size, 16)
        except ValueError:
            # It was not sent in chunks.
            return body
        found.append(body[:length])
        body = body[length + 2 :]
    return b"".join(found)


def _main() -> None:
    plan = json.load(sys.stdin)
    gc.disable()
    try:
        # What this process did to start is over for the server, too, once it has answered.
        _ask_all(plan["port"], [[plan["run_in"]]])
        clients, wall_s, cpu_s = _ask_all(plan["port"], plan["clients"])
        found: dict[str, Any] = {"replies": [_read(client) for client in clients], "wall_s": wall_s, "cpu_s": cpu_s}
    except (OSError, ValueError) as error:
        found = {"error": f"the server did not answer a request: {error}"}
    json.dump(found, sys.stdout)


def _ask_all(port: int, plans: Sequence[Sequence[dict[str, Any]]]) -> tuple[list[_Client], float, float]:
    """Have all requests of all clients answered; return the clients, the seconds, and those of them on a core."""
    with selectors.DefaultSelector() as selector:
        clients = [_Client(selector, port, bodies) for bodies in plans]
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        left = sum(client.ask() for client in clients)
        while left:
            ready = selector.select(_SILENT_S)
            if not ready:
                raise ValueError(f"it said nothing for {_SILENT_S:.0f} s")
            for key, _ in ready:
                client: _Client = key.data
                left -= client.read() and not client.ask()
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return clients, wall_s, cpu_s


if __name__ == "__main__":
    _main()
