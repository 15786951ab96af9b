"""OpenAI's own client, which checks every answer against OpenAI's types."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion

from paceline.server_options import ServerOptions
from tests.serving.hosted import NAME, Hosted, hosted, scripted
from tests.timing import WAIT_S

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
LONG = 60


@pytest.fixture
def client(server: Hosted) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


# Completions


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="abc", max_tokens=LONG, seed=1)
    again = client.completions.create(model=NAME, prompt="abc", max_tokens=LONG, seed=1)
    (choice,) = answer.choices
    assert choice.text == again.choices[0].text != ""
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, LONG, 63)
    assert client.completions.create(model=NAME, prompt="abc", max_tokens=LONG, seed=2).choices[0].text != choice.text


def test_a_completion_of_several_prompts_with_several_answers_each(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["ab", "cd"], n=3, max_tokens=20, seed=5)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({choice.text for choice in answer.choices}) == 6
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 120)
    alone = client.completions.create(model=NAME, prompt="cd", max_tokens=20, seed=5)
    assert alone.choices[0].text == answer.choices[3].text


def streamed(server: Hosted, **options: Any) -> list[Completion]:
    """Return the parts of a streamed completion.

    OpenAI's API says ``null`` for the reason of an end that has not come, and the client's type has no such value: that
    is all that is not checked here.
    """
    parts = server.chunks("/v1/completions", options)
    for part in parts:
        for choice in part["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "content_filter"
    return [Completion.model_validate(part) for part in parts]


@pytest.mark.parametrize("include_usage", [None, False, True])
def test_a_streamed_completion(server: Hosted, client: openai.OpenAI, include_usage: bool | None) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": LONG, "seed": 1}
    whole = client.completions.create(**options)
    told: dict[str, Any] = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    chunks = streamed(server, **options, **told)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [reason for reason in reasons if reason != "content_filter"] == ["length"]
    counted = [chunk for chunk in chunks if chunk.usage]
    assert [chunk.choices for chunk in counted] == ([[]] if include_usage else [])
    assert not include_usage or counted == chunks[-1:]
    assert all(chunk.usage and chunk.usage.completion_tokens == LONG for chunk in counted)


@pytest.mark.parametrize("top", [0, 1, 2])
def test_log_probabilities_of_a_completion_spell_its_text(server: Hosted, client: openai.OpenAI, top: int) -> None:
    options: dict[str, Any] = {"model": NAME, "prompt": "abc", "max_tokens": 2 * LONG, "seed": 3, "logprobs": top}
    choice = client.completions.create(**options).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    # A token that is a part of a character is named by its bytes.
    spelled = b"".join(bytes_of(token) for token in found.tokens)
    assert spelled.decode("utf-8", "replace") == choice.text
    assert any(token.startswith("bytes:") for token in found.tokens)
    whole = {offset: token for offset, token in zip(found.text_offset, found.tokens, strict=True) if len(token) == 1}
    assert len(whole) > 9
    assert all(choice.text[offset] == token for offset, token in whole.items())
    assert all(-100 < value <= 0 for value in found.token_logprobs)
    # The sampled token is always listed, so that there may be one more than was asked for.
    assert {len(listed) for listed in found.top_logprobs} == ({top, top + 1} if top else {1})
    for token, value, listed in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert listed[token] == value
        assert all(other >= value for name, other in listed.items() if len(listed) > top)
    parts = [chunk.choices[0].logprobs for chunk in streamed(server, **options)]
    assert [token for part in parts if part for token in part.tokens or []] == found.tokens
    assert [offset for part in parts if part for offset in part.text_offset or []] == found.text_offset
    assert [listed for part in parts if part for listed in part.top_logprobs or []] == found.top_logprobs


def bytes_of(token: str) -> bytes:
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token[:6] == "bytes:" else token.encode()


# Chats


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=LONG, seed=1)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.model == NAME
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == LONG
    again = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=LONG, seed=1)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


@pytest.mark.parametrize("include_usage", [None, False, True])
def test_a_streamed_chat(client: openai.OpenAI, include_usage: bool | None) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": LONG, "seed": 1}
    whole = client.chat.completions.create(**options)
    told: dict[str, Any] = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    chunks = list(client.chat.completions.create(**options, **told, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    counted = [chunk for chunk in chunks if chunk.usage]
    assert [chunk.choices for chunk in counted] == ([[]] if include_usage else [])
    assert not include_usage or counted == chunks[-1:]


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_of_a_chat_spell_its_text(client: openai.OpenAI, top: int) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "seed": 2, "logprobs": True, "top_logprobs": top}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    spelled = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert spelled.decode("utf-8", "replace") == choice.message.content
    assert {len(entry.top_logprobs) for entry in entries} == {top}
    for entry in entries if top else ():
        assert entry.top_logprobs[0].logprob >= entry.logprob
    # The end of the answer is a token, too, and comes in streams as well.
    parts = [
        entry
        for chunk in client.chat.completions.create(**options, stream=True)
        for each in chunk.choices
        if each.logprobs is not None
        for entry in each.logprobs.content or ()
    ]
    assert parts == entries


def test_log_probabilities_do_not_depend_on_drafts(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "seed": 2, "logprobs": True, "top_logprobs": 4}
    drafted = client.chat.completions.create(**options)
    plain = client.chat.completions.create(**options, extra_body={"speculative": {"off": True}})
    assert drafted.choices == plain.choices
    assert drafted.timings["draft_n_accepted"] > 0
    assert "draft_n" not in plain.timings


def test_a_stop_text_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 200, "seed": 1}
    text = client.chat.completions.create(**options).choices[0].message.content
    assert text is not None
    stop = text[10:12]
    for told in (stop, [stop, "never said"]):
        choice = client.chat.completions.create(**options, stop=told).choices[0]
        assert choice.message.content == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
    chunks = client.chat.completions.create(**options, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]


# Models


def test_models_are_listed_and_found_by_each_name() -> None:
    with (
        hosted(lambda: scripted(names=("zeta", "org/alpha"))) as running,
        running.client() as client,
    ):
        (model,) = client.models.list().data
        assert model.id == "org/alpha"
        for name in ("zeta", "org/alpha"):
            assert client.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError, match="no model 'beta' here"):
            client.models.retrieve("beta")


# Errors


def test_a_request_that_cannot_be_answered_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="has type 'sound'") as caught:
        client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            response_format={"type": "sound"},  # type: ignore[call-overload]
        )
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.completions.create(model=NAME, prompt="a" * 5000)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=NAME, prompt="a", temperature=-1, stream=True)


def test_a_wrong_key_is_an_authentication_error() -> None:
    with hosted(scripted, ServerOptions(api_key=("right", "also"))) as running:
        for key in ("right", "also"):
            with running.client(api_key=key) as client:
                assert client.completions.create(model=NAME, prompt="a", max_tokens=1).choices
        with running.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(model=NAME, prompt="a", max_tokens=1)
        assert running.get("/health").status_code == 200


def test_a_full_queue_is_a_rate_limit() -> None:
    endless: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "stream": True}
    endless["extra_body"] = {"ignore_eos": True}
    with (
        hosted(lambda: scripted(max_sequences=1, max_waiting=0, context_length=10**9)) as running,
        running.client() as client,
    ):
        with client.chat.completions.create(**endless) as stream:
            assert next(iter(stream)).choices
            with pytest.raises(openai.RateLimitError, match="max_waiting is 0") as caught:
                client.completions.create(model=NAME, prompt="b", max_tokens=3)
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.type == "rate_limit_error"
        assert client.with_options(max_retries=9).completions.create(model=NAME, prompt="b", max_tokens=3).choices


def test_a_model_that_is_loading_is_an_internal_server_error_with_status_503() -> None:
    go_on = threading.Event()

    def load() -> Any:
        assert go_on.wait(WAIT_S)
        return scripted()

    with hosted(load, wait=False) as running, running.client() as client:
        with pytest.raises(openai.InternalServerError, match="Loading model") as caught:
            client.completions.create(model=NAME, prompt="b")
        assert caught.value.status_code == 503
        go_on.set()
        retrying = client.with_options(max_retries=9)
        assert retrying.completions.create(model=NAME, prompt="b", max_tokens=1).choices


# In an event loop


async def test_sixteen_answers_in_an_event_loop_are_those_of_one_after_the_other(
    server: Hosted, client: openai.OpenAI
) -> None:
    def options(seed: int) -> dict[str, Any]:
        return {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "seed": seed}

    alone = [client.chat.completions.create(**options(seed)).choices[0].message.content for seed in range(16)]

    async def text_of(asking: openai.AsyncOpenAI, seed: int) -> str:
        text = ""
        async for chunk in await asking.chat.completions.create(**options(seed), stream=True):
            text += chunk.choices[0].delta.content or ""
        return text

    async with server.async_client() as asking:
        assert await asyncio.gather(*(text_of(asking, seed) for seed in range(16))) == alone
