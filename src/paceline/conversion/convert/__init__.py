"""Llama-type models between their two homes: a GGUF file, and a Hugging Face folder with safetensors.

::

    LlamaFile ──> LlamaSettings ──> config.json         folder ──> LlamaSettings ──> metadata
              ──> TokenizerTables ──> tokenizer*.json               ──> TokenizerTables ──> metadata
              ──> rows, a few at a time ──> shards             ──> rows, a few at a time ──> tensor data

Neither torch nor transformers is needed. llama.cpp is, as it knows end tokens by their text (``ends.py``). Memory holds
one tensor in its new type at most.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import gguf
import numpy as np

from paceline.atomic_output import atomic_file, atomic_folder, check_parent, check_room
from paceline.conversion.convert.dtypes import encode, stored_type, weight_type
from paceline.conversion.convert.end_tokens import choose_end_keys
from paceline.conversion.convert.llama_settings import (
    Weight,
    add_settings_to_gguf,
    check_folder_can_hold,
    parse_config,
    read_gguf_settings,
    settings_to_config,
    to_gguf_rows,
    to_hf_rows,
)
from paceline.conversion.convert.safetensors_files import SHARD_BYTES, PlannedTensor, read_tensors, write_tensors
from paceline.conversion.convert.tokenizer_json import read_folder_vocabulary, write_tokenizer
from paceline.conversion.convert.vocabulary import TokenizerTables, add_vocabulary_to_gguf, read_gguf_vocabulary
from paceline.conversion.llama import ARCHITECTURE, ROPE_DIVISORS, LlamaFile, check_tensors
from paceline.core.errors import InputError, ModelFileError
from paceline.models.files import check_new_folder, explain_damaged_entries, read_json, write_json
from paceline.models.weight_files import check_model_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paceline.conversion.convert.dtypes import WeightType
    from paceline.models.gguf_file import Bytes, Floats

    ByteReport = Callable[[int, int], None]

__all__ = ["exact_dtype", "folder_to_gguf", "gguf_to_folder"]

_CHUNK_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a tensor, as float32, that are converted at once."""

_CARRIED: Final = ("name", "description", "license")
"""Keys under ``general.`` that a folder keeps in its ``config.json`` for the way back, under ``gguf_metadata``."""


def gguf_to_folder(
    source: Path,
    folder: Path,
    *,
    dtype: str = "F16",
    report: ByteReport | None = None,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a GGUF file as a Hugging Face folder, tokenizer included; it appears only when it is complete.

    Any quantisation can be read that the ``gguf`` package can undo. Norms are stored as float32 always. Unused tokens,
    which fill up the vocabulary, are not in the tokenizer; their rows stay. The folder ends an answer at the tokens at
    which llama.cpp ends one of the file. ``report`` is called with the bytes written so far and in all.

    Raises:
        InputError: the model has something a Hugging Face Llama has not, or the folder cannot be written.
        ModelFileError: the source is damaged.
    """
    kind = weight_type(dtype)
    file = LlamaFile(source)
    check_new_folder(folder, source, force=force)
    check_folder_can_hold(file.shape)
    settings, vocabulary = read_gguf_settings(file), read_gguf_vocabulary(file)
    if len(vocabulary.tokens) != file.shape.vocab_size:
        raise ModelFileError(f"{source} has {len(vocabulary.tokens)} tokens and {file.shape.vocab_size} rows for them")
    weights = {weight.hf_name: weight for weight in settings.weights()}
    planned = [PlannedTensor(w.hf_name, w.shape, stored_type(w.shape, kind)) for w in weights.values()]
    progress = _Progress(sum(tensor.num_bytes for tensor in planned), report)
    check_room(folder, progress.total + _text_bytes(vocabulary))

    def chunks(tensor: PlannedTensor) -> Iterator[Bytes]:
        weight = weights[tensor.name]
        return progress.over(_convert_rows(weight, file.tensors[weight.gguf_name].rows, to_hf_rows, tensor.kind))

    config = {
        **settings_to_config(settings),
        "bos_token_id": vocabulary.bos,
        "eos_token_id": vocabulary.ends[0] if len(vocabulary.ends) == 1 else list(vocabulary.ends),
        "pad_token_id": vocabulary.pad,
        "torch_dtype": kind.config_name,
        "gguf_metadata": {key: file.get(f"general.{key}") for key in _CARRIED if file.get(f"general.{key}")},
    }
    with atomic_folder(folder) as partial_folder:
        write_tensors(partial_folder, planned, chunks, shard_bytes)
        write_json(partial_folder / "config.json", config)
        special = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None
        }
        write_json(partial_folder / "generation_config.json", special)
        write_tokenizer(vocabulary, partial_folder, settings.context_length)


def folder_to_gguf(
    folder: Path,
    destination: Path,
    *,
    dtype: str = "F16",
    name: str | None = None,
    description: str | None = None,
    license: str | None = None,  # noqa: A002 - the word GGUF has for it
    report: ByteReport | None = None,
) -> None:
    """Write a Hugging Face folder as a GGUF file, tokenizer included; it appears only when it is complete.

    The folder is of a ``LlamaForCausalLM``, or of a ``MistralForCausalLM`` without sliding window. Norms are stored as
    float32 always. ``name`` is by default the one that the folder was converted from, else the folder's. For a
    quantised file, write one of these types first and call :func:`paceline.conversion.quantize.quantize_gguf` on it.

    Raises:
        InputError: the model has something that llama.cpp's ``llama`` has not, or the disk is full.
        ModelFileError: a file of the folder is missing or damaged.

    Warns:
        ModelWarning: llama.cpp will end an answer at tokens at which the folder does not.
    """
    kind = weight_type(dtype)
    if not folder.is_dir():
        raise ModelFileError(f"there is no folder {folder}; give the path of a Hugging Face model folder")
    if destination.is_dir():
        raise InputError(f"{destination} is a folder; give the path of a .gguf file to write")
    check_parent(destination)
    check_model_folder(folder)
    config = read_json(folder / "config.json")
    with explain_damaged_entries(folder / "config.json"):
        settings = parse_config(config, str(folder))
        carried = {key: str(value) for key, value in (config.get("gguf_metadata") or {}).items()}
    vocabulary = read_folder_vocabulary(folder, config, settings.shape.vocab_size)
    ends = choose_end_keys(vocabulary, str(folder))
    weights = {weight.gguf_name: weight for weight in settings.weights()}
    stored = {n: tensor for n, tensor in read_tensors(folder).items() if not n.endswith(".rotary_emb.inv_freq")}
    check_tensors(
        {n: tensor.shape for n, tensor in stored.items()},
        {weight.hf_name: weight.shape for weight in weights.values()},
        str(folder),
        {"lm_head.weight"} if settings.shape.tied else (),  # transformers ties whatever the file has
    )
    types = {n: stored_type(weight.shape, kind) for n, weight in weights.items()}
    sizes = {n: math.prod(weight.shape) * types[n].item_bytes for n, weight in weights.items()}
    progress = _Progress(sum(sizes.values()), report)
    check_room(destination, progress.total + _text_bytes(vocabulary))

    writer_of = {
        "name": name or carried.get("name") or folder.absolute().name,
        "description": description or carried.get("description"),
        "license": license or carried.get("license"),
    }
    with atomic_file(destination) as partial_file:
        writer = gguf.GGUFWriter(partial_file, ARCHITECTURE)
        try:
            writer.add_type("model")
            for key, value in writer_of.items():
                if value:
                    writer.add_string(f"general.{key}", str(value))
            writer.add_file_type(kind.file_type)
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            add_settings_to_gguf(settings, writer)
            add_vocabulary_to_gguf(vocabulary, writer, ends)
            divisors = settings.rope_divisors()
            if divisors is not None:
                writer.add_tensor_info(ROPE_DIVISORS, divisors.shape, divisors.dtype, divisors.nbytes)
            for n, weight in weights.items():
                stored_as = gguf.GGMLQuantizationType[types[n].name]
                writer.add_tensor_info(n, weight.shape, np.dtype(np.float32), sizes[n], raw_dtype=stored_as)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if divisors is not None:
                writer.write_tensor_data(divisors)
            for n, weight in weights.items():
                data, filled = np.empty(sizes[n], np.uint8), 0
                for chunk in progress.over(_convert_rows(weight, stored[weight.hf_name].rows, to_gguf_rows, types[n])):
                    data[filled : filled + len(chunk)] = chunk
                    filled += len(chunk)
                writer.write_tensor_data(data)
        finally:
            writer.close()


def exact_dtype(folder: Path) -> str:
    """Return the smallest type that holds all weights of a Hugging Face folder as they are: F32, F16 or BF16."""
    stored = {tensor.dtype for tensor in read_tensors(folder).values() if len(tensor.shape) > 1}
    return stored.pop() if stored in ({"F16"}, {"BF16"}) else "F32"


def _convert_rows(
    weight: Weight, rows: Callable[[int, int], Floats], reorder: Callable[[Floats, int], Floats], kind: WeightType
) -> Iterator[Bytes]:
    """Yield the bytes of a tensor in its new type and order of rows, whole heads at a time."""
    unit = weight.rotated_head_size or 1
    row_bytes = 4 * math.prod(weight.shape[1:])
    step = max(1, _CHUNK_BYTES // (row_bytes * unit)) * unit
    for start in range(0, weight.shape[0], step):
        values = rows(start, min(start + step, weight.shape[0]))
        if weight.rotated_head_size is not None:
            values = reorder(values, weight.rotated_head_size)
        yield encode(values, kind, weight.hf_name)


class _Progress:
    def __init__(self, total: int, report: ByteReport | None) -> None:
        self.total = total
        self._done = 0
        self._report = report

    def over(self, chunks: Iterator[Bytes]) -> Iterator[Bytes]:
        for chunk in chunks:
            yield chunk
            self._done += len(chunk)
            if self._report is not None:
                self._report(self._done, self.total)


def _text_bytes(vocabulary: TokenizerTables) -> int:
    """Return about how much the configuration and the tokenizer take, rather too much."""
    return 1_000_000 + 200 * len(vocabulary.tokens) + 100 * len(vocabulary.merges)
