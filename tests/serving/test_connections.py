"""Connections from the moment they are accepted: how many there may be, and which of them yields to another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from paceline.serving import connections
from paceline.serving.security import SecuritySettings, TlsFiles
from tests.serving.asking import Echo, Socket, answer, serving
from tests.serving.certificates import CERTIFICATE, KEY
from tests.serving.processes import served
from tests.timing import WAIT_S, LoopTime

GET = ("GET / HTTP/1.1", "host: localhost", "")


@pytest.fixture(autouse=True)
def one_spare_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SPARE_PLACES", 1)


def tls(folder: Path, **limits: Any) -> SecuritySettings:
    (folder / "key.pem").write_text(KEY)
    (folder / "cert.pem").write_text(CERTIFICATE)
    return SecuritySettings(tls=TlsFiles(folder / "key.pem", folder / "cert.pem"), **limits)


def status(client: Socket) -> str:
    client.send(*GET)
    line = client.line()
    client.skip_body()
    return line.partition(" ")[2]


def is_over(client: Socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        assert client.rest() == ""
    return True


@contextlib.contextmanager
def silent(port: int, number: int, source: str = "127.0.0.1") -> Iterator[list[Socket]]:
    """Yield connections that were accepted in their order, and of which nothing comes."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Socket(port, source)) for _ in range(number)]


def test_the_longest_silent_connection_yields_to_a_new_one() -> None:
    with serving(Echo(), SecuritySettings(max_connections=3)) as port, silent(port, 4) as held, Socket(port) as fifth:
        assert status(fifth) == "200 OK"
        assert is_over(held[0])
        for client in held[1:]:
            assert status(client) == "200 OK"


def test_silent_connections_keep_nobody_from_a_handshake(tmp_path: Path) -> None:
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    with (
        serving(Echo(), tls(tmp_path, max_connections=3)) as port,
        httpx.Client(verify=trusting, base_url=f"https://localhost:{port}", timeout=WAIT_S) as client,
        silent(port, 12) as held,
    ):
        assert client.get("/").status_code == 200
        for each in held[:9]:
            assert is_over(each)
        # Its own connection is not the oldest silent one.
        assert client.get("/").status_code == 200


def test_there_are_only_so_many_handshakes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_MAX_HANDSHAKES", 2)
    with serving(Echo(), tls(tmp_path)) as port, silent(port, 5) as held:
        for client in held[:3]:
            assert is_over(client)
        trusting = ssl.create_default_context(cadata=CERTIFICATE)
        assert httpx.get(f"https://localhost:{port}", verify=trusting, timeout=WAIT_S).status_code == 200


def test_a_handshake_has_the_time_that_headers_have(tmp_path: Path) -> None:
    with serving(Echo(), tls(tmp_path, header_timeout_s=0.1)) as port, Socket(port) as client:
        assert is_over(client)


def test_who_was_answered_before_yields_after_who_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_time = LoopTime(monkeypatch)
    with serving(Echo(), SecuritySettings(max_connections=3)) as port, contextlib.ExitStack() as stack:

        def another() -> Socket:
            return stack.enter_context(Socket(port))

        first, second = another(), another()
        for client in (first, second):
            assert status(client) == "200 OK"
        held = [another(), another()]
        for client in (second, first):
            assert status(client) == "200 OK"
        # By now the others are accepted; from here on they have been silent for a while.
        loop_time.skip(2.0)
        # With no silent one left, the one that was of use longest ago.
        for leaving in (*held, second):
            assert status(another()) == "200 OK"
            assert is_over(leaving)
        assert status(first) == "200 OK"


class Held:
    """Answers once it may."""

    def __init__(self) -> None:
        self.taken = threading.Semaphore(0)
        self.may_answer = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.taken.release()
        assert await asyncio.to_thread(self.may_answer.wait, WAIT_S)
        await answer(send, b"late")


def test_a_request_under_way_never_yields_and_more_than_the_most_are_refused() -> None:
    routes = Held()
    with serving(routes, SecuritySettings(max_connections=2)) as port, Socket(port) as first, Socket(port) as second:
        for client in (first, second):
            client.send(*GET)
            assert routes.taken.acquire(timeout=WAIT_S)
        with Socket(port) as third:
            third.send(*GET)
            assert third.line() == "HTTP/1.1 503 Service Unavailable"
            head, _, body = third.until(b"}}").partition("\r\n\r\n")
            assert "retry-after: 1" in head
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == (503, "unavailable_error")
            assert "2 requests may be under way, and more" in error["message"]
        with silent(port, 3) as held:
            assert is_over(held[0])
        routes.may_answer.set()
        for client in (first, second):
            assert client.line() == "HTTP/1.1 200 OK"
            assert client.until(b"late").endswith("late")


def test_half_a_request_yields_where_all_others_are_answered() -> None:
    routes = Held()
    with serving(routes, SecuritySettings(max_connections=3)) as port, contextlib.ExitStack() as stack:
        half, *asking = [stack.enter_context(Socket(port)) for _ in range(4)]
        half.send("POST / HTTP/1.1", "host: localhost", "content-length: 10", "", body=b"half")
        for client in asking:
            client.send(*GET)
        for _ in asking:
            assert routes.taken.acquire(timeout=WAIT_S)
        with Socket(port):
            assert is_over(half)
        routes.may_answer.set()


def test_the_address_with_the_most_connections_gives_one_up() -> None:
    with serving(Echo(), SecuritySettings(max_connections=3)) as port:
        try:
            elsewhere = Socket(port, "127.0.0.2")
        except OSError:
            pytest.skip("this system has one loopback address")
        with elsewhere, silent(port, 4) as held:
            assert is_over(held[0])
            with elsewhere:
                assert status(elsewhere) == "200 OK"


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        (("192.0.2.1", 5), "192.0.2.1"),
        (("2001:db8::1:2:3", 5, 0, 0), socket.inet_pton(socket.AF_INET6, "2001:db8::")[:8]),
        (("fe80::1%eth0", 5, 0, 2), socket.inet_pton(socket.AF_INET6, "fe80::")[:8]),
        ("", ""),
    ],
)
def test_whose_a_connection_is(address: object, owner: object) -> None:
    assert connections._owner_key(address) == owner


def test_where_no_file_is_left_the_silent_yield_and_the_log_stays_short() -> None:
    resource = pytest.importorskip("resource")
    with (
        served(before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50))) as running,
        contextlib.ExitStack() as stack,
    ):
        port = int(running.url.rpartition(":")[2])
        for _ in range(80):
            stack.enter_context(Socket(port))
        body = {"prompt": "x", "n_predict": 3}
        assert httpx.post(f"{running.url}/completion", json=body, timeout=WAIT_S).status_code == 200
        running.process.terminate()
        assert running.status() == 0
    told = [line for line in running.said if "cannot accept a connection: Too many open files" in line]
    assert 1 <= len(told) <= 20
    assert len(running.said) < 40


async def test_a_connection_that_comes_when_the_server_ends_is_no_traceback() -> None:
    """The event loop has been told of it by then, and asyncio's own wait for one is broken off too late."""
    found: list[Any] = []

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: found.append(context))
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        acceptor = connections.Acceptor([listener], lambda: pytest.fail("one was accepted"), None, SecuritySettings())
        # Until it waits.
        await asyncio.sleep(0)
        client.connect(listener.getsockname())

        def close() -> None:
            acceptor.close()
            listener.close()

        loop.call_soon(close)
        await acceptor.wait_closed()
        await asyncio.sleep(0)
    assert found == []
