"""Heads of GGUF models: MTP layers, which draft from the states of the model that they belong to.

llama.cpp runs such a layer by a context of its own kind, on the weights of the target or on those of a file that holds
the layer alone. It ends its process over much that does not fit, so that is refused before (:mod:`.states`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as api

from paceline.core.errors import CapabilityError
from paceline.engines.llama_cpp.loading import LoadedModel, create_context, describe_loaded
from paceline.engines.llama_cpp.remarks import warn
from paceline.engines.llama_cpp.settings import DRAFT_BATCH
from paceline.engines.llama_cpp.states import has_head, state_width
from paceline.engines.llama_cpp.weights import free_model, read_model
from paceline.engines.memory import NO_FOOTPRINT
from paceline.models.description import describe


def load_head(target: LoadedModel, path: Path | None = None) -> LoadedModel:
    """Make a context for an MTP layer, which drafts from the states of a target that holds them.

    Args:
        target: the target, which was loaded with the layer where its file has it.
        path: the file with the layer; ``None`` for the target's own.

    Raises:
        ModelFileError: the file is damaged, or refused by llama.cpp.
        CapabilityError: the layer is none of this target's.
        InputError: there is no memory for it.
    """
    options, of_target = target.options, target.settings
    cells = options.max_sequences * of_target.context_length if options.cells is None else options.cells
    rows = of_target.batch_rows if of_target.devices else min(of_target.batch_rows, DRAFT_BATCH)
    settings = dataclasses.replace(
        of_target.with_batch(rows, rows),
        cells=cells,
        branches=0,
        max_ids=options.max_sequences,
        recurrent=False,
        snapshots=0,
        window=0,
        keepers=False,
        apart=False,
        attention_is_open=False,
        is_head=True,
    )
    model, keep_alive, users = target.model, target.keep_alive, target.users
    if path is not None:
        options, users = dataclasses.replace(options, path=path), []
        model, keep_alive, remarks = read_model(options, may_be_head=True)
    try:
        if path is not None:
            _check_fits(model, path, target)
            warn(path, remarks)
        context, _ = create_context(model, options, settings, None)
    except BaseException:
        if path is not None:
            free_model(model, None)
        raise
    head = dataclasses.replace(
        target,
        options=options,
        settings=settings,
        model=model,
        context=context,
        users=users,
        capabilities=dataclasses.replace(
            target.capabilities,
            max_rows=settings.batch_rows,
            max_outputs=settings.output_rows,
            cells=settings.cells,
            trees=False,
            max_rollback=None,
            shares_passes=True,
            reads_states=True,
        ),
        description=f"MTP layer of {describe_loaded(model, describe(Path(options.path)), options, settings)}",
        keep_alive=keep_alive,
        stream=None,
        room=None,
        footprint=NO_FOOTPRINT,
    )
    users.append(head)
    return head


def _check_fits(model: Any, path: Path, target: LoadedModel) -> None:
    """Raise ``CapabilityError`` for a head of another model, which llama.cpp would run all the same."""
    name = Path(target.options.path).name
    if not has_head(path):
        raise CapabilityError(f"{path} is no head that can be run here: give one MTP layer, made for {name}")
    for what, its, wanted in (
        ("architecture", describe(path).architecture, describe(Path(target.options.path)).architecture),
        ("width", state_width(model), state_width(target.model)),
        ("number of tokens", _num_tokens(model), _num_tokens(target.model)),
    ):
        if its != wanted:
            raise CapabilityError(
                f"{path} is no head of {name}: its {what} is {its}, not {wanted}; give the head that was made for this "
                "model, or leave it out"
            )


def _num_tokens(model: Any) -> int:
    return int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)))
