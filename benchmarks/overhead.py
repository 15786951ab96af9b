"""What paceline itself costs beside the models: Python time a round, a row, and a sampled row of a large vocabulary.

The engines here give prepared rows at once, so all the time that passes is the loop's, the drafter's and the
verifier's. What limits the figure is the interpreter and, at 152k entries, memory bandwidth.
"""

from __future__ import annotations

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
LARGE_VOCAB = 152_064
DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
REPEATS = 7
ROUND_TOKENS = 1200


class InstantOutput:
    """Rows that were there before they were asked for."""

    def __init__(self, rows: list[list[FloatArray]]) -> None:
        self._rows = rows

    def wait(self) -> None:
        """Nothing is under way."""

    def logits(self, step: int, output: int) -> FloatArray:
        """Return the prepared row."""
        return self._rows[step][output]

    def hidden_states(self, step: int, output: int) -> FloatArray:
        """Not used here."""
        raise AssertionError("nothing here reads hidden states")


class InstantEngine:
    """An engine that takes no time: the row after token ``t`` is ``table[t % len(table)]``."""

    description = "instant engine"

    def __init__(self, table: FloatArray, *, max_rows: int = 512) -> None:
        self.vocabulary = ScriptedVocabulary([b"a"] * table.shape[1])
        self.capabilities = EngineCapabilities(1 << 20, max_rows, max_rows, 1, None, True, None, False, 0.0)
        self._rows = list(table)

    def open(self) -> int:
        """Return the only sequence."""
        return 0

    def forward(self, steps: Sequence[Step]) -> InstantOutput:
        """Return prepared rows."""
        count = len(self._rows)
        return InstantOutput([[self._rows[step.token_ids[row] % count] for row in step.outputs] for step in steps])

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """Keep nothing."""

    def length(self, sequence: int) -> int:
        """Nothing is kept."""
        return 0

    def fork(self, sequence: int) -> int:
        """Return the only sequence."""
        return sequence

    def saved_bytes(self, sequence: int) -> int:
        """Nothing is kept."""
        return 0

    def save(self, sequence: int) -> SavedSequence:
        """Keep nothing."""
        return SavedSequence(0, 0, 0, None)

    def restore(self, saved: SavedSequence) -> int:
        """Return the only sequence."""
        return 0

    def trim(self, sequence: int, length: int) -> None:
        """Keep nothing."""

    def close_sequence(self, sequence: int) -> None:
        """Keep nothing."""

    def close(self) -> None:
        """Hold nothing."""


def measure() -> dict[str, Any]:
    """Return microseconds a round and a row (greedy, 4k) and milliseconds a sampled row (152k)."""
    return {"greedy_4k": greedy_rounds(), "sampled_152k": sampled_rows()}


def greedy_rounds() -> dict[str, float]:
    """Fit round time = fixed + slope * rows over draft lengths, all drafts accepted, draft model included."""
    table = np.random.default_rng(0).normal(size=(64, SMALL_VOCAB)).astype(np.float32)
    rows, times_us = [], []
    for _ in range(REPEATS):
        for length in DRAFT_LENGTHS:
            engine = InstantEngine(table)
            drafters = [DraftModelDrafter(InstantEngine(table), target_vocab_size=SMALL_VOCAB)] if length else []
            loop = DecodingLoop(engine, drafters, FixedPolicy(draft_max=length))
            request = loop.add([1], SamplingParams(temperature=0.0), StopRules(ROUND_TOKENS))
            loop.step()
            started = time.perf_counter()
            while request.finish_reason is None:
                loop.step()
            elapsed_us = (time.perf_counter() - started) * 1e6
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
    """Time the sampling of one row of 152k scripted logits at temperature 0.8, by kind of distribution and filters."""
    rng = np.random.default_rng(1)
    kinds = {
        "typical": rng.normal(0.0, 2.5, LARGE_VOCAB),
        "peaked": np.where(np.arange(LARGE_VOCAB) == 77, 30.0, rng.normal(0.0, 2.5, LARGE_VOCAB)),
        "flat": rng.normal(0.0, 0.2, LARGE_VOCAB),
    }
    settings = {
        "temperature alone": SamplingParams(temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, seed=3),
        "default filters": SamplingParams(temperature=0.8, seed=3),
    }
    figures = {}
    for kind, values in kinds.items():
        row = values.astype(np.float32)
        for name, params in settings.items():
            sampler = RowSampler(params)
            times_ms = []
            for position in range(200):
                started = time.perf_counter()
                sampler.emit(row, position, ())
                times_ms.append((time.perf_counter() - started) * 1e3)
            figures[f"{kind}, {name}"] = statistics.median(times_ms)
    print(
        f"temperature 0.8, vocabulary of {LARGE_VOCAB}, ms a row: "
        + "; ".join(f"{name}: {ms:.2f}" for name, ms in figures.items())
    )
    return figures
