"""Passes without their weights leave nothing in the cache that later ones read."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from tests.engines.streamed import ASKED_BYTES, mostly_streamed, rows

from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.options import ModelOptions
from paceline.engines.slow_passes import dry
from paceline.models.embedded import embedded_target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")


def test_what_passes_without_their_weights_cached_is_not_read() -> None:
    """Weights of another section may be read as no numbers, which a mask does not take out of a sum."""
    with mostly_streamed():
        engine = LlamaCppEngine(ModelOptions(embedded_target(), context_length=256, threads=1, memory=ASKED_BYTES))
    try:
        expected = rows(engine)
        with dry(engine):
            for _ in range(3):
                rows(engine, range(100, 200))
        np.testing.assert_array_equal(rows(engine), expected)
    finally:
        engine.close()
