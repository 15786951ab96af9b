"""What paceline itself costs beside the models: Python time a round, a row, and a sampled row of a large vocabulary.

The engines here give prepared rows at once, so all the time that passes is the loop's, the drafter's and the
verifier's. What limits the figure is the interpreter and, at 152k entries, memory bandwidth. All times are those that
the thread had a core, so that other processes count as little as can be.

A pass of a model empties the caches of the processor, and what follows it takes several times as long as in a loop. So
rows are sampled in a loop and after as much memory was written as a small model reads for a pass.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.params import SamplingParams, StopRules
from paceline.core.sampling import RowSampler
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import EngineCapabilities, SavedSequence, Step
from paceline.engines.scripted import ScriptedVocabulary
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop

SMALL_VOCAB = 4096
VOCABS = (SMALL_VOCAB, 49_152, 152_064)
DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
REPEATS = 7
ROUND_TOKENS = 1200
NUM_REQUESTS = 16
PASS_BYTES = 64 << 20
SAMPLED = 60


class InstantOutput:
    """Rows that were there before they were asked for."""

    def __init__(self, rows: list[list[FloatArray]]) -> None:
        self._rows = rows

    def wait(self) -> None:
        """Nothing is under way."""

    def logits(self, step: int, output: int) -> FloatArray:
        return self._rows[step][output]


class InstantEngine:
    """An engine that takes no time: the row after token ``t`` is ``table[t % len(table)]``."""

    description = "instant engine"

    def __init__(self, table: FloatArray, *, max_rows: int = 512) -> None:
        self.vocabulary = ScriptedVocabulary([b"a"] * table.shape[1])
        self.capabilities = EngineCapabilities(1 << 20, max_rows, max_rows, NUM_REQUESTS, None, True, None, 0.0)
        self._rows = list(table)
        self._handles = itertools.count()

    def open(self) -> int:
        return next(self._handles)

    def forward(self, steps: Sequence[Step]) -> InstantOutput:
        count = len(self._rows)
        return InstantOutput([[self._rows[step.token_ids[row] % count] for row in step.outputs] for step in steps])

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """Keep nothing."""

    def length(self, sequence: int) -> int:
        return 0

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        raise AssertionError("nothing here reads states")

    def first_state(self, sequence: int) -> int:
        raise AssertionError("nothing here reads states")

    def fork(self, sequence: int) -> int:
        return self.open()

    def saved_bytes(self, sequence: int) -> int:
        return 0

    def save(self, sequence: int) -> SavedSequence:
        return SavedSequence(0, 0, 0, None)

    def restore(self, saved: SavedSequence) -> int:
        return self.open()

    def trim(self, sequence: int, length: int) -> None:
        """Keep nothing."""

    def close_sequence(self, sequence: int) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Hold nothing."""


def measure() -> dict[str, Any]:
    """Return microseconds a round and a row (greedy, 4k), of rounds by what is asked, and of sampled rows."""
    return {"greedy_4k": greedy_rounds(), "rounds_us": rounds(), "sampled_rows_us": sampled_rows()}


def rounds() -> dict[str, float]:
    """Time rounds by vocabulary, draft, temperature and number of requests; all drafts are accepted."""
    figures: dict[str, list[float]] = {}
    tables = {vocab: np.stack([_row_like_text(vocab, seed) for seed in range(16)]) for vocab in VOCABS}
    cases = list(itertools.product(VOCABS, (0, 4), (0.0, 0.8), (1, NUM_REQUESTS)))
    for _ in range(3):
        for vocab, length, temperature, count in cases:
            loop = _loop(tables[vocab], length)
            rules = StopRules((length + 1) * 30, ignore_end=True)
            for index in range(count):
                loop.add([index + 1], SamplingParams(temperature, seed=index), rules)
            loop.step()
            taken, started = 0, time.thread_time()
            while loop.active:
                loop.step()
                taken += 1
            name = f"{vocab}, {length} drafted, temperature {temperature:g}, {count} at once"
            figures.setdefault(name, []).append((time.thread_time() - started) * 1e6 / taken)
    medians = {name: statistics.median(times_us) for name, times_us in figures.items()}
    for name, us in medians.items():
        print(f"a round, vocabulary of {name}: {us:.0f} us")
    return medians


def _loop(table: FloatArray, length: int) -> DecodingLoop:
    drafters = [DraftModelDrafter(InstantEngine(table), target_vocab_size=table.shape[1])] if length else []
    return DecodingLoop(InstantEngine(table), drafters, FixedPolicy(draft_max=length))


def _row_like_text(vocab: int, seed: int) -> FloatArray:
    """Return a row as models have them in a text: some tokens that may follow, and all others far below."""
    rng = np.random.default_rng(seed)
    row = rng.normal(0.0, 2.0, vocab).astype(np.float32)
    row[rng.choice(vocab, 60, replace=False)] += (6.0 + rng.exponential(3.0, 60)).astype(np.float32)
    return row


def greedy_rounds() -> dict[str, float]:
    """Fit round time = fixed + slope * rows over draft lengths, all drafts accepted, draft model included."""
    table = np.random.default_rng(0).normal(size=(64, SMALL_VOCAB)).astype(np.float32)
    rows, times_us = [], []
    for _ in range(REPEATS):
        for length in DRAFT_LENGTHS:
            loop = _loop(table, length)
            request = loop.add([1], SamplingParams(temperature=0.0), StopRules(ROUND_TOKENS))
            loop.step()
            started = time.thread_time()
            while request.finish_reason is None:
                loop.step()
            elapsed_us = (time.thread_time() - started) * 1e6
            # A row is a row of either model: length + 1 of the target's, length of the draft's.
            rows.append(2 * length + 1)
            times_us.append(elapsed_us / request.stats.rounds)
    slope, fixed = np.polyfit(rows, times_us, 1)
    by_length = {
        length: statistics.median(t for r, t in zip(rows, times_us, strict=True) if r == 2 * length + 1)
        for length in DRAFT_LENGTHS
    }
    print(
        f"greedy, vocabulary of {SMALL_VOCAB}: {fixed:.0f} us a round plus {slope:.1f} us a row (target or draft); "
        + ", ".join(f"{length} drafted: {us:.0f} us" for length, us in by_length.items())
    )
    return {"us_per_round": float(fixed), "us_per_row": float(slope)} | {
        f"draft_{k}_us": v for k, v in by_length.items()
    }


def sampled_rows() -> dict[str, float]:
    """Time the sampling of one row at temperature 0.8, by vocabulary, kind of distribution and filters."""
    swept = np.ones(PASS_BYTES // 4, np.float32)
    settings = {
        "default filters": SamplingParams(temperature=0.8, seed=3),
        "temperature alone": SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3),
    }
    figures = {}
    for vocab in VOCABS:
        rng = np.random.default_rng(1)
        kinds = {
            "like text": _row_like_text(vocab, 1),
            "normal": rng.normal(0.0, 2.5, vocab).astype(np.float32),
            "flat": rng.normal(0.0, 0.2, vocab).astype(np.float32),
        }
        for (kind, row), (name, params), cold in itertools.product(kinds.items(), settings.items(), (False, True)):
            sampler = RowSampler(params)
            times_us = []
            for position in range(SAMPLED):
                if cold:
                    np.add(swept, 1.0, out=swept)
                started = time.thread_time()
                sampler.emit(row, position, ())
                times_us.append((time.thread_time() - started) * 1e6)
            figures[f"{vocab}, {kind}, {name}, {'after a pass' if cold else 'in a loop'}"] = statistics.median(times_us)
    for name, us in figures.items():
        print(f"a row at 0.8, vocabulary of {name}: {us:.0f} us")
    return figures
