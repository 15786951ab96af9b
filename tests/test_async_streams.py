"""Answers in an event loop: round by round, token by token, as they stand, and with their reasoning ended."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.core.arrays import Float64Array
from paceline.core.reasoning import ReasoningBudget
from paceline.core.request import Emission
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary
from tests.helpers import ForcedDrafter
from tests.runtime.gate import ENDLESS, Gate

SIZE = 30
VOCABULARY = ScriptedVocabulary.of_size(SIZE, end_ids=[29])
ENDLESSLY = paceline.GenerateOptions(max_tokens=ENDLESS, ignore_end=True, temperature=0.0)
START, END = 7, (27, 28)


def counting(tokens: Sequence[int]) -> Float64Array:
    row: Float64Array = np.eye(SIZE)[(tokens[-1] + 1) % 25]
    return row


def asked(
    ask: Callable[[paceline.Model], Coroutine[Any, Any, None]], model: LogitFunction = counting, **limits: Any
) -> None:
    """Run a test in an event loop, with a model of which three tokens are drafted in each round, one of them wrong."""

    def drafted(request: paceline.Request) -> list[list[int]]:
        last = request.token_ids[-1]
        return [[(last + 1) % 25, (last + 2) % 25, 0]]

    engine = ScriptedEngine(model, VOCABULARY, max_sequences=8, context_length=2 * ENDLESS, **limits)
    with paceline.Model(engine, [ForcedDrafter(drafted)], paceline.FixedPolicy(3)) as loaded:
        asyncio.run(ask(loaded))
        assert loaded.worker.call(lambda: not loaded.loop.active)


def test_rounds_bring_the_text_that_each_made_final() -> None:
    async def ask(model: paceline.Model) -> None:
        async with model.astream([1], max_tokens=20, temperature=0.0) as stream:
            rounds = [segments async for segments in stream.rounds()]
            answer = await stream.result()
        assert "".join(segment.text for segments in rounds for segment in segments) == answer.text
        assert max(map(len, rounds)) == 3, "two tokens were accepted, and one came on top"
        assert stream.is_over
        assert [segments async for segments in stream.rounds()] == []

    asked(ask)


def test_options_that_were_read_once_start_several_answers() -> None:
    async def ask(model: paceline.Model) -> None:
        request = model.read_options({"max_tokens": 9, "temperature": 0.5})
        prompt_ids = [1, 2]
        streams = [model.astart(prompt_ids, request.replaced({"choice": choice})) for choice in range(2)]
        answers = [await stream.result() for stream in streams]
        for choice, answer in enumerate(answers):
            alone = await model.agenerate(prompt_ids, max_tokens=9, temperature=0.5, seed=answer.seed, choice=choice)
            assert answer.token_ids == alone.token_ids
        assert {answer.seed for answer in answers} == {request.params.seed}
        assert prompt_ids == [1, 2]

    asked(ask)


def test_a_round_that_reads_a_prompt_brings_nothing() -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1] * 10, max_tokens=2, temperature=0.0)
        emissions = [emission async for emission in stream.emissions()]
        assert emissions[0] is None
        assert sum(emission is not None for emission in emissions) == 2
        stream = model.astream([1] * 10, max_tokens=2, temperature=0.0)
        assert [len(segments) for segments in [each async for each in stream.rounds()] if segments] == [1, 1]

    asked(ask, max_rows=2)


def test_emissions_say_which_tokens_came_from_where_and_why_it_ended() -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], max_tokens=9, temperature=0.0)
        emissions = [emission async for emission in stream.emissions() if emission is not None]
        answer = await stream.result()
        assert [token_id for each in emissions for token_id in each.token_ids] == answer.token_ids
        assert [source for each in emissions for source in each.sources] == answer.sources
        assert {"forced", "target"} == set(answer.sources)
        assert [each.finish_reason for each in emissions] == [*[None] * (len(emissions) - 1), "length"]

    asked(ask)


def test_what_is_left_of_a_round_comes_with_the_next() -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], max_tokens=20, temperature=0.0)
        text = ""
        for _ in range(3):  # one of the first round, and one of three of the second
            text += (await anext(stream)).text
        async for segments in stream.rounds():
            text += "".join(segment.text for segment in segments)
        assert text == (await stream.result()).text
        assert await stream.aclose() == []

    asked(ask)


def test_readers_of_every_kind_share_a_stream() -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], max_tokens=300, ignore_end=True, temperature=0.0)

        async def by_segment() -> str:
            return "".join([segment.text async for segment in stream])

        async def by_round() -> str:
            return "".join([segment.text async for segments in stream.rounds() for segment in segments])

        def text_of(emission: Emission | None) -> str:
            return "" if emission is None else "".join(segment.text for segment in emission.segments)

        async def by_emission() -> str:
            return "".join([text_of(emission) async for emission in stream.emissions()])

        *texts, answer = await asyncio.gather(by_segment(), by_round(), by_round(), by_emission(), stream.result())
        assert sorted("".join(texts)) == sorted(answer.text)

    asked(ask)


def test_an_error_ends_every_iteration() -> None:
    def failing(tokens: Sequence[int]) -> Float64Array:
        if len(tokens) > 5:
            raise paceline.EngineError("the device is gone")
        return counting(tokens)

    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], max_tokens=20, temperature=0.0, speculate=False)
        seen: list[int] = []

        async def read() -> None:
            async for emission in stream.emissions():
                seen.extend([] if emission is None else emission.token_ids)

        with pytest.raises(paceline.EngineError, match="the device is gone"):
            await read()
        assert seen == [2, 3, 4, 5, 6]
        with pytest.raises(paceline.EngineError, match="the device is gone"):
            await anext(stream.rounds())
        so_far = await stream.so_far()
        assert (so_far.finish_reason, so_far.token_ids) == ("error", seen)

    asked(ask, failing)


def test_cancelling_whoever_iterates_cancels_the_request() -> None:
    async def ask(model: paceline.Model) -> None:
        for iterate in (paceline.AsyncStream.rounds, paceline.AsyncStream.emissions):
            stream = model.astream([1], **ENDLESSLY)

            async def read(stream: paceline.AsyncStream = stream, iterate: Any = iterate) -> None:
                async for _ in iterate(stream):
                    pass

            task = asyncio.create_task(read())
            await anext(stream)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await stream.result()).finish_reason == "cancelled"

    asked(ask)


@pytest.mark.parametrize("by_round", [True, False])
def test_dropping_a_stream_that_is_read_cancels_the_request(by_round: bool) -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], **ENDLESSLY)
        iterated: Any = stream.rounds() if by_round else stream
        del stream
        async for _ in iterated:
            break
        del iterated
        gc.collect()
        await asyncio.sleep(0)  # the event loop closes what was left of the iteration
        await asyncio.sleep(0)
        assert await asyncio.to_thread(model.worker.call, lambda: not model.loop.active)

    asked(ask)


def test_an_answer_as_it_stands() -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], **ENDLESSLY)
        await anext(stream)
        so_far = await stream.so_far()
        assert so_far.finish_reason is None
        assert list(so_far.token_ids) == [(2 + n) % 25 for n in range(len(so_far.token_ids))]
        assert so_far.stats.predicted_tokens == len(so_far.token_ids) > 0
        await stream.aclose()
        assert (await stream.so_far()).finish_reason == "cancelled"
        assert await stream.so_far() == await stream.result()

    asked(ask)


def test_closing_a_model_ends_the_waiting_of_an_event_loop() -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], **ENDLESSLY)
        await anext(stream)
        waiting = asyncio.create_task(stream.result())
        await asyncio.to_thread(model.close)
        assert (await waiting).finish_reason == (await stream.so_far()).finish_reason == "cancelled"
        assert not await stream.end_reasoning()
        with pytest.raises(paceline.ClosedError):
            model.astream([1])

    engine = ScriptedEngine(counting, VOCABULARY, context_length=2 * ENDLESS)
    asyncio.run(ask(paceline.Model(engine, [], paceline.NO_SPECULATION)))


def reasoning(tokens: Sequence[int]) -> Float64Array:
    """A model that opens a reasoning at once, and never ends it."""
    row: Float64Array = np.eye(SIZE)[START if len(tokens) == 1 else 2 if 28 not in tokens else 3]
    return row


def test_reasoning_is_ended_between_two_rounds() -> None:
    options = paceline.GenerateOptions(**ENDLESSLY, reasoning_budget=ReasoningBudget(None, (START,), END))

    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], **options)
        await anext(stream)
        await anext(stream)
        assert await stream.end_reasoning()
        said: list[int] = []
        async for emission in stream.emissions():
            said += [] if emission is None else emission.token_ids
            if 3 in said:
                break
        await stream.aclose()
        said = list((await stream.result()).token_ids)
        at = said.index(END[0])
        assert set(said[:at]) == {START, 2}
        assert tuple(said[at : at + 2]) == END
        assert set(said[at + 2 :]) == {3}
        assert not await stream.end_reasoning(), "it is over"

    async def ask_where_nothing_tells(model: paceline.Model) -> None:
        stream = model.astream([1], **ENDLESSLY)
        await anext(stream)
        assert not await stream.end_reasoning()
        await stream.aclose()

    asked(ask, reasoning)
    asked(ask_where_nothing_tells, reasoning)


def test_a_stream_of_a_thread_ends_its_reasoning_too() -> None:
    options = paceline.GenerateOptions(**ENDLESSLY, reasoning_budget=ReasoningBudget(None, (START,), END))
    engine = ScriptedEngine(reasoning, VOCABULARY, context_length=2 * ENDLESS)
    with paceline.Model(engine, [], paceline.NO_SPECULATION) as model:
        with model.stream([1], **options) as stream:
            next(stream.rounds())
            assert stream.end_reasoning()
            for _ in stream.rounds():
                if 3 in stream.so_far().token_ids:
                    break
        said = list(stream.so_far().token_ids)
        assert said.count(END[0]) == said.count(END[1]) == 1
        assert not stream.end_reasoning()


def test_giving_up_an_end_of_reasoning_leaves_the_answer_alone() -> None:
    gate = Gate(2, reasoning)

    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], max_tokens=5, ignore_end=True, temperature=0.0)
        while not gate.reached.is_set():
            await asyncio.sleep(0)
        # The model stands in a round, so this waits.
        task = asyncio.create_task(stream.end_reasoning())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.let_through.set()
        assert (await stream.result()).finish_reason == "length"

    asked(ask, gate)


@pytest.mark.parametrize("keep", [True, False])
def test_what_was_read_need_not_be_kept(keep: bool) -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], max_tokens=20, temperature=0.0, logprobs=2)
        read = [emission async for emission in stream.emissions(keep=keep) if emission is not None]
        answer = await stream.so_far()
        assert sum(len(emission.token_ids) for emission in read) == 20
        assert (len(answer.token_ids), len(answer.logprobs)) == ((20, 20) if keep else (0, 0))
        assert (answer.finish_reason, answer.stats.predicted_tokens) == ("length", 20)

    asked(ask)


def test_a_round_wakes_an_event_loop_once() -> None:
    num_streams, num_tokens = 6, 60

    class Rounds(paceline.PolicyBase):
        made = 0

        def observe(self, record: paceline.RoundRecord) -> None:
            self.made += 1

    async def ask(model: paceline.Model) -> None:
        loop, rounds, woken = asyncio.get_running_loop(), Rounds(), 0
        model.add_observer(rounds)
        wake = loop.call_soon_threadsafe

        def noted(*given: Any, **options: Any) -> asyncio.Handle:
            nonlocal woken
            woken += 1
            return wake(*given, **options)

        loop.call_soon_threadsafe = noted  # type: ignore[assignment,method-assign]
        streams = [model.astream([1], max_tokens=num_tokens, temperature=0.0) for _ in range(num_streams)]

        async def read(stream: paceline.AsyncStream) -> int:
            return len([each async for each in stream.emissions() if each is not None])

        handed_out = sum(await asyncio.gather(*map(read, streams)))
        assert handed_out > num_streams * num_tokens // 3
        # Each of them may be taken before the first round, or after any.
        assert woken <= rounds.made + num_streams

    asked(ask)


def test_whoever_waits_for_one_stream_at_once_is_woken() -> None:
    async def ask(model: paceline.Model) -> None:
        stream = model.astream([1], max_tokens=40, temperature=0.0)
        waiting = [asyncio.create_task(stream.result()) for _ in range(3)]
        waiting[0].cancel()
        texts = {(await each).text for each in waiting[1:]}
        assert len(texts) == 1

    asked(ask)
