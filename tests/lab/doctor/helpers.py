"""Scripted models that tests of pairs share."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary

VOCAB = 12


def noisy_model(seed: int, *, scale: float = 2.0) -> LogitFunction:
    """Return a model whose row depends on the last three tokens."""

    def logits(tokens: Sequence[int]) -> Float64Array:
        rng = np.random.default_rng([seed, *tokens[-3:]])
        row: Float64Array = scale * rng.normal(size=VOCAB)
        return row

    return logits


def engine(
    model: LogitFunction, *, max_rows: int = 512, max_outputs: int | None = None, max_sequences: int = 64
) -> ScriptedEngine:
    vocabulary = ScriptedVocabulary.of_size(VOCAB, end_ids=[0])
    return ScriptedEngine(
        model,
        vocabulary,
        context_length=512,
        max_rows=max_rows,
        max_outputs=max_outputs,
        max_sequences=max_sequences,
    )


def some_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(count)]


LETTERS = [bytes([97 + number]) for number in range(26)] + [b" "]

TEXTS = {"code": ["a text of letters", "another"], "logs": ["more letters"]}
