"""Why passes take longer at one time than at another: their time beside how far apart two cores are at that moment.

A virtual machine's cores are its host's to place. Two that share a cache hand a byte to each other some times faster
than two that do not, and attention that is not fused hands all scores of all rows from core to core. So where a host
moves them, wide passes over long contexts have two speeds, and neither is noise that more runs would average out.

The time includes what Python takes to look for the byte, which is the same at any distance.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from benchmarks.progress import progress_bar
from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.machine import machine
from paceline.models.registry import resolve_model

EPILOG = """[bold]Examples[/bold]

python -m benchmarks cores -m target-1b-q4_0

python -m benchmarks cores -m big.gguf --tokens 3000 --samples 120
"""

WIDTHS: Final = (1, 4, 8)
PASSES: Final = 4
"""Passes of a width in a row; the first, which finds the caches as another width left them, is not counted."""
EXCHANGES: Final = 20_000
CHUNK: Final = 256
_PATIENCE: Final = 100_000_000
"""Looks for the byte, some seconds of them."""

_ECHO: Final = """
import mmap, os, sys
os.sched_setaffinity(0, {int(sys.argv[2])})
shared = mmap.mmap(int(sys.argv[1]), 1)
for line in sys.stdin:
    for turn in range(int(line)):
        while not shared[0]:
            pass
        shared[0] = 0
"""
"""The other side, on a core of its own: waits without spinning until it is told how many bytes will come."""


def cores(
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file, or a name from paceline models.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens in the cache before each pass.")] = 1000,
    samples: Annotated[int, typer.Option("--samples", help="Times to look, two seconds or so each.")] = 60,
) -> None:
    """Measure passes of several widths beside the time a byte takes from core to core and back."""
    if not (tokens >= 1 and samples >= 1):
        raise InputError(f"{tokens} tokens, {samples} samples: the least of either is 1")
    path = resolve_model(model)
    found: list[tuple[float, dict[int, float]]] = []
    with _exchange() as exchange:
        engine = open_engine(ModelOptions(path, context_length=tokens + max(WIDTHS), branches=0))
        try:
            sequence = _read(engine, tokens)
            with progress_bar() as progress:
                for _ in progress.track(range(samples), description="looking"):
                    before_ns = exchange.nanoseconds()
                    passes = {width: _pass_ms(engine, sequence, width) for width in WIDTHS}
                    found.append(((before_ns + exchange.nanoseconds()) / 2, passes))
        finally:
            engine.close()
    print(f"{path.name}, {tokens} tokens in the cache, {samples} samples")
    print(f"{'core to core and back':>24}" + "".join(f"{f'{width} rows':>10}" for width in WIDTHS))
    for distance_ns, passes in sorted(found, key=lambda each: each[0]):
        print(f"{distance_ns:21.0f} ns" + "".join(f"{passes[width]:7.1f} ms" for width in WIDTHS))
    print(json.dumps({"machine": machine(), "cores": [{"ns": ns, "ms": passes} for ns, passes in found]}))


def _read(engine: Engine, tokens: int) -> int:
    """Return a sequence that holds so many tokens."""
    sequence = engine.open()
    for first in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - first)
        _forward(engine, sequence, count)
        engine.commit(sequence, range(count))
    return sequence


def _pass_ms(engine: Engine, sequence: int, width: int) -> float:
    """Return the milliseconds of a pass whose rows are dropped again, the median of several."""
    times = []
    for _ in range(PASSES):
        started_s = time.perf_counter()
        _forward(engine, sequence, width)
        times.append(1000 * (time.perf_counter() - started_s))
        engine.commit(sequence, [])
    return statistics.median(times[1:])


def _forward(engine: Engine, sequence: int, rows: int) -> None:
    chain = range(COMMITTED_END, COMMITTED_END + rows)
    engine.forward([Step(sequence, [1 + row % 100 for row in range(rows)], chain, [rows - 1])]).wait()


class _Exchange:
    """Two processes on two cores that hand a byte back and forth."""

    def __init__(self, shared: mmap.mmap, echo: subprocess.Popen[str], core: int) -> None:
        self._shared = shared
        self._echo = echo
        self._core = core

    def nanoseconds(self) -> float:
        """Return how long the byte takes there and back, on the mean."""
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {self._core})
        try:
            assert self._echo.stdin is not None
            self._echo.stdin.write(f"{EXCHANGES + 1}\n")
            self._echo.stdin.flush()
            self._hand_over(1)  # when it comes back, the other side is awake
            started_s = time.perf_counter()
            self._hand_over(EXCHANGES)
            return 1e9 * (time.perf_counter() - started_s) / EXCHANGES
        finally:
            os.sched_setaffinity(0, cores)

    def _hand_over(self, times: int) -> None:
        shared = self._shared
        for _ in range(times):
            shared[0] = 1
            for _ in range(_PATIENCE):
                if not shared[0]:
                    break
            else:
                raise EngineError("the other process does not answer: run it again")


@contextmanager
def _exchange() -> Iterator[_Exchange]:
    """Start the other side, and end it afterwards.

    Raises:
        CapabilityError: there is one core only, or the system does not place processes on cores.
    """
    try:
        cores = sorted(os.sched_getaffinity(0))
    except AttributeError:
        raise CapabilityError("this system does not let a process choose its core: run it on Linux") from None
    if len(cores) < 2:
        raise CapabilityError("there is one core only: nothing goes from core to core")
    with tempfile.TemporaryFile() as file:
        file.truncate(1)
        shared = mmap.mmap(file.fileno(), 1)
        command = [sys.executable, "-c", _ECHO, str(file.fileno()), str(cores[1])]
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True, pass_fds=[file.fileno()]) as echo:
            try:
                yield _Exchange(shared, echo, cores[0])
            finally:
                echo.kill()  # it may be waiting for a byte
