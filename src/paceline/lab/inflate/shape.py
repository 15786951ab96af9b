"""Shapes of Llama models: the well-known ones, what they weigh, and which of them can hold another."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final, NamedTuple

from paceline.conversion.llama import EMBEDDINGS, OUTPUT, LlamaShape
from paceline.core.errors import InputError

_MAX_LAYERS: Final = 512
"""``LLAMA_MAX_LAYERS``: llama.cpp loads no model that has more."""

_MAX: Final = 1 << 20
"""Most of any other dimension, beyond all models there are: a larger one takes hours to lay out, and is a slip."""

MULTIPLE: Final = 256
"""K-quants work in blocks of 256 along a row, so every row length of an inflated model is a multiple of that."""


class FileType(NamedTuple):
    """The tensor types llama.cpp mixes under one name; see :data:`FILE_TYPES`."""

    base: str
    sensitive: str
    """Type of attention values and ffn_down in the layers where :func:`is_sensitive_layer`."""
    output: str
    """Type of the output projection, or of the embeddings where they are that projection."""


FILE_TYPES: Final = {
    "F32": FileType("F32", "F32", "F32"),
    "F16": FileType("F16", "F16", "F16"),
    "BF16": FileType("BF16", "BF16", "BF16"),
    "Q8_0": FileType("Q8_0", "Q8_0", "Q8_0"),
    "Q6_K": FileType("Q6_K", "Q6_K", "Q6_K"),
    "Q5_K_M": FileType("Q5_K", "Q6_K", "Q6_K"),
    "Q4_K_M": FileType("Q4_K", "Q6_K", "Q6_K"),
    "Q4_0": FileType("Q4_0", "Q4_0", "Q6_K"),
}
"""File types a model can be inflated to.

They are those whose mix over the layers follows one rule, so that it can be reproduced at another depth; source:
``llama_tensor_get_type`` in llama.cpp's ``llama-quant.cpp``.
"""

_BITS: Final = {
    "F32": 32.0,
    "F16": 16.0,
    "BF16": 16.0,
    "Q8_0": 8.5,
    "Q6_K": 6.5625,
    "Q5_K": 5.5,
    "Q4_K": 4.5,
    "Q4_0": 4.5,
}
"""Bits per weight, the blocks' scales included."""


def find_file_type(name: str) -> str:
    """Return the name of a file type as :data:`FILE_TYPES` has it, whatever its case."""
    if name.upper() not in FILE_TYPES:
        raise InputError(f"file type {name!r} cannot be used for inflating: choose from {', '.join(FILE_TYPES)}")
    return name.upper()


def is_sensitive_layer(layer: int, num_layers: int) -> bool:
    """Return whether llama.cpp's ``_K_M`` mixes give this layer more bits (its ``use_more_bits``)."""
    return layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2


def matrix_type(name: str, num_layers: int, mix: FileType) -> str:
    """Return the type llama.cpp gives to a matrix in a model of so many layers; embeddings are taken for tied ones."""
    if name in (EMBEDDINGS, OUTPUT):
        return mix.output
    _, layer, part, _ = name.split(".")
    sensitive = part in ("attn_v", "ffn_down") and is_sensitive_layer(int(layer), num_layers)
    return mix.sensitive if sensitive else mix.base


def estimate_bytes(shape: LlamaShape, file_type: str) -> int:
    """Return the size of a GGUF file of this shape, within a few per cent."""
    mix = FILE_TYPES[find_file_type(file_type)]
    num_bits = 0.0
    for name, dimensions in shape.tensors().items():
        kind = "F32" if len(dimensions) == 1 else matrix_type(name, shape.layers, mix)
        num_bits += prod(dimensions) * _BITS[kind]
    # A token costs its text, its merge and its type; 48 bytes covers English vocabularies.
    return int(num_bits / 8) + 48 * shape.vocab_size


def check_shape(shape: LlamaShape) -> None:
    """Raise ``InputError`` unless a model can be inflated to this shape; the message names the nearest dimension."""
    for name in ("layers", "width", "feed_forward", "heads", "kv_heads", "head_size", "vocab_size"):
        value = getattr(shape, name)
        most = _MAX_LAYERS if name == "layers" else _MAX
        if not 1 <= value <= most:
            raise InputError(f"{_spell_dimension(name)} {value} is out of range: the least is 1, the most {most}")
    if shape.head_size % 2:
        raise InputError(
            f"head size {shape.head_size} is odd: rotary embeddings turn pairs, take {shape.head_size + 1}"
        )
    if shape.heads % shape.kv_heads:
        divisors = [n for n in range(1, shape.heads + 1) if shape.heads % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - shape.kv_heads))
        raise InputError(f"{shape.heads} heads cannot share {shape.kv_heads} kv heads evenly: take {nearest} kv heads")
    widths = {
        "width": shape.width,
        "feed-forward": shape.feed_forward,
        f"{shape.heads} heads of {shape.head_size}, together": shape.attention_width,
    }
    for name, value in widths.items():
        if value % MULTIPLE:
            low = value // MULTIPLE * MULTIPLE
            nearest_two = f"{low} or {low + MULTIPLE}" if low else f"{MULTIPLE}"
            raise InputError(f"{name} {value} is not a multiple of {MULTIPLE}, as K-quants need: take {nearest_two}")


def check_holds(shape: LlamaShape, source: LlamaShape) -> None:
    """Raise ``InputError`` unless a model of the shape ``source`` fits into one of ``shape``."""
    for name in ("layers", "width", "feed_forward", "vocab_size"):
        smaller, larger = getattr(shape, name), getattr(source, name)
        if smaller < larger:
            raise InputError(
                f"{_spell_dimension(name)} {smaller} is less than the source's {larger}: take at least {larger}"
            )
    if shape.head_size % source.head_size:
        raise InputError(
            f"head size {shape.head_size} is not a multiple of the source's {source.head_size}, so the rotary "
            f"frequencies would change: take {source.head_size} (more heads cost the same)"
        )
    needed = source.kv_heads * -(-source.group_size // shape.group_size)
    if shape.kv_heads < needed:
        raise InputError(
            f"{shape.heads} heads over {shape.kv_heads} kv heads cannot hold the source's {source.heads} over "
            f"{source.kv_heads}: take at least {needed} kv heads at {shape.group_size} heads each"
        )
    if shape.vocab_size > source.vocab_size:
        least = first_free_block(source.width) + MULTIPLE
        if shape.width < least:
            raise InputError(
                f"width {shape.width} leaves no room to ban the ids that pad the vocabulary beyond the source's "
                f"{source.vocab_size}: take at least {least}, or keep the vocabulary"
            )


PRESETS: Final = {
    "0.3b": LlamaShape(32, 1024, 2560, 16, 4, 64, 49152, tied=True),
    "1b": LlamaShape(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "3b": LlamaShape(28, 3072, 8192, 24, 8, 128, 128256, tied=True),
    "8b": LlamaShape(32, 4096, 14336, 32, 8, 128, 128256, tied=False),
}
"""Well-known shapes, with the vocabularies of the originals.

``1b`` and ``3b`` are Llama 3.2's, ``8b`` is Llama 3's (the ``config.json`` of meta-llama/Llama-3.2-1B, Llama-3.2-3B and
Meta-Llama-3-8B). ``0.3b`` is HuggingFaceTB/SmolLM2-360M with its width of 960 made 1024 (a multiple of 256), and so 16
heads over 4 instead of 15 over 5.
"""

VOCABULARIES: Final = {"32k": 32768, "128k": 128256, "152k": 152064}
"""Sizes by name, multiples of 256 all: Mistral's since v0.3, Llama 3's, and that of the larger Qwen 2.5 models."""


def preset_shape(name: str, source: LlamaShape, vocab_size: int | None = None) -> LlamaShape:
    """Return a preset's shape for a source: with its vocabulary, unless ``vocab_size`` is given, and heads of its size.

    A head twice as large would need the queries scaled by sqrt(2), which rounds all their weights. Twice as many heads
    of the old size have the same projections and the same cache, and read the same bytes; only the scores of attention
    are twice as many. Presets therefore keep the source's head size wherever it divides their widths.
    """
    if name.lower() not in PRESETS:
        raise InputError(f"there is no preset {name!r}: choose from {', '.join(PRESETS)}, or give the dimensions")
    preset = PRESETS[name.lower()]
    head_size, kv_width = source.head_size, preset.kv_heads * preset.head_size
    if preset.attention_width % head_size or kv_width % head_size:
        head_size = preset.head_size
    vocab_size = source.vocab_size if vocab_size is None else vocab_size
    return LlamaShape(
        preset.layers,
        preset.width,
        preset.feed_forward,
        heads=preset.attention_width // head_size,
        kv_heads=kv_width // head_size,
        head_size=head_size,
        vocab_size=vocab_size,
        tied=preset.tied and source.tied and vocab_size == source.vocab_size,
    )


def fit_shape(source: LlamaShape, shape: LlamaShape | str, vocab_size: int | None = None) -> LlamaShape:
    """Return the shape, given by its dimensions or as a preset's name, that a source is inflated to.

    ``vocab_size`` is by default the shape's, or with a preset the source's. Raises ``InputError`` where the shape
    cannot hold the source.
    """
    if isinstance(shape, str):
        shape = preset_shape(shape, source, vocab_size)
    elif vocab_size is not None:
        shape = replace(shape, vocab_size=vocab_size)
    # Banned ids need rows of the output projection that differ from their embeddings.
    if not source.tied or shape.vocab_size > source.vocab_size:
        shape = replace(shape, tied=False)
    check_shape(shape)
    check_holds(shape, source)
    return shape


def first_free_block(width: int) -> int:
    """Return the first channel of the first whole block of 256 that a source of this width leaves free."""
    return -(-width // MULTIPLE) * MULTIPLE


def _spell_dimension(name: str) -> str:
    return {"feed_forward": "feed-forward", "vocab_size": "vocabulary"}.get(name, name.replace("_", " "))
