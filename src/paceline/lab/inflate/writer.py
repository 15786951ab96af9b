"""Writing the larger model, tensor by tensor.

The source is quantised first, in its own shape and by the engine, and its blocks are then copied to their places. So
the larger model has the blocks of *the source quantised to the same type*, each tensor in the type llama.cpp gave it
there, and everything added to it is a block of zeros; added layers have the types llama.cpp gives them in a model of
that depth. Only where heads change so that the blocks of a row would hold other weights together is a tensor quantised
anew.

Norms: RMSNorm over D' channels, of which D are not 0, has a mean of squares that is D / D' of the source's. With the
epsilon times D / D' and the weights times sqrt(D / D') it gives the source's values, exactly so in floats where D' / D
is a power of 4. Other widths are brought to that case where they can be, see :func:`~.layout.count_repeats`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.atomic_output import atomic_file, check_parent, check_room, temporary_folder
from paceline.conversion.gguf_output import PIECE_BYTES, StageReport, Value, copy_metadata, type_value, write_gguf
from paceline.conversion.llama import (
    ARCHITECTURE,
    EMBEDDINGS,
    OUTPUT,
    OUTPUT_NORM,
    ROPE_DIVISORS,
    LlamaFile,
    LlamaShape,
    layer_tensor,
)
from paceline.core.errors import InputError, ModelFileError
from paceline.lab.inflate import banned
from paceline.lab.inflate.layout import NOTHING, Indices, Layout, lay_out
from paceline.lab.inflate.provenance import recipe
from paceline.lab.inflate.shape import (
    FILE_TYPES,
    FileType,
    estimate_bytes,
    find_file_type,
    fit_shape,
    matrix_type,
)

if TYPE_CHECKING:
    import gguf

    from paceline.models.gguf_file import Bytes, Floats, GGUFTensor

_PER_LAYER_ROWS_AND_COLUMNS: Final = {
    "attn_q": ("queries", "reads"),
    "attn_k": ("keys", "reads"),
    "attn_v": ("values", "reads"),
    "attn_output": ("writes", "heads_out"),
    "ffn_gate": ("feed_forward", "reads"),
    "ffn_up": ("feed_forward", "reads"),
    "ffn_down": ("writes", "feed_forward"),
}


def inflate(
    source: Path,
    destination: Path,
    shape: LlamaShape | str,
    *,
    file_type: str = "F16",
    vocab_size: int | None = None,
    report: StageReport | None = None,
) -> None:
    """Write a model that computes what ``source`` computes, at the cost of a larger shape.

    It appears only when it is complete; whatever was there is replaced then. Its logits are those of ``source``
    quantised to ``file_type``: the weights are the same blocks in other places. With heads of another size the queries
    are rounded once more.

    The source is a plain Llama model: a GGUF file of any type, or a Hugging Face folder. A destination that does not
    end in ``.gguf`` is a Hugging Face folder to make, in ``F32``, ``F16`` or ``BF16``. Ids beyond the source's are
    never emitted.

    Raises:
        InputError: the shape cannot hold the source, a name is unknown, or the destination cannot be written.
        ModelFileError: the source cannot be read or inflated.
    """
    file_type = find_file_type(file_type)
    report = report or (lambda _stage, _done, _total: None)
    _check_destination(source, destination)
    with as_gguf(source, destination.parent) as gguf_source:
        if destination.suffix.lower() == ".gguf":
            _inflate_gguf(gguf_source, destination, shape, file_type, vocab_size, report)
            return
        from paceline.conversion.convert import gguf_to_folder
        from paceline.conversion.convert.dtypes import weight_type
        from paceline.conversion.convert.llama_settings import check_folder_can_hold

        weight_type(file_type)  # before the work: a folder holds floats only
        shape = fit_shape(LlamaFile(gguf_source).shape, shape, vocab_size)
        check_folder_can_hold(shape)
        with temporary_folder(destination) as folder:
            inflated = folder / "inflated.gguf"
            _inflate_gguf(gguf_source, inflated, shape, file_type, None, report)
            convert = functools.partial(report, "converting")
            gguf_to_folder(inflated, destination, dtype=file_type, report=convert, force=True)


@contextlib.contextmanager
def as_gguf(source: Path, folder: Path) -> Iterator[Path]:
    """Yield a GGUF file of a model: ``source`` itself or, for a Hugging Face folder, a temporary file in ``folder``."""
    if not source.is_dir():
        yield source
        return
    from paceline.conversion.convert import folder_to_gguf

    with temporary_folder(folder / source.name) as temporary:
        converted = temporary / "source.gguf"
        folder_to_gguf(source, converted, dtype="F32")
        yield converted


def _inflate_gguf(
    source: Path,
    destination: Path,
    shape: LlamaShape | str,
    file_type: str,
    vocab_size: int | None,
    report: StageReport,
) -> None:
    from paceline.conversion.quantize import quantize_gguf

    original = LlamaFile(source)
    shape = fit_shape(original.shape, shape, vocab_size)
    if shape.head_size != original.shape.head_size and original.get("llama.rope.scaling.type") == "yarn":
        raise InputError(
            f"head size {shape.head_size} would change the rotary embedding, which YaRN stretches by head size: "
            f"take the source's, {original.shape.head_size}"
        )
    check_room(destination, estimate_bytes(shape, file_type) + estimate_bytes(original.shape, file_type))
    # The quantised source lies beside the result: a small file, on a disk that was found to have room.
    with atomic_file(destination) as partial, temporary_folder(destination) as folder:
        packed_path = folder / "packed.gguf"
        report(f"quantising to {file_type}", 0, 1)
        quantize_gguf(source, packed_path, file_type)
        packed = LlamaFile(packed_path)
        layout = lay_out(original.shape, shape)
        tensors = _Builder(original, packed, shape, layout, FILE_TYPES[file_type]).tensors()
        check_room(destination, sum(tensor.num_bytes for tensor in tensors))
        metadata = _metadata(packed, shape, layout, tensors) | {
            key: type_value(value) for key, value in recipe(source, shape, file_type).items()
        }
        write_gguf(partial, ARCHITECTURE, metadata, tensors, report)


def _check_destination(source: Path, destination: Path) -> None:
    check_parent(destination)
    if destination.is_dir() and destination.suffix.lower() == ".gguf":
        raise ModelFileError(f"{destination} is a directory; give the path of the file to write")
    if destination.exists() and source.exists() and destination.samefile(source):
        raise InputError(f"{destination} is the source itself: give another path to write to")


# --- tensors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stamp:
    """A block that stands at the same place in every row from ``first_row`` on."""

    block: Bytes
    offset_bytes: int
    first_row: int


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the larger model.

    Attributes:
        rows: gives the bytes of some rows, ``[rows, row_bytes]``, from the index of their source rows; ``None`` if the
            tensor is all zeros.
        index: the source row of each row, ``[rows]``.
        stamps: blocks to put in afterwards.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    row_bytes: int
    rows: Callable[[Indices], Bytes] | None
    index: Indices
    stamps: list[_Stamp] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return len(self.index) * self.row_bytes

    def pieces(self) -> Iterator[Bytes]:
        """Yield its bytes, a few rows at a time."""
        step = max(1, PIECE_BYTES // self.row_bytes)
        blank = np.zeros((min(step, len(self.index)), self.row_bytes), np.uint8)
        for start in range(0, len(self.index), step):
            index = self.index[start : start + step]
            used = index != NOTHING
            piece = blank[: len(index)]
            if self.rows is not None and used.any():
                piece = piece.copy()
                piece[used] = self.rows(index[used])
            for stamp in self.stamps:
                first = max(0, stamp.first_row - start)
                if first < len(index):
                    piece = piece.copy()
                    piece[first:, stamp.offset_bytes :][:, : len(stamp.block)] = stamp.block
            yield piece


class _Builder:
    """Makes the larger model's tensors from the source, and from the source in the types of the result (``packed``)."""

    def __init__(
        self, original: LlamaFile, packed: LlamaFile, shape: LlamaShape, layout: Layout, mix: FileType
    ) -> None:
        self._original = original
        self._packed = packed
        self._shape = shape
        self._layout = layout
        self._mix = mix
        self._pads_vocabulary = shape.vocab_size > original.shape.vocab_size

    def tensors(self) -> list[_Tensor]:
        """Return all tensors in the order they are written in."""
        shapes = self._shape.tensors()
        made = [self._embeddings(EMBEDDINGS)]
        for layer, placed in enumerate(self._layout.layers):
            for name in ("attn_norm", "ffn_norm"):
                weights = None if placed == NOTHING else self._norm(layer_tensor(placed, name))
                made.append(self._vector(layer_tensor(layer, name), weights, self._shape.width))
            for name, (rows, columns) in _PER_LAYER_ROWS_AND_COLUMNS.items():
                full_name = layer_tensor(layer, name)
                if placed == NOTHING:
                    made.append(self._zeros(full_name, shapes[full_name]))
                    continue
                source_name = layer_tensor(placed, name)
                index, from_columns = getattr(self._layout, rows), getattr(self._layout, columns)
                scale = self._layout.query_scale if name == "attn_q" else 1.0
                made.append(self._matrix(full_name, source_name, index, from_columns, scale))
        last_norm = self._norm(OUTPUT_NORM)
        if self._pads_vocabulary:
            last_norm[self._layout.free_block] = banned.NORM_WEIGHT
        made.append(self._vector(OUTPUT_NORM, last_norm, self._shape.width))
        if not self._shape.tied:
            made.append(self._embeddings(OUTPUT))
        if ROPE_DIVISORS in self._packed.tensors:
            made.append(self._rope_divisors())
        assert {tensor.name: tensor.shape for tensor in made if tensor.name != ROPE_DIVISORS} == shapes
        return made

    def _embeddings(self, name: str) -> _Tensor:
        """Return the embeddings or the output projection, which may be the same in the source."""
        source_name = name if name in self._packed.tensors else EMBEDDINGS
        index = np.full(self._shape.vocab_size, NOTHING, np.int64)
        index[: self._original.shape.vocab_size] = np.arange(self._original.shape.vocab_size)
        # Embeddings that are the output projection too are read after the last norm, which leaves one copy only.
        columns = self._layout.reads if name == OUTPUT else self._layout.writes
        tensor = self._matrix(name, source_name, index, columns)
        if not self._pads_vocabulary:
            return tensor
        offset_bytes = _row_bytes(self._layout.free_block, tensor.kind)
        if name == OUTPUT:
            stamp = _Stamp(banned.banning_block(tensor.kind), offset_bytes, self._original.shape.vocab_size)
        else:
            stamp = _Stamp(banned.constant_block(tensor.kind), offset_bytes, 0)
        return replace(tensor, stamps=[stamp])

    def _matrix(self, name: str, source_name: str, rows: Indices, columns: Indices, scale: float = 1.0) -> _Tensor:
        packed = self._packed.tensors[source_name]
        kind = packed.kind
        blocks = _whole_blocks(columns, kind)
        if scale == 1.0 and blocks is not None:
            make = _copy_blocks(packed.stored_rows(), blocks, kind)
        else:
            make = _quantise_rows(self._original.tensors[source_name], columns, scale, kind)
        return _Tensor(name, (len(rows), len(columns)), kind, _row_bytes(len(columns), kind), make, rows)

    def _zeros(self, name: str, shape: tuple[int, ...]) -> _Tensor:
        from gguf import GGMLQuantizationType

        kind = GGMLQuantizationType[matrix_type(name, self._shape.layers, self._mix)]
        index = np.full(shape[0], NOTHING, np.int64)
        return _Tensor(name, shape, kind, _row_bytes(shape[1], kind), None, index)

    def _norm(self, source_name: str) -> Floats:
        weights = np.zeros(self._shape.width, np.float32)
        values = self._packed.tensors[source_name].floats().astype(np.float64)
        weights[: len(values)] = values * self._layout.norm_scale
        return weights

    def _rope_divisors(self) -> _Tensor:
        ratio = self._shape.head_size // self._original.shape.head_size
        divisors = np.ones(self._shape.head_size // 2, np.float32)
        divisors[::ratio] = self._packed.tensors[ROPE_DIVISORS].floats()
        return self._vector(ROPE_DIVISORS, divisors, len(divisors))

    @staticmethod
    def _vector(name: str, values: Floats | None, length: int) -> _Tensor:
        from gguf import GGMLQuantizationType

        make = None if values is None else (lambda _index: values.view(np.uint8)[None, :])
        return _Tensor(name, (length,), GGMLQuantizationType.F32, 4 * length, make, np.zeros(1, np.int64))


def _whole_blocks(columns: Indices, kind: gguf.GGMLQuantizationType) -> Indices | None:
    """Return the source's block for each block of a row, or ``None`` if blocks would hold other weights together."""
    from gguf import GGML_QUANT_SIZES

    size = GGML_QUANT_SIZES[kind][0]
    by_block = columns.reshape(-1, size)
    firsts: Indices = by_block[:, 0]
    together = np.where(firsts[:, None] == NOTHING, NOTHING, firsts[:, None] + np.arange(size))
    if not np.array_equal(by_block, together) or np.any(firsts[firsts != NOTHING] % size):
        return None
    return np.where(firsts == NOTHING, NOTHING, firsts // size)


def _copy_blocks(data: Bytes, blocks: Indices, kind: gguf.GGMLQuantizationType) -> Callable[[Indices], Bytes]:
    """Return a function that copies the source's blocks to rows; a block of zero bytes is zeros in every type."""
    from gguf import GGML_QUANT_SIZES

    block_bytes = GGML_QUANT_SIZES[kind][1]
    by_block = data.reshape(len(data), -1, block_bytes)
    used = blocks != NOTHING

    def make(index: Indices) -> Bytes:
        out = np.zeros((len(index), len(blocks), block_bytes), np.uint8)
        out[:, used] = by_block[index][:, blocks[used]]
        return out.reshape(len(index), -1)

    return make


def _quantise_rows(
    original: GGUFTensor, columns: Indices, scale: float, kind: gguf.GGMLQuantizationType
) -> Callable[[Indices], Bytes]:
    """Return a function that gives rows quantised anew, from the source's own weights."""
    from paceline.conversion.quantize import quantize_rows

    used = columns != NOTHING

    def make(index: Indices) -> Bytes:
        out = np.zeros((len(index), len(columns)), np.float32)
        out[:, used] = original.floats(index)[:, columns[used]] * np.float32(scale)
        return quantize_rows(out, kind)

    return make


def _row_bytes(columns: int, kind: gguf.GGMLQuantizationType) -> int:
    from gguf import GGML_QUANT_SIZES

    size, num_bytes = GGML_QUANT_SIZES[kind]
    return int(columns // size * num_bytes)


# --- metadata ---------------------------------------------------------------------------------------------------------


def _metadata(packed: LlamaFile, shape: LlamaShape, layout: Layout, tensors: list[_Tensor]) -> dict[str, Value]:
    """Return the result's metadata: values, their types, and their items' types."""
    from gguf import GGUFValueType

    metadata = copy_metadata(packed)
    metadata |= {key: (value, GGUFValueType.UINT32, None) for key, value in shape.metadata().items()}
    epsilon = packed.epsilon * layout.repeats * packed.shape.width / shape.width
    metadata["llama.attention.layer_norm_rms_epsilon"] = (epsilon, GGUFValueType.FLOAT32, None)
    parameters = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    name = f"{packed.get('general.name', packed.path.stem)}, inflated to {parameters / 1e9:.2f}B"
    metadata["general.name"] = (name, GGUFValueType.STRING, None)
    pad_tokens(metadata, packed.path, packed.shape.vocab_size, shape.vocab_size)
    return metadata


def pad_tokens(metadata: dict[str, Value], path: Path, source_size: int, vocab_size: int) -> None:
    """Give every padded id a text that is no other token's, the type UNUSED, and a score below all."""
    from gguf import TokenType

    key = "tokenizer.ggml.tokens"
    if key not in metadata:  # a file without a tokenizer
        return
    tokens = list(metadata[key][0])
    if len(tokens) != source_size:
        raise ModelFileError(f"{path} is damaged: it has {len(tokens)} tokens and embeddings of {source_size}")
    missing = vocab_size - len(tokens)
    taken, number = set(tokens), 0
    while len(tokens) < vocab_size:
        if (text := f"<|unused_{number}|>") not in taken:
            tokens.append(text)
        number += 1
    padding = {key: tokens[-missing:], "token_type": [int(TokenType.UNUSED)] * missing, "scores": [-1e4] * missing}
    for short, values in padding.items():
        full = short if short == key else f"tokenizer.ggml.{short}"
        if full in metadata and missing:
            old, array, items = metadata[full]
            metadata[full] = ([*old, *values], array, items)
