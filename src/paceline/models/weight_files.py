"""The files that make a Hugging Face folder a model: its configuration and its weights, and whether all are there."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.core.errors import ModelFileError
from paceline.core.text import spelled_bytes
from paceline.models.files import LONGEST_START, check_is_file, explain_no_content, read_json
from paceline.models.gguf_model import is_later_part

INDEX: Final = "model.safetensors.index.json"
"""The file that says which weights are in which file."""
SINGLE: Final = "model.safetensors"
"""The file of weights where there is only one."""
ASSISTANT: Final = "assistant"
"""The kind of head that reads the cache of its target."""
_LONGEST_HEADER: Final = 100_000_000
"""Most bytes of a header, as in the safetensors library."""
ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a weight of the types that can be converted."""
_PICKLED: Final = ("pytorch_model*.bin", "*.pt", "*.pth")


def check_model_folder(folder: Path, *, may_be_head: bool = False) -> None:
    """Raise ``ModelFileError`` for a folder without the configuration of a Hugging Face model, or with pipes for files.

    The message says what the folder is, where that can be told. So is a head without the model that it drafts for.
    """
    if (folder / "config.json").is_file():
        for path in folder.iterdir():
            if path.exists():  # a link may lead nowhere
                check_is_file(path)
        if not may_be_head and (kind := head_kind(folder)) is not None:
            raise ModelFileError(
                f"{folder} is not a model but a head that drafts for one ({kind}): give the folder of the whole model"
            )
        return
    gguf_files = sorted(path.name for path in folder.glob("*.gguf") if not is_later_part(path))
    if (folder / "adapter_config.json").is_file():
        way_out = "it is a LoRA adapter, which changes a model: merge it into that model and give the merged folder"
    elif gguf_files:
        way_out = f"give a GGUF file in it, such as {folder / gguf_files[0]}"
    else:
        way_out = "give a GGUF file or a Hugging Face model folder"
    raise ModelFileError(f"{folder} is a folder that has no config.json; {way_out}")


def head_kind(folder: Path) -> str | None:
    """Return the kind of head that a folder holds, such as ``eagle3``; ``None`` for a model, or a folder without one.

    Those that publish heads name them in many ways. Of EAGLE's first two kinds only the weights tell.
    """
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    said = config.get("speculators_model_type")
    if isinstance(said, str):
        return said
    classes = config.get("architectures")
    name = str(classes[0]).lower() if isinstance(classes, list) and classes else ""
    for kind, is_said in (
        ("dflash", "dflash" in name or "dspark" in name),
        ("medusa", "medusa" in name or "medusa_num_heads" in config),
        ("peagle", "peagle" in name),
        ("eagle3", "eagle3" in name or "draft_vocab_size" in config or "eagle_config" in config),
        ("eagle", "eagle" in name and "_vl" not in name),
        (ASSISTANT, str(config.get("model_type")).endswith("_assistant")),
    ):
        if is_said:
            return kind
    return "eagle" if has_tensor(folder, "fc.weight") else None


def has_tensor(folder: Path, name: str) -> bool:
    """Return whether a folder's safetensors files say that they have a tensor; what cannot be read has none."""
    with contextlib.suppress(ModelFileError, OSError):
        single = folder / SINGLE
        if not single.is_file():
            return (folder / INDEX).is_file() and name in read_weight_map(folder)
        with single.open("rb") as file:
            return f'"{name}"'.encode() in file.read(header_bytes(single, file.read(8)))
    return False


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder; none where its weights are pickled.

    As in transformers, a single file wins over an index. Other files of that kind, such as
    ``consolidated.safetensors``, hold the same weights once more, or others.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file():
        paths = [single]
    elif index.is_file():
        paths = [folder / name for name in sorted(set(read_weight_map(folder).values()))]
    elif any(any(folder.glob(pattern)) for pattern in _PICKLED):
        return []
    elif any(folder.glob("*.safetensors")):
        raise ModelFileError(f"{folder} has neither {SINGLE} nor {INDEX}; get the index, too")
    else:
        raise ModelFileError(f"{folder} has no weights; get its *.safetensors files, too")
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelFileError(
            f"{folder} lacks {len(missing)} of its {len(paths)} weight files, such as {missing[0]}; copy or download "
            "the missing ones"
        )
    for path in paths:
        _check_content(path)
    return paths


def read_weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the tensor's name; the index must not lead out of the folder."""
    weight_map: Any = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
        raise ModelFileError(f"{folder / INDEX} has no weight_map of file names; fetch the folder again")
    return weight_map


class TensorEntry(NamedTuple):
    """What a safetensors file says of a tensor: its shape, its type, and its first byte in the file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by name; raise ``ModelFileError`` where it does not hold all of one.

    Source: https://huggingface.co/docs/safetensors, "Format".
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = header_bytes(path, file.read(8))
            text = file.read(length)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    tensors = {}
    why = f"its header has {length} bytes, the file {size}" if len(text) < length else None
    try:
        header = {} if why else json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = (int(offset) for offset in entry["data_offsets"])
            dtype, shape = str(entry["dtype"]), tuple(int(length) for length in entry["shape"])
            expected = math.prod(shape) * ITEM_BYTES.get(dtype, 0) or stop - start
            if min((start, *shape)) < 0 or 8 + length + stop > size or stop - start != expected:
                why = why or f"it does not hold all of {name}"
            tensors[name] = TensorEntry(shape, dtype, 8 + length + start)
    except (ValueError, KeyError, TypeError, AttributeError):
        why = "it has no valid safetensors header"
    if why is not None:
        raise ModelFileError(f"{path} is truncated or damaged: {why}; copy or download it again")
    return tensors


def header_bytes(path: Path, start: bytes) -> int:
    """Return the length of a safetensors header from the first 8 bytes of the file."""
    if len(start) < 8:
        raise ModelFileError(f"{path} is truncated or damaged: it has {len(start)} bytes; copy or download it again")
    length = int.from_bytes(start, "little")
    if length > _LONGEST_HEADER:
        raise ModelFileError(
            f"{path} is not a safetensors file: it begins with {spelled_bytes(start)}; copy or download it again"
        )
    return length


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and not set(name) & set("/\\")


def _check_content(path: Path) -> None:
    try:
        with path.open("rb") as file:
            why = explain_no_content(file.read(LONGEST_START))
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    if why is not None:
        raise ModelFileError(f"{path} holds no weights: {why}")
