"""Layers that are streamed however much memory there is, so that small models can show what becomes of large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.streaming.layout import Residency

MOSTLY = Residency((1,), (0, 2, 3), 2)
"""Of the embedded target's four layers."""

ASKED_BYTES = 1
"""Memory to ask for: less than any model fits into."""


@contextmanager
def mostly_streamed() -> Iterator[None]:
    """Have three of four layers streamed in engines that are opened within the block."""
    with (
        patch.object(LayerStream, "plan", lambda self, memory_bytes: MOSTLY),
        patch.object(LayerStream, "least_bytes", -(1 << 60)),
    ):
        yield
