"""Clients that go away: what was done for them ends within two rounds, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import pytest
from starlette.types import Message

from paceline.serving.app import create_app
from paceline.serving.security import SecuritySettings
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.scripted import Turnstile, writing_model
from tests.timing import WAIT_S

ENDLESS = {"prompt": "abc", "ignore_eos": True, "n_predict": -1, "seed": 1}
MESSAGES = [{"role": "user", "content": "abc"}]
PATHS = ["/completion", "/v1/completions", "/v1/chat/completions"]


@contextmanager
def stepped() -> Iterator[tuple[Hosted, Turnstile]]:
    """Yield a server of one answer at a time, whose rounds the test lets through."""
    gate = Turnstile(writing_model())
    with hosted(lambda: scripted(target=gate, drafts=False, max_sequences=1)) as running:
        try:
            yield running, gate
        finally:
            gate.open()


def body_of(path: str, **fields: object) -> dict[str, object]:
    return {**ENDLESS, **fields, **({"messages": MESSAGES} if "chat" in path else {})}


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_that_is_closed_frees_its_sequence_within_two_rounds(path: str) -> None:
    with stepped() as (running, gate), httpx.Client(timeout=WAIT_S) as client:
        with client.stream("POST", running.url + path, json=body_of(path, stream=True)) as response:
            lines = response.iter_lines()
            gate.let(20)
            assert next(lines).startswith("data: {")
            assert gate.waiting.wait(WAIT_S)
            running.over.clear()
        assert running.over.wait(WAIT_S)
        gate.let(2)
        running.wait_for_nothing()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streaming", [False, True])
def test_an_answer_that_nobody_waits_for_is_not_written(path: str, streaming: bool) -> None:
    """Of two requests, the one that runs and the one that waits for it."""
    with stepped() as (running, gate):
        sockets = []
        for _ in range(2):
            running.taken.clear()
            sockets.append(sent(running, path, body_of(path, stream=streaming)))
            assert running.taken.wait(WAIT_S)
        assert gate.waiting.wait(WAIT_S)
        running.over.clear()
        sockets[1].close()
        # A request is taken between two rounds.
        gate.let(1)
        assert running.over.wait(WAIT_S)
        running.over.clear()
        sockets[0].close()
        assert running.over.wait(WAIT_S)
        gate.let(2)
        running.wait_for_nothing()
        gate.open()
        assert len(running.answer(path, body_of(path, n_predict=5))) > 0


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_sends_no_more_but_reads_gets_its_whole_answer(path: str, streaming: bool, version: str) -> None:
    """As ``nc -N`` and some clients of HTTP/1.0 do. A little of the answer is sent ahead."""
    body = body_of(path, stream=streaming, n_predict=30, max_tokens=30)
    with stepped() as (running, gate):
        client = sent(running, path, body, version)
        client.send_no_more()
        ahead = b"" if streaming else client.read(1)
        gate.open()
        answer = ahead + client.rest()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        whole = sent(running, path, body, version, "Connection: close").rest()
    # Beside times and names nothing differs; a chunk's length may have zeros before it.
    assert texts_of(answer) == texts_of(whole)
    assert texts_of(answer)
    assert (b"\r\n0\r\n\r\n" in re.sub(rb"\r\n0+", rb"\r\n0", answer)) == (streaming and version == "1.1")


def texts_of(answer: bytes) -> list[bytes]:
    return re.findall(rb'"(?:content|text)": ?"((?:[^"\\]|\\.)*)"', answer)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_sent_no_more_and_then_leaves_is_noticed(path: str, streaming: bool) -> None:
    with stepped() as (running, gate):
        client = sent(running, path, body_of(path, stream=streaming))
        gate.let(5)
        assert gate.waiting.wait(WAIT_S)
        client.send_no_more()
        if not streaming:
            # Once the server knows, and waits to see more of the client.
            assert client.read(1) == b"H"
        running.over.clear()
        client.close()
        assert running.over.wait(WAIT_S)
        gate.let(2)
        running.wait_for_nothing()


def test_requests_that_came_before_a_client_sent_no_more_are_answered_each(server: Hosted) -> None:
    client = sent(server, "/completion", body_of("/completion", n_predict=3))
    for number in (1, 2):
        client.ask("/completion", body_of("/completion", n_predict=number))
    client.send_some(b"POST /completion HTTP/1.1\r\nHost")
    client.send_no_more()
    answers = client.rest()
    assert re.findall(rb'"tokens_predicted": ?(\d+)', answers) == [b"3", b"1", b"2"]
    assert answers.count(b"HTTP/1.1 200 OK") == 3


def test_half_a_request_is_nobody_s_who_sends_no_more(server: Hosted) -> None:
    half = Connection(server.port, "/completion", b'{"prompt"', length=100)
    half.send_no_more()
    assert half.rest() == b""


def test_one_that_goes_away_takes_no_other_with_it(server: Hosted) -> None:
    body = {"prompt": "abc", "n_predict": 400, "seed": 3, "ignore_eos": True}
    expected = server.answer("/completion", body)["content"]
    contents: list[str] = []

    def ask() -> None:
        contents.append(server.answer("/completion", body)["content"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    with httpx.Client(timeout=WAIT_S) as client:
        for _ in range(8):
            endless = body_of("/completion", stream=True)
            with client.stream("POST", f"{server.url}/completion", json=endless) as response:
                assert next(response.iter_lines()).startswith("data: {")
    for thread in threads:
        thread.join(WAIT_S)
    assert contents == [expected] * 4


def test_a_stream_whose_client_went_before_it_began_is_kept_by_nobody(server: Hosted) -> None:
    """The connection breaks while the request is being taken, so that nothing of the answer is ever sent."""
    app = create_app(server.server, SecuritySettings())
    body = json.dumps(body_of("/completion", stream=True)).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/completion",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
    }

    async def ask() -> None:
        said: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return said.pop(0) if said else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise OSError("the client is gone")

        with pytest.raises(OSError, match="gone"):
            await app(scope, receive, send)
        while server.server.board.answers:
            await asyncio.sleep(0)

    asyncio.run(ask())
    server.wait_for_nothing()


def sent(running: Hosted, path: str, body: dict[str, object], version: str = "1.1", *headers: str) -> Connection:
    return Connection(running.port, path, json.dumps(body).encode(), version, headers)


class Connection:
    """A connection on which a request was sent."""

    def __init__(
        self,
        port: int,
        path: str,
        body: bytes,
        version: str = "1.1",
        headers: Sequence[str] = (),
        *,
        length: int | None = None,
    ) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        size = len(body) if length is None else length
        lines = [f"POST {path} HTTP/{version}", "Host: 127.0.0.1", f"Content-Length: {size}", *headers]
        self.send_some("\r\n".join([*lines, "", ""]).encode() + body)

    def ask(self, path: str, body: dict[str, object]) -> None:
        """Send a further request."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        self.send_some(head.encode() + data)

    def send_some(self, data: bytes) -> None:
        self._socket.sendall(data)

    def send_no_more(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def read(self, size: int) -> bytes:
        return self._socket.recv(size, socket.MSG_WAITALL)

    def rest(self) -> bytes:
        """Return what comes until the server closes the connection, and close it."""
        with self._socket:
            return b"".join(iter(lambda: self._socket.recv(1 << 16), b""))

    def close(self) -> None:
        self._socket.close()
