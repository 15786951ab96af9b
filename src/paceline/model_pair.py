"""Opening a target and its draft model: in which order, and who gets which memory.

Usually the target comes first. Where there is so much memory and no more, what stays of its layers is what memory
is left: there the draft model, which is read again for every token that it drafts, comes first and stays whole.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.conversion.own_draft import OwnDraft, OwnDraftFile, make_own_draft
from paceline.core.errors import InputError, ModelWarning
from paceline.engines.base import Engine
from paceline.engines.loading import foreseen_context_length, memory_limit, open_engine, open_vocabulary
from paceline.engines.memory import NO_FOOTPRINT, NO_OTHER_MEMORY, SPARE_BYTES, Footprint, OtherMemory, held_memory
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.engines.slow_passes import slow_passes
from paceline.models.description import describe
from paceline.models.gguf_model import gguf_bytes
from paceline.planning.costs.attention import OpenedModel, like_target, open_model
from paceline.planning.costs.meter import Report
from paceline.vocabularies.relation import relate_vocabularies

_MAX_SHARE: Final = 0.5
"""Share of the memory that a draft takes at most which nobody named: what it takes cannot go to layers that stay."""

_KEPT_SHARE: Final = 1 / 64
"""Share of the memory, at most, for what the finished requests of a model have read, where layers are read for every
pass."""

_TRANSLATED_ROOM: Final = 2
"""Times as many tokens as the target's context has that a draft whose drafts are translated has room for."""

_ROWS_READ: Final = 2
"""Rows of a request whose logits a drafter reads of one pass, at most."""


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Engines, and what they were opened with: with all that was found out at load.

    Attributes:
        target: the model that verifies.
        target_options: how it runs.
        draft: the model that drafts, if there is one.
        draft_options: how it runs.
        kept_bytes: most memory for what the finished requests of each have read.
        measured: attention was measured just now, which took some of the time that a first load may take.
    """

    target: Engine
    target_options: ModelOptions
    draft: Engine | None
    draft_options: ModelOptions | None
    kept_bytes: int
    measured: bool

    def close(self) -> None:
        """Close both."""
        if self.draft is not None:
            self.draft.close()
        self.target.close()


def open_pair(
    target: ModelOptions,
    draft: ModelOptions | DraftOptions | None,
    *,
    may_go_without: bool = False,
    kept_bytes: int = 0,
    force: bool = False,
    report: Report | None = None,
) -> ModelPair:
    """Open the engines.

    Args:
        target: how to run the target.
        draft: how to run the draft model, if there is one. One of the target's own is made if need be. Options without
            a path are those of the default one, where there is one (:func:`default_draft`).
        may_go_without: do without the default draft, and say so, where it cannot be had.
        kept_bytes: memory that is to be left for what the finished requests of each model have read.
        force: measure what is found out at load again.
        report: told about progress of making the draft, and then of measuring.

    Raises:
        InputError: a model cannot be loaded, or not within the memory there is.
        EngineError: a pass failed.

    Warns:
        ModelWarning: the default draft had to go.
    """
    memory_bytes = memory_limit(target)
    is_default = isinstance(draft, DraftOptions)
    if isinstance(draft, DraftOptions):
        own = default_draft(target)
        draft = None if own is None else dataclasses.replace(draft, path=own.name).beside(target)
    try:
        draft = None if draft is None else _fit_draft_options(_make_draft(draft, target, report), target)
        if memory_bytes is not None:
            within = target
            if is_default and draft is not None and may_go_without:
                # Of this much and no other: before the file is left to the system, the draft goes.
                within = dataclasses.replace(target, memory=memory_bytes)
            pair = _open_within(memory_bytes, within, draft, kept_bytes, force=force, report=report)
            options = dataclasses.replace(pair.target_options, memory=target.memory)
            return dataclasses.replace(pair, target_options=options)
    except InputError as error:
        if draft is None or not (is_default and may_go_without):
            raise
        # Where it was not for the draft, the same error ends this too.
        pair = open_pair(target, None, kept_bytes=kept_bytes, force=force, report=report)
        warnings.warn(
            f"no draft of the target's own: {error}; name one (`draft`), or none (`drafters=['suffix']`)",
            ModelWarning,
            stacklevel=2,
        )
        return pair
    opened = open_model(target, has_draft=draft is not None, force=force, report=report)
    return _open_draft(opened, draft, kept_bytes)


@contextmanager
def managed_pair(
    target: ModelOptions, draft: ModelOptions | None, *, force: bool = False, report: Report | None = None
) -> Iterator[ModelPair]:
    """Open the engines as :func:`open_pair` does once the block begins, and close them behind it."""
    pair = open_pair(target, draft, force=force, report=report)
    try:
        yield pair
    finally:
        pair.close()


def default_draft(target: ModelOptions) -> OwnDraftFile | None:
    """Return the draft of its own that a target has where none is named; ``None`` where it has none.

    A target whose layers are read while they are used has one: each of its passes takes so long that any draft that
    stays in memory pays, and none agrees with it as its own copy does. It has none where the copy would take more than
    half of the memory or hardly be smaller, or there is no type to quantise to.

    Args:
        target: how it runs.

    Raises:
        InputError: the model cannot be read, or not be run as it was asked for.
    """
    memory_bytes = memory_limit(target)
    if memory_bytes is None or not _exceeds(memory_bytes, target):
        return None
    for file_type in (None, "Q2_K"):
        try:
            own = OwnDraft(file_type).of(Path(target.path))
            num_bytes = own.foreseen_bytes()
        except InputError:
            return None
        if num_bytes <= memory_bytes * _MAX_SHARE and own.is_worth(num_bytes):
            return own
    return None


def _open_within(
    memory_bytes: int,
    target: ModelOptions,
    draft: ModelOptions | None,
    kept_bytes: int,
    *,
    force: bool,
    report: Report | None,
) -> ModelPair:
    """Open the draft model first, whole and in memory of its own, and the target in what that leaves."""
    engine, footprint, first = None, NO_FOOTPRINT, None
    if draft is not None:
        first = dataclasses.replace(like_target(draft, target), own_weights=True)
        held_bytes = held_memory()
        engine = open_engine(first)
        # Engines that do not say it have written to all that they have.
        footprint = getattr(engine, "footprint", None) or Footprint(max(held_memory() - held_bytes, 0))
    try:
        models = 1 if engine is None else 2
        other = OtherMemory(footprint, models * kept_bytes)
        if _exceeds(memory_bytes, target, other):
            kept_bytes = min(kept_bytes, int(memory_bytes * _KEPT_SHARE))
            other = OtherMemory(footprint, models * kept_bytes)
        target = dataclasses.replace(target, other_memory=other)
        opened = open_model(target, has_draft=draft is not None, force=force, report=report)
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    if engine is None or slow_passes(opened.engine) is not None:
        return ModelPair(opened.engine, opened.options, engine, first, kept_bytes, opened.measured)
    # Both fit, or nobody asked for layers to be streamed and they cannot be.
    engine.close()
    return _open_draft(opened, draft, kept_bytes)


def _make_draft(draft: ModelOptions, target: ModelOptions, report: Report | None) -> ModelOptions:
    """Return how to run a draft model that is there: one of the target's own is made if need be."""
    asked = OwnDraft.parse(draft.path)
    if asked is None:
        return draft
    return dataclasses.replace(draft, path=make_own_draft(Path(target.path), asked.file_type, report=report))


def _fit_draft_options(draft: ModelOptions, target: ModelOptions) -> ModelOptions:
    """Return how to run a draft model with no more than drafting for its target takes.

    A text is never longer than the target's context, but may take more tokens of another vocabulary. Of each request a
    pass has a row to propose from, and where drafts are translated the one before it.
    """
    context_length = draft.context_length
    if draft.context_may_shrink and context_length in (None, target.context_length):
        context_length = foreseen_context_length(target) * (_TRANSLATED_ROOM if _is_translated(draft, target) else 1)
    rows_read = draft.rows_read or _ROWS_READ * draft.max_sequences
    # The draft's own pending tree is a chain: siblings are proposed but never fed.
    return dataclasses.replace(draft, context_length=context_length, rows_read=rows_read, branches=0)


def _is_translated(draft: ModelOptions, target: ModelOptions) -> bool:
    """Return whether the tokens of a draft are others than its target's, so that a text may take more of them."""
    if draft.draft_vocab != "auto":
        return draft.draft_vocab == "translate"
    # Comparing tokens takes some tenths of a second.
    if describe(Path(draft.path)).vocabulary_size == describe(Path(target.path)).vocabulary_size:
        return False
    with open_vocabulary(target) as ours, open_vocabulary(draft) as theirs:
        return not relate_vocabularies(ours, theirs).fits


def _open_draft(opened: OpenedModel, draft: ModelOptions | None, kept_bytes: int) -> ModelPair:
    """Open the draft model of a target that is open; close that where it fails."""
    try:
        draft = None if draft is None else like_target(draft, opened.options)
        engine = None if draft is None else open_engine(draft)
    except BaseException:
        opened.engine.close()
        raise
    return ModelPair(opened.engine, opened.options, engine, draft, kept_bytes, opened.measured)


def _exceeds(memory_bytes: int, target: ModelOptions, other: OtherMemory = NO_OTHER_MEMORY) -> bool:
    """Return whether the weights alone are more than what so much memory leaves for them, so that they are streamed."""
    process_bytes = held_memory() - other.draft.held_bytes
    return gguf_bytes(Path(target.path)) > memory_bytes - process_bytes - other.num_bytes - SPARE_BYTES
