"""Heads of the source, for the larger model: it leaves the source's states in its first channels, and zeros behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.atomic_output import atomic_file, check_parent
from paceline.conversion.gguf_output import copy_metadata, type_value
from paceline.conversion.llama import EMBEDDINGS, OUTPUT, LlamaShape
from paceline.core.errors import InputError
from paceline.lab.inflate.layout import lay_out
from paceline.lab.inflate.provenance import recipe
from paceline.lab.inflate.writer import pad_tokens
from paceline.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.gguf_file import Bytes

HEAD_TYPE: Final = "as in the source"
"""What an inflated head has in the place of a file type."""

_FUSING, _DRAFT_IDS = "fc.weight", "d2t"


def inflate_head(head: Path, destination: Path, source: LlamaShape, shape: LlamaShape) -> None:
    """Write an EAGLE-3 head of a model of shape ``source`` for the model of ``shape`` that this was inflated to.

    It drafts what ``head`` drafts, and costs what that costs. The file appears only when it is complete.

    Raises:
        InputError: it is no head of the source, or the destination cannot be written.
        ModelFileError: the file is damaged.
    """
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    check_parent(destination)
    file = GGUFFile(head, may_be_head=True)
    layers, known = _check_head(file, source), source.vocab_size
    placed = lay_out(source, shape).layers
    metadata = copy_metadata(file) | {key: type_value(value) for key, value in recipe(head, shape, HEAD_TYPE).items()}
    metadata["eagle3.target_layers"] = (
        [placed.index(layer) for layer in layers],
        GGUFValueType.ARRAY,
        GGUFValueType.UINT32,
    )
    metadata["eagle3.target_hidden_size"] = type_value(shape.width)
    pad_tokens(metadata, head, known, shape.vocab_size)
    tensors = {
        name: (tensor.stored_rows().reshape(*tensor.shape[:-1], -1), tensor.kind)
        for name, tensor in file.tensors.items()
    }
    rows, kind = tensors[_FUSING]
    by_layer = rows.reshape(len(rows) * len(layers), -1)
    tensors[_FUSING] = (_lengthen(by_layer, shape.width / source.width, 1).reshape(len(rows), -1), kind)
    if shape.vocab_size > known:
        rows, kind = tensors[EMBEDDINGS]
        tensors[EMBEDDINGS] = (_lengthen(rows, shape.vocab_size / known, 0), kind)
        tensors.setdefault(_DRAFT_IDS, (np.arange(known).view(np.uint8), GGMLQuantizationType.I64))
    with atomic_file(destination) as partial:
        writer = GGUFWriter(partial, "eagle3")
        try:
            for key, (value, value_type, items) in metadata.items():
                writer.add_key_value(key, value, value_type, items)
            for name, (rows, kind) in tensors.items():
                writer.add_tensor(name, rows, raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _check_head(head: GGUFFile, source: LlamaShape) -> list[int]:
    """Return the layers whose states a head reads; raise unless they are the source's."""
    layers = head.get("eagle3.target_layers")
    needed = {_FUSING, EMBEDDINGS, OUTPUT}
    if head.text("general.architecture") != "eagle3" or not isinstance(layers, list) or needed - head.tensors.keys():
        raise InputError(f"{head.path} is not an EAGLE-3 head with embeddings and an output layer of its own: give one")
    width = head.integer("eagle3.target_hidden_size", source.width)
    if width != source.width or not all(0 <= layer < source.layers for layer in layers):
        raise InputError(
            f"{head.path} reads layers {', '.join(map(str, layers))} of width {width}, and the source has "
            f"{source.layers} of width {source.width}: give a head of the source"
        )
    known = head.tensors[EMBEDDINGS].shape[0]
    if known != source.vocab_size:
        raise InputError(f"{head.path} has {known} tokens and the source {source.vocab_size}: give its head")
    return layers


def _lengthen(rows: Bytes, factor: float, axis: int) -> Bytes:
    """Return rows with zeros behind them, which are zeros in every type of weights."""
    added = list(rows.shape)
    added[axis] = round(rows.shape[axis] * factor) - rows.shape[axis]
    return np.concatenate((rows, np.zeros(added, np.uint8)), axis)
