"""The thread that owns an engine: whoever asks it, whenever they go, it goes on, and ends when it should."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import pytest

from paceline.core.arrays import Float64Array
from paceline.core.errors import BusyError, ClosedError, EngineError, InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Emission, Request
from paceline.drafters.base import DraftJob
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary
from paceline.planning.base import Observer, RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop
from paceline.runtime.loop_driver import LoopDriver
from paceline.runtime.output_queue import Ending, ThreadOutputQueue
from paceline.runtime.worker import Worker
from tests.helpers import ForcedDrafter
from tests.runtime.gate import ENDLESS, SIZE, Gate, counting, interrupt_once, needs_signals
from tests.timing import WAIT_S


class Owner:
    """Whoever wants an answer."""


def engine(model: LogitFunction = counting, *, max_rows: int = 512) -> ScriptedEngine:
    vocabulary = ScriptedVocabulary.of_size(SIZE)
    return ScriptedEngine(model, vocabulary, context_length=2 * ENDLESS, max_rows=max_rows)


def driver_on(worker: Worker, target: ScriptedEngine) -> LoopDriver:
    return LoopDriver(worker, DecodingLoop(target, [], NO_SPECULATION, clock=target.clock))


def adding(driver: LoopDriver, prompt: Sequence[int], max_tokens: int) -> Callable[[], Request]:
    return lambda: driver.loop.add(prompt, SamplingParams(0.0), StopRules(max_tokens))


def ids_of(outputs: ThreadOutputQueue) -> list[int]:
    return [token_id for emission in outputs.rounds if emission for token_id in emission.token_ids]


@pytest.fixture
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


def test_all_calls_are_made_in_one_thread_that_is_none_of_the_callers(worker: Worker) -> None:
    threads = {worker.call(threading.get_ident) for _ in range(3)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_what_a_call_raises_is_raised_in_the_caller_and_nothing_keeps_it(worker: Worker) -> None:
    class FaultError(Exception):
        pass

    def fail() -> None:
        raise FaultError("the function's own")

    with pytest.raises(FaultError, match="own") as caught:
        worker.call(fail)
    error = weakref.ref(caught.value)
    gc.disable()
    try:
        del caught
        assert error() is None, "only a collector finds it"
    finally:
        gc.enable()
    assert worker.call(lambda: 7) == 7


def test_what_a_post_raises_is_logged(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("nobody waits for this")

    worker.post(fail)
    worker.call(lambda: None)
    assert "nobody waits for this" in caplog.text


def test_a_call_from_within_a_call_is_an_error_and_no_deadlock(worker: Worker) -> None:
    with pytest.raises(BusyError, match="within one of its own rounds"):
        worker.call(lambda: worker.call(lambda: None))
    with pytest.raises(BusyError):
        worker.call(worker.close)


def test_after_the_end_calls_are_refused_and_posts_ignored() -> None:
    worker = Worker()
    worker.close()
    worker.close()
    worker.post(lambda: None)
    with pytest.raises(ClosedError, match="load it again"):
        worker.call(lambda: None)


def test_calls_that_race_with_the_end_are_made_or_refused() -> None:
    for _ in range(50):
        worker = Worker()
        results: list[int | str] = []

        def ask(worker: Worker = worker, results: list[int | str] = results) -> None:
            try:
                for number in range(ENDLESS):
                    worker.call(lambda number=number: number)  # type: ignore[misc]
            except ClosedError:
                results.append("refused")

        callers = [threading.Thread(target=ask) for _ in range(3)]
        for caller in callers:
            caller.start()
        closers = [threading.Thread(target=worker.close) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in callers + closers:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert results == ["refused"] * 3


def test_a_worker_that_is_dropped_ends_its_thread() -> None:
    worker = Worker()
    thread = worker._state.thread
    driver = driver_on(worker, engine())
    outputs, owner = ThreadOutputQueue(), Owner()
    driver.submit(adding(driver, [0], 3), outputs, owner)
    outputs.wait(ENDLESS)
    del worker, driver
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_context_is_entered_and_left_in_the_thread(worker: Worker) -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def context() -> Iterator[str]:
        seen.append(threading.current_thread().name)
        try:
            yield "value"
        except ValueError as error:
            seen.append(str(error))
            raise
        finally:
            seen.append(threading.current_thread().name)

    with worker.entered(context()) as value:
        assert value == "value"
    assert seen == ["paceline"] * 2
    seen.clear()
    with pytest.raises(ValueError, match="in between"), worker.entered(context()):
        raise ValueError("in between")
    assert seen == ["paceline", "in between", "paceline"]


def test_an_error_within_a_context_that_fails_to_be_left_is_kept_by_nobody(worker: Worker) -> None:
    class FaultError(Exception):
        pass

    class Context:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            raise ValueError("not left")

    def fail() -> weakref.ref[FaultError]:
        error = FaultError()
        kept = weakref.ref(error)
        with pytest.raises(ValueError, match="not left"), worker.entered(Context()):
            raise error
        del error
        return kept

    gc.disable()
    try:
        error = fail()
        worker.call(lambda: None)  # so that the thread has let go of the call before
        assert error() is None, "only a collector finds it"
    finally:
        gc.enable()


def test_loops_that_share_a_worker_have_rounds_in_turn(worker: Worker) -> None:
    order: list[int] = []

    def noting(which: int) -> LogitFunction:
        def logits(tokens: Sequence[int]) -> Float64Array:
            order.append(which)
            return counting(tokens)

        return logits

    drivers = [driver_on(worker, engine(noting(which))) for which in range(2)]
    queues, owner = [ThreadOutputQueue(), ThreadOutputQueue()], Owner()

    def admit_both() -> None:
        for driver, outputs in zip(drivers, queues, strict=True):
            driver.submit_soon(adding(driver, [0], 5), outputs, owner)

    worker.call(admit_both)
    for outputs in queues:
        outputs.wait(ENDLESS)
        assert ids_of(outputs) == [1, 2, 3, 4, 5]
    assert order == [0, 1] * 5


class NotingQueue(ThreadOutputQueue):
    """Keeps what it is told of every round."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[int] | None] = []

    def put(self, emission: Emission | None) -> None:
        self.told.append(None if emission is None else list(emission.token_ids))
        super().put(emission)


def test_a_long_prompt_is_told_of_round_by_round(worker: Worker) -> None:
    driver = driver_on(worker, engine(max_rows=4))
    outputs, owner = NotingQueue(), Owner()
    driver.submit(adding(driver, [0] * 11, 3), outputs, owner)
    outputs.wait(ENDLESS)
    assert outputs.told == [None, None, [1], [2]]
    assert ids_of(outputs) == [1, 2, 3]
    assert outputs.ending is not None
    assert outputs.ending.stats.prompt_tokens == 11


def test_rounds_without_a_gain_that_nobody_waits_for_are_kept_once() -> None:
    outputs = ThreadOutputQueue()
    for _ in range(1000):
        outputs.put(None)
    assert outputs.rounds == [None]
    reader = threading.Thread(target=outputs.wait, args=(2,))
    reader.start()
    while reader.is_alive():
        outputs.put(None)
    assert outputs.rounds == [None] * 2


def test_a_request_that_is_refused_raises_where_it_was_asked_for(worker: Worker) -> None:
    driver = driver_on(worker, engine())
    outputs, owner = ThreadOutputQueue(), Owner()
    with pytest.raises(InputError, match="token id 99"):
        driver.submit(adding(driver, [99], 1), outputs, owner)
    driver.submit_soon(adding(driver, [99], 1), outputs, owner)
    outputs.wait(ENDLESS)
    assert outputs.rounds == []
    assert outputs.ending is not None
    assert isinstance(outputs.ending.error, InputError)


def test_an_owner_that_is_dropped_ends_its_own_request_and_no_other() -> None:
    gate = Gate(7)
    target = engine(gate)
    with Worker() as worker:
        driver = driver_on(worker, target)
        dropped, kept = ThreadOutputQueue(), ThreadOutputQueue()
        leaving, staying = Owner(), Owner()
        wanted = [(ENDLESS, dropped, leaving), (12, kept, staying)]

        def admit_both() -> None:
            while wanted:
                max_tokens, outputs, owner = wanted.pop()
                driver.submit_soon(adding(driver, [0], max_tokens), outputs, owner)

        worker.call(admit_both)
        assert gate.reached.wait(WAIT_S)
        del leaving
        gate.let_through.set()
        dropped.wait(ENDLESS)
        kept.wait(ENDLESS)
        assert dropped.ending is not None
        assert dropped.ending.finish_reason == "cancelled"
        # It was in the middle of a round, which was still made whole.
        assert ids_of(dropped) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert ids_of(kept) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert not target._sequences


def test_an_owner_collected_by_the_thread_itself_ends_its_request_after_the_round(worker: Worker) -> None:
    """Python collects garbage wherever it likes."""
    collected = threading.Event()

    def logits(tokens: Sequence[int]) -> Float64Array:
        if not collected.is_set():
            gc.collect()
        return counting(tokens)

    class Holder:
        def __init__(self) -> None:
            self.cycle = self

    driver = driver_on(worker, engine(logits))
    outputs, kept = ThreadOutputQueue(), ThreadOutputQueue()
    owner, other = Holder(), Owner()
    weakref.finalize(owner, collected.set)
    gc.disable()
    try:
        driver.submit(adding(driver, [0], ENDLESS), outputs, owner)
        del owner
        driver.submit(adding(driver, [0], 5), kept, other)
        outputs.wait(ENDLESS)
        kept.wait(ENDLESS)
    finally:
        gc.enable()
    assert collected.is_set()
    assert outputs.ending is not None
    assert outputs.ending.finish_reason == "cancelled"
    assert ids_of(kept) == [1, 2, 3, 4, 5]


def test_a_round_that_fails_ends_the_requests_of_its_loop_and_the_loop_goes_on(worker: Worker) -> None:
    class Failing(ScriptedEngine):
        failing = False

        def forward(self, steps: Sequence[object]) -> object:  # type: ignore[override]
            if self.failing:
                raise EngineError("the device is gone")
            return super().forward(steps)  # type: ignore[arg-type]

    gate = Gate(5)
    target = Failing(gate, ScriptedVocabulary.of_size(SIZE))
    other = engine()
    driver, beside = driver_on(worker, target), driver_on(worker, other)
    queues, owner = [ThreadOutputQueue() for _ in range(3)], Owner()
    first, second, unharmed = queues

    def admit_all() -> None:
        driver.submit_soon(adding(driver, [0], 9), first, owner)
        driver.submit_soon(adding(driver, [1], 9), second, owner)
        beside.submit_soon(adding(beside, [0], 9), unharmed, owner)

    worker.call(admit_all)
    assert gate.reached.wait(WAIT_S)
    target.failing = True
    gate.let_through.set()
    for outputs in queues:
        outputs.wait(ENDLESS)
    for outputs in (first, second):
        assert outputs.ending is not None
        assert outputs.ending.finish_reason == "error"
        assert isinstance(outputs.ending.error, EngineError)
        assert outputs.ending.stats.predicted_tokens == len(ids_of(outputs))
    assert ids_of(unharmed) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert not target._sequences
    target.failing = False
    again = ThreadOutputQueue()
    driver.submit(adding(driver, [5], 3), again, owner)
    again.wait(ENDLESS)
    assert ids_of(again) == [6, 7, 8]


class FailingOnce(Observer):
    """Observes rounds, and fails after one of them.

    Attributes:
        at: number of that round.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self._rounds = 0

    def observe(self, record: RoundRecord) -> None:
        self._rounds += 1
        if self._rounds == self.at:
            raise ZeroDivisionError("an observer's own")


def submit_all(driver: LoopDriver, owner: Owner, wanted: Sequence[tuple[ThreadOutputQueue, int]]) -> None:
    """Have requests admitted between the same two rounds: for each its outputs and the most tokens of its answer."""

    def admit() -> None:
        for outputs, max_tokens in wanted:
            driver.submit_soon(adding(driver, [0], max_tokens), outputs, owner)

    driver.worker.call(admit)
    for outputs, _ in wanted:
        outputs.wait(ENDLESS)


def ending_of(outputs: ThreadOutputQueue) -> Ending:
    assert outputs.ending is not None
    assert outputs.ending.stats.predicted_tokens == len(ids_of(outputs))
    return outputs.ending


def test_an_error_of_a_round_ends_no_request_that_waits_for_its_start(worker: Worker) -> None:
    drafter = ForcedDrafter(lambda request: [])
    target = engine()
    driver = LoopDriver(worker, DecodingLoop(target, [drafter], FixedPolicy(2), clock=target.clock, max_running=2))
    grow, rounds = drafter.grow, 0

    def fail_once(jobs: Sequence[DraftJob]) -> list[bool]:
        nonlocal rounds
        rounds += 1
        if rounds == 4:
            raise ZeroDivisionError("a drafter's own")
        return list(grow(jobs))

    drafter.grow = fail_once  # type: ignore[method-assign]
    first, second, waiting, owner = ThreadOutputQueue(), ThreadOutputQueue(), ThreadOutputQueue(), Owner()
    submit_all(driver, owner, [(first, 9), (second, 9), (waiting, 9)])
    for outputs in (first, second):
        assert ending_of(outputs).finish_reason == "error"
        assert isinstance(ending_of(outputs).error, ZeroDivisionError)
    assert ending_of(waiting).finish_reason == "length"
    assert ids_of(waiting) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_what_a_round_emitted_stands_where_an_observer_fails_after_it(worker: Worker) -> None:
    target = engine()
    loop = DecodingLoop(target, [], NO_SPECULATION, clock=target.clock, observers=[FailingOnce(3)], max_running=2)
    driver = LoopDriver(worker, loop)
    over, running, waiting, owner = ThreadOutputQueue(), ThreadOutputQueue(), ThreadOutputQueue(), Owner()
    submit_all(driver, owner, [(over, 3), (running, 9), (waiting, 5)])
    assert ending_of(over).finish_reason == "length"
    assert ending_of(over).error is None
    assert ids_of(over) == [1, 2, 3]
    assert ending_of(running).finish_reason == "error"
    assert isinstance(ending_of(running).error, ZeroDivisionError)
    assert ids_of(running) == [1, 2, 3]
    assert ending_of(waiting).finish_reason == "length"
    assert ids_of(waiting) == [1, 2, 3, 4, 5]
    assert worker.call(lambda: not target._sequences)


def test_an_error_of_a_round_that_nobody_can_be_told_is_logged(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    target = engine()
    driver = LoopDriver(
        worker,
        DecodingLoop(target, [], NO_SPECULATION, clock=target.clock, observers=[FailingOnce(3)], max_running=1),
    )
    over, waiting, owner = ThreadOutputQueue(), ThreadOutputQueue(), Owner()
    submit_all(driver, owner, [(over, 3), (waiting, 5)])
    assert [ending_of(outputs).finish_reason for outputs in (over, waiting)] == ["length"] * 2
    assert "an observer's own" in caplog.text


def test_an_error_that_lets_no_request_start_ends_those_that_wait(worker: Worker) -> None:
    class Leaving(ForcedDrafter):
        def begin(self, request: Request) -> None:
            raise SystemExit

    target = engine()
    drafter = Leaving(lambda request: [])
    driver = LoopDriver(worker, DecodingLoop(target, [drafter], FixedPolicy(2), clock=target.clock))
    queues, owner = [ThreadOutputQueue(), ThreadOutputQueue()], Owner()
    submit_all(driver, owner, [(outputs, 3) for outputs in queues])
    for outputs in queues:
        assert isinstance(ending_of(outputs).error, SystemExit)


def test_a_request_that_waits_for_its_start_is_told_of_its_own_rounds_only(worker: Worker) -> None:
    target = engine()
    driver = LoopDriver(worker, DecodingLoop(target, [], NO_SPECULATION, clock=target.clock, max_running=1))
    running, waiting, owner = ThreadOutputQueue(), NotingQueue(), Owner()
    submit_all(driver, owner, [(running, 20), (waiting, 3)])
    assert waiting.told == [[1], [2]]
    assert ids_of(waiting) == [1, 2, 3]
    assert len(ids_of(running)) == 20


def test_an_outbox_that_fails_ends_its_own_request_and_no_other(worker: Worker) -> None:
    class Broken:
        def __init__(self) -> None:
            self.ended = threading.Event()

        def begin(self) -> None:
            """Whoever submitted it waited for that."""

        def put(self, emission: Emission | None) -> None:
            raise RuntimeError("Event loop is closed")

        def end(self, ending: Ending, emission: Emission | None = None) -> None:
            self.ended.set()
            raise RuntimeError("Event loop is closed")

    target = engine()
    driver = driver_on(worker, target)
    broken, fine, owner = Broken(), ThreadOutputQueue(), Owner()
    driver.submit(adding(driver, [0], ENDLESS), broken, owner)
    driver.submit(adding(driver, [0], 6), fine, owner)
    assert broken.ended.wait(WAIT_S)
    fine.wait(ENDLESS)
    assert ids_of(fine) == [1, 2, 3, 4, 5, 6]
    worker.call(lambda: None)
    assert not target._sequences


@needs_signals
def test_an_interrupt_ends_the_wait_of_a_call_and_the_call_is_made_all_the_same(worker: Worker) -> None:
    started, let_through, done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        assert let_through.wait(WAIT_S)
        done.set()

    with pytest.raises(KeyboardInterrupt), interrupt_once(started.is_set):
        worker.call(slow)
    assert not done.is_set()
    let_through.set()
    assert worker.call(done.is_set)


@needs_signals
def test_an_interrupt_while_a_request_waits_for_its_place_ends_the_request() -> None:
    gate = Gate(3)
    target = engine(gate)
    with Worker() as worker:
        driver = driver_on(worker, target)
        running, given_up, owner = ThreadOutputQueue(), ThreadOutputQueue(), Owner()
        driver.submit(adding(driver, [0], 20), running, owner)
        assert gate.reached.wait(WAIT_S)
        with pytest.raises(KeyboardInterrupt), interrupt_once(lambda: not worker._state.inbox.empty()):
            driver.submit(adding(driver, [5], ENDLESS), given_up, owner)
        gate.let_through.set()
        given_up.wait(ENDLESS)
        running.wait(ENDLESS)
        assert given_up.ending is not None
        assert given_up.ending.finish_reason == "cancelled"
        assert len(ids_of(running)) == 20
    assert not target._sequences


@needs_signals
def test_an_interrupted_wait_for_rounds_loses_none_of_them(worker: Worker) -> None:
    gate = Gate(3)
    driver = driver_on(worker, engine(gate))
    outputs, owner = ThreadOutputQueue(), Owner()
    driver.submit(adding(driver, [0], 20), outputs, owner)
    with pytest.raises(KeyboardInterrupt), interrupt_once(lambda: outputs._wanted == ENDLESS):
        outputs.wait(ENDLESS)
    gate.let_through.set()
    outputs.wait(ENDLESS)
    assert ids_of(outputs) == [(1 + place) % SIZE for place in range(20)]


@needs_signals
def test_a_signal_handler_that_waits_leaves_the_wait_around_it_to_be_rung_for(worker: Worker) -> None:
    gate, later = Gate(3), Gate(5)
    driver = driver_on(worker, engine(lambda tokens: later(tokens) if len(tokens) > 5 else gate(tokens)))
    outputs, owner = ThreadOutputQueue(), Owner()
    driver.submit(adding(driver, [0], ENDLESS), outputs, owner)
    assert gate.reached.wait(WAIT_S)
    heard = threading.Event()

    def handle(signum: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            gate.let_through.set()
            # The fourth round, which the wait around this one is for, comes before the end of this wait.
            outputs.wait(5)

    def signal_once() -> None:
        while outputs._wanted != 4:
            pass
        while not heard.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    signaller = threading.Thread(target=signal_once)
    signaller.start()
    try:
        outputs.wait(4)
        assert not outputs.is_over
    finally:
        later.let_through.set()
        signaller.join()
        signal.signal(signal.SIGUSR1, before)


def test_event_loops_are_woken_after_a_round_and_not_after_those_of_other_loops_too(worker: Worker) -> None:
    woken = threading.Event()
    in_time: list[bool] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()

        def first(tokens: Sequence[int]) -> Float64Array:
            worker.wake(loop, woken.set)
            return counting(tokens)

        def second(tokens: Sequence[int]) -> Float64Array:
            in_time.append(woken.wait(WAIT_S))
            return counting(tokens)

        drivers = [driver_on(worker, engine(model)) for model in (first, second)]
        queues, owner = [ThreadOutputQueue(), ThreadOutputQueue()], Owner()

        def admit_both() -> None:
            for driver, outputs in zip(drivers, queues, strict=True):
                driver.submit_soon(adding(driver, [0], 1), outputs, owner)

        worker.call(admit_both)
        for outputs in queues:
            await asyncio.to_thread(outputs.wait, ENDLESS)

    asyncio.run(test())
    assert in_time == [True]


def test_after_leaving_no_round_is_made() -> None:
    passes: list[int] = []

    def logits(tokens: Sequence[int]) -> Float64Array:
        passes.append(len(tokens))
        return counting(tokens)

    worker = Worker()
    driver = driver_on(worker, engine(logits))
    outputs, owner = ThreadOutputQueue(), Owner()
    driver.submit(adding(driver, [0], ENDLESS), outputs, owner)
    outputs.wait(1)

    def leave() -> int:
        worker._state.leave()
        return len(passes)

    passes_before = worker.call(leave)
    worker._state.thread.join(WAIT_S)
    assert len(passes) == passes_before
    assert ending_of(outputs).finish_reason == "cancelled"


def test_closing_a_worker_ends_what_runs() -> None:
    target = engine()
    worker = Worker()
    driver = driver_on(worker, target)
    outputs, owner = ThreadOutputQueue(), Owner()
    driver.submit(adding(driver, [0], ENDLESS), outputs, owner)
    outputs.wait(1)
    worker.close()
    assert outputs.ending is not None
    assert outputs.ending.finish_reason == "cancelled"
    assert not target._sequences


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, which has to end by itself."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env=environment,
    )


SCRIPTED = """
    import os, signal, sys, threading
    import numpy as np
    import paceline
    from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary

    def counting(tokens):
        return np.eye(10)[(tokens[-1] + 1) % 10]

    def load(model=counting):
        engine = ScriptedEngine(model, ScriptedVocabulary.of_size(10), context_length=1 << 40)
        return paceline.Model(engine, [], paceline.NO_SPECULATION)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "model = load(); print(model.generate([1], max_tokens=3, temperature=0).token_ids)",
        "stream = load().stream([1], max_tokens=10**9); next(iter(stream)); print('[2, 3, 4]')",
        "stream = load().stream([1], max_tokens=10**9); next(iter(stream)); print('[2, 3, 4]'); del stream",
        "stream = load().stream([1], max_tokens=10**9); next(iter(stream)); print('[2, 3, 4]'); sys.exit()",
        # A thread that is not a daemon is served to its end.
        "model = load(); threading.Thread(target=lambda: print(model.generate([1], max_tokens=3, temperature=0)"
        ".token_ids)).start()",
        # One that is a daemon does not keep the process.
        "model = load(); stream = model.stream([1], max_tokens=10**9)\n"
        "    threading.Thread(target=stream.result, daemon=True).start(); print('[2, 3, 4]')",
    ],
)
def test_a_process_that_closes_nothing_ends_at_once_and_quietly(ending: str) -> None:
    ended = run_program(f"{SCRIPTED}\n    {ending}")
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "[2, 3, 4]", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_forked_process_is_told_so_by_every_way_of_asking_and_ends() -> None:
    ended = run_program(
        SCRIPTED
        + """
    import asyncio

    async def ask(model):
        return await model.agenerate([1], max_tokens=3)

    model = load()
    stream = model.stream([1], max_tokens=10**9)
    next(iter(stream))
    child = os.fork()
    if child == 0:
        ways = (
            lambda: model.generate([1]),
            lambda: model.stream([1]),
            lambda: asyncio.run(ask(model)),
            lambda: model.worker.call(int),
            stream.result,
            stream.so_far,
        )
        for ask_in_vain in ways:
            try:
                ask_in_vain()
            except paceline.CapabilityError as error:
                print("get_context('spawn')" in str(error))
        stream.close()
        del stream
        model.close()
        del model
        print(load().generate([1], max_tokens=3, temperature=0).token_ids)
    else:
        os.waitpid(child, 0)
        stream.close()
        print(model.generate([1], max_tokens=3, temperature=0).token_ids)
"""
    )
    assert ended.stdout.splitlines() == ["True"] * 6 + ["[2, 3, 4]"] * 2, ended.stderr
    assert ended.returncode == 0
