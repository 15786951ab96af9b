"""How long a context an engine gives a model, and what it takes: the same answer from every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from paceline.core.errors import ContextLengthError
from paceline.engines.options import CacheType, DType, ModelOptions, cache_types
from paceline.models.description import ModelDescription

DEFAULT_CONTEXT_LENGTH: Final = 4096
"""Tokens of context where none are asked for, the model takes more, and nothing is known of the memory for them."""

BYTES_OF_BOOKKEEPING: Final = 52
"""Bytes that llama.cpp notes about each cache cell, at least.

It touches all of it at once, so that no allocation fails.
"""


def choose_context_length(wanted: int | None, trained: int | None, *, model: object, may_shrink: bool = False) -> int:
    """Return the context to give a model, in tokens; ``None`` wants ``trained``, up to :data:`DEFAULT_CONTEXT_LENGTH`.

    ``trained`` is the most the model was made for, ``None`` where it does not say. Beyond it positions mean nothing to
    the model: nothing fails, the text just gets worse. So more is refused by a :class:`ContextLengthError`, or not
    given (``may_shrink``).
    """
    if wanted is None:
        return DEFAULT_CONTEXT_LENGTH if trained is None else min(trained, DEFAULT_CONTEXT_LENGTH)
    if trained is None or wanted <= trained:
        return wanted
    if may_shrink:
        return trained
    raise ContextLengthError(
        f"a context of {wanted} tokens is more than the {trained} that {model} was made for: "
        f"give at most {trained} (`context_length`, or `DraftOptions.context_length` for a draft model)"
    )


def fit_context_length(trained: int, fits: Callable[[int], bool]) -> int:
    """Return all of the context that a model was made for, halved until there is memory for it.

    Not as many tokens as would just fit: costs are kept by the length of the context, and what is free changes from
    load to load. Down to :data:`DEFAULT_CONTEXT_LENGTH` nobody asks.
    """
    length = trained
    while length > DEFAULT_CONTEXT_LENGTH and not fits(length):
        length = max(length // 2, DEFAULT_CONTEXT_LENGTH)
    return length


_OF_DTYPE: Final[dict[DType | None, CacheType]] = {"float16": "f16", "bfloat16": "bf16"}


def cell_bytes(about: ModelDescription, options: ModelOptions) -> int | None:
    """Return what a token of the cache takes at most, by the header alone; ``None`` where that does not say it."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    heads, key_size = (about.layers or 0) * (about.kv_heads or 0), about.head_size
    value_size = about.metadata.get(f"{about.architecture}.attention.value_length") or key_size
    if not (heads and key_size) or not isinstance(value_size, int):
        return None
    types = (_OF_DTYPE.get(options.dtype, "f32"),) * 2 if about.format == "huggingface" else cache_types(options)
    num_bytes = BYTES_OF_BOOKKEEPING
    for size, cache_type in zip((key_size, value_size), types, strict=True):
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[cache_type.upper()]]
        num_bytes += heads * size * block_bytes // block
    return num_bytes
