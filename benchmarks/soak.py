"""Ten thousand requests on one model whose consumers drop, cancel, interrupt and fail, beside some left alone.

The consumers are in several threads, and only those in the main one can be interrupted. What limits it is decoding
itself. It fails where an answer that was left alone differs from the same one alone, and
prints how many requests ended in which way, and what memory the process held after each fifth of them. The target is
the embedded one with weights and cache in F32: other requests make passes wider, and in other types that turns
near-ties.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import paceline
from paceline.conversion.quantize import quantize_gguf
from paceline.drafters.registry import build_drafters
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.runtime.worker import Worker

REQUESTS = 10_000
MAX_TOKENS = 24
THREADS = 4
MAX_OPEN = 3
"""Answers under way that are left alone, in each thread."""

LONGER = 4
"""How many times as long the answers that are misused would be, so that they are under way when it happens."""

SEQUENCES = 32
"""For the answers that are left alone, as many misused ones, and what was dropped in cycles and not collected yet."""

LONGEST_ALARM_S = 0.01
PROMPTS = ("def add(a, b):\n    return", "INFO  server started\nINFO  server", "Once upon a time")


@dataclass(frozen=True)
class Expected:
    """An answer, as it is where nothing disturbs it."""

    prompt: str | Sequence[int]
    seed: int
    max_tokens: int
    token_ids: Sequence[int]
    text: str

    @classmethod
    def of(cls, model: paceline.Model, prompt: str | Sequence[int], *, seed: int = 5, max_tokens: int) -> Expected:
        answer = model.generate(prompt, max_tokens=max_tokens, seed=seed)
        return cls(prompt, seed, max_tokens, answer.token_ids, answer.text)

    def stream(self, model: paceline.Model, *, longer: int = 1) -> paceline.Stream:
        return model.stream(self.prompt, max_tokens=longer * self.max_tokens, seed=self.seed)

    def check(self, answer: paceline.Generation) -> None:
        if (answer.token_ids, answer.text) != (self.token_ids, self.text):
            raise AssertionError(f"an answer that was left alone is {answer.text!r}, not {self.text!r}")


class ConsumerError(Exception):
    """The consumer's own."""


Consumer = Callable[[paceline.Stream, random.Random], None]


def drop(stream: paceline.Stream, rng: random.Random) -> None:
    _read(stream, rng.randrange(4))


def drop_in_a_cycle(stream: paceline.Stream, rng: random.Random) -> None:
    _read(stream, rng.randrange(4))
    cycle: list[Any] = [stream]
    cycle.append(cycle)


def fail_and_keep_the_error(stream: paceline.Stream, rng: random.Random) -> None:
    try:
        _read(stream, rng.randrange(4))
        raise ConsumerError
    except ConsumerError as error:
        kept = error  # noqa: F841 - a cycle of error, traceback, this frame and the error


def cancel(stream: paceline.Stream, rng: random.Random) -> None:
    _read(stream, rng.randrange(4))
    stream.close()


def leave_a_generator(stream: paceline.Stream, rng: random.Random) -> None:
    """Its ``finally`` closes the stream wherever the generator is collected."""

    def texts() -> Iterator[str]:
        with stream:
            for segment in stream:
                yield segment.text

    generator = texts()
    for _ in range(rng.randrange(3)):
        next(generator, None)
    cycle: list[Any] = [generator]
    cycle.append(cycle)


def interrupt(stream: paceline.Stream, rng: random.Random) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, LONGEST_ALARM_S))
        try:
            stream.result()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


CONSUMERS: tuple[Consumer, ...] = (drop, drop_in_a_cycle, fail_and_keep_the_error, cancel, leave_a_generator, interrupt)
OFF_THE_MAIN_THREAD = CONSUMERS[:-1]
"""Signals interrupt the main thread only."""


def misuse_in_threads(
    model: paceline.Model,
    expected: Sequence[Expected],
    *,
    requests: int,
    seed: int,
    threads: int = THREADS,
    progress: Callable[[int], None] = lambda done: None,
) -> Counter[str]:
    """Misuse a model from several threads at once, the main one among them; see :func:`misuse`."""
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(max(1, threads - 1)) as pool:
        others = [
            pool.submit(misuse, model, expected, requests=requests, seed=seed + number, consumers=OFF_THE_MAIN_THREAD)
            for number in range(1, threads)
        ]
        with alarms_interrupt():
            counts += misuse(model, expected, requests=requests, seed=seed, progress=progress)
        for other in others:
            counts += other.result()
    return counts


def misuse(
    model: paceline.Model,
    expected: Sequence[Expected],
    *,
    requests: int,
    seed: int,
    consumers: Sequence[Consumer] = CONSUMERS,
    progress: Callable[[int], None] = lambda done: None,
) -> Counter[str]:
    """Make requests, of which some are left alone and all others misused, and check those that were left alone.

    The model has room for :data:`MAX_OPEN` answers and two more. Returns how many requests were used how.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    alone: list[tuple[Expected, paceline.Stream, Iterator[Any]]] = []
    while counts.total() < requests:
        if len(alone) < MAX_OPEN:
            wanted = rng.choice(expected)
            stream = wanted.stream(model)
            alone.append((wanted, stream, stream.rounds()))
            counts["left alone"] += 1
        else:
            consumer = rng.choice(consumers)
            # Nothing here holds the stream, so that the consumer's dropping it is what drops it.
            consumer(rng.choice(expected).stream(model, longer=LONGER), rng)
            counts[consumer.__name__.replace("_", " ")] += 1
        if alone and rng.random() < 0.8:
            at = rng.randrange(len(alone))
            wanted, stream, rounds = alone[at]
            if next(rounds, None) is None:
                wanted.check(stream.so_far())
                del alone[at]
        progress(counts.total())
    for wanted, stream, _ in alone:
        wanted.check(stream.result())
    return counts


def _read(stream: paceline.Stream, segments: int) -> None:
    for _, _ in zip(range(segments), stream, strict=False):
        pass


@contextlib.contextmanager
def alarms_interrupt() -> Iterator[None]:
    def raise_interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def report_others(unraisable: sys.UnraisableHookArgs) -> None:
        # An alarm while a generator is collected ends its ``finally``, and Python lets nobody hear of it.
        if unraisable.exc_type is not KeyboardInterrupt:
            hook(unraisable)

    before, hook = signal.signal(signal.SIGALRM, raise_interrupt), sys.unraisablehook
    sys.unraisablehook = report_others
    try:
        yield
        gc.collect()
    finally:
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _model(folder: Path) -> paceline.Model:
    path = folder / "target-f32.gguf"
    quantize_gguf(embedded_target(), path, "F32")
    worker = Worker()

    def open_here() -> paceline.Model:
        options = ModelOptions(
            path, context_length=256, max_sequences=SEQUENCES, cache_type_k="f32", cache_type_v="f32"
        )
        target = LlamaCppEngine(options)
        draft = LlamaCppEngine(ModelOptions(embedded_draft(), context_length=256, max_sequences=SEQUENCES, branches=0))
        drafters = build_drafters(["suffix", "draft"], target=target, draft=draft)
        return paceline.Model(target, drafters, paceline.FixedPolicy(3, siblings=2), worker=worker)

    return worker.call(open_here)


def measure() -> dict[str, Any]:
    memory: list[int] = []

    def progress(done: int) -> None:
        if done >= (len(memory) + 1) * REQUESTS // THREADS // 5:
            gc.collect()
            memory.append(_resident_bytes())
            print(f"{done} requests in each thread, {memory[-1] >> 20} MiB", flush=True)

    with tempfile.TemporaryDirectory() as folder, _model(Path(folder)) as model:
        expected = [Expected.of(model, prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS]
        counts = misuse_in_threads(model, expected, requests=REQUESTS // THREADS, seed=0, progress=progress)
        gc.collect()
        still_open = model.worker.call(lambda: len(model.target._sequences))  # type: ignore[attr-defined]
    if still_open:
        raise AssertionError(f"{still_open} sequences are still open")
    print(", ".join(f"{kind} {count}" for kind, count in counts.items()))
    print("no sequence is still open, and every answer that was left alone was as it is alone")
    return {"counts": dict(counts), "resident_bytes": memory}
