"""Clients that go away: what was done for them ends within two rounds, and nothing of it is kept."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest
from benchmarks.server_soak.wire import Connection, ask, post_bytes, request_bytes

from paceline.serving.event_stream import EventStream
from tests.serving.hosted import Hosted
from tests.serving.live import Live, live
from tests.timing import WAIT_S

LONG: Final[dict[str, Any]] = {"max_tokens": 400, "ignore_eos": True}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/completion": {"prompt": "ABC", **LONG},
    "/v1/completions": {"prompt": "ABC", **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ABC"}], **LONG},
}
PATH: Final = "/completion"
BODY: Final = BODIES[PATH]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_request_is_off_the_engine_within_two_rounds_of_its_client(
    path: str, stream: bool, waits: bool
) -> None:
    """Whether it runs or waits for its start, and whether anything of its answer was sent."""

    async with live(max_sequences=1 if waits else 2) as server:
        other = await server.send(PATH, {**BODY, "stream": True})
        await other.head()
        server.gate.close()
        await server.gate.arrived()
        leaving = await server.send(path, {**BODIES[path], "stream": stream})
        await server.until(lambda: len(server.server.board.answers) == 2)
        if not waits:
            # It starts in the round after the one that is held.
            server.gate.let_through()
            await server.gate.arrived()
        assert server.server.load().running == (1 if waits else 2)
        leaving.close()
        await server.until(lambda: server.server._endings)
        before = server.gate.rounds
        while len(server.server.board.answers) == 2:
            server.gate.let_through()
            await server.gate.arrived()
            await asyncio.sleep(0)
        assert server.gate.rounds - before <= 2
        server.gate.open()
        assert server.active() == 1
        other.close()
        await server.until(lambda: not server.server.board.answers)
        assert server.active() == 0
        assert (await server.post(path, {**BODIES[path], "max_tokens": 5})).status == 200


async def is_gone(server: Live) -> None:
    """Wait until the server knows that the one client left, and has nothing left of its answer soon."""
    await server.until(lambda: server.server._endings)
    server.gate.open()
    await server.until(lambda: not server.server.board.answers)
    # One was held, and one may have been on its way.
    assert server.gate.rounds <= 2


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_whose_clients_left_are_counted(stream: bool) -> None:
    async with live() as server:
        server.gate.close()
        leaving = await server.send(PATH, {**BODY, "stream": stream, "n": 2})
        await server.gate.arrived()
        leaving.reset()
        await is_gone(server)
        metrics = (await server.get("/metrics")).body.decode()
        assert 'paceline:requests_total{finish_reason="cancelled"} 2.0' in metrics


async def test_a_client_that_leaves_after_it_asked_for_more_is_noticed() -> None:
    async with live() as server:
        server.gate.close()
        connection = await server.send(PATH, BODY)
        await server.gate.arrived()
        # Twice, each once the server has taken the bytes before.
        for _ in range(2):
            await connection.send(post_bytes(PATH, BODY))
            await ask(server.port, request_bytes("GET", "/health"))
        connection.close()
        await is_gone(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sent_no_more_and_then_leaves_is_noticed(stream: bool) -> None:
    async with live() as server:
        server.gate.close()
        connection = await server.send(PATH, {**BODY, "stream": stream})
        await server.gate.arrived()
        connection.writer.write_eof()
        if not stream:
            # Once the server knows, and waits to see more of the client.
            assert await connection.reader.readexactly(1) == b"H"
        connection.close()
        await is_gone(server)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_sends_no_more_but_reads_gets_its_whole_answer(stream: bool, version: str) -> None:
    """As ``nc -N`` and some clients of HTTP/1.0 do. A little of the answer is sent ahead."""
    request = post_bytes(PATH, {**BODY, "max_tokens": 30, "stream": stream, "seed": 1}, headers={"Connection": "close"})
    request = request.replace(b"HTTP/1.1", f"HTTP/{version}".encode())

    async with live() as server:
        server.gate.close()
        async with await Connection.open(server.port) as connection:
            await connection.send(request)
            connection.writer.write_eof()
            ahead = b"" if stream else await connection.reader.readexactly(1)
            server.gate.open()
            answer = ahead + await connection.reader.read(-1)
        async with await Connection.open(server.port) as connection:
            await connection.send(request)
            whole = await connection.reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        # Beside times and names nothing differs; a chunk's length may have zeros before it.
        texts = [re.findall(rb'"content": ?"((?:[^"\\]|\\.)*)"', each) for each in (answer, whole)]
        assert texts[0] == texts[1] != []
        ends = b"\r\n0\r\n\r\n" in re.sub(rb"\r\n0+", rb"\r\n0", answer)
        assert ends == (stream and version == "1.1")


async def test_requests_that_came_before_a_client_sent_no_more_are_answered_in_their_order() -> None:
    async with live() as server, await Connection.open(server.port) as connection:
        requests = [post_bytes(PATH, {**BODY, "max_tokens": number}) for number in (3, 1, 2)]
        await connection.send(b"".join([*requests, b"POST /completion HTTP/1.1\r\nHost"]))
        connection.writer.write_eof()
        answers = [(await connection.answer()).json()["tokens_predicted"] for _ in requests]
        assert (answers, await connection.reader.read(-1)) == ([3, 1, 2], b"")
        # Half a request is nobody's who sends no more.
        async with await Connection.open(server.port) as half:
            await half.send(request_bytes("POST", PATH, b'{"prompt"', length=100))
            half.writer.write_eof()
            assert await half.reader.read(-1) == b""


def test_one_that_goes_away_takes_no_other_with_it(server: Hosted) -> None:
    body = {"prompt": "abc", "n_predict": 400, "seed": 3, "ignore_eos": True}
    expected = server.answer(PATH, body)["content"]
    with ThreadPoolExecutor(4) as threads, httpx.Client(timeout=WAIT_S) as client:
        others = [threads.submit(server.answer, PATH, body) for _ in range(4)]
        for _ in range(8):
            endless = {**body, "n_predict": -1, "stream": True}
            with client.stream("POST", server.url + PATH, json=endless) as response:
                assert next(response.iter_lines()).startswith("data: {")
        assert [other.result(WAIT_S)["content"] for other in others] == [expected] * 4


async def test_a_client_that_leaves_while_its_prompt_is_read_asks_the_engine_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async with live() as server:
        vocabulary = server.model.target.vocabulary
        tokenize = vocabulary.tokenize

        def slow(text: str, **options: Any) -> list[int]:
            begun.set()
            assert go_on.wait(WAIT_S)
            return tokenize(text, **options)

        monkeypatch.setattr(vocabulary, "tokenize", slow)
        leaving = await server.send(PATH, BODY)
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        leaving.close()
        await server.until(lambda: b'status="499"' in server.server.metrics.render()[0])  # type: ignore[union-attr]
        go_on.set()
        # Notes of the engine's thread are read in their order, so nothing comes after this one.
        assert server.active() == 0
        assert server.gate.rounds == 0


async def test_a_stream_that_never_began_is_over_all_the_same() -> None:
    over: list[bool] = []

    async def content() -> Any:
        yield b"never asked for"

    async def send(message: Any) -> None:
        # Of a connection that is full.
        await asyncio.Event().wait()

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    stream = EventStream(content(), over=lambda: over.append(True), ping_s=0, ping=b": \n\n")
    await stream({"type": "http", "method": "POST"}, receive, send)
    assert over == [True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
async def test_nothing_holds_an_answer_that_is_over(stream: bool, path: str) -> None:
    async with live() as server:
        server.gate.close()
        connection = await server.send(path, {**BODY, "max_tokens": 5, "n_probs": 2, "stream": stream})
        await server.gate.arrived()
        (answer,) = server.server.board.answers
        held = [weakref.ref(each) for each in (answer, answer.choices[0], answer.choices[0].stream)]
        del answer
        server.gate.open()
        assert (await connection.answer()).status == 200
        connection.close()
        await server.until(lambda: not server.server.board.answers)
        await server.get("/health")
        gc.collect()
        assert [each() for each in held] == [None, None, None]
        (slot, *_) = (await server.get("/slots")).json()
        assert (slot["is_processing"], slot["n_prompt_tokens"]) == (False, len("ABC") + 5)
