"""Weights that are streamed however much memory there is, so that small models can show what becomes of large ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from tests.models.helpers import in_f32

from paceline.core.arrays import FloatArray
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.options import ModelOptions
from paceline.engines.streaming import layout
from paceline.engines.streaming.layout import Residency
from paceline.models.embedded import embedded_target

_SECTION_BYTES = 1 << 20
"""Of which the embedded target has many."""

ASKED_BYTES = 1
"""Memory to ask for: less than any model fits into."""


def _mostly(stream: LayerStream, memory_bytes: int) -> Residency:
    """Have every fourth section stay."""
    numbers = range(len(stream._sections))
    resident = tuple(number for number in numbers if number % 4 == 1)
    return Residency(resident, tuple(number for number in numbers if number % 4 != 1), 2)


@contextmanager
def mostly_streamed(section_bytes: int = _SECTION_BYTES) -> Iterator[None]:
    """Have most of the weights streamed in engines that are opened within the block."""
    with (
        patch.object(layout, "SECTION_BYTES", section_bytes),
        patch.object(LayerStream, "plan", _mostly),
        patch.object(LayerStream, "least_bytes", -(1 << 60)),
        patch.object(LayerStream, "needed_bytes", -(1 << 60)),
    ):
        yield


def exact_target() -> Path:
    """Return the embedded target in F32, 52 MB: rows are equal with streamed layers and without."""
    return in_f32(embedded_target())


TOKENS = [11, 42, 7, 99, 3, 3, 250, 17]


def config(path: Path, **changes: object) -> ModelOptions:
    return ModelOptions(path, context_length=64, threads=1, memory=ASKED_BYTES, **changes)  # type: ignore[arg-type]


def rows(engine: LlamaCppEngine, token_ids: Sequence[int] = TOKENS) -> FloatArray:
    sequence = engine.open()
    count = len(token_ids)
    try:
        output = engine.forward([Step(sequence, token_ids, [COMMITTED_END, *range(count - 1)], list(range(count)))])
        return np.stack([output.logits(0, row) for row in range(count)])
    finally:
        engine.close_sequence(sequence)
