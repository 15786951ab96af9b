"""Answers to conversations in an event loop: the same parts and replies as in a thread, and nothing is waited for."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.chat.prompt_builder import ChatPromptBuilder
from tests.chat.conversing import BEGUN, CHATML, CONTROLS, THINKING, chat_gguf
from tests.chat.replies import FORMATS, answering, text_of, writing
from tests.models.helpers import with_last_tokens
from tests.timing import WAIT_S

THINK, NO_THINK = 258, 259
SAID = "<think>\nHm. 2 + 2\n</think>\n\nIt is <b>4</b>."


ENDLESS_THOUGHT = "<think>" + "Hm. " * 15_000
"""Takes seconds to write, so that it goes on still when something is asked of it."""


@pytest.mark.parametrize("reasoning_format", FORMATS)
@pytest.mark.parametrize("begun", [False, True])
def test_parts_and_replies_are_those_of_a_thread(reasoning_format: str, begun: bool) -> None:
    said, source = (SAID.removeprefix("<think>"), BEGUN) if begun else (SAID, THINKING)
    with answering(said, source, reasoning_format=reasoning_format) as inner:
        expected, reply = list(inner), inner.result()

    async def read() -> None:
        async with writing(said, source, reasoning_format=reasoning_format) as stream:
            assert [part async for part in stream] == expected
            assert (await stream.result()).message == reply.message
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        async with writing(said, source, reasoning_format=reasoning_format) as stream:
            assert [part async for parts in stream.rounds() for part in parts] == expected
        async with writing(said, source, reasoning_format=reasoning_format) as stream:
            rounds = [each async for each in stream.emissions()]
            assert [part for each in rounds for part in each.parts] == expected
            token_ids = [token_id for each in rounds if each.emission for token_id in each.emission.token_ids]
            assert token_ids == (await stream.result()).generation.token_ids

    asyncio.run(read())


def test_an_answer_closed_early_keeps_what_there_is() -> None:
    async def read() -> None:
        for length in range(0, 40, 7):
            async with writing(SAID) as stream:
                parts = []
                async for part in stream:
                    parts.append(part)
                    if sum(len(each.segment.text) for each in parts) > length:
                        break
                parts += await stream.aclose()
                reply = await stream.so_far()
            assert SAID.startswith(reply.generation.text)
            assert text_of(parts, "reasoning") == (reply.reasoning or "")
            assert text_of(parts, "content") == reply.text
            assert await stream.aclose() == []

    asyncio.run(read())


def test_leaving_the_block_ends_the_answer() -> None:
    async def read() -> None:
        async with writing("It is 4. " * 100, CHATML) as stream:
            async with stream:
                await anext(stream)
            assert (await stream.so_far()).generation.finish_reason in ("cancelled", "end")

    asyncio.run(read())


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
    with answering(ENDLESS_THOUGHT, THINKING) as inner:
        assert next(iter(inner)).kind == "reasoning"
        assert inner.end_reasoning()
        assert any(part.kind == "content" for part in inner)
        inner.close()
        assert list(inner.result().generation.token_ids).count(NO_THINK) == 1


# --- models -----------------------------------------------------------------------------------------------------------

QUESTION = "Write a function that adds two numbers."
OPTIONS = paceline.GenerateOptions(max_tokens=16, seed=1, ignore_end=True)


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    return chat_gguf(folder / "instruct.gguf", THINKING, source=with_last_tokens(folder / "tokens.gguf", CONTROLS))


def test_answers_in_an_event_loop_are_those_of_a_thread(instruct: Path) -> None:
    with paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=512, max_sequences=4) as model:
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


def test_what_cannot_be_is_raised_before_an_answer_begins(instruct: Path) -> None:
    async def ask(model: paceline.Model) -> None:
        for asking in (model.achat, model.achat_stream, model.achat_prompt):
            with pytest.raises(paceline.InputError, match="there are no messages"):
                await asking([])
            with pytest.raises(paceline.InputError, match="tokens"):
                await asking("a", max_tokens=-2)
        with pytest.raises(paceline.InputError, match="temperature -1"):
            await model.achat_stream("a", temperature=-1)
        model.close()
        for asking in (model.achat, model.achat_stream, model.achat_prompt):
            with pytest.raises(paceline.ClosedError):
                await asking("a")

    asyncio.run(ask(paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=256)))


def test_a_prompt_is_made_beside_the_event_loop_and_given_up_with_the_task(
    instruct: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, reached, let_through = ChatPromptBuilder.prompt, threading.Event(), threading.Event()
    threads: list[int] = []

    def wait(self: ChatPromptBuilder, *arguments: Any, **named: Any) -> Any:
        threads.append(threading.get_ident())
        reached.set()
        assert let_through.wait(WAIT_S)
        return prompt(self, *arguments, **named)

    with paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=256) as model:
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


def test_cancelling_whoever_waits_for_a_reply_cancels_the_request(instruct: Path) -> None:
    async def ask(model: paceline.Model) -> None:
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

    with paceline.load(instruct, policy=paceline.NO_SPECULATION, context_length=512) as model:
        asyncio.run(ask(model))
