"""Safetensors files, read by offsets and written tensor by tensor: no file is ever in memory as a whole.

The format: eight bytes with the length of the header, the header (JSON: for each tensor its type, shape and the range
of its bytes), the bytes. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from paceline.conversion.convert.dtypes import WeightType, decode
from paceline.core.errors import ModelFileError
from paceline.models.weight_files import (
    INDEX,
    ITEM_BYTES,
    SINGLE,
    read_safetensors_header,
    read_weight_map,
    weight_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from paceline.models.gguf_file import Bytes, Floats

SHARD_BYTES: Final = 5_000_000_000
"""Most bytes of weights in one file, as transformers splits them."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """Offset of its first byte in the file."""

    def rows(self, start: int, stop: int) -> Floats:
        """Return ``[stop - start, ...]`` of its first axis as float32."""
        if self.dtype not in ITEM_BYTES:
            raise ModelFileError(
                f"{self.path}: {self.name} is of type {self.dtype}; weights of {', '.join(ITEM_BYTES)} can be read"
            )
        row_bytes = math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]
        raw: Bytes = np.memmap(
            self.path, np.uint8, mode="r", offset=self.offset + start * row_bytes, shape=((stop - start) * row_bytes,)
        )
        return decode(raw, self.dtype).reshape((stop - start, *self.shape[1:]))


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a model folder, in one file or in shards, by name."""
    paths = weight_files(folder)
    if not paths:
        raise ModelFileError(f"{folder} has pickled weights; load it in transformers and save_pretrained it")
    shards = {
        path.name: {name: StoredTensor(path, name, *entry) for name, entry in read_safetensors_header(path).items()}
        for path in paths
    }
    if SINGLE in shards:
        return shards[SINGLE]
    weight_map = read_weight_map(folder)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise ModelFileError(f"{folder / shard} lacks {name}, which {INDEX} says it has; fetch it again")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    kind: WeightType

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.kind.item_bytes


def plan_shards(tensors: Sequence[PlannedTensor], shard_bytes: int = SHARD_BYTES) -> dict[str, list[PlannedTensor]]:
    """Return which tensors go into which file, in order; a tensor is never split."""
    shards: list[list[PlannedTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def write_tensors(
    folder: Path,
    tensors: Sequence[PlannedTensor],
    chunks: Callable[[PlannedTensor], Iterable[Bytes]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write files with all ``tensors`` into ``folder``, and the index if there are several.

    ``chunks`` gives the bytes of a tensor, piece by piece. A file has at most ``shard_bytes`` of weights, unless a
    single tensor is larger.
    """
    plan = plan_shards(tensors, shard_bytes)
    for file_name, shard in plan.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in shard:
            end = offset + tensor.num_bytes
            header[tensor.name] = {
                "dtype": tensor.kind.name,
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # aligns the weights behind it
        with (folder / file_name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in shard:
                for chunk in chunks(tensor):
                    file.write(chunk.data)
    if len(plan) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {tensor.name: file_name for file_name, shard in plan.items() for tensor in shard},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
