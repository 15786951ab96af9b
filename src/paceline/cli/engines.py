"""A target and its draft model, open for as long as a command needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.engines.loading import ModelOptions
from paceline.opening import OpenedPair, open_pair
from paceline.planning.costs.meter import Report


@contextmanager
def open_engines(
    target: ModelOptions, draft: ModelOptions | None, *, force: bool = False, report: Report | None = None
) -> Iterator[OpenedPair]:
    """Open the engines as :func:`~paceline.opening.open_pair` does, and close them afterwards."""
    pair = open_pair(target, draft, force=force, report=report)
    try:
        yield pair
    finally:
        pair.close()
