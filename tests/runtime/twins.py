"""A scripted engine that does what it is told on a recurrent model of llama.cpp, too, and compares their rows."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.engines.base import COMMITTED_END, Engine, SavedSequence, Step
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import LogitFunction, ScriptedOutput
from tests.engines.tiny_models import VOCABULARY_SIZE
from tests.runtime.scenes import CountingEngine, Scene

MAX_ROLLBACK = 16

ROUNDING = 2e-3
"""Of a state in F32 over a text; a state of another text is off by 1 or more."""


class Twins:
    """A recurrent model, and what it says when it reads a text from its beginning."""

    def __init__(self, path: Path) -> None:
        from paceline.engines.llama_cpp import LlamaCppEngine

        self.engine, self._fresh = (
            LlamaCppEngine(
                ModelOptions(
                    path, context_length=256, max_sequences=most, threads=1, cache_type_k="f32", cache_type_v="f32"
                )
            )
            for most in (4, 1)
        )
        self._rows: dict[tuple[int, ...], Float64Array] = {}
        self._latest: TwinEngine | None = None
        self.num_rows = self.num_unequal = 0

    def model(self, token_ids: Sequence[int]) -> Float64Array:
        """Return the row after some tokens."""
        key = tuple(token_ids)
        if key not in self._rows:
            sequence = self._fresh.open()
            parents = range(COMMITTED_END, COMMITTED_END + len(key))
            output = self._fresh.forward([Step(sequence, key, parents, [len(key) - 1])])
            row = self._rows[key] = output.logits(0, 0).astype(np.float64)
            row.setflags(write=False)
            self._fresh.close_sequence(sequence)
        return self._rows[key]

    def shaped(self, scene: Scene) -> Scene:
        """Return a scene as the model can play it."""
        setups = tuple(dataclasses.replace(setup, trees=False) for setup in scene.setups)
        return dataclasses.replace(scene, vocab_size=VOCABULARY_SIZE, setups=setups)

    def make_model(self, scene: Scene, rng: random.Random) -> LogitFunction:
        return self.model

    def make(self, model: LogitFunction, *arguments: Any, **limits: Any) -> TwinEngine:
        """Return an engine; those that were made before are not used any more."""
        if self._latest is not None:
            self._latest.close()
        self._latest = TwinEngine(self, model, *arguments, **limits)
        return self._latest

    def close(self) -> None:
        """Free both."""
        self.engine.close()
        self._fresh.close()


class TwinEngine(CountingEngine):
    """A scripted engine that does what it is told on a real one, too."""

    def __init__(self, twins: Twins, model: LogitFunction, *arguments: Any, **limits: Any) -> None:
        super().__init__(model, *arguments, **{**limits, "max_rollback": MAX_ROLLBACK})
        self._twins = twins
        self._real: Engine = twins.engine
        self._handles: dict[int, int] = {}
        self._saved: dict[SavedSequence, SavedSequence] = {}
        assert twins.engine.capabilities.max_rollback == MAX_ROLLBACK

    def open(self) -> int:
        sequence = super().open()
        self._handles[sequence] = self._real.open()
        return sequence

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        output = super().forward(steps)
        real = self._real.forward([dataclasses.replace(step, sequence=self._handles[step.sequence]) for step in steps])
        for at, step in enumerate(steps):
            for row in range(len(step.outputs)):
                np.testing.assert_allclose(real.logits(at, row), output.logits(at, row), rtol=0, atol=ROUNDING)
                self._twins.num_rows += 1
        self._twins.num_unequal += len({len(step.token_ids) for step in steps}) > 1
        return output

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        super().commit(sequence, path)
        self._real.commit(self._handles[sequence], path)

    def fork(self, sequence: int) -> int:
        fork = super().fork(sequence)  # which opens one
        self._real.close_sequence(self._handles[fork])
        self._handles[fork] = self._real.fork(self._handles[sequence])
        return fork

    def trim(self, sequence: int, length: int) -> None:
        super().trim(sequence, length)
        self._real.trim(self._handles[sequence], length)

    def save(self, sequence: int) -> SavedSequence:
        saved = super().save(sequence)
        self._saved[saved] = self._real.save(self._handles[sequence])
        return saved

    def restore(self, saved: SavedSequence) -> int:
        restored = super().restore(saved)
        self._real.close_sequence(self._handles[restored])
        self._handles[restored] = self._real.restore(self._saved[saved])
        return restored

    def close_sequence(self, sequence: int) -> None:
        super().close_sequence(sequence)
        self._real.close_sequence(self._handles.pop(sequence))

    def close(self) -> None:
        super().close()
        while self._handles:
            self._real.close_sequence(self._handles.popitem()[1])
