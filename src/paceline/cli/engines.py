"""A target and its draft model, open for as long as a command needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.engines.base import Engine
from paceline.engines.loading import ModelOptions, open_engine


@contextmanager
def opened(target: ModelOptions, draft: ModelOptions | None) -> Iterator[tuple[Engine, Engine | None]]:
    """Open the engines, and close them afterwards.

    Raises:
        EngineError: a model cannot be loaded.
    """
    target_engine = open_engine(target)
    try:
        draft_engine = None if draft is None else open_engine(draft)
        try:
            yield target_engine, draft_engine
        finally:
            if draft_engine is not None:
                draft_engine.close()
    finally:
        target_engine.close()
