"""A target and its draft model, open for as long as a command needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.engines.base import Engine
from paceline.engines.loading import ModelOptions, open_engine
from paceline.planning.costs.attention import like_target, open_model
from paceline.planning.costs.meter import Report


@dataclass(frozen=True, slots=True)
class OpenedPair:
    """Engines, and what they were opened with: with all that was found out at load.

    Attributes:
        target: the model that verifies.
        target_options: how it runs.
        draft: the model that drafts, if there is one.
        draft_options: how it runs.
    """

    target: Engine
    target_options: ModelOptions
    draft: Engine | None
    draft_options: ModelOptions | None


@contextmanager
def opened(
    target: ModelOptions, draft: ModelOptions | None, *, force: bool = False, report: Report | None = None
) -> Iterator[OpenedPair]:
    """Open the engines, and close them afterwards.

    Args:
        target: how to run the target.
        draft: how to run the draft model, if there is one.
        force: measure what is found out at load again.
        report: told about progress of that.

    Raises:
        EngineError: a model cannot be loaded.
    """
    opened_target = open_model(target, force=force, report=report)
    try:
        draft = None if draft is None else like_target(draft, opened_target.options)
        draft_engine = None if draft is None else open_engine(draft)
        try:
            yield OpenedPair(opened_target.engine, opened_target.options, draft_engine, draft)
        finally:
            if draft_engine is not None:
                draft_engine.close()
    finally:
        opened_target.engine.close()
