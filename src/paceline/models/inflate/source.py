"""A Llama GGUF file, read and checked: what is inflated, before and after it was quantised."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelFileError
from paceline.engines.llama_cpp import native
from paceline.models.inflate.shape import LlamaShape

if TYPE_CHECKING:
    import gguf

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LAYER_TENSORS: Final = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)
EMBEDDINGS, OUTPUT, OUTPUT_NORM = "token_embd.weight", "output.weight", "output_norm.weight"
ROPE_FACTORS: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies, one for each pair of a head: Llama 3.1's way to longer contexts."""


def layer_tensor(layer: int, name: str) -> str:
    """Return a tensor's full name."""
    return f"blk.{layer}.{name}.weight"


class LlamaFile:
    """A plain Llama model in one GGUF file: dense, without biases, rotary over whole heads.

    Args:
        path: the file. Weights are mapped, not read.

    Attributes:
        shape: its dimensions.
        epsilon: of its norms.
        fields: its metadata, as the ``gguf`` package has it.

    Raises:
        ModelFileError: it cannot be read, is damaged, or holds something other than that.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        native.check_model_file(path)
        self.path = path
        try:
            reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
            raise ModelFileError(
                f"{path} cannot be read: it is truncated or damaged ({error}); copy or download it again"
            ) from None
        self.fields: dict[str, gguf.ReaderField] = dict(reader.fields)
        self._tensors: dict[str, gguf.ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
        self._check_kind()
        self.shape = self._read_shape()
        self.epsilon = float(self._number("attention.layer_norm_rms_epsilon"))
        self._check_tensors()

    def has(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return name in self._tensors

    def kind(self, name: str) -> gguf.GGMLQuantizationType:
        """Return a tensor's type."""
        return self._tensors[name].tensor_type

    def raw(self, name: str) -> Bytes:
        """Return a matrix as it lies in the file, ``[rows, bytes of a row]``."""
        tensor = self._tensors[name]
        rows = int(tensor.shape[1])
        data: Bytes = tensor.data.reshape(rows, -1).view(np.uint8)
        return data

    def floats(self, name: str, rows: npt.NDArray[np.int64] | None = None) -> Floats:
        """Return a tensor, or some rows of a matrix, as float32."""
        from gguf.quants import dequantize

        data = self._tensors[name].data
        values: Floats = dequantize(data if rows is None else data[rows], self.kind(name))
        return values.astype(np.float32, copy=False)

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata."""
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def _check_kind(self) -> None:
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise ModelFileError(f"{self.path} has the architecture {architecture!r}; only 'llama' can be inflated")
        if self.value("split.count", 1) > 1:
            raise ModelFileError(f"{self.path} is one part of a split model; merge it first (llama-gguf-split --merge)")
        if self.value("llama.expert_count", 0):
            raise ModelFileError(f"{self.path} is a mixture of experts; only dense models can be inflated")

    def _number(self, key: str, default: float | None = None) -> float:
        value = self.value(f"llama.{key}", default)
        if value is None:
            raise ModelFileError(f"{self.path} has no llama.{key}; check the file with the tool that made it")
        if not isinstance(value, (int, float)):
            raise ModelFileError(f"{self.path} has another llama.{key} in each layer, and cannot be inflated")
        return value

    def _read_shape(self) -> LlamaShape:
        layers, width, feed_forward, heads = (
            int(self._number(key))
            for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
        )
        if min(layers, width, feed_forward, heads) < 1:
            raise ModelFileError(f"{self.path} is damaged: it says that one of its dimensions is 0")
        kv_heads = int(self._number("attention.head_count_kv", heads))
        head_size = int(self._number("attention.key_length", width // heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._number(key, head_size) != head_size:
                raise ModelFileError(
                    f"{self.path} has llama.{key} {self._number(key):g} and heads of {head_size}; they must be equal"
                )
        if kv_heads < 1 or heads % kv_heads:
            raise ModelFileError(f"{self.path} is damaged: {heads} heads cannot share {kv_heads} kv heads")
        if EMBEDDINGS not in self._tensors:
            raise ModelFileError(f"{self.path} has no {EMBEDDINGS}; check the file with the tool that made it")
        vocab_size = int(self._tensors[EMBEDDINGS].shape[-1])
        tied = OUTPUT not in self._tensors
        return LlamaShape(layers, width, feed_forward, heads, kv_heads, head_size, vocab_size, tied)

    def _check_tensors(self) -> None:
        expected = tensor_shapes(self.shape)
        for name in self._tensors:
            if name not in expected and name != ROPE_FACTORS:
                raise ModelFileError(
                    f"{self.path} has a tensor {name}, which a plain Llama has not: it can't be inflated"
                )
        for name, wanted in expected.items():
            found = tuple(reversed([int(n) for n in self._tensors[name].shape])) if name in self._tensors else None
            if found != wanted:
                raise ModelFileError(f"{self.path} is damaged: {name} should be {wanted}, and is {found or 'missing'}")


def tensor_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a model, as rows and columns, in the order they are written in."""
    queries, values = shape.attention_width, shape.kv_heads * shape.head_size
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (shape.width,),
        "attn_q": (queries, shape.width),
        "attn_k": (values, shape.width),
        "attn_v": (values, shape.width),
        "attn_output": (shape.width, queries),
        "ffn_norm": (shape.width,),
        "ffn_gate": (shape.feed_forward, shape.width),
        "ffn_up": (shape.feed_forward, shape.width),
        "ffn_down": (shape.width, shape.feed_forward),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDINGS: (shape.vocab_size, shape.width)}
    for index in range(shape.layers):
        shapes |= {layer_tensor(index, name): layer[name] for name in LAYER_TENSORS}
    shapes[OUTPUT_NORM] = (shape.width,)
    if not shape.tied:
        shapes[OUTPUT] = (shape.vocab_size, shape.width)
    return shapes
