"""What bounds a request: time, size, room, other requests; and errors that are the server's own."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

import paceline
from paceline.core.arrays import Float64Array
from paceline.core.errors import InputError
from paceline.server_options import ServerOptions
from paceline.serving.middleware import with_security
from paceline.serving.security import ApiKeys, SecuritySettings
from paceline.serving.slots import SlotBoard
from tests.serving.asking import Echo, Sent, Socket, answer, ask, body_part, call, http_scope, run, serving
from tests.serving.hosted import NAME, Hosted, hosted, json_of, scripted
from tests.serving.live import live
from tests.serving.scripted import Turnstile, writing_model
from tests.timing import WAIT_S, LoopTime

ENDLESS: dict[str, Any] = {"prompt": "abc", "n_predict": -1, "ignore_eos": True, "seed": 1}
PATHS = ["/completion", "/v1/completions", "/v1/chat/completions"]


def long_scripted(**options: Any) -> Any:
    return scripted(context_length=10**6, **options)


# Time


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_takes_too_long_ends_where_it_is(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**ENDLESS, "messages": [{"role": "user", "content": "abc"}]}
    model, loop_time = writing_model(), LoopTime(monkeypatch)

    def halting(tokens: Sequence[int]) -> Float64Array:
        if len(tokens) == 300:
            loop_time.skip(1000.0)
        return model(tokens)

    with hosted(lambda: long_scripted(target=halting), ServerOptions(request_s=900.0)) as running:
        answer = running.answer(path, body)
        if path == "/completion":
            assert (answer["stop_type"], answer["truncated"]) == ("limit", False)
        else:
            assert answer["choices"][0]["finish_reason"] == "length"
        assert 1 < answer["timings"]["predicted_n"] < 10**6
        last = running.chunks(path, body)[-1]
        assert last.get("stop_type") == "limit" or last["choices"][0]["finish_reason"] == "length"
        assert running.sequences == 0


def test_an_answer_may_end_at_the_next_line(server: Hosted) -> None:
    answer = server.answer("/completion", {**ENDLESS, "n_predict": 3000, "t_max_predict_ms": 1})
    assert answer["tokens_predicted"] < 3000
    assert "\n" in answer["content"]
    assert answer["stop_type"] == "limit"


# Size and number


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_is_too_long_tells_both_lengths(server: Hosted, path: str) -> None:
    text = "a" * 5000
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "max_tokens": 5}
    for stream in (False, True):
        error = server.refusal(path, {**body, "stream": stream})
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] >= 5000
        assert error["n_ctx"] == 4096


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/completion", {"n_probs": 9}, "n_probs"),
        ("/v1/completions", {"logprobs": 9}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 9}, "top_logprobs"),
    ],
)
def test_log_probabilities_are_counted_before_an_answer_is_taken(path: str, fields: dict[str, Any], name: str) -> None:
    options = ServerOptions(max_answer_logprobs=1000, api_key=("a", "b"))
    with hosted(lambda: scripted(context_length=200), options) as running:

        def post(key: str, **more: Any) -> Any:
            body = {
                "prompt": "a" * 90,
                "messages": [{"role": "user", "content": "a" * 10}],
                "ignore_eos": True,
                **fields,
            }
            running.over.clear()
            response = running.post(path, {**body, **more}, headers={"Authorization": f"Bearer {key}"})
            # Its room is free once all of it is sent.
            assert response.status_code != 200 or running.over.wait(WAIT_S)
            return response

        assert post("a", max_tokens=50, n=2).status_code == 200
        for stream in (False, True):
            error = post("a", max_tokens=51, n=2, stream=stream).json()["error"]
            assert error["param"] == name
            assert error["message"] == (
                "10 log-probabilities a token for 2 answers of up to 51 tokens come to 1,020, and at most 1,000 are "
                "accepted: request fewer, set a smaller max_tokens, or start the server with a larger "
                "--max-answer-logprobs"
            )
        # Without a number of tokens, as many as there is room for.
        assert post("a", n=2).json()["error"]["param"] == name
        room = running.server._room
        assert room.take("taken", 2000)
        assert post("a", max_tokens=100).status_code == 200
        assert room.take("taken too", 1000)
        assert post("b", max_tokens=50).status_code == 200
        room.give_back("taken", 2000)
        assert post("b", max_tokens=100).status_code == 200
        room.give_back("taken too", 1000)
        assert room.take("others", 2000)


LISTING = {"prompt": "abc", "max_tokens": 100, "logprobs": 9}


async def test_requests_wait_for_room_for_log_probabilities() -> None:
    """Most of them end far before they need it."""

    options = ServerOptions(grace_s=0.0, metrics=True, max_answer_logprobs=1000, max_waiting=4)
    async with live(options) as server:
        server.gate.close()
        asking = [await server.send("/v1/completions", LISTING) for _ in range(2)]
        room, board = server.server._room, server.server.board
        await server.until(lambda: room._held.total() == 2000)
        asking += [await server.send("/v1/completions", LISTING) for _ in range(4)]
        await server.until(lambda: room._waiting)
        (waiting,) = room._waiting.values()
        await server.until(lambda: len(waiting) == 4)
        # Others have places.
        plain = await server.send("/v1/completions", {"prompt": "abc", "max_tokens": 1})
        await server.until(lambda: len(list(board.answers)) == 3)
        refused = await server.post("/v1/completions", LISTING)
        assert refused.status == 429
        assert refused.head.headers["retry-after"] == "1"
        told = refused.json()["error"]["message"]
        assert "4 requests of this client are waiting for room" in told
        assert told.endswith("set a smaller max_tokens")
        refused = await server.post("/v1/completions", {"prompt": "abc", "n_predict": 100, "logprobs": 9})
        assert refused.json()["error"]["message"].endswith("set a smaller n_predict")
        # Who leaves waits no more.
        asking.pop(3).close()
        await server.until(lambda: len(waiting) == 3)
        server.gate.open()
        for connection in (plain, *asking):
            assert (await connection.answer()).status == 200
            connection.close()
        await server.until(lambda: not room._held)


def test_all_answers_of_a_request_wait_or_none() -> None:
    with hosted(lambda: scripted(max_sequences=1, max_waiting=2)) as running:
        body = {"prompt": "abc", "max_tokens": 20, "seed": 1}
        assert len(running.answer("/v1/completions", {**body, "n": 3})["choices"]) == 3
        # The first is not over before the fourth comes.
        response = running.post("/v1/completions", {**body, "n": 4, "max_tokens": 3000, "ignore_eos": True})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        running.wait_for_nothing()


def test_more_requests_than_places_are_answered_in_turn() -> None:
    with hosted(lambda: scripted(max_sequences=2)) as running:
        body = {"prompt": "abc", "n_predict": 30, "ignore_eos": True}

        def ask(seed: int) -> Any:
            return running.answer("/completion", {**body, "seed": seed})

        alone = [ask(seed)["content"] for seed in range(12)]
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(ask, range(12)))
        assert [answer["content"] for answer in answers] == alone
        assert {answer["id_slot"] for answer in answers} <= {0, 1}


def test_an_answer_that_ended_before_anybody_looked_had_a_place_too() -> None:
    def choice(*, is_over: bool) -> Any:
        return SimpleNamespace(slot=-1, stream=SimpleNamespace(is_over=is_over))

    board = SlotBoard(cast("Any", SimpleNamespace(max_running=2)))
    running, over, waiting = [choice(is_over=False) for _ in range(2)], choice(is_over=True), choice(is_over=False)
    answer = cast("Any", SimpleNamespace(request=SimpleNamespace(slot=None)))
    for each in (*running, over, waiting):
        board.started(answer, each)
    assert [each.slot for each in (*running, over, waiting)] == [0, 1, 0, -1]
    running[1].stream.is_over = True
    board.started(answer, waiting)
    assert waiting.slot == 1


# What is shared


def test_what_was_read_is_shared_with_nobody_else() -> None:
    prompt = "one secret beginning, " * 15
    with hosted(scripted, ServerOptions(api_key=("a", "b"))) as running:

        def cached(key: str, **fields: Any) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": prompt, "n_predict": 3, **fields}
            count: int = running.answer("/completion", body, headers=headers)["timings"]["cache_n"]
            return count

        assert [cached("a"), cached("b"), cached("a", cache_salt="x")] == [0, 0, 0]
        whole = len(prompt) - 1
        assert [cached("a"), cached("b"), cached("a", cache_salt="x")] == [whole] * 3
        assert cached("a", cache_salt="y") == 0
        assert cached("a", cache_prompt=False) == 0


def test_keys_take_turns() -> None:
    """Of ten answers that wait for one key, in a namespace apart, one at most goes before another key's next."""
    gate = Turnstile(writing_model())
    body = {"prompt": "a", "n_predict": 3, "ignore_eos": True}

    def load() -> Any:
        return scripted(target=gate, drafts=False, max_sequences=1, max_waiting=10, context_length=10**5)

    with hosted(load, ServerOptions(api_key=("many", "one"))) as running, ThreadPoolExecutor(4) as threads:

        def ask(key: str, **fields: Any) -> int:
            return running.post(
                "/completion", {**body, **fields}, headers={"Authorization": f"Bearer {key}"}
            ).status_code

        def admitted(count: int) -> bool:
            choices = [choice for answer in running.server.board.answers for choice in answer.choices]
            return sum(choice.stream.request is not None for choice in choices) == count

        # However many rounds it takes until all others wait.
        first = threads.submit(ask, "many", n_predict=-1)
        gate.let_until(lambda: admitted(1))
        many = threads.submit(ask, "many", n=10, cache_salt="x")
        gate.let_until(lambda: admitted(11))
        more = threads.submit(ask, "many", cache_salt="y")
        gate.let_until(more.done)
        assert more.result() == 429, "the queue of this key is full"
        one = threads.submit(ask, "one")
        gate.let_until(lambda: admitted(12))
        answers = running.server.board.answers
        requests = [choice.stream.request for answer in answers for choice in answer.choices]
        running.server.board.answers[0].choices[0].stop()
        gate.open()
        assert [each.result() for each in (first, many, one)] == [200] * 3
    starts = [request.stats.added_s + (request.stats.queue_s or 0.0) for request in requests if request is not None]
    assert sorted(starts).index(starts[-1]) in (1, 2)


def test_what_is_refused_is_counted_before_a_route_sees_it_too() -> None:
    with hosted(scripted, ServerOptions(api_key=("a",), metrics=True)) as running:
        for _ in range(2):
            assert running.post("/completion", {"prompt": "x"}).status_code == 401
        headers = {"Authorization": "Bearer a"}
        assert running.post("/completion", {"prompt": []}, headers=headers).status_code == 400
        scraped = running.get("/metrics", headers=headers).text
    for status, kind, count in ((401, "authentication_error", 2), (400, "invalid_request_error", 1)):
        assert f'paceline:requests_refused_total{{kind="{kind}",status="{status}"}} {count}.0' in scraped


# The server's own errors


def failing(tokens: Sequence[int]) -> Float64Array:
    if tokens[-1] == ord("!"):
        raise paceline.EngineError("the device at /dev/secret is gone")
    return writing_model()(tokens)


def test_an_error_of_the_engine_tells_nothing_and_ends_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with hosted(lambda: scripted(target=failing, drafts=False)) as running, running.client() as client:
        expected = {
            "code": 500,
            "message": "the server failed; its log says why",
            "type": "server_error",
            "param": None,
        }
        fine = {"prompt": "abc", "n_predict": 200, "ignore_eos": True, "seed": 1}
        text = running.answer("/completion", fine)["content"]
        with ThreadPoolExecutor(1) as threads:
            beside = threads.submit(running.answer, "/completion", fine)
            response = running.post("/completion", {"prompt": "abc!"})
            assert beside.result()["content"] == text
        assert (response.status_code, response.json()) == (500, {"error": expected})
        events = running.post("/v1/completions", {"prompt": "abc!", "stream": True}).text.strip().split("\n\n")
        assert json_of(events[-1].removeprefix("data: ")) == {"error": expected}
        with pytest.raises(openai.InternalServerError, match="its log says why"):
            client.completions.create(model=NAME, prompt="abc!")
        with pytest.raises(openai.APIError, match="its log says why"):
            list(client.completions.create(model=NAME, prompt="abc!", stream=True))
        assert running.sequences == 0
        # A stream is put away once its last event is sent.
        while running.server.board.answers:
            pass


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_that_is_too_long_by_its_bytes_is_refused_unread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    with hosted(scripted) as running:
        vocabulary = running.model.target.vocabulary
        tokenize, reach = vocabulary.tokenize, max(map(len, vocabulary._spellings))  # type: ignore[attr-defined]

        def noted(text: str, **options: bool) -> list[int]:
            read.append(len(text))
            return tokenize(text, **options)

        monkeypatch.setattr(vocabulary, "tokenize", noted)

        def refused(length: int) -> dict[str, Any]:
            text = "!" * length
            return running.refusal(path, {"prompt": text, "messages": [{"role": "user", "content": text}]})

        error = refused(4096 * reach)
        assert error["type"] == "exceed_context_size_error"
        assert error["message"].startswith(
            f"request (at least {error['n_prompt_tokens']} tokens) exceeds the available"
        )
        assert 4096 <= error["n_prompt_tokens"] < 4110
        assert max(read, default=0) < 100
        # What may fit is read, and its tokens are told.
        length = 4090 * reach - 100
        assert refused(length)["n_prompt_tokens"] >= length
        assert max(read) >= length


SMALL = SecuritySettings(max_body_bytes=10)
HINT = "and the server takes at most 10: send less, or start the server with a larger --max-body"


def refused(status: int, message: str, kind: str = "invalid_request_error") -> dict[str, object]:
    return {"error": {"code": status, "message": message, "type": kind, "param": None}}


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


@pytest.mark.parametrize("size", [0, 1, 10])
def test_a_body_within_the_limit_arrives_whole(size: int) -> None:
    routes = Echo()
    assert ask(SMALL, app=routes, content=b"x" * size).status_code == 200
    assert ask(SMALL, app=routes, content=pieces(*[b"x"] * size)).status_code == 200
    assert routes.bodies == [b"x" * size] * 2


def test_a_body_beyond_the_limit_is_refused_by_its_announced_size() -> None:
    routes = Echo()
    reply = ask(SMALL, app=routes, content=b"x" * 11)
    assert reply.status_code == 413
    assert reply.json() == refused(413, f"the body has 11 bytes, {HINT}")
    assert reply.headers["connection"] == "close"
    assert not routes.bodies


@pytest.mark.parametrize("parts", [(b"x" * 11,), (b"x" * 6, b"x" * 6), (b"x" * 12, b"x" * 1000, b"x")])
def test_a_body_of_unknown_size_is_refused_where_it_passes_the_limit(parts: tuple[bytes, ...]) -> None:
    routes = Echo()
    reply = ask(SMALL, app=routes, content=pieces(*parts))
    assert reply.status_code == 413
    assert reply.json()["error"]["message"] in (f"the body has {seen} bytes or more, {HINT}" for seen in (11, 12))
    assert not routes.bodies


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "²"])
def test_a_nonsensical_length_is_not_believed(length: str) -> None:
    """Nor is anything waited for after the end of the body."""
    scope = http_scope(content_length=length)
    for size, status in ((10, 200), (11, 413)):
        sent = call(with_security(Echo(), SMALL), scope, body_part(b"x" * size, more=False))
        assert sent.status == status
        assert not sent[-1].get("more_body")


def test_a_client_that_leaves_within_its_body_gets_no_answer() -> None:
    routes = Echo()
    parts = [body_part(b"ab", more=True), {"type": "http.disconnect"}]
    assert not call(with_security(routes, SMALL), http_scope(), *parts)
    assert not routes.bodies


def test_routes_hear_that_the_client_left() -> None:
    heard: list[Message] = []

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        heard.extend([await receive(), await receive()])
        await answer(send, b"{}")

    parts = [body_part(b"a", more=True), body_part(b"b", more=False), {"type": "http.disconnect"}]
    call(with_security(routes, SMALL), http_scope(), *parts)
    assert heard == [body_part(b"ab", more=False), {"type": "http.disconnect"}]


def test_the_rest_of_a_refused_body_is_read_before_the_end_of_the_answer() -> None:
    order: list[str] = []
    parts = iter([body_part(b"x" * 9, more=True), body_part(b"x" * 9, more=True), body_part(b"", more=False)])

    async def receive() -> Message:
        order.append("read")
        return next(parts)

    async def send(message: Message) -> None:
        order.append("end" if not message.get("more_body", True) else "answer")

    run(lambda: with_security(Echo(), SMALL)(http_scope(content_length="18"), receive, send))
    assert order == ["answer", "answer", "read", "read", "read", "end"]


@pytest.mark.parametrize(
    "name", ["max_body_bytes", "body_timeout_s", "header_timeout_s", "read_timeout_s", "max_connections"]
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"^{name} is {value}: it has to be above 0$"):
        SecuritySettings(**{name: value})  # type: ignore[arg-type]


async def test_bodies_are_held_within_a_bound_of_all_and_of_each_key() -> None:
    settings = SecuritySettings(max_body_bytes=1000, keys=ApiKeys(["a", "b"]))
    going_on = asyncio.Event()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await going_on.wait()
        await answer(send, b"{}")

    app = with_security(routes, settings)

    async def sent(key: str, body: bytes, more: bool = False) -> Sent:
        parts, heard = [body_part(body, more=more)], Sent()

        async def receive() -> Message:
            if not parts:
                await asyncio.Event().wait()
            return parts.pop()

        await app(http_scope(authorization=f"Bearer {key}"), receive, heard)
        return heard

    # Half of one has not arrived; all of it that has is held.
    slow = asyncio.create_task(sent("a", b"," * 400, more=True))
    first = [asyncio.create_task(sent(key, b"," * 800)) for key in "aab"]
    while not first[1].done():
        await asyncio.sleep(0)
    refused = first.pop(1).result()
    going_on.set()
    again = asyncio.create_task(sent("a", b"," * 900))
    assert [(await one).status for one in (*first, again)] == [200, 200, 200]
    slow.cancel()
    assert refused.status == 429
    assert (b"retry-after", b"1") in refused[0]["headers"]
    assert "of each key half of what others leave" in refused.text


@pytest.mark.parametrize("keys", [["a"], []])
async def test_without_keys_all_bodies_have_all_of_the_memory(keys: list[str]) -> None:
    """With one there still are requests without it."""
    settings = SecuritySettings(max_body_bytes=1000, keys=ApiKeys(keys))
    statuses = await held_together(settings, [("a", [b"," * 1000])] * 4)
    assert statuses == ([200, 429, 429, 429] if keys else [200, 200, 200, 429])


async def test_a_body_goes_on_with_the_memory_that_it_has() -> None:
    """However little others that came later leave."""
    settings = SecuritySettings(max_body_bytes=1000, keys=ApiKeys(["a", "b"]))
    sent = [("a", [b"," * 800, b""]), ("a", [b"," * 690]), ("b", [b"," * 600])]
    assert await held_together(settings, sent) == [200, 200, 200]


async def held_together(settings: SecuritySettings, bodies: list[tuple[str, list[bytes]]]) -> list[int]:
    """Return the statuses of bodies by key and parts, of which all have begun before one is whole, and one is over."""
    whole, answered = asyncio.Event(), asyncio.Event()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answered.wait()
        await answer(send, b"{}")

    app = with_security(routes, settings)

    async def status(key: str, parts: list[bytes]) -> int:
        left, heard = [body_part(part, more=True) for part in parts[:-1]] + [body_part(parts[-1], more=False)], Sent()

        async def receive() -> Message:
            if len(left) < len(parts):
                await whole.wait()
            return left.pop(0)

        await app(http_scope(authorization=f"Bearer {key}"), receive, heard)
        return heard.status

    tasks = [asyncio.create_task(status(key, parts)) for key, parts in bodies]
    for event in (whole, answered):
        for _ in range(20):
            await asyncio.sleep(0)
        event.set()
    return [await task for task in tasks]


# Over a socket


@pytest.mark.parametrize("settings", [SMALL, SecuritySettings(keys=ApiKeys(["k"]))], ids=["413", "401"])
def test_who_sends_much_still_gets_to_read_the_refusal(settings: SecuritySettings) -> None:
    body = b"x" * (8 << 20)
    with serving(Echo(), settings) as port, Socket(port) as client:
        client.send("POST / HTTP/1.1", "host: localhost", f"content-length: {len(body)}", "", body=body)
        reply = client.rest()
    assert reply.startswith(f"HTTP/1.1 {401 if settings.keys else 413}")
    assert reply.endswith('"param":null}}')


def test_a_chunked_body_beyond_the_limit_is_refused_over_a_socket() -> None:
    with serving(Echo(), SMALL) as port, Socket(port) as client:
        client.send("POST / HTTP/1.1", "host: localhost", "transfer-encoding: chunked", "", "8", "x" * 8, "8", "x" * 8)
        client.send("0", "")
        assert client.line().startswith("HTTP/1.1 413")


def test_a_body_that_stops_halfway_ends_the_connection() -> None:
    routes = Echo()
    with serving(routes, SecuritySettings(body_timeout_s=0.1)) as port, Socket(port) as client:
        client.send("POST / HTTP/1.1", "host: localhost", "content-length: 100", "", body=b"half")
        head, _, body = client.rest().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 408")
    assert "connection: close" in head.lower()
    message = (
        "the body did not arrive within 0.1 s, 4 bytes of it did: send it faster, or start the server with a longer "
        "--timeout"
    )
    assert json.loads(body) == refused(408, message, "timeout_error")
    assert not routes.bodies


def test_a_client_that_drops_a_half_sent_body_reaches_no_route() -> None:
    routes = Echo()
    with serving(routes, SecuritySettings()) as port:
        with Socket(port) as dropped:
            dropped.send("POST / HTTP/1.1", "host: localhost", "content-length: 100", "", body=b"half")
        with Socket(port) as whole:
            whole.send("POST / HTTP/1.1", "host: localhost", "content-length: 4", "connection: close", "", body=b"full")
            assert '"bytes": 4' in whole.rest()
    assert routes.bodies == [b"full"]
