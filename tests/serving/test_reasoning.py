"""Answers that reason: where their reasoning comes back, and how a client ends it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import httpx
import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.engines.scripted import LogitFunction
from tests.chat.conversing import BEGUN, CHATML, EFFORT, THINKING
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.reasoning import ANSWER, reasoning, thinking
from tests.serving.scripted import END, NO_THINK, SIZE, Turnstile, writing_model
from tests.timing import WAIT_S

CHAT: Final = "/v1/chat/completions"
BODY: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "temperature": 0.0,
    "max_tokens": 400,
}


@pytest.mark.parametrize("template", [THINKING, BEGUN])
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_comes_apart_from_the_answer(template: str, stream: bool) -> None:
    with thinking(template) as server:
        reply = message_of(server, BODY, stream=stream)
        assert (reply["reasoning_content"].strip(), reply["content"]) == ("h" * 20, ANSWER)
        kept = message_of(server, {**BODY, "reasoning_format": "none"}, stream=stream)
        assert "reasoning_content" not in kept
        assert kept["content"].replace("\n", "") == f"<think>{'h' * 20}</think>{ANSWER}"
        usage = server.answer(CHAT, BODY)["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == pytest.approx(21, abs=1)


def message_of(server: Hosted, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    if not stream:
        message: dict[str, Any] = server.answer(CHAT, body)["choices"][0]["message"]
        return message
    found: dict[str, str] = {}
    for chunk in server.chunks(CHAT, body):
        for choice in chunk["choices"]:
            for name, text in choice["delta"].items():
                if text is not None and name != "role":
                    found[name] = found.get(name, "") + text
    return found


def test_reasoning_has_a_budget() -> None:
    own = ("reasoning_budget_tokens", "thinking_budget_tokens")
    asking: list[dict[str, Any]] = [{name: budget} for budget in (0, 5) for name in own]
    asking += [{"thinking": {"budget_tokens": 5.0}}, {"reasoning": {"max_tokens": 5}}]
    with thinking() as server:
        for asked, budget in zip(asking, (0, 0, 5, 5, 5, 5), strict=True):
            plain, drafted = (
                server.answer(CHAT, {**BODY, **asked, "speculative": {"off": off}})["choices"] for off in (True, False)
            )
            assert plain == drafted
            reply = plain[0]["message"]
            assert (reply.get("reasoning_content") or "").count("h") == budget
            assert reply["content"] == ANSWER


@contextmanager
def running_answer(
    model: LogitFunction, **fields: Any
) -> Iterator[tuple[Turnstile, Iterator[str], Callable[[], dict[str, Any]]]]:
    """Yield what lets the rounds of an answer through, the lines of its stream, and what ends its reasoning."""
    gate = Turnstile(model)
    gate.let(10)  # a stream begins with its first token
    body = {**BODY, **fields, "max_tokens": -1, "stream": True}
    with (
        hosted(lambda: scripted(THINKING, target=gate, drafts=False, context_length=10**6)) as server,
        ThreadPoolExecutor(1) as threads,
        httpx.Client(timeout=WAIT_S) as other,
        server.web.stream("POST", server.url + CHAT, json=body) as response,
    ):
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))
        answer_id = json.loads(next(lines))["id"]

        def end_reasoning() -> dict[str, Any]:
            control = {"id": answer_id, "action": "reasoning_end"}
            asked = threads.submit(other.post, f"{server.url}{CHAT}/control", json=control)
            gate.let_until(asked.done)
            result: dict[str, Any] = asked.result().json()
            return result

        try:
            yield gate, lines, end_reasoning
        finally:
            gate.open()


def test_a_client_ends_the_reasoning_of_a_running_answer() -> None:
    with running_answer(reasoning(10**6)) as (gate, lines, end_reasoning):
        assert end_reasoning()["success"] is True
        gate.open()
        deltas = [choice["delta"] for line in lines if line != "[DONE]" for choice in json.loads(line)["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
        assert "h" in "".join(delta.get("reasoning_content") or "" for delta in deltas)
        assert end_reasoning() == {"success": False, "message": "no active completion for this id"}


def test_an_answer_that_does_not_reason_says_so() -> None:
    with running_answer(writing_model(), ignore_eos=True) as (_, _, end_reasoning):
        assert end_reasoning() == {"success": False, "message": "the answer does not reason now"}


# Settings that clients send whatever the model is

NOTHING_OF_REASONING: Final = "changed nothing: the model's chat template does not support reasoning"
NOTHING_OF_LEVELS: Final = "changed nothing: the model's chat template does not support levels of reasoning"

OFF: Final[tuple[dict[str, Any], ...]] = (
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": True}, "reasoning_effort": "none"},
)
"""Ways to say that nothing is to be reasoned."""


@pytest.mark.parametrize(
    "asked",
    [
        *OFF,
        *({name: budget} for name in ("thinking_budget_tokens", "reasoning_budget_tokens") for budget in (0, 9, -1)),
        {"thinking": {"budget_tokens": 9}},
        {"reasoning": {"max_tokens": 0}},
        {"thinking": {"type": "adaptive"}},
        {"reasoning_effort": ""},
        {"thinking": {}, "reasoning": {}},
    ],
)
def test_what_changes_nothing_for_a_model_that_does_not_reason_is_taken(server: Hosted, asked: dict[str, Any]) -> None:
    body = {**BODY, "max_tokens": 5}
    answer = server.answer(CHAT, {**body, **asked})
    assert "warnings" not in answer
    assert answer["choices"] == server.answer(CHAT, body)["choices"]
    assert "warnings" not in server.answer("/apply-template", {**body, **asked})


@pytest.mark.parametrize(
    ("asked", "warning"),
    [
        ({"enable_thinking": True}, f"enable_thinking {NOTHING_OF_REASONING}"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, f"chat_template_kwargs {NOTHING_OF_REASONING}"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, f"thinking.type {NOTHING_OF_REASONING}"),
        ({"reasoning": {"enabled": True}}, f"reasoning.enabled {NOTHING_OF_REASONING}"),
        *(
            ({"reasoning_effort": level}, f"reasoning_effort {NOTHING_OF_LEVELS}")
            for level in ("minimal", "low", "high")
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, f"reasoning.effort {NOTHING_OF_LEVELS}"),
        ({"reasoning": {"zap": 1}}, "unknown field 'reasoning.zap' was ignored"),
        ({"thinking": {"zap": 1}}, "unknown field 'thinking.zap' was ignored"),
    ],
)
def test_what_a_model_cannot_follow_is_a_warning(server: Hosted, asked: dict[str, Any], warning: str) -> None:
    body = {**BODY, "max_tokens": 5}
    answer = server.answer(CHAT, {**body, **asked})
    assert answer["warnings"] == [warning]
    assert answer["choices"] == server.answer(CHAT, body)["choices"]
    assert [chunk["warnings"] for chunk in server.chunks(CHAT, {**body, **asked}) if "warnings" in chunk] == [[warning]]
    assert server.answer("/apply-template", {**body, **asked})["warnings"] == [warning]


@pytest.mark.parametrize("template", [THINKING, BEGUN])
def test_reasoning_is_switched_off_in_the_words_of_many_apis(template: str) -> None:
    with thinking(template) as server:
        for asked in OFF:
            answer = server.answer(CHAT, {**BODY, **asked})
            message = answer["choices"][0]["message"]
            assert (message.get("reasoning_content") or "", message["content"]) == ("", ANSWER), asked
            assert "warnings" not in answer
        # What a model does anyway.
        for asked in ({"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"reasoning": True}):
            answer = server.answer(CHAT, {**BODY, **asked})
            assert answer["choices"][0]["message"]["reasoning_content"].strip() == "h" * 20
            assert "warnings" not in answer


def test_a_level_that_a_template_refuses_is_a_warning() -> None:
    picky = "{% if reasoning_effort is defined and reasoning_effort not in ('low', 'high') %}"
    picky += "{{ raise_exception('low or high') }}{% endif %}" + EFFORT
    with hosted(lambda: scripted(picky)) as server:
        prompts = {}
        for level in ("low", "medium", "high"):
            told = server.answer("/apply-template", {**BODY, "reasoning_effort": level})
            refused = "reasoning_effort changed nothing: the model's chat template refuses the level 'medium'"
            assert told.get("warnings") == ([refused] if level == "medium" else None)
            prompts[level] = told["prompt"].split("\n")[0]
        assert prompts == {"low": "Effort: low", "medium": "Effort: ", "high": "Effort: high"}
        # With other messages it is those that are refused.
        error = server.refusal("/apply-template", {"messages": [], "reasoning_effort": "low"})
        assert error["param"] == "messages"


def test_a_template_may_know_none_as_a_level() -> None:
    own = "{% if reasoning_effort == 'none' %}</think>{% endif %}" + CHATML
    with hosted(lambda: scripted(own)) as server:
        prompt = server.answer("/apply-template", {**BODY, "reasoning_effort": "none"})["prompt"]
        assert prompt.startswith("</think>")


def test_a_form_that_cannot_be_streamed_is_refused() -> None:
    with thinking() as server:
        body = {**BODY, "reasoning_format": "deepseek-legacy"}
        told = server.answer(CHAT, body)["choices"][0]["message"]
        assert "<think>" in told["content"]
        assert told["reasoning_content"]
        error = server.refusal(CHAT, {**body, "stream": True})
        assert error["param"] == "reasoning_format"


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_that_is_continued_keeps_its_spaces(stream: bool) -> None:
    def logits(tokens: Sequence[int]) -> Float64Array:
        text = bytes(token for token in tokens if token < 256).decode()
        said = ord(" ") if text.endswith("It is") else ord("4") if text.endswith("It is ") else END
        row: Float64Array = 50.0 * np.eye(SIZE)[said]
        return row

    with hosted(lambda: scripted(THINKING, target=logits)) as server:
        body = {**BODY, "messages": [*BODY["messages"], {"role": "assistant", "content": "It is"}]}
        assert message_of(server, body, stream=stream)["content"] == " 4"


BEGINNINGS: Final[dict[str, dict[str, str]]] = {
    "content": {"content": "It is"},
    "reasoning": {"reasoning_content": "Hm."},
    "both": {"reasoning_content": "Hm.", "content": "It is"},
    "all of it": {"content": ANSWER},
}


@pytest.mark.parametrize("kind", BEGINNINGS)
@pytest.mark.parametrize("reasoning_format", ["deepseek", "none"])
def test_a_beginning_is_not_repeated_unless_it_is_asked_for(kind: str, reasoning_format: str) -> None:
    begun = BEGINNINGS[kind]

    def logits(tokens: Sequence[int]) -> Float64Array:
        text = bytes(token for token in tokens if token < 256).decode()
        if kind == "reasoning" and NO_THINK not in tokens:
            said = ord("h") if text.endswith(".") else NO_THINK
        else:
            rest = next(ANSWER[length:] for length in range(len(ANSWER), -1, -1) if text.endswith(ANSWER[:length]))
            said = ord(rest[0]) if rest else END
        row: Float64Array = 50.0 * np.eye(SIZE)[said]
        return row

    rest = ANSWER.removeprefix(begun.get("content", ""))
    expected = {"content": rest} if kind != "reasoning" else {"reasoning_content": "h", "content": ANSWER}
    echoed = {name: begun.get(name, "") + expected.get(name, "") for name in {**begun, **expected}}
    if reasoning_format == "none":
        before = f"<think>{begun['reasoning_content']}" if "reasoning_content" in begun else ""
        before += f"</think>{begun['content']}" if kind == "both" else begun.get("content", "")
        expected = {"content": rest if kind != "reasoning" else f"h</think>{ANSWER}"}
        echoed = {"content": before + expected["content"]}
    with hosted(lambda: scripted(THINKING, target=logits)) as server:
        messages = [*BODY["messages"], {"role": "assistant", **begun}]
        body = {**BODY, "messages": messages, "reasoning_format": reasoning_format}
        for fields in ({}, {"n": 2}, {"continue_final_message": True}):
            for echo in (None, False, True):
                asked = {**body, **fields, "echo": echo}
                answer = server.answer(CHAT, asked)
                for choice in answer["choices"]:
                    told = choice["message"]
                    assert {name: text for name, text in told.items() if name != "role"} == (
                        echoed if echo else expected
                    )
                assert "warnings" not in answer
                if "n" not in fields:
                    streamed = message_of(server, asked, stream=True)
                    assert {**dict.fromkeys(expected, ""), **streamed} == (echoed if echo else expected)
        # A conversation that is answered has no beginning to repeat.
        told = server.answer(CHAT, {**BODY, "max_tokens": 3, "echo": True})["warnings"]
        assert told == ["echo changed nothing: no message is continued"]
