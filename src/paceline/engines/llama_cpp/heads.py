"""Heads of GGUF models, which draft from the states of the model that they belong to.

llama.cpp runs an MTP layer by a context of its own kind, on the weights of the target or on those of a file that holds
the layer alone; EAGLE-3 as a model with an encoder, which fuses the states of several layers to one; an assistant of
Gemma 4 on the cache of its target; and DFlash as a model whose cache holds states. It ends its process
over much that does not fit, so that is refused before (:mod:`.states`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api

from paceline.core.errors import CapabilityError
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.loading import LoadedModel, create_context, describe_loaded
from paceline.engines.llama_cpp.remarks import warn
from paceline.engines.llama_cpp.settings import DRAFT_BATCH
from paceline.engines.llama_cpp.states import HeadFile, check_reads_cache, check_token_ids
from paceline.engines.llama_cpp.weights import free_model, read_model
from paceline.engines.memory import NO_FOOTPRINT
from paceline.engines.options import OUTPUT_STATE
from paceline.models.gguf_header import read_gguf_header

_LEVEL_ROWS: Final = 16
"""Least rows of a pass of a head that reads no text, but drafts of each request."""


def load_head(target: LoadedModel, head: HeadFile, path: Path | None = None) -> LoadedModel:
    """Make a context for a head, which drafts from the states of a target that holds them."""
    options, of_target = target.options, target.settings
    if head.reads_cache:
        # It reads no prompts, and its cells are those of the target, by the same ids.
        rows = min(of_target.batch_rows, max(_LEVEL_ROWS, options.max_sequences))
        settings = dataclasses.replace(of_target.with_batch(rows, rows), branches=0, attention_is_open=False)
    else:
        rows = of_target.batch_rows if of_target.devices else min(of_target.batch_rows, DRAFT_BATCH)
        block_rows, window = (0, 0) if head.block is None else (head.block.rows, head.block.window)
        keepers = window > 0 and 1 < options.max_sequences <= native.MAX_SEQUENCE_IDS // 2
        rows = max(rows, block_rows)
        # A block lies behind the text.
        length = of_target.context_length + block_rows
        cells = options.max_sequences * of_target.context_length if options.cells is None else options.cells
        settings = dataclasses.replace(
            of_target.with_batch(rows, rows),
            context_length=length,
            cells=cells + options.max_sequences * block_rows,
            branches=0,
            max_ids=options.max_sequences * (2 if keepers else 1),
            recurrent=False,
            snapshots=0,
            window=window,
            keepers=keepers,
            apart=False,
            attention_is_open=False,
        )
    if head.kind not in ("eagle3", "dflash"):
        settings = dataclasses.replace(settings, context_type=api.LLAMA_CONTEXT_TYPE_MTP)
    options = dataclasses.replace(options, hold_states=() if head.block is not None else (OUTPUT_STATE,))
    model, keep_alive = target.model, target.keep_alive
    if path is not None:
        options = dataclasses.replace(options, path=path)
        model, keep_alive, remarks = read_model(options, may_be_head=True)
    try:
        if path is not None:
            _check_fits(model, head, path, target)
            warn(path, remarks)
        context, _ = create_context(model, options, settings, None, target.context if head.borrows else None)
        if head.block is not None:
            api.llama_set_causal_attn(context, head.block.causal)
            if head.block.says_confidence:
                native.hold_output_states(context)
    except BaseException:
        if path is not None:
            free_model(model, None)
        raise
    architecture = read_gguf_header(Path(options.path)).metadata.get("general.architecture")
    loaded = LoadedModel(
        options=options,
        settings=settings,
        model=model,
        context=context,
        capabilities=dataclasses.replace(
            target.capabilities,
            context_length=settings.context_length,
            max_rows=settings.batch_rows,
            max_outputs=settings.output_rows,
            cells=settings.cells,
            trees=head.reads_cache,
            max_rollback=None,
            shares_passes=True,
            reads_states=True,
        ),
        description=f"{head.kind} head: {describe_loaded(model, architecture, options, settings)}",
        keep_alive=keep_alive,
        stream=None,
        room=None,
        footprint=NO_FOOTPRINT,
        encodes=head.kind == "eagle3",
        reads_cache=head.reads_cache,
        block=head.block,
        lender=target,
    )
    target.heads.append(loaded)
    return loaded


def _check_fits(model: Any, head: HeadFile, path: Path, target: LoadedModel) -> None:
    """Raise ``CapabilityError`` for a head of another model, which llama.cpp would run all the same, or end over."""
    of_target = Path(target.options.path)
    its, wanted = (str(read_gguf_header(each).metadata.get("general.architecture")) for each in (path, of_target))
    if head.kind not in ("eagle3", "dflash") and its.removesuffix("-assistant") != wanted:
        raise CapabilityError(
            f"{path} is a head for a model of {its.removesuffix('-assistant')}, and {of_target} is one of {wanted}: "
            "give the head that was made for this model, or leave it out"
        )
    if head.reads_cache:
        check_reads_cache(path, of_target)
    width = api.llama_model_n_embd_out(target.model)
    checks = [("number of tokens", _num_tokens(model), _num_tokens(target.model))]
    if head.target_width is not None:
        checks.append(("target's width", head.target_width, width))
    if head.kind not in ("eagle3", "dflash"):
        checks.append(("width", api.llama_model_n_embd_out(model), width))
    elif head.kind == "eagle3" and head.borrows:
        checks.append(("width, without an embedding of its own,", api.llama_model_n_embd(model), width))
    check_token_ids(path, _num_tokens(model))
    for what, found, due in checks:
        if found != due:
            raise CapabilityError(
                f"{path} is not a head for {Path(target.options.path).name}: its {what} "
                f"is {found}, not {due}; give the "
                "head that was made for this model, or leave it out"
            )


def _num_tokens(model: Any) -> int:
    return int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
