"""Writing what is left of a model: whole rows, whole blocks and whole layers of the file as it is.

No weight is computed anew. Rows of the embeddings and of the output are rows of whole quantised blocks, a unit of a
gated feed-forward is a row of two matrices and a column of the third, and columns go by whole blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.conversion.gguf_output import PIECE_BYTES, StageReport, Value, copy_metadata, type_value, write_gguf
from paceline.conversion.llama import EMBEDDINGS, OUTPUT
from paceline.core.errors import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

    import gguf

    from paceline.models.gguf_file import Bytes, GGUFFile, GGUFTensor

Indices: TypeAlias = npt.NDArray[np.int64]

PREFIX: Final = "paceline.pruned."
"""Beginning of the metadata keys that say how a file was pruned."""

LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
"""Name of a layer's tensor: the layer, and what the tensor is in it."""

TOKENS: Final = "tokenizer.ggml.tokens"
"""Key of the texts of all tokens."""
MERGES: Final = "tokenizer.ggml.merges"
"""Key of the pairs that BPE joins, the first ones first."""
LISTS_OF_IDS: Final = ("tokenizer.ggml.suppress_tokens",)
"""Keys whose values are lists of token ids."""
_OF_OTHER_TOOLS: Final = ("tokenizer.huggingface.json", "tokenizer.rwkv.world")
"""Copies of the whole vocabulary, which llama.cpp does not read, and which would be wrong."""
_NO_ID: Final = (0xFFFFFFFF, -1)
"""What stands for no token where a key names one."""

PER_TOKEN: Final = re.compile(
    r"token_embd\.weight|output\.(weight|bias)|per_layer_token_embd\.weight"
    r"|blk\.\d+\.nextn\.(embed_tokens|shared_head_head)\.weight"
)
"""Tensors with a row for every token."""
_LOOKED_UP: Final = (EMBEDDINGS, "per_layer_token_embd.weight")
"""Tensors of which a pass reads one row for each of its tokens, where the output is another one."""

FEED_FORWARD: Final = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
"""Tensors of a gated feed-forward part: a unit is a row of both first ones and a column of the last."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What becomes of a model.

    Attributes:
        token_ids: ids that are kept, in their new order; ``None`` for all.
        layers: layers that are removed, ascending.
        blocks: of every layer of the source, the blocks of feed-forward units that are kept, ascending, as many in
            each; ``None`` for all.
        block_units: units of such a block.
    """

    token_ids: Indices | None = None
    layers: tuple[int, ...] = ()
    blocks: tuple[Indices, ...] | None = None
    block_units: int = 0

    @property
    def is_nothing(self) -> bool:
        """Whether the model stays as it is."""
        return self.token_ids is None and not self.layers and self.blocks is None


@dataclass(frozen=True, slots=True)
class Part:
    """What is kept of a tensor; ``None`` keeps all rows, or all blocks of each."""

    source: GGUFTensor
    name: str
    rows: Indices | None = None
    blocks: Indices | None = None

    @property
    def kind(self) -> gguf.GGMLQuantizationType:
        return self.source.kind

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = self.source.shape
        first = first if self.rows is None else len(self.rows)
        return (first, *rest) if self.blocks is None else (first, len(self.blocks) * self._block[0])

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.shape[0] * self._row_bytes

    @property
    def _block(self) -> tuple[int, int]:
        """Weights and bytes of a block."""
        from gguf import GGML_QUANT_SIZES

        size, num_bytes = GGML_QUANT_SIZES[self.kind]
        return int(size), int(num_bytes)

    @property
    def _row_bytes(self) -> int:
        if self.blocks is None:
            return int(self.source.stored_rows().shape[1])
        return len(self.blocks) * self._block[1]

    def pieces(self) -> Iterator[Bytes]:
        """Yield its bytes, a few rows at a time."""
        stored = self.source.stored_rows()
        step = max(1, PIECE_BYTES // max(1, stored.shape[1]))
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            piece = stored[start:stop] if self.rows is None else stored[self.rows[start:stop]]
            if self.blocks is not None:
                piece = piece.reshape(len(piece), -1, self._block[1])[:, self.blocks]
            yield piece.reshape(len(piece), -1)


def cut_tensors(file: GGUFFile, cut: Cut) -> list[Part]:
    """Return the tensors of the cut model, in the order of the file."""
    left = [layer for layer in range(num_layers(file)) if layer not in cut.layers]
    place = {layer: number for number, layer in enumerate(left)}
    units = _kept_units(cut)
    made = []
    for name, tensor in file.tensors.items():
        found = LAYER.fullmatch(name)
        new_name, rows, blocks = name, None, None
        if found is not None:
            layer, inner = int(found[1]), found[2]
            if layer in cut.layers:
                continue
            new_name = f"blk.{place.get(layer, layer)}.{inner}"
            if units is not None and inner in FEED_FORWARD:
                rows, blocks = _cut_feed_forward(tensor, inner, units[layer])
        if cut.token_ids is not None and PER_TOKEN.fullmatch(name):
            rows = cut.token_ids
        made.append(Part(tensor, new_name, rows, blocks))
    return made


def _kept_units(cut: Cut) -> list[Indices] | None:
    if cut.blocks is None:
        return None
    within = np.arange(cut.block_units)
    return [(blocks[:, None] * cut.block_units + within).reshape(-1) for blocks in cut.blocks]


def _cut_feed_forward(tensor: GGUFTensor, inner: str, units: Indices) -> tuple[Indices | None, Indices | None]:
    """Return the rows of gate and up, or the blocks of down, of these units."""
    from gguf import GGML_QUANT_SIZES

    if inner != FEED_FORWARD[2]:
        return units, None
    size = int(GGML_QUANT_SIZES[tensor.kind][0])
    return None, units[::size] // size


def read_whole(tensors: Sequence[Part]) -> list[Part]:
    """Return the tensors that a pass of one token reads: all but tables that are looked up in a row."""
    has_output = any(tensor.name == OUTPUT for tensor in tensors)
    looked_up = _LOOKED_UP if has_output else _LOOKED_UP[1:]
    return [tensor for tensor in tensors if tensor.name not in looked_up]


def pass_bytes(tensors: Sequence[Part]) -> int:
    """Return the bytes of weights that a pass of one token reads."""
    return sum(tensor.num_bytes for tensor in read_whole(tensors))


def num_layers(file: GGUFFile) -> int:
    return file.integer(f"{file.text('general.architecture')}.block_count", 0)


def write_cut(
    file: GGUFFile,
    path: Path,
    cut: Cut,
    about: Mapping[str, Value] | None = None,
    report: StageReport = lambda stage, done, total: None,
) -> None:
    """Write the cut model straight to ``path``; ``about`` is metadata that stands beside the model's own.

    Raises:
        ModelFileError: the metadata names tokens in a way that is not known, or differs between layers.
    """
    metadata = cut_metadata(file, cut) | dict(about or {})
    write_gguf(path, file.text("general.architecture"), metadata, cut_tensors(file, cut), report)


# --- metadata ---------------------------------------------------------------------------------------------------------


def cut_metadata(file: GGUFFile, cut: Cut) -> dict[str, Value]:
    """Return the metadata of the cut model."""
    architecture = file.text("general.architecture")
    metadata = copy_metadata(file)
    if cut.token_ids is not None:
        for key in _OF_OTHER_TOOLS:
            metadata.pop(key, None)
        _cut_tokens(file, metadata, cut.token_ids)
    if cut.layers:
        _cut_layers(file, metadata, architecture, cut.layers)
    if cut.blocks is not None:
        key = f"{architecture}.feed_forward_length"
        units = len(cut.blocks[0]) * cut.block_units
        value, kind, items = metadata[key]
        metadata[key] = ([units] * len(value) if isinstance(value, list) else units, kind, items)
    return metadata


def _cut_tokens(file: GGUFFile, metadata: dict[str, Value], token_ids: Indices) -> None:
    tokens: list[str] = metadata[TOKENS][0]
    size = len(tokens)
    new_ids = {int(old): new for new, old in enumerate(token_ids)}
    kept = {tokens[old] for old in new_ids}
    for key, (value, kind, items) in list(metadata.items()):
        new = value
        if key == MERGES:
            new = [merge for merge in value if _survives(merge, kept)]
        elif key in LISTS_OF_IDS:
            new = [new_ids[token_id] for token_id in value if token_id in new_ids]
        elif isinstance(value, list) and len(value) == size and key != "tokenizer.ggml.precompiled_charsmap":
            new = [value[old] for old in new_ids]
        elif key.endswith("_token_id") and value not in _NO_ID:
            if value not in new_ids:  # past the end of the vocabulary: it names nothing
                del metadata[key]
                continue
            new = new_ids[value]
        elif key.endswith(".vocab_size") and value == size:
            new = len(new_ids)
        elif key.endswith(("_id", "_ids")) and not isinstance(value, (str, bool)) and value not in _NO_ID:
            raise ModelFileError(
                f"{file.path} has {key}, which may name tokens, and how is not known here: a cut would have it name "
                "others, so leave out --vocab"
            )
        if isinstance(new, list) and not new:
            del metadata[key]
        else:
            metadata[key] = (new, kind, items)


def split_merge(merge: str) -> tuple[str, str]:
    """Return both parts of a merge, as llama.cpp reads them: the first may be a space."""
    place = merge.find(" ", 1)
    return merge[:place], merge[place + 1 :]


def _survives(merge: str, kept: set[str]) -> bool:
    left, right = split_merge(merge)
    return left in kept and right in kept and left + right in kept


def _cut_layers(file: GGUFFile, metadata: dict[str, Value], architecture: str, layers: Sequence[int]) -> None:
    total = num_layers(file)
    for key, (value, kind, items) in list(metadata.items()):
        if key == f"{architecture}.block_count":
            metadata[key] = (total - len(layers), kind, items)
        elif key.startswith(f"{architecture}.") and isinstance(value, list) and len(value) == total:
            metadata[key] = ([item for layer, item in enumerate(value) if layer not in layers], kind, items)


def provenance(file: GGUFFile, source: Path, digest: str, cut: Cut, file_type: str | None = None) -> dict[str, Value]:
    """Return the metadata that says what a file was cut from, and how. ``digest`` is the source's fingerprint."""
    from gguf import GGUFValueType

    said: dict[str, int | str] = {"version": 1, "source": source.name, "source_fingerprint": digest}
    if cut.token_ids is not None:
        said |= {"tokens": len(cut.token_ids), "tokens_before": file.tensors[EMBEDDINGS].shape[0]}
    if cut.blocks is not None:
        said["feed_forward"] = len(cut.blocks[0]) * cut.block_units
        said["feed_forward_before"] = file.tensors[f"blk.0.{FEED_FORWARD[0]}"].shape[0]
    if file_type is not None:
        said["file_type"] = file_type
    made = {PREFIX + key: type_value(value) for key, value in said.items()}
    if cut.layers:
        made[f"{PREFIX}layers_before"] = type_value(num_layers(file))
        made[f"{PREFIX}removed_layers"] = (list(cut.layers), GGUFValueType.ARRAY, GGUFValueType.UINT32)
    name = file.get("general.name") or source.stem
    return made | {"general.name": type_value(f"{name}, pruned")}
