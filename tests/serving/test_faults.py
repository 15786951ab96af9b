"""Faults that soaking and fuzzing found, and their kin: what clients may do that once broke something.

The server is a real one on a socket, the model scripted; its rounds are held where their number matters.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from benchmarks.server_soak.wire import Connection, ask, post_bytes, request_bytes
from pydantic import ValidationError

from paceline.server_options import ServerOptions
from paceline.serving import deployment as running
from paceline.serving.connections import CarefulProtocol
from paceline.serving.event_stream import EventStream
from paceline.serving.json_bodies import read_json
from paceline.serving.response_formats.base import list_probabilities
from paceline.serving.schema import MAX_TEXTS, ChatBody, CompletionBody, TemplateBody
from tests.serving.live import live, repeated
from tests.timing import WAIT_S

PROMPT = [65, 66, 67]
LONG = {"prompt": PROMPT, "n_predict": 400, "ignore_eos": True}
ROUTES = ("/completion", "/v1/completions")


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    asyncio.run(bounded())


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# --- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "biases",
    [
        {"--5": 1},
        {"²": 1},
        {"1" * 5000: 1},
        {"": 1},
        [["--5", 1]],
        [[5, False]],
        [["a", -1.5], [6, 2]],
        {"5": False, "6": 1e9},
        [],
        {},
        None,
    ],
    ids=lambda biases: str(biases)[:20],
)
def test_biases_that_can_be_added_are_taken(biases: Any) -> None:
    async def test() -> None:
        async with live() as server:
            answer = await server.post("/completion", {"prompt": PROMPT, "n_predict": 2, "logit_bias": biases})
            assert answer.status == 200, answer.body
            assert answer.json()["tokens_predicted"] == 2

    in_loop(test)


@pytest.mark.parametrize(
    "biases",
    [5, "5", [5], [[5]], [[5, 1, 2]], [[5, True]], [[True, 1]], [[5.5, 1]], [None], {"5": "1"}, {"5": None}, {"5": []}],
    ids=str,
)
def test_biases_of_another_shape_are_refused(biases: Any) -> None:
    async def test() -> None:
        async with live() as server:
            error = await server.refusal("/completion", {"prompt": PROMPT, "logit_bias": biases})
            assert error["param"] == "logit_bias"

    in_loop(test)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 5e-324},
        {"temperature": 1e-21},
        {"repeat_penalty": 1e-320},
        {"repeat_penalty": 1e-7},
        {"logit_bias": {"5": -1e308, "6": 1e308}},
        {"logit_bias": {"5": 1.1e9}},
    ],
    ids=str,
)
def test_what_logits_would_overflow_by_is_refused(field: dict[str, Any]) -> None:
    async def test() -> None:
        async with live() as server:
            error = await server.refusal("/completion", {"prompt": PROMPT, **field})
            assert error["type"] == "invalid_request_error"
            assert error["param"] == next(iter(field))

    in_loop(test)


def test_the_least_that_is_divided_by_and_the_largest_bias_at_once_are_sampled() -> None:
    async def test() -> None:
        async with live() as server:
            extreme = {"temperature": 1e-20, "repeat_penalty": 1e-6, "logit_bias": [[65, 1e9], [66, -1e9]]}
            body = {"prompt": PROMPT, "n_predict": 3, "n_probs": 2, "post_sampling_probs": True, **extreme}
            answer = await server.post("/completion", body)
            assert answer.status == 200, answer.body
            assert answer.json()["content"] == "AAA"

    in_loop(test)


def test_prompts_and_answers_to_each_are_bounded_together() -> None:
    async def test() -> None:
        async with live(ServerOptions(max_choices=6, grace_s=0.0)) as server:
            answer = await server.post("/completion", {"prompt": ["a", "b"], "n": 3, "n_predict": 1})
            assert len(answer.json()) == 6
            error = await server.refusal("/completion", {"prompt": ["a", "b", "c"], "n": 3, "n_predict": 1})
            assert error["message"] == (
                "3 prompts with 3 answers each: at most 6 answers are written at once; send fewer, or start the "
                "server with a larger --max-n"
            )
            await server.refusal("/completion", {"prompt": ["a"] * 7, "n_predict": 1})

    in_loop(test)


def test_a_parameter_of_the_query_is_refused_like_a_field() -> None:
    async def test() -> None:
        async with live() as server:
            answer = await server.get("/slots?fail_on_no_slot=x")
            assert answer.status == 400
            assert answer.json()["error"]["param"] == "fail_on_no_slot"

    in_loop(test)


@pytest.mark.parametrize(
    ("body", "field"),
    [(CompletionBody, "stop"), (CompletionBody, "response_fields"), (ChatBody, "messages"), (TemplateBody, "tools")],
)
def test_of_a_long_list_the_first_wrong_item_ends_the_look(body: Any, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate({"prompt": "a", "messages": [], field: [1] * 1000})
    # One for each kind that the field may be.
    assert caught.value.error_count() <= 2


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/completion", {"prompt": ["a", 1] * (MAX_TEXTS + 1)}),
        ("/tokenize", {"content": ["a"] * (MAX_TEXTS + 1)}),
        ("/completion", {"prompt": "a", "logit_bias": {f"text {number}": 1 for number in range(MAX_TEXTS + 1)}}),
        ("/completion", {"prompt": "a", "response_fields": ["a"] * (MAX_TEXTS + 1)}),
        ("/completion", {"prompt": "a", "samplers": "k" * (MAX_TEXTS + 1)}),
        ("/completion", {"prompt": "a", **{f"field {number}": 1 for number in range(1000)}}),
        (
            "/apply-template",
            {"messages": [], "chat_template_kwargs": {f"name {number}": 1 for number in range(1001)}},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_looked_at_piece_by_piece_is_bounded(route: str, body: dict[str, Any]) -> None:
    """A body has room for millions, each of which would cost more than to send it."""

    async def test() -> None:
        async with live() as server:
            error = await server.refusal(route, body)
            assert "at most" in error["message"] or "more than" in error["message"]
            assert len(error["message"]) < 300

    in_loop(test)


def test_a_few_of_many_unknown_fields_are_named() -> None:
    async def test() -> None:
        async with live() as server:
            unknown = {f"field {number}": 1 for number in range(99)} | {"x" * 1000: 1}
            answer = await server.post("/completion", {"prompt": "a", "n_predict": 1, **unknown})
            warnings = answer.json()["warnings"]
            assert warnings[0] == "unknown field 'field 0' was ignored"
            assert warnings[-1] == "84 more unknown fields were ignored"
            assert len(warnings) == 17

    in_loop(test)


@pytest.mark.parametrize("tokens", [5, "5", None, [True], ["5"], [5.5], [[5]], [-1], [10**15]], ids=str)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    async def test() -> None:
        async with live() as server:
            assert (await server.refusal("/detokenize", {"tokens": tokens}))["param"] == "tokens"
            assert (await server.post("/detokenize", {"tokens": [65.0, 66]})).json()["content"] == "AB"

    in_loop(test)


# --- what takes long --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "elsewhere"), [(100, False), (1 << 17, True)])
def test_a_long_body_is_read_in_a_thread(size: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by: list[int] = []

    def noted(body: bytes) -> dict[str, Any]:
        read_by.append(threading.get_ident())
        return read_json(body)

    monkeypatch.setattr("paceline.serving.schema.read_json", noted)

    async def test() -> None:
        async with live() as server:
            answer = await server.post("/tokenize", {"content": "a" * size})
            assert len(answer.json()["tokens"]) == size

    in_loop(test)
    assert [thread != threading.get_ident() for thread in read_by] == [elsewhere]


@pytest.mark.parametrize(("n_probs", "elsewhere"), [(3, False), (260, True)])
@pytest.mark.parametrize("stream", [False, True])
def test_many_probabilities_are_written_in_a_thread(
    n_probs: int, elsewhere: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by: set[int] = set()
    for module in ("work", "server"):
        monkeypatch.setattr(f"paceline.serving.{module}.MAX_AT_ONCE", 200)

    def noted(*args: Any, **options: Any) -> list[dict[str, Any]]:
        written_by.add(threading.get_ident())
        return list_probabilities(*args, **options)

    monkeypatch.setattr("paceline.serving.response_formats.base.list_probabilities", noted)

    async def test() -> None:
        async with live() as server:
            body = {"prompt": PROMPT, "n_predict": 3, "n_probs": n_probs, "temperature": 0, "stream": stream}
            answer = await server.post("/completion", body)
            assert answer.status == 200
            assert answer.body.count(b'"top_logprobs"') == 3

    in_loop(test)
    assert written_by
    assert all((thread != threading.get_ident()) == elsewhere for thread in written_by)


def test_all_answers_of_a_request_are_taken_in_one_round() -> None:
    async def test() -> None:
        async with live(max_sequences=8) as server:
            first = await server.send("/completion", {**LONG, "stream": True})
            await first.head()
            server.gate.close()
            await server.gate.arrived()
            second = await server.send("/completion", {**LONG, "stream": True, "n": 6})
            await server.until(lambda: len(server.server.board.answers) == 2)
            # By the time that another request is answered, all are asked for.
            await server.get("/health")
            server.gate.let_through()
            assert (await second.head()).status == 200
            server.gate.open()
            for connection in (first, second):
                connection.close()

    in_loop(test)


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_request_is_off_the_engine_within_two_rounds_of_its_client(path: str, stream: bool, waits: bool) -> None:
    """Whether it runs or waits for its start, and whether anything of its answer was sent."""

    async def test() -> None:
        async with live(max_sequences=1 if waits else 2) as server:
            other = await server.send("/completion", {**LONG, "stream": True})
            await other.head()
            server.gate.close()
            await server.gate.arrived()
            leaving = await server.send(path, {**LONG, "stream": stream})
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

    in_loop(test)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_whose_clients_left_are_counted(stream: bool) -> None:
    async def test() -> None:
        async with live() as server:
            server.gate.close()
            leaving = await server.send("/completion", {**LONG, "stream": stream, "n": 2})
            await server.gate.arrived()
            leaving.reset()
            await server.until(lambda: server.server._endings)
            server.gate.open()
            await server.until(lambda: not server.server.board.answers)
            # One was held, and one may have been on its way.
            assert server.gate.rounds <= 2
            metrics = (await server.get("/metrics")).body.decode()
            assert 'paceline:requests_total{finish_reason="cancelled"} 2.0' in metrics

    in_loop(test)


def test_a_client_that_leaves_while_its_prompt_is_read_asks_the_engine_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def test() -> None:
        async with live() as server:
            vocabulary = server.model.target.vocabulary
            tokenize = vocabulary.tokenize

            def slow(text: str, **options: Any) -> list[int]:
                begun.set()
                assert go_on.wait(WAIT_S)
                return tokenize(text, **options)

            monkeypatch.setattr(vocabulary, "tokenize", slow)
            leaving = await server.send("/completion", {"prompt": "abc", "n_predict": 5})
            assert await asyncio.to_thread(begun.wait, WAIT_S)
            leaving.close()
            await server.until(lambda: b'status="499"' in server.server.metrics.render()[0])  # type: ignore[union-attr]
            go_on.set()
            # Notes of the engine's thread are read in their order, so nothing comes after this one.
            assert server.active() == 0
            assert server.gate.rounds == 0

    in_loop(test)


def test_a_client_that_leaves_after_it_asked_for_more_is_noticed() -> None:
    async def test() -> None:
        async with live() as server:
            server.gate.close()
            connection = await server.send("/completion", LONG)
            await server.gate.arrived()
            # Twice, each once the server has taken the bytes before.
            for _ in range(2):
                await connection.send(post_bytes("/completion", LONG))
                await ask(server.port, request_bytes("GET", "/health"))
            connection.close()
            await server.until(lambda: server.server._endings)
            server.gate.open()
            await server.until(lambda: not server.server.board.answers)
            # One was held, and one may have been on its way.
            assert server.gate.rounds <= 2

    in_loop(test)


def test_pipelined_requests_are_answered_in_their_order() -> None:
    async def test() -> None:
        async with live() as server, await Connection.open(server.port) as connection:
            bodies = [{"prompt": PROMPT, "n_predict": number} for number in (3, 1, 2)]
            await connection.send(b"".join(post_bytes("/completion", body) for body in bodies))
            answers = [await connection.answer() for _ in bodies]
            assert [answer.json()["tokens_predicted"] for answer in answers] == [3, 1, 2]

    in_loop(test)


def test_a_stream_that_never_began_is_over_all_the_same() -> None:
    over: list[bool] = []

    async def test() -> None:
        async def content() -> Any:
            yield b"never asked for"

        async def send(message: Any) -> None:
            # Of a connection that is full.
            await asyncio.Event().wait()

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        stream = EventStream(content(), over=lambda: over.append(True), ping_s=0, ping=b": \n\n")
        await stream({"type": "http", "method": "POST"}, receive, send)

    in_loop(test)
    assert over == [True]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ROUTES)
def test_nothing_holds_an_answer_that_is_over(stream: bool, api: str) -> None:
    async def test() -> None:
        async with live() as server:
            server.gate.close()
            connection = await server.send(
                api, {"prompt": PROMPT, "n_predict": 5, "n_probs": 2, "ignore_eos": True, "stream": stream}
            )
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
            assert slot["is_processing"] is False
            assert slot["n_prompt_tokens"] == len(PROMPT) + 5

    in_loop(test)


# --- nonsense ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "elsewhere.example"])
def test_nonsense_in_a_body_is_refused_once(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """A request that is refused before its body is read has an answer of its own beside that to the nonsense."""
    head = f"POST /completion HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()

    async def test() -> None:
        async with live() as server:
            for pieces in ([head + b"zz\r\n\r\n"], [head, b"zz\r\n\r\n"], [head, b"1\r\nx\r\n", b"zz\r\n\r\n"]):
                async with await Connection.open(server.port) as connection:
                    for piece in pieces:
                        await connection.send(piece)
                        await server.get("/health")
                    said = await connection.reader.read(-1)
                    assert said.startswith(b"HTTP/1.1 4")
                    assert said.count(b"HTTP/1.1") == 1

    in_loop(test)
    assert not errors(caplog)


def test_an_error_that_ends_a_stream_is_its_last_event(caplog: pytest.LogCaptureFixture) -> None:
    broken = repeated("a")
    said: list[int] = []

    def logits(token_ids: Any) -> Any:
        said.append(len(token_ids))
        return broken(token_ids) * (float("nan") if len(token_ids) > len(PROMPT) + 3 else 1.0)

    async def test() -> None:
        async with live(logits=logits) as server:
            answer = await server.post("/v1/completions", {**LONG, "stream": True})
            assert answer.status == 200
            events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line.startswith(b"data: {")]
            assert [event["choices"][0]["text"] for event in events[:-1]] == ["a"] * 4
            assert events[-1]["error"]["type"] == "server_error"
            assert (await server.post("/completion", {"prompt": "ab", "n_predict": 1})).status == 200
            assert server.active() == 0

    in_loop(test)
    assert errors(caplog) == ["a request ended by an error"]


# --- the end ----------------------------------------------------------------------------------------------------------


ENDLESS: dict[str, Any] = {"logits": repeated("a"), "context_length": 1 << 20, "max_rows": 512}


def test_answers_that_the_end_of_the_server_cut_say_so(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with live(ServerOptions(grace_s=0.0), **ENDLESS) as server:
            body = {"prompt": PROMPT, "n_predict": -1, "ignore_eos": True}
            whole = await server.send("/completion", body)
            stream = await server.send("/v1/completions", {**body, "stream": True})
            head = await stream.head()
            await server.until(lambda: server.server.load().running == 2)
            server.terminate()
            answer = await whole.answer()
            assert answer.status == 503
            assert answer.head.headers["retry-after"]
            said = b"".join([chunk async for chunk in stream.chunks(head)])
            assert b'"unavailable_error"' in said
            assert b"[DONE]" not in said
            assert await server.ended == 1
            for connection in (whole, stream):
                connection.close()

    in_loop(test)
    assert not errors(caplog)


def test_halves_of_requests_do_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
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

    in_loop(test)
    assert not errors(caplog)


def test_clients_that_read_nothing_do_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[bool] = []
    pause = CarefulProtocol.pause_writing

    def noted(protocol: CarefulProtocol) -> None:
        full.append(True)
        pause(protocol)

    monkeypatch.setattr(CarefulProtocol, "pause_writing", noted)
    monkeypatch.setattr(running, "_FLUSH_S", 0.01)

    async def test() -> None:
        async with live(ServerOptions(grace_s=0.0, max_answer_logprobs=10**9), **ENDLESS) as server:
            body = {"prompt": PROMPT, "n_predict": -1, "ignore_eos": True, "stream": True, "n_probs": 200}
            stuck = await server.send("/completion", body, receive_bytes=1024)
            await server.until(lambda: full)
            server.terminate()
            assert await server.ended == 1
            stuck.close()

    in_loop(test)
    assert not errors(caplog)


def test_a_second_signal_ends_the_server_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with live(ServerOptions(grace_s=600.0), **ENDLESS) as server:
            stream = await server.send("/completion", {"prompt": PROMPT, "n_predict": -1, "stream": True})
            await stream.head()
            server.terminate()
            await server.until(lambda: server.server.host.state == "closing")
            assert not server.ended.done()
            server.terminate()
            assert await server.ended == 2
            stream.close()

    in_loop(test)
    assert not errors(caplog)


def test_there_may_be_as_many_files_as_connections() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 400 or soft == resource.RLIM_INFINITY:
        pytest.skip("the limit is set by others")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (350, hard))
        assert running._allow_files(300) == 350
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 350
        assert running._allow_files(400) == 400
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 400
        if hard != resource.RLIM_INFINITY:
            assert running._allow_files(hard + 1) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
