"""Chats with a model from Python: one text with speculation and without, and one line for what cannot be."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.chat.params import ChatParams
from paceline.constraints import Choice
from paceline.core.errors import CapabilityError, ClosedError, ContextLengthError, InputError
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine
from paceline.models.embedded import embedded_draft, embedded_target
from tests.chat.conversing import CHATML, CONTROLS, THINKING, ControlledBytes, chat_gguf
from tests.models.helpers import with_last_tokens
from tests.tiers import some_long

NOW = {"type": "function", "function": {"name": "now"}}
QUESTION = "Write a function that adds two numbers, and then one that adds three numbers."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chats")


@pytest.fixture(scope="module")
def chatml(files: Path) -> ChatParams:
    (files / "chatml.jinja").write_text(CHATML)
    return ChatParams(template_file=files / "chatml.jinja")


@pytest.fixture(scope="module")
def instruct(files: Path) -> Path:
    """A model with a template of its own, whose control tokens are those of the template."""
    tokens = with_last_tokens(files / "tokens.gguf", CONTROLS)
    return chat_gguf(files / "instruct.gguf", THINKING, source=tokens)


@pytest.fixture(scope="module")
def model() -> Iterator[paceline.Model]:
    """The embedded pair, which drafts whether that pays or not."""
    with paceline.load(draft=embedded_draft(), policy=paceline.FixedPolicy(4), context_length=512) as loaded:
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafters", some_long([["draft"], ["suffix"], ["suffix", "draft"]], quick=[["draft"]]))
def test_speculation_changes_no_word(chatml: ChatParams, temperature: float, drafters: list[str]) -> None:
    """With arithmetic that is the same at every width, so that no near-tie is decided by rounding."""
    with paceline.load(
        ModelOptions(embedded_target(), context_length=512, exact=True),
        draft=embedded_draft() if "draft" in drafters else None,
        drafters=drafters,
        policy=paceline.FixedPolicy(4),
    ) as model:
        messages: list[Any] = [{"role": "system", "content": "Be brief."}]
        for turn in range(3):
            messages.append({"role": "user", "content": f"{QUESTION} ({turn})"})
            options = paceline.GenerateOptions(max_tokens=32, temperature=temperature, seed=turn, ignore_end=True)
            drafted = model.chat(messages, chat=chatml, **options)
            plain = model.chat(messages, chat=chatml, **options | {"speculate": False})
            assert drafted.message == plain.message
            assert list(drafted.generation.token_ids) == list(plain.generation.token_ids)
            assert plain.generation.stats.num_drafted == 0
            with model.chat_stream(messages, chat=chatml, **options) as stream:
                assert "".join(part.segment.text for part in stream) == drafted.text
            messages.append(drafted.message)
        assert drafted.generation.stats.num_drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_changes_no_word_of_reasoning_with_a_budget(instruct: Path, temperature: float) -> None:
    options = paceline.GenerateOptions(max_tokens=40, temperature=temperature, seed=1, ignore_end=True)
    replies = []
    for policy in (paceline.FixedPolicy(4), paceline.NO_SPECULATION):
        with paceline.load(instruct, policy=policy, context_length=512) as loaded:
            for budget in (0, 5):
                chat = ChatParams(reasoning_budget=budget, reasoning_format="none")
                # The prompt has opened the reasoning: the model need not be able to.
                prompt = loaded.chat_prompt(QUESTION, chat=chat)
                (think, no_think) = prompt.options["preserved_ids"] or ()
                bound = prompt.options["reasoning_budget"]
                assert bound is not None
                assert (bound.tokens, bound.start, bound.end) == (budget, (think,), (no_think,))
                begun = paceline.ReasoningBudget(budget, (think,), (no_think,), begun=True)
                asked = {**prompt.options, **options, "reasoning_budget": begun}
                answer = loaded.generate([*prompt.token_ids, think], **asked)  # type: ignore[arg-type]
                assert list(answer.token_ids).index(no_think) <= budget
                replies.append(answer)
    assert [reply.text for reply in replies[:2]] == [reply.text for reply in replies[2:]]


def test_a_seed_repeats_an_answer(model: paceline.Model, chatml: ChatParams) -> None:
    first = model.chat(QUESTION, chat=chatml, max_tokens=16)
    again = model.chat(QUESTION, chat=chatml, max_tokens=16, seed=first.generation.seed)
    assert again.message == first.message
    other = model.chat(QUESTION, chat=chatml, max_tokens=16, seed=first.generation.seed, choice=1)
    assert other.message != first.message


def test_without_a_limit_the_answer_may_fill_the_context(chatml: ChatParams) -> None:
    with paceline.load(policy=paceline.NO_SPECULATION, context_length=300) as loaded:
        reply = loaded.chat(QUESTION, chat=chatml, ignore_end=True, seed=1)
        assert reply.generation.finish_reason == "context"
        assert len(reply.prompt.token_ids) + len(reply.generation.token_ids) >= 300
        short = loaded.chat(QUESTION, chat=chatml, ignore_end=True, seed=1, max_tokens=7)
        assert (short.generation.finish_reason, len(short.generation.token_ids)) == ("length", 7)


def test_a_next_turn_reads_what_is_new(model: paceline.Model, chatml: ChatParams) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    first = model.chat(messages, chat=chatml, max_tokens=16, seed=1, ignore_end=True, namespace="turns")
    assert first.generation.stats.cached_tokens == 0
    messages += [first.message, {"role": "user", "content": "Go on."}]
    second = model.chat(messages, chat=chatml, max_tokens=4, seed=1, namespace="turns")
    stats = second.generation.stats
    assert stats.cached_tokens >= len(first.prompt.token_ids)
    assert stats.cached_tokens + stats.prompt_tokens == len(second.prompt.token_ids)


def test_what_is_forgotten_is_told(model: paceline.Model, chatml: ChatParams) -> None:
    turns = [{"role": role, "content": "x y z " * 20} for _ in range(6) for role in ("user", "assistant")]
    asked = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "And now?"}]
    reply = model.chat(asked, chat=chatml, max_tokens=4)
    left_out = reply.prompt.num_left_out
    assert left_out > 0
    assert list(reply.prompt.messages) == [asked[0], *asked[1 + left_out :]]
    forgetting_nothing = ChatParams(template_file=chatml.template_file, forget=False)
    with pytest.raises(ContextLengthError):
        model.chat(asked, chat=forgetting_nothing)


def test_a_prompt_can_be_used_for_choices(model: paceline.Model, chatml: ChatParams) -> None:
    prompt = model.chat_prompt(QUESTION, chat=chatml)
    choices = model.choices(prompt.token_ids, 2, **prompt.options | {"max_tokens": 8, "seed": 3})
    wanted = [model.chat(QUESTION, chat=chatml, max_tokens=8, seed=3, choice=choice).text for choice in (0, 1)]
    assert [choice.text for choice in choices] == wanted


def test_a_models_own_template_and_another(instruct: Path, chatml: ChatParams) -> None:
    with paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=256) as loaded:
        off = ChatParams(reasoning="off")
        assert loaded.chat_prompt("a", chat=off).text.endswith("assistant\n<think>\n\n</think>\n\n")
        with pytest.raises(InputError) as caught:
            loaded.chat_prompt("a", chat=ChatParams(reasoning="off", template_file=chatml.template_file))
        assert caught.value.field == "reasoning"
        # Control tokens come of the template alone.
        ids = list(loaded.chat_prompt("Never write <|im_end|> or <think>.").token_ids)
        tokenize = loaded.target.vocabulary.tokenize
        controls = loaded.worker.call(
            lambda: [tokenize(name, add_special=False, parse_special=True) for name in CONTROLS]
        )
        assert [len(token_ids) for token_ids in controls] == [1, 1, 1, 1]
        assert [ids.count(token_id) for (token_id,) in controls] == [2, 1, 0, 0]
        assert loaded.chat("a", max_tokens=3, seed=1).generation.token_ids


def test_prompts_are_made_in_many_threads_beside_a_running_answer(instruct: Path) -> None:
    """From the first on, which makes what all of them share."""
    questions = [f"Never write <|im_end|>. {'x' * 50} {number}" for number in range(16)]
    with paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=512) as loaded:
        with loaded.stream("def", max_tokens=400, ignore_end=True) as running, ThreadPoolExecutor(8) as threads:
            next(iter(running))
            prompts = list(threads.map(loaded.chat_prompt, questions))
            running.close()
        assert prompts == [loaded.chat_prompt(question) for question in questions]
        assert len({tuple(prompt.token_ids) for prompt in prompts}) == len(questions)


def test_a_prompt_is_not_made_from_within_a_round(instruct: Path) -> None:
    with paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=256) as loaded:
        for ask in (loaded.chat_prompt, loaded.stream):
            with pytest.raises(paceline.BusyError):
                loaded.worker.call(lambda ask=ask: ask("a"))  # type: ignore[misc]


@pytest.mark.parametrize("max_tokens", [0, -5, 1.5, "many", True])
def test_lengths_that_are_refused(model: paceline.Model, chatml: ChatParams, max_tokens: Any) -> None:
    # A prompt alone may be for no answer.
    for ask in (model.chat, model.chat_stream, *([model.chat_prompt] if max_tokens != 0 else ())):
        with pytest.raises(InputError) as caught:
            ask("a", chat=chatml, max_tokens=max_tokens)
        assert caught.value.field == "max_tokens"


def test_a_prompt_for_no_answer_may_have_any_length(model: paceline.Model, chatml: ChatParams) -> None:
    length = model.target.capabilities.context_length
    with pytest.raises(ContextLengthError):
        model.chat_prompt("a b " * length, chat=dataclasses.replace(chatml, forget=False))
    prompt = model.chat_prompt("a b " * length, chat=dataclasses.replace(chatml, forget=False), max_tokens=0)
    assert len(prompt.token_ids) > length


def test_a_model_without_a_template() -> None:
    with paceline.load(policy=paceline.NO_SPECULATION, context_length=64) as base:
        for ask in (base.chat, base.chat_stream, base.chat_prompt):
            with pytest.raises(CapabilityError, match="`template_file`"):
                ask("a")


def test_a_model_without_a_file() -> None:
    vocabulary = ControlledBytes()
    engine = ScriptedEngine(lambda tokens: np.zeros(vocabulary.size), vocabulary, context_length=64)
    with (
        paceline.Model(engine, [], paceline.NO_SPECULATION) as model,
        pytest.raises(CapabilityError),
    ):
        model.chat("a")


def test_a_closed_model(instruct: Path) -> None:
    async def ask_in_an_event_loop(model: paceline.Model) -> None:
        for ask in (model.achat, model.achat_stream, model.achat_prompt):
            with pytest.raises(ClosedError):
                await ask("a")

    for is_used in (True, False):
        model = paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=64)
        if is_used:
            model.chat_prompt("a")
        model.close()
        for ask in (model.chat, model.chat_stream, model.chat_prompt):
            with pytest.raises(ClosedError):
                ask("a")
        asyncio.run(ask_in_an_event_loop(model))


@pytest.mark.parametrize("tools", [[NOW], None])
def test_calls_are_read_out_of_an_answer(files: Path, model: paceline.Model, tools: list[Any] | None) -> None:
    (files / "calling.jinja").write_text('{# <tool_call>\n{"name": ..., "arguments": ...} #}' + CHATML)
    chat = ChatParams(template_file=files / "calling.jinja")
    answer = 'It is <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    options = paceline.GenerateOptions(constraint=Choice([answer]), max_tokens=200, seed=1)
    replies = [
        model.chat(QUESTION, tools=tools, chat=chat, **options),
        asyncio.run(model.achat(QUESTION, tools=tools, chat=chat, **options)),
    ]
    with model.chat_stream(QUESTION, tools=tools, chat=chat, **options) as stream:
        parts = list(stream)
        said = "".join(part.segment.text for part in parts if part.kind == "content")
        assert said == (answer if tools is None else "It is")
        assert [part.name for part in parts if part.kind == "call"] == ([] if tools is None else ["now"])
        replies += [stream.result(), stream.so_far()]
    assert [call["id"] for call in replies[2].tool_calls] == [call["id"] for call in replies[3].tool_calls]
    for reply in replies:
        if tools is None:
            assert (reply.text, reply.tool_calls) == (answer, ())
            continue
        (call,) = reply.tool_calls
        assert call == {"id": call["id"], "type": "function", "function": {"name": "now", "arguments": "{}"}}
        assert reply.text == reply.message["content"] == "It is"
        # The message is one for the conversation to go on with.
        told = model.chat_prompt(
            [{"role": "user", "content": "a"}, reply.message, {"role": "tool", "content": "b"}], tools=tools, chat=chat
        )
        assert told.text.endswith("tool\nb<|im_end|>\n<|im_start|>assistant\n")
