"""Shapes of Llama models: the well-known ones, what they weigh, and which of them can hold another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from paceline.core.errors import InputError

MULTIPLE: Final = 256
"""K-quants work in blocks of 256 along a row, so every row length of an inflated model is a multiple of that."""


class FileType(NamedTuple):
    """The tensor types llama.cpp mixes under one name; see :data:`FILE_TYPES`."""

    base: str
    sensitive: str
    """Of attention values and ffn_down, in the layers where :func:`is_sensitive_layer`."""
    output: str
    """Of the output projection, or of the embeddings where they are that projection."""


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


def file_type_named(name: str) -> str:
    """Return the name of a file type as :data:`FILE_TYPES` has it, whatever its case.

    Raises:
        InputError: it is none of them.
    """
    if name.upper() not in FILE_TYPES:
        raise InputError(f"file type {name!r} is none a model can be inflated to: choose from {', '.join(FILE_TYPES)}")
    return name.upper()


def is_sensitive_layer(layer: int, num_layers: int) -> bool:
    """Return whether llama.cpp's ``_K_M`` mixes give this layer more bits (its ``use_more_bits``)."""
    return layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a Llama model.

    Attributes:
        layers: transformer layers.
        width: length of the residual stream.
        feed_forward: hidden units of a layer's feed-forward part.
        heads: attention heads of a layer.
        kv_heads: heads that have keys and values of their own; each serves ``heads / kv_heads`` others.
        head_size: length of one head's vectors.
        vocab_size: tokens.
        tied: the embeddings are the output projection as well.
    """

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool

    @classmethod
    def from_gguf(cls, path: Path) -> LlamaShape:
        """Read the shape of a GGUF file.

        Raises:
            ModelFileError: it cannot be read, is damaged, or is not a plain Llama model.
        """
        from paceline.models.inflate.source import LlamaFile

        return LlamaFile(path).shape

    @property
    def num_parameters(self) -> int:
        """Weights of all tensors."""
        return sum(count for count, _ in self._weights(FILE_TYPES["F32"]))

    def num_bytes(self, file_type: str) -> int:
        """Return about how large a GGUF file of this shape is, within a few per cent.

        Raises:
            InputError: the file type is none of :data:`FILE_TYPES`.
        """
        mix = FILE_TYPES[file_type_named(file_type)]
        weights = sum(count * _BITS[kind] for count, kind in self._weights(mix)) / 8
        # A token costs its text, its merge and its type; 48 bytes covers English vocabularies.
        return int(weights) + 48 * self.vocab_size

    @property
    def group_size(self) -> int:
        """Heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def attention_width(self) -> int:
        """Length of all heads' vectors together."""
        return self.heads * self.head_size

    def check(self) -> None:
        """Check that this is a shape a model can be inflated to.

        Raises:
            InputError: a dimension is out of range or not the multiple it has to be; the message names the nearest.
        """
        for name in ("layers", "width", "feed_forward", "heads", "kv_heads", "head_size", "vocab_size"):
            value = getattr(self, name)
            if value < 1:
                raise InputError(f"{_called(name)} {value} is out of range: the least is 1")
        if self.head_size % 2:
            raise InputError(
                f"head size {self.head_size} is odd: rotary embeddings turn pairs, take {self.head_size + 1}"
            )
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            nearest = min(divisors, key=lambda n: abs(n - self.kv_heads))
            raise InputError(
                f"{self.heads} heads cannot share {self.kv_heads} kv heads evenly: take {nearest} kv heads"
            )
        widths = {
            "width": self.width,
            "feed-forward": self.feed_forward,
            f"{self.heads} heads of {self.head_size}, together": self.attention_width,
        }
        for name, value in widths.items():
            if value % MULTIPLE:
                low = value // MULTIPLE * MULTIPLE
                nearest_two = f"{low} or {low + MULTIPLE}" if low else f"{MULTIPLE}"
                raise InputError(
                    f"{name} {value} is not a multiple of {MULTIPLE}, as K-quants need: take {nearest_two}"
                )

    def check_holds(self, source: LlamaShape) -> None:
        """Check that a model of the shape ``source`` fits into this one.

        Raises:
            InputError: a dimension is too small; the message names it and both values.
        """
        for name in ("layers", "width", "feed_forward", "vocab_size"):
            smaller, larger = getattr(self, name), getattr(source, name)
            if smaller < larger:
                raise InputError(
                    f"{_called(name)} {smaller} is less than the source's {larger}: take at least {larger}"
                )
        if self.head_size % source.head_size:
            raise InputError(
                f"head size {self.head_size} is no multiple of the source's {source.head_size}, so the rotary "
                f"frequencies would change: take {source.head_size} (more heads cost the same)"
            )
        needed = source.kv_heads * -(-source.group_size // self.group_size)
        if self.kv_heads < needed:
            raise InputError(
                f"{self.heads} heads over {self.kv_heads} kv heads cannot hold the source's {source.heads} over "
                f"{source.kv_heads}: take at least {needed} kv heads at {self.group_size} heads each"
            )
        if self.vocab_size > source.vocab_size:
            least = first_free_block(source.width) + MULTIPLE
            if self.width < least:
                raise InputError(
                    f"width {self.width} leaves no room to ban the ids that pad the vocabulary beyond the source's "
                    f"{source.vocab_size}: take at least {least}, or keep the vocabulary"
                )

    def _weights(self, mix: FileType) -> list[tuple[int, str]]:
        """Return counts of weights with their types."""
        values = self.width * self.kv_heads * self.head_size
        down = self.width * self.feed_forward
        in_layer = 2 * self.width * self.attention_width + values + 2 * down
        sensitive = sum(is_sensitive_layer(layer, self.layers) for layer in range(self.layers))
        matrices = 1 if self.tied else 2
        return [
            (matrices * self.vocab_size * self.width, mix.output),
            (self.layers * in_layer + (self.layers - sensitive) * (values + down), mix.base),
            (sensitive * (values + down), mix.sensitive),
            ((2 * self.layers + 1) * self.width, "F32"),
        ]


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
    """Return a preset's shape for a source: with its vocabulary, and with heads of its size.

    A head twice as large would need the queries scaled by sqrt(2), which rounds every weight of theirs. Twice as many
    heads of the old size have the same projections and the same cache, and read the same bytes; only the scores of
    attention are twice as many. Presets therefore keep the source's head size wherever it divides their widths.

    Args:
        name: among :data:`PRESETS`.
        source: the shape to place into it.
        vocab_size: tokens, the added ones banned; ``None`` keeps the source's.

    Raises:
        InputError: there is no such preset.
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


def fitted_shape(source: LlamaShape, shape: LlamaShape | str, vocab_size: int | None = None) -> LlamaShape:
    """Return the shape that a source is inflated to, checked to be possible.

    Args:
        source: the shape of the source.
        shape: the dimensions wanted, or the name of a preset.
        vocab_size: tokens; ``None`` takes the shape's, or with a preset the source's.

    Raises:
        InputError: there is no such preset, or the shape cannot hold the source.
    """
    if isinstance(shape, str):
        shape = preset_shape(shape, source, vocab_size)
    elif vocab_size is not None:
        shape = replace(shape, vocab_size=vocab_size)
    # Banned ids need rows of the output projection that differ from their embeddings.
    if not source.tied or shape.vocab_size > source.vocab_size:
        shape = replace(shape, tied=False)
    shape.check()
    shape.check_holds(source)
    return shape


def first_free_block(width: int) -> int:
    """Return where the first whole block of 256 begins that a source of this width leaves free."""
    return -(-width // MULTIPLE) * MULTIPLE


def _called(name: str) -> str:
    return {"feed_forward": "feed-forward", "vocab_size": "vocabulary"}.get(name, name.replace("_", " "))
