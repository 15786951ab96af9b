"""Opening a target and its draft model: in which order, and how memory is shared.

Usually the target comes first. Where memory is limited, the layers that stay in it get what is left: there the draft
model, which is read again for every token that it drafts, comes first and stays whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.conversion.own_draft import OwnDraft, OwnDraftFile, make_own_draft
from paceline.core.errors import CapabilityError, InputError, ModelFileError, ModelWarning
from paceline.engines.base import Engine
from paceline.engines.loading import (
    foresee_memory,
    foreseen_context_length,
    has_head,
    head_names,
    is_head,
    memory_limit,
    open_engine,
    open_head,
    open_vocabulary,
    settle_context,
    states_read,
)
from paceline.engines.memory import (
    NO_FOOTPRINT,
    NO_OTHER_MEMORY,
    PROCESS_BYTES,
    SPARE_BYTES,
    Footprint,
    MemoryNeed,
    OtherMemory,
    held_memory,
)
from paceline.engines.options import DraftOptions, ModelOptions, has_quantized_cache
from paceline.engines.slow_passes import slow_passes
from paceline.models.description import describe
from paceline.models.gguf_model import gguf_bytes
from paceline.models.hub.local_cache import find_snapshot
from paceline.models.registry import MTP_DRAFT, MTP_FILES, find_head_beside
from paceline.planning.costs.attention import OpenedModel, like_target, open_model
from paceline.planning.costs.meter import Report
from paceline.vocabularies.relation import relate_vocabularies

_MAX_SHARE: Final = 0.5
"""Largest share of the memory for a draft that the user did not name: what it takes cannot go to layers that stay."""

_KEPT_SHARE: Final = 1 / 64
"""Largest share of the memory for the kept prompts of a model whose layers are read for every pass."""

_TRANSLATED_ROOM: Final = 2
"""Context of a translated draft, over that of the target: a text may take more of its tokens."""

_DRAFTED_ROOM: Final = 64
"""Cells of a draft model for what it drafts for a request."""

_ROWS_READ: Final = 2
"""Most rows of a request whose logits a drafter reads of one pass."""


_MEANINGLESS_TO_HEADS: Final = {
    "context_may_shrink": "context_length",
    "gpu_layers": "gpu_layers",
    "devices": "devices",
    "threads": "threads",
    "threads_batch": "threads_batch",
    "cache_type_k": "cache_type_k",
    "cache_type_v": "cache_type_v",
    "draft_vocab": "vocab",
    "draft_map": "token_map",
}
"""Options that a draft model may have otherwise than its target, and what they are called in ``DraftOptions``."""


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Engines, and the options they run with, everything that was found out at load included.

    Attributes:
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
        if self.draft is not None:
            self.draft.close()
        self.target.close()


@dataclass(frozen=True, slots=True)
class PairNeed:
    """What a target and its draft model will take once they are loaded.

    Attributes:
        prompts_bytes: most for what the finished requests of both have read.
        process_bytes: of Python and its libraries.
    """

    target: MemoryNeed
    draft: MemoryNeed | None
    prompts_bytes: int
    process_bytes: int = PROCESS_BYTES

    @property
    def models(self) -> tuple[MemoryNeed, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def start_bytes(self) -> int:
        """Bytes that are taken when the models are loaded."""
        return self.process_bytes + sum(need.num_bytes - (need.compute_bytes or 0) for need in self.models)

    @property
    def most_bytes(self) -> int:
        """Bytes that are taken when passes are widest and texts longest, but for what finished requests leave."""
        return self.process_bytes + sum(need.num_bytes for need in self.models)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of :attr:`most_bytes` that a GPU with all layers would take: weights, cache and scratch memory."""
        return sum(need.num_bytes - need.other_bytes for need in self.models)

    @property
    def device_bytes(self) -> int:
        """The part of :attr:`most_bytes` that is on devices."""
        return sum(need.device_bytes for need in self.models)


def foresee_pair(target: ModelOptions, draft: ModelOptions | None, *, kept_bytes: int = 0) -> PairNeed:
    """Return what :func:`open_pair` would take, without loading weights; all layers count as if they stayed in memory.

    Of a head only the weights are counted. Raises as :func:`open_pair` does, but for too little memory.
    """
    target = settle_context(target)
    of_target = foresee_memory(target)
    of_draft = None if draft is None else _foresee_draft(draft, target, of_target)
    prompts_bytes = 0 if target.exact else kept_bytes * (1 if draft is None else 2)
    return PairNeed(of_target, of_draft, prompts_bytes)


def _foresee_draft(draft: ModelOptions, target: ModelOptions, of_target: MemoryNeed) -> MemoryNeed:
    own = OwnDraft.parse(draft.path)
    if own is None and (draft.path == MTP_DRAFT or is_head(draft)):
        path = find_mtp(target) if draft.path == MTP_DRAFT else Path(draft.path)
        num_bytes = 0 if path is None else describe(path, may_be_head=True).num_bytes
        return MemoryNeed(of_target.context_length, of_target.cells, num_bytes, cache_bytes=0)
    file = None if own is None else own.of(Path(target.path))
    if file is not None:
        # Until it is made, its shape is that of its target.
        draft = dataclasses.replace(draft, path=file.path if file.is_there() else target.path)
    need = foresee_memory(like_target(_fit_draft_options(draft, target), target))
    return need if file is None else dataclasses.replace(need, weights_bytes=file.foreseen_bytes())


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

    A draft of the target's own is made if need be. :class:`DraftOptions` are those of the
    default draft (:func:`default_draft`); with ``may_go_without``, a ``ModelWarning`` says where it cannot be had.
    ``kept_bytes`` are left for what the finished requests of each model have read. ``force`` measures again what is
    kept of earlier loads.

    Raises:
        InputError: a model cannot be loaded, or not within the memory there is.
        EngineError: a pass failed.
    """
    memory_bytes = memory_limit(target)
    target = _settle_context(target)
    is_default = isinstance(draft, DraftOptions)
    if isinstance(draft, DraftOptions):
        own = default_draft(target)
        draft = None if own is None else dataclasses.replace(draft, path=own).beside(target)
    try:
        if draft is not None and (draft.path == MTP_DRAFT or is_head(draft)):
            if target.rpc:
                raise CapabilityError(
                    "a head reads its target's states, which stay on the workers (`rpc`): name another draft model, or "
                    "none"
                )
            if memory_bytes is not None:
                raise InputError(
                    f"a head (`draft={str(draft.path)!r}`) drafts where all layers of its target fit into memory: "
                    "leave out how much there is (`memory`), or name another draft model"
                )
            return _open_with_head(target, draft, kept_bytes, force=force, report=report)
        draft = None if draft is None else _fit_draft_options(_make_draft(draft, target, report), target)
        if memory_bytes is not None:
            within = target
            if is_default and draft is not None and may_go_without:
                # The limit is fixed: the draft is given up before streaming is.
                within = dataclasses.replace(target, memory=memory_bytes)
            pair = _open_within(memory_bytes, within, draft, kept_bytes, force=force, report=report)
            options = dataclasses.replace(pair.target_options, memory=target.memory)
            return dataclasses.replace(pair, target_options=options)
    except InputError as error:
        if draft is None or not (is_default and may_go_without):
            raise
        # If the draft was not the reason, the same error ends this too.
        pair = open_pair(target, None, kept_bytes=kept_bytes, force=force, report=report)
        warnings.warn(
            f"no draft of the target's own: {error}; name one (`draft`), or none (`drafters=['suffix']`)",
            ModelWarning,
            stacklevel=2,
        )
        return pair
    opened = open_model(target, has_draft=draft is not None, force=force, report=report)
    return _open_draft(opened, draft, kept_bytes)


def _open_with_head(
    target: ModelOptions, draft: ModelOptions, kept_bytes: int, *, force: bool, report: Report | None
) -> ModelPair:
    """Open a target with a head, which drafts for it, and runs as it does."""
    usual = (DraftOptions(draft.path).beside(target), ModelOptions(draft.path, context_may_shrink=True))
    given = [
        label
        for name, label in _MEANINGLESS_TO_HEADS.items()
        if getattr(draft, name) not in [getattr(options, name) for options in usual]
    ]
    if given:
        named = ", ".join(f"`DraftOptions.{label}`" for label in given)
        warnings.warn(f"{named} changes nothing: a head runs as its target does", ModelWarning, stacklevel=3)
    path = find_mtp(target) if draft.path == MTP_DRAFT else Path(draft.path)
    target = dataclasses.replace(target, hold_states=states_read(target, path))
    opened = open_model(target, has_draft=True, force=force, report=report)
    try:
        head = open_head(opened.engine, opened.options, path)
    except BaseException:
        opened.engine.close()
        raise
    options = dataclasses.replace(opened.options, path=path or opened.options.path)
    return ModelPair(opened.engine, opened.options, head, options, kept_bytes, opened.measured)


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


def default_draft(target: ModelOptions) -> str | None:
    """Return the name of the draft that a target has where none is named; ``None`` where it has none.

    It is the MTP layer in its file, where there is one that can be run here, or for a model of the hub a head that was
    fetched from beside it.
    """
    if target.rpc:
        return None
    if memory_limit(target) is None:
        if has_head(target):
            return MTP_DRAFT
        head = None
        if find_snapshot(Path(target.path)) is not None:
            with contextlib.suppress(ModelFileError):
                head = find_head_beside(Path(target.path), head_names(target))
        return None if head is None else str(head)
    own = default_own_draft(target)
    return None if own is None else own.name


def find_mtp(target: ModelOptions) -> Path | None:
    """Return the file of a target's MTP layer, which may lie beside it; ``None`` for its own file.

    Raises:
        InputError: there is none that drafts here.
    """
    if has_head(target):
        return None
    kinds = [name for name in head_names(target) if name == MTP_FILES]
    head = find_head_beside(Path(target.path), kinds)
    if head is None:
        also = f", and no {MTP_FILES}*.gguf lies beside it" if kinds else ""
        raise InputError(
            f"{Path(target.path).name} has no MTP layer that drafts here (`draft={MTP_DRAFT!r}`){also}: name a draft "
            "model, or leave it out",
            field="draft",
        )
    return head


def default_own_draft(target: ModelOptions) -> OwnDraftFile | None:
    """Return the draft of its own that a target gets where none is named; ``None`` where it gets none.

    A target whose layers are read while they are used has one: each of its passes takes so long that any draft that
    stays in memory pays, and none agrees with it as its own copy does. It has none where the copy would take more than
    half of the memory or hardly be smaller, or there is no type to quantise to.
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
        # Engines without footprints have written to all of their memory.
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
    # Both fit, or layers cannot be streamed and the user did not ask for it.
    engine.close()
    return _open_draft(opened, draft, kept_bytes)


def _settle_context(target: ModelOptions) -> ModelOptions:
    """Return options with the length of the context; a ``ModelWarning`` says where memory cut it short."""
    settled = settle_context(target)
    length = settled.context_length
    trained = None if target.context_length is not None else describe(Path(target.path)).context_length
    if length is not None and trained is not None and length < trained:
        # torch_hf settles nothing.
        warnings.warn(
            f"{Path(target.path).name} gets a context of {length} tokens of the {trained} that it was made for: more "
            "would take over a third of the memory besides its weights; ask for more (`context_length`), or make keys "
            "and values smaller (`cache_type_k`, `cache_type_v`)",
            ModelWarning,
            stacklevel=3,
        )
    return settled


def _make_draft(draft: ModelOptions, target: ModelOptions, report: Report | None) -> ModelOptions:
    asked = OwnDraft.parse(draft.path)
    if asked is None:
        return draft
    return dataclasses.replace(draft, path=make_own_draft(Path(target.path), asked.file_type, report=report))


def _fit_draft_options(draft: ModelOptions, target: ModelOptions) -> ModelOptions:
    """Return how to run a draft model with no more than drafting for its target takes.

    A text is never longer than the target's context, but may take more tokens of another vocabulary. In a pass each
    request has one row to propose from, and where drafts are translated the row before it, too.
    """
    context_length, cells = draft.context_length, draft.cells
    if draft.context_may_shrink and context_length in (None, target.context_length):
        room = _TRANSLATED_ROOM if _is_translated(draft, target) else 1
        context_length = foreseen_context_length(target) * room
        if target.cells is not None and cells is None:
            # As many as the target's, and some for what is drafted behind them.
            cells = max(room * target.cells + _DRAFTED_ROOM * draft.max_sequences, context_length)
    rows_read = draft.rows_read or _ROWS_READ * draft.max_sequences
    # Else it gets its target's attention, which may not be fused.
    fused = True if has_quantized_cache(draft) else draft.flash_attention
    # The draft's own pending tree is a chain: siblings are proposed but never fed.
    return dataclasses.replace(
        draft, context_length=context_length, cells=cells, rows_read=rows_read, flash_attention=fused, branches=0
    )


def _is_translated(draft: ModelOptions, target: ModelOptions) -> bool:
    """Return whether the tokens of a draft differ from its target's, so that a text may take more of them."""
    if draft.draft_vocab != "auto":
        return draft.draft_vocab == "translate"
    # Comparing tokens takes some tenths of a second.
    if describe(Path(draft.path)).vocabulary_size == describe(Path(target.path)).vocabulary_size:
        return False
    with open_vocabulary(target) as ours, open_vocabulary(draft) as theirs:
        return not relate_vocabularies(ours, theirs).fits


def _open_draft(opened: OpenedModel, draft: ModelOptions | None, kept_bytes: int) -> ModelPair:
    """Open the draft model of an open target; close the target where that fails."""
    try:
        draft = None if draft is None else like_target(draft, opened.options)
        engine = None if draft is None else open_engine(draft)
    except BaseException:
        opened.engine.close()
        raise
    return ModelPair(opened.engine, opened.options, engine, draft, kept_bytes, opened.measured)


def _exceeds(memory_bytes: int, target: ModelOptions, other: OtherMemory = NO_OTHER_MEMORY) -> bool:
    """Return whether the weights alone are more than the memory left for them, so that they are streamed."""
    process_bytes = held_memory() - other.draft.held_bytes
    return gguf_bytes(Path(target.path)) > memory_bytes - process_bytes - other.num_bytes - SPARE_BYTES
