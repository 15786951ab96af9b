"""What bounds a request: time, size, room, other requests; and errors that are the server's own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

import paceline
from paceline.core.arrays import Float64Array
from paceline.serving.settings import ServerOptions
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


def test_a_body_that_is_too_large_is_refused() -> None:
    with hosted(scripted, ServerOptions(max_body=1)) as running:
        error = running.refusal("/completion", {"prompt": "a" * (1 << 20)}, 413)
        assert error["type"] == "invalid_request_error"
        running.answer("/tokenize", {"content": "a" * 9000})


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
                "taken: ask for fewer, set a smaller max_tokens, or start the server with a larger "
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


def test_requests_wait_for_room_for_log_probabilities() -> None:
    """Most of them end far before they need it."""

    async def test() -> None:
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
            assert "4 requests of this client wait for room" in refused.json()["error"]["message"]
            # Who leaves waits no more.
            asking.pop(3).close()
            await server.until(lambda: len(waiting) == 3)
            server.gate.open()
            for connection in (plain, *asking):
                assert (await connection.answer()).status == 200
                connection.close()
            await server.until(lambda: not room._held)

    asyncio.run(test())


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
        assert running.post("/completion", {"prompt": "x"}).status_code == 401
        headers = {"Authorization": "Bearer a"}
        assert running.post("/completion", {"prompt": []}, headers=headers).status_code == 400
        scraped = running.get("/metrics", headers=headers).text
    for status, kind in ((401, "authentication_error"), (400, "invalid_request_error")):
        assert f'paceline:requests_refused_total{{kind="{kind}",status="{status}"}} 1.0' in scraped


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
