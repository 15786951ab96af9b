"""A model in GGUF: the whole of it, whether it lies in one file or is split into several.

::

    big-00001-of-00003.gguf    metadata, and some of the weights    <- what is given to every command
    big-00002-of-00003.gguf    weights
    big-00003-of-00003.gguf    weights

Every part says in ``split.no`` and ``split.count`` which of how many it is. llama.cpp is given the first part and finds
the others by their names.
Source: https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import ModelFileError
from paceline.models.gguf_header import GgufHeader, Value, commonest_type, read_gguf_header

_PART_NAME: Final = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

_NO_MODELS: Final = {
    "adapter": "a LoRA adapter, which changes a model; merge it into that model and give the merged file",
    "mmproj": "a projector of images or sound for a model; give the file of that model",
    "imatrix": "an importance matrix, which helps to quantise a model; give the file of that model",
    "controlvector": "a control vector, which steers a model; give the file of that model",
    "head": "a head that drafts for a model from what that model computes; give the file of a whole model",
}
"""What a file holds, and the way out, by its ``general.type``, and by some architectures that stand for a type."""
HEAD_ARCHITECTURES: Final = ("eagle3", "dflash", "gemma4-assistant")
"""Architectures of heads that have files of their own."""
_TYPE_OF_ARCHITECTURE: Final = {
    "clip": "mmproj",
    "controlvector": "controlvector",
    **dict.fromkeys(HEAD_ARCHITECTURES, "head"),
}


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A whole model.

    Attributes:
        paths: its files, the first part first.
        header: of the first part, which says everything about the model but the weights of the others.
        weights_by_type: number of weights in all parts, by ggml's number for their type.
        header_bytes: what stands before the weights of each part.
    """

    paths: tuple[Path, ...]
    header: GgufHeader
    weights_by_type: Mapping[int, int]
    num_bytes: int
    header_bytes: tuple[int, ...]

    @property
    def num_parameters(self) -> int:
        return sum(self.weights_by_type.values())

    @property
    def tensor_type(self) -> str | None:
        return commonest_type(self.weights_by_type)


def read_gguf_model(path: Path, *, may_be_head: bool = False) -> GgufModel:
    """Read the headers of a model in one file, or in several of which ``path`` is the first.

    Raises ``ModelFileError`` also for a later part, and for a file that holds no model, unless it is a head.
    """
    header = read_gguf_header(path)
    paths = _paths(path, header.metadata)
    _check_holds_model(path, header.metadata, may_be_head=may_be_head)
    weights_by_type = Counter(header.weights_by_type)
    header_bytes = [header.num_bytes]
    for number, part in enumerate(paths[1:], start=1):
        other = read_gguf_header(part)
        if other.metadata.get("split.no") != number:
            raise ModelFileError(
                f"{part} does not say that it is part {number + 1} of {len(paths)}; copy or download it again"
            )
        weights_by_type.update(other.weights_by_type)
        header_bytes.append(other.num_bytes)
    num_bytes = sum(part.stat().st_size for part in paths)
    return GgufModel(paths, header, weights_by_type, num_bytes, tuple(header_bytes))


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return the paths of all parts of the model that a file belongs to by its name, whether or not they exist.

    The first part comes first. A file whose name is not that of a part is alone.
    """
    name = _PART_NAME.fullmatch(path.name)
    count = 0 if name is None else int(name["count"])
    if name is None or not 1 <= int(name["number"]) <= count:
        return (path,)
    return tuple(path.with_name(f"{name['model']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def gguf_bytes(path: Path) -> int:
    """Return the bytes of all files of a model, of whose parts ``path`` is the first."""
    return sum(part.stat().st_size for part in part_paths(path))


def model_name(path: Path) -> str:
    """Return the name of a model's file without the number of a part and the ending."""
    name = _PART_NAME.fullmatch(path.name)
    return path.stem if name is None else name["model"]


def is_later_part(path: Path) -> bool:
    """Return whether a file is a part of a model, by its name, whose first part lies beside it."""
    first = part_paths(path)[0]
    return path != first and first.is_file()


def _paths(path: Path, said: Mapping[str, Value]) -> tuple[Path, ...]:
    """Return the files of a model whose first part is ``path``; raise where one is missing."""
    number, count = said.get("split.no", 0), said.get("split.count", 1)
    paths = part_paths(path)
    if isinstance(number, int) and number > 0:
        first = f", {paths[0].name}" if paths[0] != path else ""
        raise ModelFileError(f"{path} is part {number + 1} of a split model; give the first part{first}")
    if not isinstance(count, int) or count <= 1:
        return (path,)
    if len(paths) != count or paths[0] != path:
        raise ModelFileError(
            f"{path} is the first of {count} parts of a split model, and the others are found by its name; "
            f"name them as they were, NAME-00001-of-{count:05}.gguf and so on"
        )
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(
            f"{path} is the first of {count} parts, and beside it {missing[0]}{others} is missing; "
            "copy or download the missing parts"
        )
    return paths


def _check_holds_model(path: Path, said: Mapping[str, Value], *, may_be_head: bool) -> None:
    architecture = said.get("general.architecture")
    kind = _TYPE_OF_ARCHITECTURE.get(str(architecture), said.get("general.type"))
    if kind in _NO_MODELS and not (kind == "head" and may_be_head):
        raise ModelFileError(f"{path} is not a model but {_NO_MODELS[str(kind)]}")
    if not isinstance(architecture, str):
        raise ModelFileError(f"{path} names no architecture, so it holds no model; give the file of a model")
