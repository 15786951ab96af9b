"""The fields of requests: what each does, and that none is read and then ignored without a word."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any, Final

import pytest
from pydantic import ValidationError

from paceline.server_options import ServerOptions
from paceline.serving.fields import HARMLESS, NEUTRAL
from paceline.serving.generation_request import GenerationRequest, read_generation_request
from paceline.serving.schema import MAX_TEXTS, ChatBody, CompletionBody, Speculative, TemplateBody
from tests.chat.conversing import CHATML
from tests.serving.hosted import Hosted, hosted, scripted
from tests.tiers import by_tier

PATHS: Final = ["/completion", "/v1/completions", "/v1/chat/completions"]
BASE: Final[dict[str, Any]] = {"prompt": "abc", "n_predict": 30, "seed": 7}
CHAT: Final[dict[str, Any]] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 20, "seed": 7}

# Values that change nothing, and values that would.
VALUES: Final[dict[str, tuple[list[Any], list[Any]]]] = {
    "mirostat": ([0], [1, 2]),
    "adaptive_target": ([-1, -1.0], [0.5]),
    "min_keep": ([0, 1], [2]),
    "best_of": ([1], [2]),
    "suffix": ([""], ["after"]),
    "use_beam_search": ([False], [True]),
    "length_penalty": ([1, 1.0], [1.2]),
    "reasoning.exclude": ([False], [True]),
    "structured_outputs.disable_any_whitespace": ([False], [True]),
    "bad_words": ([[]], [["a"]]),
    "modalities": ([["text"]], [["text", "audio"]]),
    "mcp_servers": ([[]], [[{"type": "url", "url": "http://127.0.0.1", "name": "a"}]]),
    "audio": ([{}], [{"voice": "a"}]),
    "web_search_options": ([{}], [{"search_context_size": "low"}]),
    "repetition_penalty": ([1, 1.0], [1.1]),
    "truncate_prompt_tokens": ([-1], [5]),
    "chat_template": ([""], ["{{ messages }}"]),
    "tfs_z": ([1, 1.0], [0.9]),
    "lora": ([[]], [[{"id": 0, "scale": 1.0}]]),
    "grammar_lazy": ([False], [True]),
    "grammar_triggers": ([[]], [[{"type": 0, "value": "a"}]]),
    "chat_format": ([0], [1]),
    "chat_parser": ([""], ["a"]),
    "multimodal_data": ([[]], [["aGk="]]),
    "functions": ([[]], [[{"name": "f"}]]),
    "function_call": (["none", "auto"], [{"name": "f"}]),
}
REALISTIC: Final[dict[str, Any]] = {"user": "me", "store": False, "metadata": {"a": "b"}, "id_slot": 3, "n_keep": 5}


@pytest.fixture(scope="module")
def strict() -> Iterator[Hosted]:
    with hosted(scripted, ServerOptions(strict_fields=True, max_choices=3, max_stop=2)) as running:
        yield running


def text_of(server: Hosted, **fields: Any) -> str:
    return str(server.answer("/completion", {**BASE, **fields})["content"])


# What is known and not built, what changes nothing, and what nobody knows


def test_every_field_that_is_known_and_not_built_is_looked_at_here() -> None:
    assert set(VALUES) == set(NEUTRAL)


@pytest.mark.parametrize("name", VALUES)
def test_a_field_that_is_not_built_may_have_the_value_that_changes_nothing(strict: Hosted, name: str) -> None:
    neutral, others = VALUES[name]
    for value in (*neutral, None):
        assert "warnings" not in strict.answer("/completion", {**BASE, "n_predict": 1, name: value})
    for value in others:
        error = strict.refusal("/completion", {**BASE, name: value})
        assert error["param"] == name
        assert error["message"].startswith(name)


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_change_nothing_of_an_answer_are_taken(strict: Hosted, path: str) -> None:
    body = CHAT if "chat" in path else BASE
    plain, told = (
        strict.answer(path, {**body, **fields}) for fields in ({}, {**dict.fromkeys(HARMLESS, 1), **REALISTIC})
    )
    (warning,) = told.pop("warnings")
    assert warning.startswith("n_cache_reuse changes nothing: what stands behind a change was read after another text")
    assert "warnings" not in strict.answer(path, {**body, "n_cache_reuse": 0})
    assert told.get("content") == plain.get("content")
    assert told.get("choices") == plain.get("choices")


@pytest.mark.parametrize("path", PATHS)
def test_names_that_nobody_knows_are_named_in_the_answer(server: Hosted, strict: Hosted, path: str) -> None:
    body = {**(CHAT if "chat" in path else BASE), "temprature": 0.1, "frobnicate": None, "zap": {"a": 1}}
    expected = ["unknown field 'temprature' was ignored", "unknown field 'zap' was ignored"]
    assert server.answer(path, body)["warnings"] == expected
    streamed = [chunk["warnings"] for chunk in server.chunks(path, body) if "warnings" in chunk]
    assert streamed == [expected]
    error = strict.refusal(path, body)
    assert error["param"] == "temprature"
    assert "--strict-fields" in error["message"]


def test_null_is_the_same_as_leaving_a_field_out(server: Hosted) -> None:
    known = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "stop", "n", "stream"]
    known += ["max_tokens", "max_completion_tokens", "logit_bias", "samplers", "n_probs", "logprobs", "cache_prompt"]
    known += ["ignore_eos", "speculative", "speculative.n_max", "echo", "response_fields", "sse_ping_interval"]
    assert text_of(server, **dict.fromkeys(known)) == text_of(server)
    assert "warnings" not in server.answer("/completion", {**BASE, **dict.fromkeys(known)})


# How much is generated


@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("path", PATHS)
def test_the_number_of_tokens_has_three_names(server: Hosted, path: str, name: str) -> None:
    body = {**(CHAT if "chat" in path else BASE), "n_predict": None, "max_tokens": None, "ignore_eos": True}
    for count in (1, 5, 5.0):
        assert server.answer(path, {**body, name: count})["timings"]["predicted_n"] == count
    error = server.refusal(path, {**body, name: -2})
    assert error["param"] == name
    assert server.refusal(path, {**body, name: "5"})["param"] == name
    assert server.refusal(path, {**body, name: True})["param"] == name


def test_of_several_names_the_first_in_a_fixed_order_counts(server: Hosted) -> None:
    body = {"prompt": "abc", "ignore_eos": True}
    lengths = {"n_predict": 3, "max_completion_tokens": 5, "max_tokens": 7}
    for name in list(lengths):
        assert server.answer("/completion", {**body, **lengths})["tokens_predicted"] == lengths.pop(name)


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens_reads_the_prompt_alone(server: Hosted, path: str) -> None:
    body = {**(CHAT if "chat" in path else BASE), "n_predict": 0, "max_tokens": None, "n_probs": 2}
    answer = server.answer(path, body)
    assert answer["timings"]["predicted_n"] == 0
    choice = answer["choices"][0] if "choices" in answer else answer
    assert (choice.get("content", choice.get("text")) or choice.get("message", {}).get("content") or "") == ""
    assert not choice.get("logprobs")
    assert not choice.get("completion_probabilities")
    if "usage" in answer:
        assert answer["usage"]["completion_tokens"] == 0
    for chunk in server.chunks(path, body):
        for part in chunk.get("choices", [chunk]):
            said = part.get("content") or part.get("text") or part.get("delta", {}).get("content")
            assert not said


def test_minus_one_writes_until_the_model_ends_or_the_context_does() -> None:
    with hosted(lambda: scripted(context_length=100)) as running:
        answer = running.answer("/completion", {**BASE, "n_predict": -1, "ignore_eos": True})
        assert answer["tokens_evaluated"] + answer["tokens_predicted"] in (100, 101)
        assert answer["truncated"]
        assert answer["stop_type"] == "limit"
        ended = running.answer("/completion", {**BASE, "n_predict": -1, "logit_bias": {"257": 100}})
        assert (ended["content"], ended["stop_type"], ended["truncated"]) == ("", "eos", False)


# How tokens are chosen


def test_the_order_of_sampling_steps_is_obeyed(server: Hosted) -> None:
    hot = {"temperature": 3.0, "top_p": 0.6, "top_k": 0, "min_p": 0.0, "n_predict": 60}
    last, first = (
        text_of(server, **hot, samplers=order) for order in (["top_p", "temperature"], ["temperature", "top_p"])
    )
    assert last != first
    assert text_of(server, **hot) == last
    assert text_of(server, **hot, samplers="pt") == last
    assert text_of(server, **hot, samplers="tp") == first
    assert text_of(server, **hot, samplers=["temp", "top_p"]) == first
    assert text_of(server, **hot, samplers=["dry", "typ_p", "temperature", "xtc", "top_p"]) == first
    settings = server.answer("/completion", {**BASE, "samplers": "tp"})["generation_settings"]
    assert settings["samplers"][:2] == ["temperature", "top_p"]


@pytest.mark.parametrize(
    ("name", "letter", "value", "off"),
    [
        *(("temperature", "t", 0.1, 1.0), ("top_k", "k", 1, 0), ("top_p", "p", 0.01, 1.0), ("min_p", "m", 0.99, 0.0)),
        *(("top_n_sigma", "s", 0.5, -1.0), ("typical_p", "y", 0.1, 1.0), ("dynatemp_range", "t", 0.9, 0.0)),
        *(("xtc_probability", "x", 1.0, 0.0), ("dry_multiplier", "d", 90.0, 0.0)),
    ],
)
def test_a_step_that_is_not_named_is_switched_off(
    server: Hosted, name: str, letter: str, value: float, off: float
) -> None:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n_predict": 60, "dry_allowed_length": 1}
    acts, idle = text_of(server, **{**neutral, name: value}), text_of(server, **neutral)
    assert acts != idle
    others = "edskypmxt".replace(letter, "")
    assert text_of(server, **{**neutral, name: value}, samplers=others) == idle
    assert text_of(server, **{**neutral, name: value}, samplers=[]) == idle
    assert text_of(server, **{**neutral, name: value}, samplers=letter) == acts
    answer = server.answer("/completion", {**BASE, **neutral, name: value, "samplers": others})
    assert answer["generation_settings"][name] == off


def test_penalties_are_a_step_too(server: Hosted) -> None:
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n_predict": 60}
    penalised = {**neutral, "presence_penalty": 5.0, "frequency_penalty": 2.0}
    assert text_of(server, **penalised) != text_of(server, **neutral)
    assert text_of(server, **penalised, samplers="kpmt") == text_of(server, **neutral)
    assert text_of(server, **penalised, samplers="epkmt") != text_of(server, **neutral)


def test_dry_stops_at_its_sequence_breakers(server: Hosted) -> None:
    # Each letter is a token, and the last ones stood before: "c" would go on with them.
    body = {**BASE, "prompt": "abcab", "n_predict": 1, "temperature": 0, "logit_bias": {"c": 90, "d": 50}}
    assert text_of(server, **body) == "c"
    dry = {**body, "dry_multiplier": 100.0}
    assert text_of(server, **dry) == "d"
    for breakers in (["b"], "b", ["xx", "ab"]):
        assert text_of(server, **dry, dry_sequence_breakers=breakers) == "c"
    assert text_of(server, **dry, dry_sequence_breakers=[]) == "d"
    for path, asked in (("/v1/completions", body), ("/v1/chat/completions", {**CHAT, **body, "max_tokens": 1})):
        settings = server.answer(path, {**asked, "dry_multiplier": 1, "dry_sequence_breakers": ["b"], "verbose": True})
        assert settings["__verbose"]["generation_settings"]["dry_sequence_breakers"] == ["b"]


def test_what_is_sampled_from_can_be_seen(server: Hosted) -> None:
    body = {**BASE, "n_predict": 5, "n_probs": 5, "post_sampling_probs": True}
    for fields, most in (
        ({"top_k": 2}, 2),
        ({"top_k": 2, "samplers": "pmt", "min_p": 0, "top_p": 1}, 5),
        ({"top_n_sigma": 0.01}, 1),
    ):
        entries = server.answer("/completion", {**body, **fields})["completion_probabilities"]
        assert max(len(entry["top_probs"]) for entry in entries) == most
        assert all(0 < entry["prob"] <= 1 for entry in entries)
    raw = server.answer("/completion", {**body, "post_sampling_probs": False, "top_k": 2})["completion_probabilities"]
    assert {len(entry["top_logprobs"]) for entry in raw} == {5}


@pytest.mark.parametrize("bias", [{"102": False}, {"f": False}, [[102, False]], [["f", -100]], [[102.0, -100]]])
def test_a_token_is_banned_by_id_or_text(server: Hosted, bias: Any) -> None:
    assert "f" in text_of(server)
    assert "f" not in text_of(server, logit_bias=bias)


@pytest.mark.parametrize(
    "biases",
    [
        *({"--5": 1}, {"²": 1}, {"-": 1}, {"1" * 60: 1}, {"1" * 5000: 1}, {"": 1}, [["--5", 1]], [[5, False]]),
        *([["a", -1.5], [6, 2]], {"5": False, "6": 1e9}, [], {}, None),
    ],
    ids=lambda biases: str(biases)[:20],
)
def test_biases_that_can_be_added_are_taken(server: Hosted, biases: Any) -> None:
    """Also of texts that look like ids."""
    assert server.answer("/completion", {**BASE, "n_predict": 2, "logit_bias": biases})["tokens_predicted"] == 2


def test_the_least_that_is_divided_by_and_the_largest_bias_at_once_are_sampled(server: Hosted) -> None:
    extreme = {"temperature": 1e-20, "repeat_penalty": 1e-6, "logit_bias": [[65, 1e9], [66, -1e9]]}
    assert text_of(server, n_predict=3, n_probs=2, post_sampling_probs=True, **extreme) == "AAA"


def test_the_end_of_an_answer_can_be_ignored(server: Hosted) -> None:
    body = {**BASE, "n_predict": 300, "logit_bias": {"257": 4}}
    assert server.answer("/completion", body)["stop_type"] == "eos"
    longer = server.answer("/completion", {**body, "ignore_eos": True})
    assert longer["tokens_predicted"] == 300
    assert longer["generation_settings"]["logit_bias"] == [{"token": 257, "bias": None}]


def test_a_seed_of_minus_one_draws_one_and_tells_it(server: Hosted) -> None:
    drawn = [server.answer("/completion", {**BASE, "seed": seed}) for seed in (-1, None)]
    seeds = [answer["generation_settings"]["seed"] for answer in drawn]
    assert len(set(seeds)) == 2
    for answer, seed in zip(drawn, seeds, strict=True):
        assert text_of(server, seed=seed) == answer["content"]


# What is out of range or of another kind


REFUSED: Final[dict[str, list[Any]]] = {
    "temperature": [-0.1, 101, "1", True, 5e-324, 1e-21],
    "top_k": [-1, 1.5],
    "top_p": [0, 1.1],
    "min_p": [-0.1, 2],
    "repeat_penalty": [0, 1e-320, 1e-7],
    "presence_penalty": [101],
    "frequency_penalty": [-101],
    "repeat_last_n": [-2],
    "penalty_last_n": [-2],
    "seed": ["x"],
    "n": [0, 4, "2"],
    "n_cmpl": [4],
    "stop": [5, [5], ["a", "b", "c"]],
    "samplers": ["q", ["top_nonsense"], ["nucleus", "Top-P"], 5, "k" * (MAX_TEXTS + 1)],
    "typical_p": [1.1],
    "top_n_sigma": ["1"],
    "dynatemp_range": [-1],
    "dry_base": [0.9],
    "dry_allowed_length": [1.5],
    "dry_penalty_last_n": [-2],
    "dry_sequence_breakers": [[""], ["x" * 41], [5]],
    "xtc_probability": [2],
    "xtc_threshold": [True],
    "ignore_eos": ["yes"],
    "cache_prompt": ["yes"],
    "stream": ["yes"],
    "stream_options": [5],
    "n_probs": [-1, 1001],
    "logprobs": [-1, 1001],
    "response_fields": [5, ["a"] * (MAX_TEXTS + 1)],
    "cache_salt": [5],
    "speculative": [5],
    "return_rounds": ["yes"],
    "logit_bias": [
        *({"5000": 1}, {"-5": 1}, {"5": True}, {"5": "x"}, {"5": None}, {"5": []}, 5, "5", [5], [[5]], [[1]], [None]),
        *([[5000, 1]], [[-1, False]], [[5, 1, 2]], [[5, True]], [[True, 1]], [[5.5, 1]]),
        *({"5": -1e308, "6": 1e308}, {"5": 1.1e9}, {f"text {number}": 1 for number in range(MAX_TEXTS + 1)}),
    ],
    "prompt": [
        *(None, "", [], {}, 5, [[]], [1.5], [5000], [-1], ["a", "b", "c", "d"], ["a", 1] * (MAX_TEXTS + 1)),
        *({"prompt_string": 5}, {"prompt_string": "a", "multimodal_data": ["aGk="]}),
    ],
}
REFUSED_OF_CHATS: Final[dict[str, list[Any]]] = {
    "messages": [
        *(None, [], "hello", [5], [{"content": "no role"}]),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
    "top_logprobs": [3],
    "chat_template_kwargs": [
        *(5, {"enable_thinking": "yes"}, {"messages": []}),
        {f"name {number}": 1 for number in range(1001)},
    ],
    "reasoning_format": ["loud"],
    "reasoning_budget_tokens": [-2],
    "thinking_budget_tokens": [-2],
    "reasoning_effort": [5],
    "enable_thinking": ["yes"],
    "thinking": [5],
    "thinking.type": ["always", ["enabled"], {}],
    "thinking.budget_tokens": [-2, "many"],
    "reasoning": ["low"],
    "reasoning.enabled": [1],
    "reasoning.effort": [5],
    "reasoning.max_tokens": [1.5],
    "reasoning.exclude": [True],
    "reasoning.zap": [5],
    "continue_final_message": [True],
    "max_completion_tokens": [-2],
}


@pytest.mark.parametrize(
    ("path", "name"), [*((PATHS[0], name) for name in REFUSED), *((PATHS[2], name) for name in REFUSED_OF_CHATS)]
)
def test_a_value_that_cannot_be_used_names_its_field(strict: Hosted, path: str, name: str) -> None:
    outer, _, inner = name.partition(".")
    base, values = (BASE, REFUSED) if path == PATHS[0] else (CHAT, REFUSED_OF_CHATS)
    for value in values[name]:
        error = strict.refusal(path, {**base, outer: {inner: value} if inner else value})
        assert (error["param"], error["type"]) == (name, "invalid_request_error"), value
        assert len(error["message"]) < 300
        assert_no_flag_for_a_field(error["message"])


def test_a_body_has_so_many_fields_at_most(server: Hosted) -> None:
    error = server.refusal("/completion", {**BASE, **{f"field {number}": 1 for number in range(1000)}})
    assert (error["param"], len(error["message"]) < 300) == (None, True)


def test_a_few_of_many_unknown_fields_are_named(server: Hosted) -> None:
    unknown = {f"field {number}": 1 for number in range(99)} | {"x" * 1000: 1}
    warnings = server.answer("/completion", {**BASE, "n_predict": 1, **unknown})["warnings"]
    assert (len(warnings), warnings[0]) == (17, "unknown field 'field 0' was ignored")
    assert warnings[-1] == "84 more unknown fields were ignored"


@pytest.mark.parametrize(
    ("body", "field"),
    [(CompletionBody, "stop"), (CompletionBody, "response_fields"), (ChatBody, "messages"), (TemplateBody, "tools")],
)
def test_of_a_long_list_the_first_wrong_item_ends_the_look(body: Any, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        body.model_validate({"prompt": "a", "messages": [], field: [1] * 1000})
    # One for each kind that the field may be.
    assert caught.value.error_count() <= 2


def test_prompts_and_answers_to_each_are_bounded_together(strict: Hosted) -> None:
    body = {"n": 1, "n_predict": 1}
    assert len(strict.answer("/completion", {**body, "prompt": ["a", "b", "c"]})) == 3
    error = strict.refusal("/completion", {**body, "prompt": ["a", "b"], "n": 2})
    assert (error["param"], "--max-n" in error["message"]) == ("prompt", True)


FIELDS: Final = {*ChatBody.model_fields, *CompletionBody.model_fields, *NEUTRAL, *HARMLESS}
WITHIN: Final[dict[str, list[str]]] = {
    "thinking": ["type", "budget_tokens", "display"],
    "reasoning": ["enabled", "effort", "max_tokens", "exclude"],
    "tool_choice": ["type", "function", "name", "mode", "tools", "allowed_tools"],
    "response_format": ["type", "schema", "json_schema"],
    "structured_outputs": ["json", "json_object", "regex", "choice", "grammar"],
    "stream_options": ["include_usage"],
    "speculative": list(Speculative.model_fields),
    "chat_template_kwargs": ["enable_thinking", "thinking", "messages"],
}
OF_EVERY_KIND: Final[list[Any]] = [True, -5, 1.5, "x", [], [1], ["x"], [[]], [{}], {}, {"a": 1}, {"type": [1]}]


@pytest.mark.parametrize("name", [*sorted(FIELDS), *(f"{o}.{i}" for o, inner in WITHIN.items() for i in inner)])
def test_no_value_of_any_field_is_more_than_the_server_can_take(server: Hosted, name: str) -> None:
    outer, _, inner = name.partition(".")
    asking = [(PATHS[0], BASE), (PATHS[2], CHAT)] * 2
    for number, value in enumerate(OF_EVERY_KIND, len(name)):
        for path, body in asking[number % 2 :][: by_tier(2, quick=1)]:
            asked = {**body, "max_tokens": 1, "n_predict": None, outer: {inner: value} if inner else value}
            assert server.post(path, asked).status_code in (200, 400), (path, value)


SERVER_FLAGS = {"--max-n", "--max-stop", "--strict-fields", "--chat-template", "--chat-template-file"}
"""Flags that say what to do to the server, for which there is no field."""


def assert_no_flag_for_a_field(message: str) -> None:
    assert set(re.findall(r"(?<!\w)--?(?!inf\b)[a-z][a-z-]*", message)) <= SERVER_FLAGS, message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"temperature": -1}, "(temperature, 0 decodes greedily)"),
        ({"temperature": 1e-300}, "(temperature)"),
        ({"penalty_last_n": -3}, "(penalty_last_n, -1 counts all tokens)"),
        ({"repeat_last_n": -3}, "(repeat_last_n, -1 counts all tokens)"),
        ({"speculative": {"draft_max": -3}}, "(speculative.draft_max, speculative.off drafts nothing)"),
        ({"speculative": {"drafters": []}}, "without speculation (speculative.off)"),
        ({"grammar": 'root ::= "a"', "ignore_eos": True}, "leave out ignore_eos"),
        ({"stop": ["--temp"] * 3}, "start the server with a larger --max-stop"),
        ({"samplers": ["`temperature=[1]`"]}, "unknown sampling step '`temperature=[1]`'"),
        ({"samplers": ["a `temperature=[1]` b"]}, "unknown sampling step"),
        ({"seed": "a `temperature={[]: 1}`"}, "it should be"),
    ],
)
def test_an_error_speaks_of_fields_and_not_of_flags(strict: Hosted, body: dict[str, Any], said: str) -> None:
    message = strict.refusal("/completion", {**BASE, **body})["message"]
    assert said in message
    assert_no_flag_for_a_field(message)


def test_other_requests_go_on_while_a_long_body_is_looked_at(server: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_loop: list[bool] = []

    def looked_at(*arguments: Any, **options: Any) -> GenerationRequest:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            on_the_loop.append(False)
        else:
            on_the_loop.append(True)
        return read_generation_request(*arguments, **options)

    monkeypatch.setattr("paceline.serving.app.read_generation_request", looked_at)
    message = {"role": "user", "content": "abc"}
    for body in ({"messages": [message]}, {"messages": [message] * 5000}, {"messages": [message], "a" * 100_000: 1}):
        server.post("/v1/chat/completions", {**CHAT, **body})
    assert on_the_loop == [True, False, False]


def test_the_field_without_which_a_conversation_could_be_used_is_at_fault() -> None:
    told = "{% if style is defined %}{{ raise_exception('no style') }}{% endif %}" + CHATML
    with hosted(lambda: scripted(told)) as running:
        error = running.refusal("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"style": "odd"}})
        assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("body", ["", "[]", "5", "{", '{"prompt": NaN}', '{"prompt": "a", "prompt": "b"}', "\xff"])
def test_a_body_that_is_no_object_is_refused(server: Hosted, body: str) -> None:
    response = server.web.post(f"{server.url}/completion", content=body.encode("latin-1"))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_need_not_say_that_it_is_json(server: Hosted) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    body = b'{"prompt": "abc", "n_predict": 30, "seed": 7}'
    response = server.web.post(f"{server.url}/completion", content=body, headers=headers)
    assert response.json()["content"] == text_of(server)


def test_a_query_that_cannot_be_used_is_refused_like_a_body(server: Hosted) -> None:
    response = server.get("/slots?fail_on_no_slot=many")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "fail_on_no_slot"


# How an answer is sent


def test_fields_of_a_native_answer_can_be_chosen(server: Hosted) -> None:
    fields = ["content", "generation_settings/n_predict", "no/such", "speculative/rounds"]
    answer = server.answer("/completion", {**BASE, "response_fields": fields})
    assert set(answer) == {"content", "generation_settings/n_predict", "speculative/rounds"}
    assert answer["generation_settings/n_predict"] == 30


def test_token_ids_are_sent_where_they_are_asked_for(server: Hosted) -> None:
    answer = server.answer("/completion", {**BASE, "return_tokens": True})
    assert len(answer["tokens"]) == answer["tokens_predicted"]
    assert server.answer("/detokenize", {"tokens": answer["tokens"]})["content"] == answer["content"]
    streamed = server.chunks("/completion", {**BASE, "return_tokens": True})
    assert [token for chunk in streamed for token in chunk["tokens"]] == answer["tokens"]
    assert server.answer("/completion", BASE)["tokens"] == []


def test_the_progress_of_a_prompt_is_sent_before_its_answer(server: Hosted) -> None:
    body = {**BASE, "prompt": "progress " * 90, "return_progress": True, "timings_per_token": True}
    for cached in (0, 809):
        chunks = server.chunks("/completion", body)
        progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
        assert [each["total"] for each in progress] == [810] * len(progress)
        assert progress[0]["cache"] == progress[0]["processed"] == cached
        assert progress[-1]["processed"] == 810
        assert all("timings" in chunk for chunk in chunks)


def test_a_verbose_answer_has_its_prompt_and_settings(server: Hosted) -> None:
    answer = server.answer("/v1/chat/completions", {**CHAT, "verbose": True})
    assert answer["__verbose"]["prompt"] == "<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n"
    assert answer["__verbose"]["generation_settings"]["n_predict"] == 20
    assert "__verbose" not in server.answer("/v1/chat/completions", CHAT)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"content": "abc"}),
        ("/tokenize", {"content": "abc", "with_pieces": True}),
        ("/detokenize", {"tokens": [97]}),
        ("/apply-template", CHAT),
        ("/v1/chat/completions/control", {"id": "chatcmpl-none", "action": "reasoning_end"}),
    ],
)
def test_small_routes_tell_names_that_nobody_knows_too(
    server: Hosted, strict: Hosted, path: str, body: dict[str, Any]
) -> None:
    assert "warnings" not in strict.answer(path, {**body, "model": "any", "zap": None})
    assert server.answer(path, {**body, "zap": 1})["warnings"] == ["unknown field 'zap' was ignored"]
    assert strict.refusal(path, {**body, "zap": 1})["param"] == "zap"


# What a route does nothing with, and what several choices took


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/completion", "echo", True),
        ("/v1/completions", "return_tokens", True),
        ("/v1/completions", "response_fields", ["content"]),
        ("/completion", "stream_options", {"include_usage": True}),
        ("/completion", "return_token_ids", True),
    ],
)
def test_a_field_that_changes_nothing_on_a_route_is_told(server: Hosted, path: str, field: str, value: Any) -> None:
    assert server.answer(path, {**BASE, field: value})["warnings"] == [f"{field} changes nothing on this route"]


def test_options_of_a_stream_that_nobody_knows_are_told(server: Hosted, strict: Hosted) -> None:
    body = {**BASE, "stream_options": {"include_usage": True, "include_obfuscation": False, "zap": 1}}
    told = server.chunks("/v1/completions", body)[-1]["warnings"]
    assert told == ["unknown field 'stream_options.zap' was ignored"]
    assert strict.refusal("/v1/completions", body)["param"] == "stream_options.zap"


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}}
TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
USER = {"role": "user", "content": "abc"}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"structured_outputs": {"regx": "a+"}}, "structured_outputs.regx"),
        ({"response_format": {"typ": "json_object"}}, "response_format.typ"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strct": True}}},
            "response_format.json_schema.strct",
        ),
        ({"tools": [TOOL, {**TOOL, "strict": True}]}, "tools[1].strict"),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "paramters": {}}}]}, "tools[0].function.paramters"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}, "nam": "f"}},
            "tool_choice.nam",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "a", "toolcalls": []}, USER]}, "messages[1].toolcalls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": ""}]}]},
            "messages[0].content[0].txt",
        ),
        ({"messages": [{**USER, "zap": 1}] * 50}, "messages[0].zap"),
    ],
)
def test_what_nobody_knows_within_a_field_is_told(
    server: Hosted, strict: Hosted, fields: dict[str, Any], name: str
) -> None:
    paths, body = ["/v1/chat/completions"], {**CHAT, **fields}
    if name.startswith(("messages", "tools")):
        paths.append("/apply-template")
    for path in paths:
        warnings = server.answer(path, body)["warnings"]
        assert [said for said in warnings if "unknown" in said] == [f"unknown field '{name}' was ignored"]
        assert strict.refusal(path, body)["param"] == name


def test_what_clients_send_within_fields_is_known(server: Hosted) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}
    said = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": [call],
    }
    cached = {"type": "text", "text": "abc", "cache_control": {"type": "ephemeral"}}
    body = {
        **CHAT,
        "messages": [
            USER,
            {**said, "function_call": None, "reasoning_content": "a"},
            {"role": "tool", "tool_call_id": "a", "name": "f", "content": "b"},
            {"role": "user", "name": "me", "content": [cached]},
        ],
        "tools": [TOOL],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "description": "b", "schema": SCHEMA}},
        "tool_choice": "none",
        "chat_template_kwargs": {"anything": 1},
    }
    warnings = server.answer("/v1/chat/completions", body)["warnings"]
    assert warnings == ["tools: the model's chat template knows none, so the model is told of none"]


def test_within_a_field_too_what_would_change_the_answer_is_refused(server: Hosted) -> None:
    asked = {"json": SCHEMA, "disable_any_whitespace": False}
    assert "warnings" not in server.answer("/completion", {**BASE, "structured_outputs": asked})
    refusal = server.refusal("/completion", {**BASE, "structured_outputs": {**asked, "disable_any_whitespace": True}})
    assert refusal["param"] == "structured_outputs.disable_any_whitespace"


@pytest.mark.parametrize("seed", [-5, -(2**31), -2, -(2**32) + 7])
def test_a_negative_seed_is_one_of_32_bits(server: Hosted, seed: int) -> None:
    body = {**BASE, "temperature": 1.0}
    answer, same = (server.answer("/completion", {**body, "seed": given}) for given in (seed, seed % 2**32))
    assert answer["generation_settings"]["seed"] == seed % 2**32
    assert answer["content"] == same["content"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_of_several_choices_tells_its_own_times(server: Hosted, path: str) -> None:
    body = {**(CHAT if "chat" in path else BASE), "n": 2, "temperature": 1.0, "seed": 1}
    answer = server.answer(path, body)
    assert answer["usage"]["completion_tokens"] == sum(one["timings"]["predicted_n"] for one in answer["choices"])
    assert answer["timings"] == answer["choices"][0]["timings"]
    told = [chunk for chunk in server.chunks(path, body) if "timings" in chunk]
    assert len(told) == 2


def test_speculation_that_is_off_is_told_as_plain(server: Hosted) -> None:
    told = server.answer("/completion", {**BASE, "speculative": {"off": True}})
    assert told["speculative"]["policy"] == "plain"
    for field, value in (("speculative", {"draft_max": 0}), ("speculative.types", "none")):
        settings = server.answer("/completion", {**BASE, field: value})["generation_settings"]
        assert settings["speculative.types"] == "none"
    settings = server.answer("/completion", {**BASE, "speculative.types": "lookup"})["generation_settings"]
    assert settings["speculative.types"] == "lookup"
    assert "draft" in server.refusal("/completion", {**BASE, "speculative.type": "ngram-map"})["message"]


def test_a_number_of_log_probabilities_that_is_0_needs_none_of_them(server: Hosted) -> None:
    body = {**CHAT, "logprobs": False, "top_logprobs": 0}
    assert server.answer("/v1/chat/completions", body)["choices"][0].get("logprobs") is None
    entries = server.answer("/v1/chat/completions", {**body, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert entries
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in entries)


def test_log_probabilities_of_llama_server_stand_beside_a_logprobs_of_0(server: Hosted) -> None:
    told = server.answer("/completion", {**BASE, "logprobs": 0, "n_probs": 2})["completion_probabilities"]
    assert {len(one["top_logprobs"]) for one in told} == {2}
