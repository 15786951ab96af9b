"""What evaluation harnesses and reinforcement learning ask for: how likely a prompt is, and token ids."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

import paceline
from paceline.server_options import ServerOptions
from tests.serving.hosted import NAME, Hosted, hosted, scripted
from tests.timing import WAIT_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def tokens_of(server: Hosted, text: str) -> list[int]:
    found: list[int] = server.answer("/tokenize", {"content": text, "add_special": True})["tokens"]
    return found


def teacher_forced(server: Hosted, token_ids: list[int]) -> list[float]:
    """Return the log-probability of each token but the first, by having the model say it."""
    found = []
    for i in range(1, len(token_ids)):
        body = {"prompt": token_ids[:i], "n_predict": 1, "n_probs": 1, "cache_prompt": False, "temperature": 0}
        told = server.answer("/completion", {**body, "logit_bias": {str(token_ids[i]): 1e6}})
        (entry,) = told["completion_probabilities"]
        assert entry["id"] == token_ids[i]
        found.append(entry["logprob"])
    return found


@pytest.mark.parametrize("name", ["server", "pair_server"])
def test_an_echo_has_the_log_probabilities_of_teacher_forcing(name: str, request: pytest.FixtureRequest) -> None:
    """As lm-evaluation-harness asks: prompts of token ids, several at once, with one token behind each."""
    server: Hosted = request.getfixturevalue(name)
    prompts = [tokens_of(server, text) for text in ("abcabd", "def f", "a")]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    server.answer(COMPLETIONS, {"prompt": prompts[0], "max_tokens": 1})  # its beginning is at hand from now on
    choices = server.answer(COMPLETIONS, body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    tolerance = 2 * server.model.target.capabilities.logit_tolerance + 1e-9
    for prompt, choice in zip(prompts, choices, strict=True):
        found = choice["logprobs"]
        assert len({len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:-1] == pytest.approx(teacher_forced(server, prompt), abs=tolerance)
        assert len(found["tokens"]) == len(prompt) + 1
        for token, value, listed in zip(*(found[name][1:] for name in list(found)[:3]), strict=True):
            assert listed[token] == value
            assert 1 <= len(listed) <= 2
        assert choice["text"].startswith("".join(found["tokens"][: len(prompt)]))
        for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"].startswith(token, offset)


@pytest.mark.parametrize("count", [0, 7])
def test_a_streamed_echo_is_the_whole_one(server: Hosted, count: int) -> None:
    body = {"prompt": "abcé d", "max_tokens": count, "logprobs": 2, "echo": True, "seed": 3, "n": 2}
    body["return_progress"] = True
    whole = server.answer(COMPLETIONS, body)["choices"]
    for choice in whole:
        parts = [
            part
            for chunk in server.chunks(COMPLETIONS, body)
            for part in chunk["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset", "content"):
            said = [each for part in parts if part["logprobs"] for each in part["logprobs"][name]]
            assert said == choice["logprobs"][name]
    assert len(whole[0]["logprobs"]["tokens"]) == len(tokens_of(server, "abcé d")) + count
    assert whole[0]["text"].startswith("abcé d")


def test_openais_client_reads_an_echo(server: Hosted) -> None:
    """OpenAI says ``null`` for the first token, and its client's type has no such value: nothing else is amiss."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S) as client:
        options: dict[str, Any] = {"model": NAME, "prompt": "abcd", "logprobs": 2, "echo": True, "seed": 1}
        (choice,) = client.completions.create(**options, max_tokens=0).choices
        streamed = [part.choices[0] for part in client.completions.create(**options, max_tokens=5, stream=True)]
    assert choice.text == "abcd"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "b", "c", "d"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert streamed[0].text == "abcd"
    assert streamed[0].logprobs is not None
    assert streamed[0].logprobs.token_logprobs == choice.logprobs.token_logprobs
    assert choice.logprobs.token_logprobs is not None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


@pytest.mark.parametrize("count", [0, 3])
def test_prompt_logprobs_as_vllm_has_them(server: Hosted, count: int) -> None:
    prompt = tokens_of(server, "abcd")
    expected = teacher_forced(server, prompt)
    body = {"prompt": prompt, "max_tokens": 2, "prompt_logprobs": count}
    (choice,) = server.answer(COMPLETIONS, body)["choices"]
    assert choice["logprobs"] is None
    native = server.answer("/completion", body)
    for told in (choice["prompt_logprobs"], native["prompt_logprobs"]):
        assert told[0] is None
        for place, token_id in enumerate(prompt[1:], 1):
            by_id = told[place]
            assert by_id[str(token_id)]["logprob"] == pytest.approx(expected[place - 1], abs=1e-9)
            assert by_id[str(token_id)]["decoded_token"] == "abcd"[place]
            ranked = sorted((one["rank"], one["logprob"]) for one in by_id.values() if one["rank"] is not None)
            assert [rank for rank, _ in ranked] == list(range(1, count + 1))
            assert [value for _, value in ranked] == sorted((value for _, value in ranked), reverse=True)
    whole = server.answer(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **body})
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in whole["choices"][0]


def test_an_echo_lists_as_many_as_it_asks_for_beside_more_of_prompt_logprobs(server: Hosted) -> None:
    body = {"prompt": "abcd", "max_tokens": 1, "logprobs": 1, "prompt_logprobs": 5, "echo": True}
    (choice,) = server.answer(COMPLETIONS, body)["choices"]
    assert all(len(listed) <= 2 for listed in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(listed) >= 5 for listed in choice["prompt_logprobs"][1:])


def test_what_of_a_prompt_cannot_be_told(server: Hosted) -> None:
    error = server.refusal(COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True})
    assert (error["param"], "leave out stream" in error["message"]) == ("prompt_logprobs", True)
    error = server.refusal(COMPLETIONS, {"prompt": "a", "logprobs": 1, "echo": True, "post_sampling_probs": True})
    assert error["param"] == "post_sampling_probs"
    for count in (-1, 1001):
        error = server.refusal(COMPLETIONS, {"prompt": "a", "prompt_logprobs": count})
        assert (error["param"], "give a value from 0 to 1000" in error["message"]) == ("prompt_logprobs", True)


@pytest.mark.parametrize(
    ("fields", "name"), [({"echo": True, "logprobs": 9}, "echo"), ({"prompt_logprobs": 9}, "prompt_logprobs")]
)
def test_log_probabilities_of_prompts_are_counted_beforehand(fields: dict[str, Any], name: str) -> None:
    with hosted(scripted, ServerOptions(max_answer_logprobs=1000)) as running:
        body = {"prompt": ["a" * 45, "b" * 45], "max_tokens": 0, **fields}
        running.answer(COMPLETIONS, body)
        running.wait_for_nothing()
        error = running.refusal(COMPLETIONS, {**body, "prompt": ["a" * 50, "b" * 51]})
        assert error["param"] == name
        assert "of 101 tokens of prompts" in error["message"]
        assert "--max-answer-logprobs" in error["message"]
        assert running.refusal(COMPLETIONS, {**body, "n": 2})["param"] == name


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids_of_prompt_and_answer(server: Hosted, path: str) -> None:
    body = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 30, "seed": 5}
    plain = server.answer(path, body)
    whole = server.answer(path, {**body, "return_token_ids": True})
    (choice,) = whole["choices"]
    holder = choice if path == COMPLETIONS else whole
    assert len(holder["prompt_token_ids"]) == plain["usage"]["prompt_tokens"]
    assert path == CHAT or holder["prompt_token_ids"] == tokens_of(server, "abc")
    assert len(choice["token_ids"]) == plain["usage"]["completion_tokens"] == 30
    said = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
    assert said == (plain["choices"][0].get("text") or plain["choices"][0]["message"]["content"])
    assert server.answer("/detokenize", {"tokens": choice["token_ids"]})["content"] == said
    chunks = server.chunks(path, {**body, "return_token_ids": True})
    holders = [part for chunk in chunks for part in chunk["choices"]] if path == COMPLETIONS else chunks
    assert [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each] == [holder["prompt_token_ids"]]
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert [one for part in parts for one in part.get("token_ids", ())] == choice["token_ids"]
    assert not any("token_ids" in part for chunk in server.chunks(path, body) for part in chunk["choices"])


def test_tokens_named_by_their_ids(server: Hosted) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "logprobs": 2, "echo": True, "seed": 5, "return_token_ids": True}
    body["return_tokens_as_token_ids"] = True
    (choice,) = server.answer(COMPLETIONS, body)["choices"]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in ids]
    assert all(name.startswith("token_id:") for listed in choice["logprobs"]["top_logprobs"][1:] for name in listed)
    asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "max_tokens": 2}
    (choice,) = server.answer(CHAT, {**asked, "return_tokens_as_token_ids": True})["choices"]
    assert all(entry["token"] == f"token_id:{entry['id']}" for entry in choice["logprobs"]["content"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_on_each_chunk(server: Hosted, path: str) -> None:
    body: dict[str, Any] = {"prompt": "abc", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 30}
    body["seed"] = 2
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.chunks(path, body)
    usages = [CompletionUsage.model_validate(chunk["usage"]) for chunk in chunks]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[-2:] == [30, 30]
    assert len(set(counts)) > 10, "tokens of a round are counted one by one, where each has a text"
    assert {usage.prompt_tokens for usage in usages} == {usages[-1].prompt_tokens}
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
    body["stream_options"] = {"continuous_usage_stats": True}
    chunks = server.chunks(path, body)
    assert not any("usage" in chunk for chunk in chunks)
    assert "continuous_usage_stats changes nothing" in chunks[-1]["warnings"][-1]


def spelled(server: Hosted, choice: dict[str, Any]) -> str:
    text: str = server.answer("/detokenize", {"tokens": choice["token_ids"]})["content"]
    return text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_an_answer_of_a_least_length(server: Hosted, path: str) -> None:
    """The scripted model would end at once: its end token has a bias."""
    end = sorted(server.model.target.vocabulary.end_ids)[0]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 20, "seed": 5}
    body |= {"prompt": "abc"} if path == COMPLETIONS else {}
    body |= {"return_token_ids": True, "logit_bias": {str(end): 100}}
    for least in (0, 1, 7):
        for speculate in (True, False):
            asked = {**body, "min_tokens": least, "speculative": {"enabled": speculate}}
            (choice,) = server.answer(path, asked)["choices"]
            assert (choice["token_ids"].index(end), choice["finish_reason"]) == (least, "stop")
    error = server.refusal(path, {**body, "min_tokens": 21})
    assert (error["param"], "lower min_tokens" in error["message"]) == ("min_tokens", True)


def test_tokens_that_are_allowed_and_tokens_that_end_an_answer(server: Hosted) -> None:
    ids = tokens_of(server, "abc")
    body = {"prompt": "abc", "max_tokens": 40, "seed": 5, "return_token_ids": True, "allowed_token_ids": ids}
    (choice,) = server.answer(COMPLETIONS, body)["choices"]
    assert set(choice["token_ids"]) == set(ids)
    assert choice["text"] == spelled(server, choice)
    for include in (False, True):
        asked = {**body, "stop_token_ids": [ids[1]], "include_stop_str_in_output": include, "min_tokens": 3}
        (ended,) = server.answer(COMPLETIONS, asked)["choices"]
        assert (ended["token_ids"].index(ids[1]), ended["finish_reason"]) == (len(ended["token_ids"]) - 1, "stop")
        assert len(ended["token_ids"]) > 3
        assert ended["text"] == spelled(server, ended)[: None if include else -1]
    asked = {**body, "stop": ["b"], "include_stop_str_in_output": True}
    text = server.answer(COMPLETIONS, asked)["choices"][0]["text"]
    assert text == choice["text"][: choice["text"].index("b") + 1]
    for name, value in (("allowed_token_ids", [10**6]), ("stop_token_ids", ["a"]), ("allowed_token_ids", [])):
        assert server.refusal(COMPLETIONS, {**body, name: value})["param"] == name


def test_control_tokens_may_be_spelled_out(server: Hosted) -> None:
    vocabulary = server.model.target.vocabulary
    control = sorted(vocabulary.control_ids - vocabulary.end_ids)[0]
    name = (vocabulary.token_spelling(control) or b"").decode()
    body = {"prompt": "abc", "max_tokens": 2, "allowed_token_ids": [control]}
    for skips in (None, True, False):
        (choice,) = server.answer(COMPLETIONS, {**body, "skip_special_tokens": skips})["choices"]
        assert choice["text"] == ("" if skips is not False else 2 * name)
    chat = {"messages": [{"role": "user", "content": "a"}], "skip_special_tokens": False, **body}
    del chat["prompt"]
    assert server.answer(CHAT, chat)["choices"][0]["message"]["content"] == 2 * name


def test_a_tokenizer_as_vllm_offers_it(pair_server: Hosted) -> None:
    server = pair_server
    told = server.answer("/tokenize", {"prompt": "def f", "add_special_tokens": False})
    plain = server.answer("/tokenize", {"content": "def f"})
    assert told == {**plain, "count": len(plain["tokens"]), "max_model_len": 512}
    with_own = server.answer("/tokenize", {"prompt": "def f"})["tokens"]
    assert with_own == server.answer("/tokenize", {"content": "def f", "add_special": True})["tokens"]
    assert server.answer("/detokenize", {"tokens": plain["tokens"]})["prompt"] == "def f"
    info, props = server.get("/tokenizer_info").json(), server.get("/props").json()
    assert info == {name: props[name] or None for name in ("bos_token", "eos_token", "chat_template")}
    body = {"prompt": "def f", "max_tokens": 1, "return_token_ids": True}
    bare = server.answer(COMPLETIONS, {**body, "add_special_tokens": False})["choices"][0]["prompt_token_ids"]
    assert bare == plain["tokens"]
    assert server.answer(COMPLETIONS, body)["choices"][0]["prompt_token_ids"] == with_own
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "add_special_tokens": True}
    assert server.answer(CHAT, chat)["warnings"] == ["add_special_tokens changes nothing on this route"]


def test_what_watches_over_vllm(server: Hosted) -> None:
    assert server.get("/version").json() == {"version": paceline.__version__}
    assert server.get("/ping").status_code == 200
    server.wait_for_nothing()
    assert server.get("/load").json() == {"server_load": 0}
