"""Llama-type models: their dimensions, the tensors these ask for, and GGUF files that were checked for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.core.errors import ModelFileError
from paceline.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    import gguf

ARCHITECTURE: Final = "llama"
"""``general.architecture`` of the GGUF files."""

EMBEDDINGS, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
ROPE_DIVISORS: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one for each pair of a head: Llama 3.1's way to longer contexts."""

_HEAD_LENGTHS: Final = ("llama.attention.key_length", "llama.attention.value_length")


def layer_tensor(layer: int, name: str) -> str:
    return f"blk.{layer}.{name}.weight"


@dataclass(frozen=True)
class LlamaShape:
    """Dimensions of a Llama model.

    Attributes:
        width: length of the residual stream.
        feed_forward: hidden units of a layer's feed-forward part.
        kv_heads: heads that have keys and values of their own; each serves ``heads / kv_heads`` others.
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
        """Read the shape of a GGUF file; raise ``ModelFileError`` unless it is a plain Llama model."""
        return LlamaFile(path).shape

    @property
    def num_parameters(self) -> int:
        return sum(prod(dimensions) for dimensions in self.tensors().values())

    @property
    def group_size(self) -> int:
        return self.heads // self.kv_heads

    @property
    def attention_width(self) -> int:
        """Length of all heads' vectors together."""
        return self.heads * self.head_size

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return all tensors by their GGUF names, as rows and columns, in the order they are written in."""
        values = self.kv_heads * self.head_size
        in_layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (self.width,),
            "attn_q": (self.attention_width, self.width),
            "attn_k": (values, self.width),
            "attn_v": (values, self.width),
            "attn_output": (self.width, self.attention_width),
            "ffn_norm": (self.width,),
            "ffn_gate": (self.feed_forward, self.width),
            "ffn_up": (self.feed_forward, self.width),
            "ffn_down": (self.width, self.feed_forward),
        }
        tensors: dict[str, tuple[int, ...]] = {EMBEDDINGS: (self.vocab_size, self.width)}
        for layer in range(self.layers):
            tensors |= {layer_tensor(layer, name): dimensions for name, dimensions in in_layer.items()}
        tensors[OUTPUT_NORM] = (self.width,)
        if not self.tied:
            tensors[OUTPUT] = (self.vocab_size, self.width)
        return tensors

    def metadata(self) -> dict[str, int]:
        """Return the metadata of a GGUF file of this shape; all values are ``UINT32`` there."""
        return {
            "llama.vocab_size": self.vocab_size,
            "llama.embedding_length": self.width,
            "llama.block_count": self.layers,
            "llama.feed_forward_length": self.feed_forward,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            **dict.fromkeys(_HEAD_LENGTHS, self.head_size),
            "llama.rope.dimension_count": self.head_size,
        }

    def add_to_gguf(self, writer: gguf.GGUFWriter) -> None:
        """Write :meth:`metadata`, without the length of heads where it follows from their number and the width."""
        implied = _HEAD_LENGTHS if self.attention_width == self.width else ()
        for key, value in self.metadata().items():
            if key not in implied:
                writer.add_uint32(key, value)


def check_tensors(
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    name: str,
    ignored: Collection[str] = (),
) -> None:
    """Raise unless a model has the tensors of its shape, but for ``ignored`` ones, and no others."""
    for tensor, dimensions in wanted.items():
        if tensor not in found:
            raise ModelFileError(f"{name} lacks {tensor}; fetch it again, or check the number of layers it claims")
        if found[tensor] != dimensions:
            raise ModelFileError(f"{name} has {tensor} in shape {found[tensor]}, and its sizes ask for {dimensions}")
    unknown = sorted(found.keys() - wanted.keys() - set(ignored))
    if unknown:
        raise ModelFileError(
            f"{name} has {unknown[0]}, which a plain Llama has not; such a model can be neither converted nor inflated"
        )


class LlamaFile(GGUFFile):
    """A plain Llama model in one GGUF file: dense, without biases, rotary over whole heads.

    Raises ``ModelFileError`` for any other file. ``epsilon`` is that of its norms.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        architecture = self.text("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelFileError(
                f"{path} is of architecture {architecture!r}; {ARCHITECTURE!r} (Llama, Mistral and their like) can be "
                "converted and inflated"
            )
        if self.get("llama.expert_count"):
            raise ModelFileError(
                f"{path} sets llama.expert_count: a mixture of experts can be neither converted nor inflated"
            )
        self.shape = self._read_shape()
        self.epsilon = self.number("llama.attention.layer_norm_rms_epsilon")
        found = {name: tensor.shape for name, tensor in self.tensors.items()}
        check_tensors(found, self.shape.tensors(), str(path), {ROPE_DIVISORS})

    def _read_shape(self) -> LlamaShape:
        layers, width = self.integer("llama.block_count"), self.integer("llama.embedding_length")
        feed_forward, heads = self.integer("llama.feed_forward_length"), self.integer("llama.attention.head_count")
        kv_heads = self.integer("llama.attention.head_count_kv", heads)
        head_size = self.integer("llama.attention.key_length", width // max(1, heads))
        if min(layers, width, feed_forward, heads, kv_heads, head_size) < 1 or heads % kv_heads or head_size % 2:
            raise ModelFileError(
                f"{self.path} has impossible sizes: {layers} layers of {width}, feed-forward {feed_forward}, {heads} "
                f"heads, {kv_heads} for keys and values, of {head_size} dimensions"
            )
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            value = self.integer(key, head_size)
            if value != head_size:
                raise ModelFileError(
                    f"{self.path} has {key} {value} and heads of {head_size}; other than equal, a model can be neither "
                    "converted nor inflated"
                )
        if EMBEDDINGS not in self.tensors:
            raise ModelFileError(f"{self.path} lacks {EMBEDDINGS}; check the file with the tool that made it")
        vocab_size = self.tensors[EMBEDDINGS].shape[0]
        tied = OUTPUT not in self.tensors
        return LlamaShape(layers, width, feed_forward, heads, kv_heads, head_size, vocab_size, tied)
