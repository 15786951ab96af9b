"""Opening a target and its draft model: in which order, and who gets which memory.

Usually the target comes first. Where its layers are to be read while they are used, what stays of them is what memory
is left: there the draft model, which is read again for every token that it drafts, comes first and stays whole.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import InputError
from paceline.engines.base import Engine
from paceline.engines.loading import ModelOptions, foreseen_memory, open_engine
from paceline.engines.memory import NOTHING_BESIDE, Beside
from paceline.models.own_draft import OwnDraft, OwnDraftFile
from paceline.planning.costs.attention import like_target, open_model
from paceline.planning.costs.meter import Report

_MOST_SHARE: Final = 0.5
"""Of the memory, for a draft that nobody named: what it takes cannot go to layers that stay."""


@dataclass(frozen=True, slots=True)
class OpenedPair:
    """Engines, and what they were opened with: with all that was found out at load.

    Attributes:
        target: the model that verifies.
        target_options: how it runs.
        draft: the model that drafts, if there is one.
        draft_options: how it runs.
        measured: attention was measured just now, which took some of the time that a first load may take.
    """

    target: Engine
    target_options: ModelOptions
    draft: Engine | None
    draft_options: ModelOptions | None
    measured: bool

    def close(self) -> None:
        """Close both."""
        if self.draft is not None:
            self.draft.close()
        self.target.close()


def open_pair(
    target: ModelOptions,
    draft: ModelOptions | None,
    *,
    prompts_bytes: int = 0,
    force: bool = False,
    report: Report | None = None,
) -> OpenedPair:
    """Open the engines.

    Args:
        target: how to run the target.
        draft: how to run the draft model, if there is one.
        prompts_bytes: memory that is to be left for what finished requests have read.
        force: measure what is found out at load again.
        report: told about progress of that.

    Raises:
        InputError: a model cannot be loaded, or not within the memory there is.
        EngineError: a pass failed.
    """
    if foreseen_memory(target) is None:
        opened = open_model(target, force=force, report=report)
        try:
            draft = None if draft is None else like_target(draft, opened.options)
            draft_engine = None if draft is None else _open_draft(draft)
        except BaseException:
            opened.engine.close()
            raise
        return OpenedPair(opened.engine, opened.options, draft_engine, draft, opened.measured)
    draft = None if draft is None else dataclasses.replace(like_target(draft, target), own_weights=True)
    draft_engine = None if draft is None else _open_draft(draft)
    try:
        reserved: Beside = getattr(draft_engine, "reserved", NOTHING_BESIDE)
        beside = dataclasses.replace(reserved, prompts_bytes=prompts_bytes)
        opened = open_model(dataclasses.replace(target, beside=beside), force=force, report=report)
    except BaseException:
        if draft_engine is not None:
            draft_engine.close()
        raise
    return OpenedPair(opened.engine, opened.options, draft_engine, draft, opened.measured)


def default_draft(target: ModelOptions) -> OwnDraftFile | None:
    """Return the draft of its own that a target has where none is named; ``None`` where it has none.

    A target whose layers are read while they are used has one: each of its passes takes so long that any draft that
    stays in memory pays, and none agrees with it as its own copy does. It has none where the copy would take more than
    half of the memory, or there is no type to quantise to.

    Args:
        target: how it runs.

    Raises:
        ModelFileError: the model cannot be read.
    """
    memory_bytes = foreseen_memory(target)
    if memory_bytes is None:
        return None
    for file_type in (None, "Q2_K"):
        try:
            own = OwnDraft(file_type).of(Path(target.path))
            fits = own.foreseen_bytes() <= memory_bytes * _MOST_SHARE
        except InputError:
            return None
        if fits:
            return own
    return None


def _open_draft(draft: ModelOptions) -> Engine:
    # The draft's own pending tree is a chain: siblings are proposed but never fed.
    return open_engine(dataclasses.replace(draft, branches=0))
