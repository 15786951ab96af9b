"""Which sockets a server listens on, and how it ends."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.server_soak.wire import Connection, request_bytes

from paceline.core.errors import InputError
from paceline.server_options import ServerOptions
from paceline.serving import deployment
from paceline.serving.connections import CarefulProtocol
from paceline.serving.deployment import listening, notify_service_manager, server_url
from tests.serving.live import live, repeated

PROMPT = [65, 66, 67]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names of this machine, which a test fills: each with its addresses."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def looked_up(host: str, port: int, **hints: Any) -> list[Any]:
        return [found for address in known.get(host, [host]) for found in real(address, port, **hints)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    return known


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the loopback has one address")
def test_all_addresses_of_a_name_are_taken_at_one_port(names: dict[str, list[str]]) -> None:
    names["box"] = ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
    with listening(["box"], 0) as bound:
        assert [each.getsockname()[0] for each in bound] == ["127.0.0.1", "127.0.0.2"]
        assert len({each.getsockname()[1] for each in bound}) == 1


def test_addresses_of_a_name_that_this_machine_does_not_have_now_are_left_out(names: dict[str, list[str]]) -> None:
    names["box"] = ["192.0.2.1", "127.0.0.1"]
    with listening(["box"], 0) as bound:
        assert [each.getsockname()[0] for each in bound] == ["127.0.0.1"]


def test_a_name_of_another_machine_is_refused(names: dict[str, list[str]]) -> None:
    names["other"] = ["192.0.2.1"]
    with pytest.raises(InputError, match=r"^cannot listen on other port 0: "), listening(["other"], 0):
        pass


def test_a_unix_socket_is_named_and_put_away(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    for _ in range(2):
        with listening([str(path)], 0) as (bound,):
            assert server_url(bound, has_tls=False, prefix="/llm") == f"unix:{path}/llm"
        assert not path.exists()
        # One that nobody answers may be taken.
        with socket.socket(socket.AF_UNIX) as left_over:
            left_over.bind(str(path))


def test_connections_are_known_to_be_tcp_so_that_asyncio_sends_small_writes_at_once() -> None:
    with listening(["127.0.0.1"], 0) as (bound,):
        assert bound.proto == socket.IPPROTO_TCP


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("host", ["localhost", "elsewhere.example"])
async def test_nonsense_in_a_body_is_refused_once(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """A request that is refused before its body is read has an answer of its own beside that to the nonsense."""
    head = f"POST /completion HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()

    async with live() as server:
        for pieces in ([head + b"zz\r\n\r\n"], [head, b"zz\r\n\r\n"], [head, b"1\r\nx\r\n", b"zz\r\n\r\n"]):
            async with await Connection.open(server.port) as connection:
                for piece in pieces:
                    await connection.send(piece)
                    await server.get("/health")
                said = await connection.reader.read(-1)
                assert said.startswith(b"HTTP/1.1 4")
                assert said.count(b"HTTP/1.1") == 1
    assert not errors(caplog)


async def test_an_error_that_ends_a_stream_is_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    broken = repeated("a")
    said: list[int] = []

    def logits(token_ids: Any) -> Any:
        said.append(len(token_ids))
        return broken(token_ids) * (float("nan") if len(token_ids) > len(PROMPT) + 3 else 1.0)

    async with live(logits=logits) as server:
        answer = await server.post(
            "/v1/completions", {"prompt": PROMPT, "n_predict": 400, "ignore_eos": True, "stream": True}
        )
        assert answer.status == 200
        events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line.startswith(b"data: {")]
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["a"] * 4
        assert events[-1]["error"]["type"] == "server_error"
        assert (await server.post("/completion", {"prompt": "ab", "n_predict": 1})).status == 200
        assert server.active() == 0
    assert errors(caplog) == ["a request ended by an error"]


# The end


ENDLESS: dict[str, Any] = {"logits": repeated("a"), "context_length": 1 << 20, "max_rows": 512}


async def test_a_stream_that_runs_when_the_signal_comes_is_finished(caplog: pytest.LogCaptureFixture) -> None:
    async with live(ServerOptions(grace_s=600.0)) as server:
        server.gate.close()
        body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True}
        stream = await server.send("/v1/completions", body)
        for _ in range(2):  # a stream begins with its first token, which leaves once its round is over
            await server.gate.arrived()
            server.gate.let_through()
        head = await stream.head()
        server.terminate()
        await server.until(lambda: server.server.host.state == "closing")
        server.gate.open()
        said = b"".join([chunk async for chunk in stream.chunks(head)])
        *_, last, done = (event.removeprefix(b"data: ") for event in said.strip().split(b"\n\n"))
        answer = json.loads(last)
        assert (answer["choices"][0]["finish_reason"], answer["timings"]["predicted_n"]) == ("length", 40)
        assert done == b"[DONE]"
        assert await server.ended == 1
        stream.close()
    assert not errors(caplog)


@contextlib.contextmanager
def heeded(by: signal.Signals) -> Iterator[None]:
    """Have a signal heeded, also where tests that run in the background or under nohup ignore it."""
    before = signal.signal(by, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(by, before)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_answers_that_the_end_of_the_server_cut_say_so(
    by: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    with heeded(by):
        async with live(ServerOptions(grace_s=0.0), **ENDLESS) as server:
            body = {"prompt": PROMPT, "n_predict": -1, "ignore_eos": True}
            whole = await server.send("/completion", body)
            stream = await server.send("/v1/completions", {**body, "stream": True})
            head = await stream.head()
            await server.until(lambda: server.server.load().running == 2)
            server.terminate(by)
            answer = await whole.answer()
            assert answer.status == 503
            assert answer.head.headers["retry-after"]
            said = b"".join([chunk async for chunk in stream.chunks(head)])
            assert b'"unavailable_error"' in said
            assert b"[DONE]" not in said
            assert await server.ended == 1
            for connection in (whole, stream):
                connection.close()
    assert not errors(caplog)


async def test_halves_of_requests_do_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async with live(ServerOptions(grace_s=600.0)) as server:
        half, begun, idle = [await Connection.open(server.port) for _ in range(3)]
        await half.send(request_bytes("POST", "/completion", b'{"prompt":', length=1000))
        await begun.send(b"POST /completion HT")
        await idle.send(request_bytes("GET", "/health"))
        assert (await idle.answer()).status == 200
        server.terminate()
        assert await server.ended == 1
        for connection in (half, begun, idle):
            assert await connection.reader.read(-1) == b""
            connection.close()
    assert not errors(caplog)


async def test_clients_that_read_nothing_do_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[bool] = []
    pause = CarefulProtocol.pause_writing

    def noted(protocol: CarefulProtocol) -> None:
        full.append(True)
        pause(protocol)

    monkeypatch.setattr(CarefulProtocol, "pause_writing", noted)
    monkeypatch.setattr(deployment, "_FLUSH_S", 0.01)

    async with live(ServerOptions(grace_s=0.0, max_answer_logprobs=10**9), **ENDLESS) as server:
        body = {"prompt": PROMPT, "n_predict": -1, "ignore_eos": True, "stream": True, "n_probs": 200}
        stuck = await server.send("/completion", body, receive_bytes=1024)
        await server.until(lambda: full)
        server.terminate()
        assert await server.ended == 1
        stuck.close()
    assert not errors(caplog)


async def test_a_second_signal_ends_the_server_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with live(ServerOptions(grace_s=600.0), **ENDLESS) as server:
        stream = await server.send("/completion", {"prompt": PROMPT, "n_predict": -1, "stream": True})
        await stream.head()
        server.terminate()
        await server.until(lambda: server.server.host.state == "closing")
        assert not server.ended.done()
        server.terminate()
        assert await server.ended == 2
        stream.close()
    assert not errors(caplog)


def test_there_may_be_as_many_files_as_connections() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 400 or soft == resource.RLIM_INFINITY:
        pytest.skip("the limit is set by others")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (350, hard))
        assert deployment._allow_files(300) == 350
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 350
        assert deployment._allow_files(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
        if hard != resource.RLIM_INFINITY:
            assert deployment._allow_files(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is there on Linux alone")
@pytest.mark.parametrize("is_abstract", [True, False])
def test_systemd_is_told_where_it_asks(is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_service_manager("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + tmp_path.name + "-notify" if is_abstract else str(tmp_path / "notify"))
        name = manager.getsockname()
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name[1:].decode()}" if is_abstract else name)
        notify_service_manager("READY=1")
        assert manager.recv(100) == b"READY=1"
    notify_service_manager("STOPPING=1")  # nobody is there any more
