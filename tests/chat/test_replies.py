"""Answers in threads and event loops: their parts while they are written, and the message that they are in the end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

import paceline
from paceline.chat.assembler import AnswerEvent
from paceline.chat.prompt_builder import ChatPromptBuilder
from paceline.chat.reasoning import ReasoningFormat
from paceline.chat.tool_calls.base import CallStarted
from tests.chat.conversing import BEGUN, CALLING, CHATML, CONTROLS, THINKING, answering, chat_gguf, writing
from tests.models.helpers import with_last_tokens
from tests.timing import WAIT_S

FORMATS: tuple[ReasoningFormat, ...] = ("auto", "deepseek", "none", "deepseek-legacy")
NO_THINK = 259
SAID = "<think>\nHm. 2 + 2\n</think>\n\nIt is <b>4</b>."
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CALLS = [f'<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>' for number in range(2)]
CUT_OFF = CALLS[1][:-14]
ENDLESS_THOUGHT = "<think>" + "Hm. " * 15_000
"""Takes seconds to write, so that it goes on still when something is asked of it."""


def text_of(parts: Sequence[AnswerEvent], kind: str) -> str:
    return "".join(part.segment.text for part in parts if part.kind == kind)


def in_event_loops(said: str, source: str, **asked: Any) -> Iterator[tuple[list[AnswerEvent], paceline.Reply]]:
    """Yield parts and replies of answers that are read in an event loop: part by part, by the round, with tokens."""

    async def read(how: str) -> tuple[list[AnswerEvent], paceline.Reply]:
        async with writing(said, source, **asked) as stream:
            match how:
                case "parts":
                    parts = [part async for part in stream]
                    with pytest.raises(StopAsyncIteration):
                        await anext(stream)
                case "rounds":
                    parts = [part async for some in stream.rounds() for part in some]
                case _:
                    rounds = [each async for each in stream.emissions()]
                    parts = [part for each in rounds for part in each.parts]
                    token_ids = [token_id for each in rounds if each.emission for token_id in each.emission.token_ids]
                    assert token_ids == (await stream.result()).generation.token_ids
            return parts, await stream.result()

    for how in ("parts", "rounds", "emissions"):
        yield asyncio.run(read(how))


@pytest.mark.parametrize("reasoning_format", FORMATS)
@pytest.mark.parametrize("begun", [False, True])
def test_where_reasoning_goes(reasoning_format: ReasoningFormat, begun: bool) -> None:
    source, said = (BEGUN, SAID.removeprefix("<think>")) if begun else (THINKING, SAID)
    with answering(said, source, reasoning_format=reasoning_format) as stream:
        parts = list(stream)
        reply = stream.result()
    is_apart, is_within = reasoning_format != "none", reasoning_format in ("none", "deepseek-legacy")
    message = {"role": "assistant", "content": SAID if is_within else "It is <b>4</b>."}
    assert reply.message == message | ({"reasoning_content": "Hm. 2 + 2"} if is_apart else {})
    assert (reply.text, reply.reasoning) == (message["content"], "Hm. 2 + 2" if is_apart else None)
    assert (reply.generation.text, reply.generation.finish_reason, reply.prompt.begun) == (said, "end", begun)
    # What is in the message twice is said once.
    assert text_of(parts, "content") == (SAID if reasoning_format == "none" else "It is <b>4</b>.")
    assert text_of(parts, "reasoning") == (reply.reasoning or "")
    assert all(part.segment.text for part in parts)
    for others, other in in_event_loops(said, source, reasoning_format=reasoning_format):
        assert (others, other.message) == (parts, reply.message)


@pytest.mark.parametrize("reasoning_format", FORMATS)
def test_an_answer_closed_early_keeps_what_there_is(reasoning_format: ReasoningFormat) -> None:
    def check(parts: Sequence[AnswerEvent], reply: paceline.Reply) -> None:
        assert reply.generation.finish_reason in ("cancelled", "end")
        assert SAID.startswith(reply.generation.text)
        assert text_of(parts, "reasoning") == (reply.reasoning or "")
        if reasoning_format != "deepseek-legacy":
            assert text_of(parts, "content") == reply.text

    async def read(length: int) -> None:
        async with writing(SAID, reasoning_format=reasoning_format) as stream:
            parts = []
            async for part in stream:
                parts.append(part)
                if len(parts) > length:
                    break
            parts += await stream.aclose()
            check(parts, await stream.so_far())
            assert await stream.aclose() == []

    for num_rounds in range(3, 30, 4):
        with answering(SAID, reasoning_format=reasoning_format) as stream:
            parts = [part for some in itertools.islice(stream.rounds(), num_rounds) for part in some]
            parts += stream.close()
            check(parts, stream.so_far())
            assert stream.close() == []
        asyncio.run(read(num_rounds))


def test_an_answer_as_it_stands() -> None:
    with answering(SAID) as stream:
        rounds = stream.rounds()
        seen = ""
        while "Hm" not in seen:
            seen += text_of(next(rounds), "reasoning")
        assert (stream.so_far().reasoning or "").startswith("Hm")
        assert list(rounds)
        assert stream.so_far() == stream.result()


def test_a_result_needs_no_iteration_and_ends_it() -> None:
    with answering("<think is no marker", CHATML) as stream:
        assert stream.result().message == {"role": "assistant", "content": "<think is no marker"}
        assert list(stream) == []


def test_leaving_the_block_ends_the_answer() -> None:
    async def read() -> None:
        async with writing("It is 4. " * 100, CHATML) as stream:
            async with stream:
                await anext(stream)
            assert (await stream.so_far()).generation.finish_reason in ("cancelled", "end")

    asyncio.run(read())
    with answering("It is 4." * 100, CHATML) as stream:
        with stream:
            next(stream.rounds())
        assert stream.so_far().generation.finish_reason in ("cancelled", "end")


def test_an_error_ends_the_iteration_and_leaves_what_was_said() -> None:
    with answering("It is 4.", CHATML, fails_after=5) as stream:
        parts: list[AnswerEvent] = []
        with pytest.raises(paceline.PacelineError):
            parts.extend(stream)
        with pytest.raises(paceline.PacelineError):
            stream.result()
        assert text_of(parts, "content") == stream.so_far().text == "It is"


def test_the_reasoning_of_a_running_answer_is_ended() -> None:
    async def read() -> None:
        async with writing(ENDLESS_THOUGHT) as stream:
            assert (await anext(stream)).kind == "reasoning"
            assert await stream.end_reasoning()
            async for part in stream:
                if part.kind == "content":
                    break
            await stream.aclose()
            reply = await stream.result()
            assert reply.message["content"]
            token_ids = list(reply.generation.token_ids)
            assert token_ids.count(NO_THINK) == 1
            assert 0 < len(reply.reasoning or "") < token_ids.index(NO_THINK)
        async with writing("It is 4.") as stream:
            await anext(stream)
            assert not await stream.end_reasoning()

    asyncio.run(read())
    with answering(ENDLESS_THOUGHT) as inner:
        assert next(iter(inner)).kind == "reasoning"
        assert inner.end_reasoning()
        assert any(part.kind == "content" for part in inner)
        inner.close()
        assert list(inner.result().generation.token_ids).count(NO_THINK) == 1


def test_calls_are_apart_from_reasoning_and_content() -> None:
    said = f"<think>\nHm. {CALLS[0]}\n</think>\n\nLet me look.\n{CALLS[0]}\n{CALLS[1]}\n{CUT_OFF}"
    with answering(said, CALLING, tools=TOOLS) as stream:
        rounds = list(stream.rounds())
        reply = stream.result()
        assert stream.close() == []
        assert stream.so_far().message == reply.message
    assert [call["function"] for call in reply.tool_calls] == [
        {"name": "f", "arguments": f'{{"a": {number}}}'} for number in range(2)
    ]
    parts = [part for some in rounds for part in some]
    kinds = [kind for kind, _ in itertools.groupby(part.kind for part in parts)]
    # One that is cut off is content.
    assert kinds == ["reasoning", "content", "call", "arguments", "call", "arguments", "content"]
    assert reply.reasoning == text_of(parts, "reasoning") == f"Hm. {CALLS[0]}"
    assert reply.text == text_of(parts, "content")
    assert reply.text.endswith(CUT_OFF)
    assert {part.segment.source for part in parts} == {"target"}
    assert [part.call_id for part in parts if part.kind == "call"] == [call["id"] for call in reply.tool_calls]
    # Each call comes with the token that closes it, and not at the end.
    begun = [number for number, some in enumerate(rounds) if any(part.kind == "call" for part in some)]
    assert len(begun) == 2
    assert begun[1] < len(rounds) - len(CUT_OFF)
    for others, _ in in_event_loops(said, CALLING, tools=TOOLS):
        assert list(map(_without_id, others)) == list(map(_without_id, parts))


def _without_id(part: AnswerEvent) -> AnswerEvent:
    return CallStarted(part.index, "", part.name, part.source) if isinstance(part, CallStarted) else part


def test_calls_alone_and_calls_of_a_model_of_no_known_family() -> None:
    with answering(CALLS[0], CALLING, tools=TOOLS) as stream:
        reply = stream.result()
    assert (reply.message["content"], reply.text, len(reply.tool_calls)) == (None, "", 1)
    with answering(CALLS[0], THINKING, tools=TOOLS) as stream:
        reply = stream.result()
    assert (reply.text, reply.tool_calls) == (CALLS[0], ())


def test_a_stream_that_is_closed_early_keeps_its_calls() -> None:
    with answering(f"{CALLS[0]} and {CALLS[1]}", CALLING, tools=TOOLS) as stream:
        parts: list[AnswerEvent] = []
        for some in stream.rounds():
            parts += some
            if any(part.kind == "arguments" for part in parts):
                break
        parts += stream.close()
        reply = stream.so_far()
    assert [part.call_id for part in parts if part.kind == "call"] == [call["id"] for call in reply.tool_calls]
    assert len(reply.tool_calls) >= 1
    assert text_of(parts, "content") == reply.text


@pytest.mark.parametrize(
    ("said", "content"),
    [
        (f"<think>\nWhich?\n</think>\n\nSee: {CALLS[0]} Well.", "<think>\nWhich?\n</think>\n\nSee: Well."),
        (f"<think>\nWhich?\n</think>{CALLS[0]}", "<think>\nWhich?\n</think>"),
        ("<think>\nWhich?\n</think>\n\nNone.", "<think>\nWhich?\n</think>\n\nNone."),
        (f"{CALLS[0]} Well.", " Well."),
    ],
)  # fmt: skip
def test_reasoning_stays_in_the_content_beside_calls_where_it_is_to_be_in_both(said: str, content: str) -> None:
    with answering(said, CALLING, tools=TOOLS, reasoning_format="deepseek-legacy") as stream:
        reply = stream.result()
    assert reply.text == content
    assert reply.reasoning == ("Which?" if "Which?" in said else None)
    assert len(reply.tool_calls) == said.count(CALLS[0])


# --- models -----------------------------------------------------------------------------------------------------------

QUESTION = "Write a function that adds two numbers."
OPTIONS = paceline.GenerateOptions(max_tokens=16, seed=1, ignore_end=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[paceline.Model]:
    folder = tmp_path_factory.mktemp("models")
    path = chat_gguf(folder / "instruct.gguf", THINKING, source=with_last_tokens(folder / "tokens.gguf", CONTROLS))
    with paceline.load(path, policy=paceline.NO_SPECULATION, context_length=512, max_sequences=4) as loaded:
        yield loaded


def test_answers_in_an_event_loop_are_those_of_a_thread(model: paceline.Model) -> None:
    expected = model.chat(QUESTION, **OPTIONS)

    async def ask() -> None:
        replies = await asyncio.gather(*(model.achat(QUESTION, **OPTIONS) for _ in range(8)))
        assert [reply.message for reply in replies] == [expected.message] * 8
        async with await model.achat_stream(QUESTION, **OPTIONS) as stream:
            assert stream.prompt == expected.prompt
            parts = [part async for part in stream]
            assert text_of(parts, "content") == expected.text
            assert text_of(parts, "reasoning") == (expected.reasoning or "")
        assert (await model.achat_prompt(QUESTION)) == model.chat_prompt(QUESTION)

    asyncio.run(ask())


def test_what_cannot_be_is_raised_before_an_answer_begins(model: paceline.Model) -> None:
    async def ask() -> None:
        for asking in (model.achat, model.achat_stream, model.achat_prompt):
            with pytest.raises(paceline.InputError, match="there are no messages"):
                await asking([])
            with pytest.raises(paceline.InputError, match="tokens"):
                await asking("a", max_tokens=-2)
        with pytest.raises(paceline.InputError) as caught:
            await model.achat_stream("a", temperature=-1)
        assert caught.value.field == "temperature"

    asyncio.run(ask())


def test_a_prompt_is_made_beside_the_event_loop_and_given_up_with_the_task(
    model: paceline.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, reached, let_through = ChatPromptBuilder.prompt, threading.Event(), threading.Event()
    threads: list[int] = []

    def wait(self: ChatPromptBuilder, *arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        reached.set()
        assert let_through.wait(WAIT_S)
        return prompt(self, *arguments, **named)

    worker = model.worker.call(threading.get_ident)
    monkeypatch.setattr(ChatPromptBuilder, "prompt", wait)

    async def ask() -> None:
        task = asyncio.create_task(model.achat("a", max_tokens=1000))
        while not reached.is_set():
            await asyncio.sleep(0)
        # Neither the engine nor the event loop waits for the template.
        assert len((await model.agenerate([1], max_tokens=3, ignore_end=True)).token_ids) == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        let_through.set()

    asyncio.run(ask())
    assert set(threads).isdisjoint({worker, threading.get_ident()})
    assert model.worker.call(lambda: not model.loop.active)


def test_cancelling_whoever_waits_for_a_reply_cancels_the_request(model: paceline.Model) -> None:
    async def ask() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async with await model.achat_stream("a", ignore_end=True, max_tokens=400) as stream:
                started.set()
                await stream.result()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(model.worker.call, lambda: not model.loop.active)

    asyncio.run(ask())
