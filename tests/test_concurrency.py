"""One model for many: threads, event loops, and whoever closes, interrupts or asks at a bad time."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import paceline
from paceline.core.arrays import Float64Array
from paceline.drafters.base import Drafter, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.lookup import LookupDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.loading import open_engine
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary, blended_model, random_model
from paceline.options import GenerateOptions
from tests.helpers import ForcedDrafter
from tests.runtime.gate import ENDLESS, Gate, interrupt_once, needs_signals
from tests.tiers import some_long
from tests.timing import WAIT_S

SIZE = 30
VOCABULARY = ScriptedVocabulary.of_size(SIZE, end_ids=[29])
TARGET = random_model(SIZE, seed=1, order=2)
DRAFT = blended_model(TARGET, random_model(SIZE, seed=2, order=2), 0.3)


def scripted(target: LogitFunction = TARGET, drafters: Sequence[Drafter] | None = None) -> paceline.Model:
    engine = ScriptedEngine(target, VOCABULARY, max_sequences=64, context_length=2 * ENDLESS)
    if drafters is None:
        draft = ScriptedEngine(DRAFT, VOCABULARY, max_sequences=64, context_length=2 * ENDLESS)
        drafters = [DraftModelDrafter(draft, target_vocab_size=SIZE), SuffixDrafter(), LookupDrafter()]
    return paceline.Model(engine, drafters, paceline.FixedPolicy(3, siblings=2))


def counting(tokens: Sequence[int]) -> Float64Array:
    row: Float64Array = np.eye(SIZE)[(tokens[-1] + 1) % (SIZE - 1)]
    return row


@dataclass
class Question:
    """A request, and what plain decoding answers where it is alone."""

    prompt: list[int]
    options: GenerateOptions
    expected: paceline.Generation | None = field(default=None, repr=False)

    @classmethod
    def draw(cls, rng: random.Random) -> Question:
        options: GenerateOptions = {
            "max_tokens": rng.randint(1, 40),
            "seed": rng.randrange(1000),
            "temperature": rng.choice((0.0, 0.7, 1.3)),
            "ignore_end": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            options["stop"] = ["".join(rng.choices("#$%&'()*", k=2))]
        if rng.random() < 0.3:
            options["repeat_penalty"] = 1.2
        return cls([rng.randrange(SIZE - 1) for _ in range(rng.randint(1, 12))], options)

    def check(self, answer: paceline.Generation) -> None:
        assert self.expected is not None
        assert answer.text == self.expected.text
        assert answer.token_ids == self.expected.token_ids
        assert answer.finish_reason == self.expected.finish_reason
        assert answer.stats.predicted_tokens == len(answer.token_ids) == len(answer.sources)


def questions(seed: int, count: int) -> list[Question]:
    rng = random.Random(seed)
    drawn = [Question.draw(rng) for _ in range(count)]
    for question in drawn:
        with scripted() as plain:
            options: GenerateOptions = {**question.options, "speculate": False}
            question.expected = plain.generate(question.prompt, **options)
    return drawn


def in_threads(works: Sequence[Callable[[], object]]) -> None:
    """Run functions in threads, and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_eight_threads_get_what_each_would_get_alone() -> None:
    shares = [questions(seed, 12) for seed in range(8)]
    with scripted() as model:

        def ask(share: list[Question], seed: int) -> None:
            rng = random.Random(seed)
            for question in share:
                options: GenerateOptions = {**question.options, "speculate": rng.random() < 0.7}
                if rng.random() < 0.5:
                    question.check(model.generate(question.prompt, **options))
                else:
                    stream = model.stream(question.prompt, **options)
                    text = "".join(segment.text for segment in stream)
                    question.check(stream.result())
                    assert text == stream.result().text

        in_threads([lambda share=share, seed=seed: ask(share, seed) for seed, share in enumerate(shares)])  # type: ignore[misc]
        assert model.worker.call(lambda: not model.loop.active)
        assert isinstance(model.target, ScriptedEngine)
        assert not model.target._sequences


def test_sixteen_streams_in_an_event_loop_get_what_each_would_get_alone() -> None:
    asked = questions(100, 48)

    async def stream(model: paceline.Model, question: Question) -> None:
        async with model.astream(question.prompt, **question.options) as stream:
            text = "".join([segment.text async for segment in stream])
            answer = await stream.result()
        question.check(answer)
        assert text == answer.text
        assert list(stream.prompt_ids) == question.prompt
        question.check(await model.agenerate(question.prompt, **question.options))

    async def ask_all(model: paceline.Model) -> None:
        for first in range(0, len(asked), 16):
            await asyncio.gather(*(stream(model, question) for question in asked[first : first + 16]))

    with scripted() as model:
        asyncio.run(ask_all(model))
        assert isinstance(model.target, ScriptedEngine)
        assert not model.target._sequences


def test_an_event_loop_goes_on_while_the_model_is_in_a_round() -> None:
    gate = Gate(3, counting)

    async def ask(model: paceline.Model) -> list[int]:
        first = asyncio.create_task(model.agenerate([1], max_tokens=5, temperature=0.0))
        while not gate.reached.is_set():
            await asyncio.sleep(0)
        # The model stands in a round now. A second request and a text of any length are taken at once.
        second = model.astream("#$%" * 1000, max_tokens=2, temperature=0.0)
        waiting = asyncio.create_task(second.result())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.let_through.set()
        assert len(second.prompt_ids) in (0, 3000)
        assert len((await waiting).token_ids) == 2
        return list((await first).token_ids)

    with scripted(gate) as model:
        assert asyncio.run(ask(model)) == [2, 3, 4, 5, 6]


def test_cancelling_a_task_cancels_its_request_and_no_other() -> None:
    async def ask(model: paceline.Model) -> None:
        streams = [model.astream([1], max_tokens=ENDLESS, ignore_end=True) for _ in range(3)]

        async def read(stream: paceline.AsyncStream) -> None:
            async for _ in stream:
                pass

        await anext(streams[0])
        tasks = [asyncio.create_task(read(streams[0])), asyncio.create_task(streams[1].result())]
        tasks.append(asyncio.create_task(model.agenerate([1], max_tokens=ENDLESS, ignore_end=True)))
        other = asyncio.create_task(model.agenerate([2], max_tokens=500, temperature=0.0, ignore_end=True))
        await anext(streams[2])
        await asyncio.sleep(0)  # a task that is cancelled before it begins waits for nothing
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
        unread = await streams[2].aclose()
        assert (await streams[2].result()).finish_reason == "cancelled"
        assert (await streams[2].result()).text.endswith("".join(segment.text for segment in unread))
        for stream in streams[:2]:
            assert (await stream.result()).finish_reason == "cancelled"
        assert len((await other).token_ids) == 500
        assert await asyncio.to_thread(model.worker.call, lambda: not model.loop.active)

    with scripted() as model:
        asyncio.run(ask(model))


def test_threads_that_share_a_stream_all_come_to_its_end() -> None:
    with scripted() as model:
        stream = model.stream([1], max_tokens=300, ignore_end=True)
        in_threads([lambda: list(stream), lambda: list(stream), stream.result, stream.so_far])
        stream = model.stream([1], max_tokens=300, ignore_end=True)
        texts: list[str] = []
        in_threads([lambda: texts.extend(segment.text for segment in stream)] * 3)
        assert sorted("".join(texts)) == sorted(stream.result().text)


def test_a_reader_whose_round_another_one_read_first_loses_none_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(2, counting)
    with scripted(gate, []) as model:
        stream = model.stream([1], max_tokens=5, temperature=0.0)
        readers = [stream.rounds(), stream.rounds()]
        texts: list[str] = []
        wait = stream._wait

        def wait_and_let_another_read(*rounds: float) -> None:
            wait(*rounds)
            if len(readers) == 2:
                texts.extend(segment.text for segment in next(readers.pop()))

        monkeypatch.setattr(stream, "_wait", wait_and_let_another_read)
        # Only the first round is there.
        texts.extend(segment.text for segment in next(readers[0]))
        gate.let_through.set()
        texts.extend(segment.text for segments in readers[0] for segment in segments)
        assert "".join(texts) == stream.result().text
        assert stream.is_read


def test_an_event_loop_that_is_closed_takes_nothing_with_it() -> None:
    with scripted() as model:
        kept: list[paceline.AsyncStream] = []

        async def leave() -> None:
            kept.append(model.astream([1], max_tokens=ENDLESS, ignore_end=True))
            await anext(kept[0])

        asyncio.run(leave())
        assert len(model.generate([1], max_tokens=50, ignore_end=True).token_ids) == 50
        while model.worker.call(lambda: bool(model.loop.active)):
            pass


def test_what_is_wrong_with_a_request_is_raised_by_the_first_wait() -> None:
    async def ask(model: paceline.Model) -> None:
        with pytest.raises(paceline.InputError, match="temperature"):
            model.astream([1], temperature=-1.0)
        stream = model.astream([99])
        with pytest.raises(paceline.InputError, match="token id 99"):
            await anext(stream)
        with pytest.raises(paceline.InputError, match="token id 99"):
            await stream.result()
        assert await stream.aclose() == []
        with pytest.raises(paceline.InputError, match="no token of this vocabulary"):
            await model.agenerate("\x00")

    with scripted() as model:
        asyncio.run(ask(model))


def test_closing_from_several_threads_ends_everybodys_waiting() -> None:
    for _ in range(20):
        model = scripted()
        reasons: list[str | None] = []
        streams = [model.stream([1], max_tokens=ENDLESS, ignore_end=True) for _ in range(3)]

        def read(stream: paceline.Stream, reasons: list[str | None] = reasons) -> None:
            reasons.append(stream.result().finish_reason)

        def ask(model: paceline.Model = model, reasons: list[str | None] = reasons) -> None:
            try:
                while True:
                    answer = model.generate([1], max_tokens=3, ignore_end=True)
                    assert answer.finish_reason in ("length", "cancelled")
            except paceline.ClosedError:
                reasons.append("closed")

        works: list[Callable[[], object]] = [lambda stream=stream: read(stream) for stream in streams]  # type: ignore[misc]
        in_threads([*works, ask, ask, model.close, model.close])
        assert sorted(map(str, reasons)) == ["cancelled"] * 3 + ["closed"] * 2
        assert isinstance(model.target, ScriptedEngine)
        with pytest.raises(paceline.ClosedError):
            model.target.open()


def test_a_request_that_a_drafter_asks_for_is_an_error_that_ends_the_requests_of_the_round() -> None:
    asked: list[paceline.Model] = []

    class Asking(ForcedDrafter):
        def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
            asked.pop().generate([1])
            return [False] * len(jobs)

    with scripted(drafters=[Asking(lambda request: [])]) as model:
        asked.append(model)
        with pytest.raises(paceline.BusyError):
            model.generate([1], max_tokens=9, ignore_end=True)
        assert not asked
        asked.append(model)
        with pytest.raises(paceline.BusyError):
            model.worker.call(model.close)
        assert len(model.generate([1], max_tokens=9, ignore_end=True, speculate=False).token_ids) == 9


def test_what_a_drafter_raises_reaches_every_request_of_the_round_and_the_next_ones_are_answered() -> None:
    class Failing(ForcedDrafter):
        failing = threading.Event()

        def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
            if self.failing.is_set():
                raise ZeroDivisionError("a drafter's own")
            return [False] * len(jobs)

    drafter = Failing(lambda request: [])
    with scripted(drafters=[drafter]) as model:
        streams = [model.stream([1], max_tokens=ENDLESS, ignore_end=True) for _ in range(3)]
        next(iter(streams[0]))
        drafter.failing.set()
        for stream in streams:
            with pytest.raises(ZeroDivisionError):
                stream.result()
            assert stream.so_far().finish_reason == "error"
            assert len(stream.so_far().token_ids) == stream.so_far().stats.predicted_tokens
        drafter.failing.clear()
        assert len(model.generate([1], max_tokens=9, ignore_end=True).token_ids) == 9


class TooManyError(Exception):
    """Makes its message of what it is given."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} are too many")
        self.count = count


def failing(error: Exception) -> LogitFunction:
    def logits(tokens: Sequence[int]) -> Float64Array:
        if len(tokens) > 5:
            raise error
        return counting(tokens)

    return logits


def test_each_consumer_is_told_of_an_error_by_one_of_its_own() -> None:
    error = paceline.EngineError("the device is gone")
    error.add_note("its name is 7")
    error.__cause__ = OSError(5, "input or output")
    with scripted(failing(error), []) as model:
        stream = model.stream([1], max_tokens=10, ignore_end=True)
        told: list[paceline.EngineError] = []

        def ask() -> None:
            with pytest.raises(paceline.EngineError, match=r"^the device is gone") as caught:
                stream.result()
            told.append(caught.value)

        in_threads([ask] * 3)
        assert len({id(each) for each in [*told, error]}) == 4
        for each in told:
            assert each.__notes__ == ["its name is 7"]
            assert each.__cause__ is error.__cause__
            names = [frame.name for frame in traceback.extract_tb(each.__traceback__)]
            assert names.count("result") == 1
            assert names[-1] == "logits", "where it came from is told too"


def test_an_error_that_a_copy_would_change_is_raised_as_it_is() -> None:
    with scripted(failing(TooManyError(7)), []) as model:
        stream = model.stream([1], max_tokens=10, ignore_end=True)
        for _ in range(2):
            with pytest.raises(TooManyError, match=r"^7 are too many$") as caught:
                stream.result()
            assert caught.value.count == 7


def test_a_stream_that_raised_an_error_is_kept_by_nobody() -> None:
    def fail(model: paceline.Model) -> list[weakref.ref[Any]]:
        stream = model.stream([1], max_tokens=10, ignore_end=True)
        try:
            stream.result()
        except paceline.EngineError as error:
            return [weakref.ref(stream), weakref.ref(stream._outputs), weakref.ref(error)]
        raise AssertionError("no error was raised")

    with scripted(failing(paceline.EngineError("the device is gone")), []) as model:
        gc.disable()
        try:
            kept = fail(model)
            model.worker.call(lambda: None)  # so that the thread has let go of the round
            assert [each() for each in kept] == [None] * 3, "only a collector finds them"
        finally:
            gc.enable()


def test_an_answer_so_far_is_of_one_moment() -> None:
    with scripted() as model, model.stream([1, 2, 3], max_tokens=ENDLESS, ignore_end=True) as stream:
        segments = iter(stream)
        read = ""
        for _ in range(50):
            read += next(segments).text
            answer = stream.so_far()
            assert answer.finish_reason is None
            assert answer.text.startswith(read)
            assert len(answer.token_ids) == answer.stats.predicted_tokens == len(answer.stats.arrivals_s)
        assert stream.prompt_ids == [1, 2, 3]
        assert stream.rules.max_tokens == ENDLESS


@needs_signals
@pytest.mark.parametrize("how", some_long(["generate", "stream"], quick=["stream"]))
def test_an_interrupt_hits_the_wait_of_its_own_thread_only(how: str) -> None:
    with scripted() as model:
        model.generate([1], max_tokens=1)
        results: list[paceline.Generation] = []
        others = [model.stream([seed], max_tokens=2000, seed=seed, ignore_end=True) for seed in (1, 2)]
        reader = threading.Thread(target=lambda: results.append(others[0].result()))
        reader.start()

        def runs() -> bool:
            return bool(model.worker.call(lambda: len(model.loop.active) > 0))

        def ask() -> None:
            if how == "generate":
                model.generate([3], max_tokens=ENDLESS, ignore_end=True)
            else:
                for _ in model.stream([3], max_tokens=ENDLESS, ignore_end=True):
                    pass

        with pytest.raises(KeyboardInterrupt), interrupt_once(runs):
            ask()
        reader.join()
        gc.collect()
        assert [len(answer.token_ids) for answer in (*results, others[1].result())] == [2000, 2000]
        assert model.worker.call(lambda: not model.loop.active)
        assert len(model.generate([1], max_tokens=5, ignore_end=True).token_ids) == 5


@contextmanager
def opened_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield a list of the engines that are opened by ``load``."""
    opened: list[Any] = []

    def opening(options: paceline.ModelOptions) -> Any:
        opened.append(open_engine(options))
        return opened[-1]

    monkeypatch.setattr("paceline.model_pair.open_engine", opening)
    monkeypatch.setattr("paceline.planning.costs.attention.open_engine", opening)
    yield opened


def is_closed(engine: Any) -> bool:
    try:
        engine.open()
    except paceline.ClosedError:
        return True
    return False


@needs_signals
def test_an_interrupted_load_closes_what_it_opened_and_ends_its_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    measuring, let_through = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def report(share: float) -> None:
        threads.append(threading.current_thread())
        measuring.set()
        assert let_through.wait(WAIT_S)

    with opened_engines(monkeypatch) as opened:
        with pytest.raises(KeyboardInterrupt), interrupt_once(measuring.is_set):
            paceline.load(context_length=256, report=report)
        let_through.set()
        threads[0].join(WAIT_S)
        assert not threads[0].is_alive()
        assert opened
        assert all(map(is_closed, opened))


@needs_signals
def test_a_model_that_is_loaded_for_nobody_any_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    built, let_through = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def build(*arguments: Any, **named: Any) -> list[Drafter]:
        threads.append(threading.current_thread())
        built.set()
        assert let_through.wait(WAIT_S)
        return []

    monkeypatch.setattr("paceline.api.build_drafters", build)
    with opened_engines(monkeypatch) as opened:
        with pytest.raises(KeyboardInterrupt), interrupt_once(built.is_set):
            paceline.load(context_length=256, policy=paceline.FixedPolicy(2))
        let_through.set()
        threads[0].join(WAIT_S)
        assert not threads[0].is_alive()
        assert len(opened) == 2
        assert is_closed(opened[0])


def test_a_report_that_raises_ends_the_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))

    def report(share: float) -> None:
        raise KeyboardInterrupt

    with opened_engines(monkeypatch) as opened:
        with pytest.raises(KeyboardInterrupt):
            paceline.load(context_length=256, report=report)
        assert opened
        assert all(map(is_closed, opened))


def test_a_real_model_is_loaded_measured_and_run_in_one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from paceline.engines.llama_cpp import LlamaCppEngine

    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    threads: set[str] = set()

    def noting(name: str) -> None:
        real = getattr(LlamaCppEngine, name)

        def noted(self: LlamaCppEngine, *arguments: Any) -> Any:
            threads.add(threading.current_thread().name)
            return real(self, *arguments)

        monkeypatch.setattr(LlamaCppEngine, name, noted)

    for name in ("_start", "forward", "commit", "close"):
        if hasattr(LlamaCppEngine, name):
            noting(name)
    with paceline.load(context_length=256, report=lambda share: threads.add(threading.current_thread().name)) as model:
        model.generate("def f(x):", max_tokens=20)
        asyncio.run(model.agenerate("def f(x):", max_tokens=20))
    assert threads == {"paceline"}
