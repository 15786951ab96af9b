"""Which GGUF models give their states, and which files have layers that draft from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api

from paceline.engines.llama_cpp import native
from paceline.models.description import describe

MTP_ARCHITECTURES: Final = frozenset(("qwen35", "qwen35moe"))
"""Architectures whose states and MTP layer were tried. Of others llama.cpp may give zeros, or end its process."""


def gives_states(path: Path) -> bool:
    """Return whether a model gives the states that an MTP layer reads."""
    return native.GIVES_STATES and describe(path).architecture in MTP_ARCHITECTURES


def has_head(path: Path) -> bool:
    """Return whether a file has an MTP layer that can be run here, by its header.

    llama.cpp ends its process over more than one layer, and some who publish files leave the layer out.
    """
    header = native.check_model_file(path, may_be_head=True).header
    architecture = header.metadata.get("general.architecture")
    layers = header.metadata.get(f"{architecture}.block_count")
    return (
        native.GIVES_STATES
        and architecture in MTP_ARCHITECTURES
        and header.metadata.get(f"{architecture}.nextn_predict_layers") == 1
        and isinstance(layers, int)
        and f"blk.{layers - 1}.nextn.eh_proj.weight" in header.tensors
    )


def state_width(model: Any) -> int:
    """Return the numbers of a state."""
    return int(api.llama_model_n_embd_out(model))
