"""A target and its draft model, open for as long as a command needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.engines.loading import ModelOptions
from paceline.model_pair import ModelPair, open_pair
from paceline.planning.costs.meter import Report


@contextmanager
def open_engines(
    target: ModelOptions, draft: ModelOptions | None, *, force: bool = False, report: Report | None = None
) -> Iterator[ModelPair]:
    """Open the engines as :func:`~paceline.model_pair.open_pair` does, and close them afterwards."""
    pair = open_pair(target, draft, force=force, report=report)
    try:
        yield pair
    finally:
        pair.close()
