"""The header of a GGUF file: its metadata and the places of its tensors, read without its weights.

The ``gguf`` package's reader builds an array for every token and every merge: 6.6 s and 500 MB for a vocabulary of 152k
[2-core machine]. A list of models needs the lengths of those arrays only, which takes some 0.1 s here.

Layout, all little-endian: magic, version, counts of tensors and of keys; for every key its name, type and value; for
every tensor its name, dimensions, type and offset; then, aligned, the weights.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

from paceline.core.errors import ModelFileError
from paceline.core.text import spelled_bytes
from paceline.models.files import LONGEST_START, check_is_file, explain_no_content

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[Scalar]

_MAGIC: Final = b"GGUF"
_OLDEST_VERSION, _NEWEST_VERSION = 2, 3
_OLDER_MAGICS: Final = (b"lmgg", b"fmgg", b"tjgg", b"algg")
"""First bytes of llama.cpp's formats before GGUF (ggml, ggmf, ggjt, ggla)."""
_SCALARS: Final = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_UINT32, _UINT64 = _SCALARS[4], _SCALARS[10]

_MAX_DIMENSIONS: Final = 4

_LONGEST_KEPT_ARRAY: Final = 1024
"""Longer arrays, and all arrays of texts, are vocabularies: only their lengths are kept."""

_LONGEST_SHOWN: Final = 80
"""Characters of a key in a message."""

_MAX_ITEMS: Final = 1 << 24
"""Most items of a vocabulary, list of keys or list of tensors; a damaged count would be walked for minutes."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the weights.

    Attributes:
        metadata: every key but the long arrays.
        array_lengths: items of each array that is not in ``metadata``.
        weights_by_type: number of weights in all tensors of this file, by ggml's number for their type.
        spans: first byte and the one after the last of each tensor, by its name; tensors of unknown types are left out.
        tensors: ggml's number for the type of each, by its name.
        num_bytes: length of all this, from the start of the file.
    """

    metadata: Mapping[str, Value]
    array_lengths: Mapping[str, int]
    weights_by_type: Mapping[int, int]
    spans: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, int]
    num_bytes: int

    @property
    def num_parameters(self) -> int:
        return sum(self.weights_by_type.values())

    @property
    def tensor_type(self) -> str | None:
        """The type most of the weights have, by its usual name, such as ``"Q4_0"``; ``None`` without weights."""
        return commonest_type(self.weights_by_type)


def commonest_type(weights_by_type: Mapping[int, int]) -> str | None:
    """Return the type that most weights have, by its usual name; ``None`` for an unknown type or none."""
    from gguf.constants import GGMLQuantizationType

    names = {int(kind): str(kind.name) for kind in GGMLQuantizationType}
    commonest = max(weights_by_type, key=weights_by_type.__getitem__, default=None)
    return None if commonest is None else names.get(commonest)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read everything before the weights, and check that the file is long enough for them.

    Every command opens a GGUF file by this function first, so that all of them say the same of a file that is none, or
    is of another byte order or version.
    """
    with _open_reader(path) as reader:
        return reader.header()


def read_gguf_texts(path: Path, key: str) -> list[bytes]:
    """Read the texts of one array of the metadata, which may be a vocabulary; none where there is no such array."""
    with _open_reader(path) as reader:
        reader.wanted = key
        reader.header()
        return reader.texts


@contextmanager
def _open_reader(path: Path) -> Iterator[_Reader]:
    try:
        if path.is_dir():
            raise ModelFileError(f"{path} is a directory; give the path of one .gguf file")
        check_is_file(path)
        with path.open("rb") as file:
            start = file.read(LONGEST_START)
            if not start.startswith(_MAGIC):
                raise ModelFileError(f"{path} is not a GGUF file: {_explain_start(path, start)}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield _Reader(path, data)
    except FileNotFoundError:
        raise ModelFileError(f"there is no file {path}; give the path of a .gguf file") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except _DamagedError as error:
        raise ModelFileError(f"{path} is truncated or damaged: {error}; copy or download it again") from None


def _explain_start(path: Path, start: bytes) -> str:
    """Say what a file is that does not start as GGUF does, and the way out."""
    why = explain_no_content(start)
    if why is not None:
        return why
    magic = start[: len(_MAGIC)]
    if magic in _OLDER_MAGICS:
        return "it is of a format from before GGUF; convert the original model again, or get a newer file"
    if path.suffix == ".safetensors":
        return "it holds weights of a Hugging Face model; give the folder it lies in"
    return f"it begins with {spelled_bytes(magic)}; convert the model to GGUF first"


class _DamagedError(Exception):
    """The bytes cannot be what the layout says."""


class _Reader:
    """Reads the header from front to back.

    Attributes:
        wanted: key of an array whose texts are kept in ``texts``.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._offset = len(_MAGIC)
        self.wanted: str | None = None
        self.texts: list[bytes] = []

    def header(self) -> GgufHeader:
        self._check_version(int(self._scalar(_UINT32)))
        num_tensors = self._count("tensors")
        metadata: dict[str, Value] = {}
        array_lengths: dict[str, int] = {}
        for _ in range(self._count("keys")):
            key = self._text()
            kind = int(self._scalar(_UINT32))
            if kind == _ARRAY:
                items, length = self._array(key)
                if items is None:
                    array_lengths[key] = length
                else:
                    metadata[key] = items
            else:
                metadata[key] = self._value(kind, key)
        kinds, weights_by_type, spans = self._tensors(num_tensors, metadata.get("general.alignment", 32))
        return GgufHeader(metadata, array_lengths, weights_by_type, spans, kinds, self._offset)

    def _check_version(self, version: int) -> None:
        """Raise for versions of which the rest cannot be read, or not by llama.cpp."""
        if version & 0xFFFF == 0 and version != 0:  # no version is that large: its bytes stand the other way round
            raise ModelFileError(
                f"{self._path} is a big-endian GGUF file, and little-endian ones can be read; convert a copy with: "
                "gguf-convert-endian COPY little"
            )
        if version == 1:
            raise ModelFileError(
                f"{self._path} is of GGUF version 1, which llama.cpp no longer reads; convert the original model "
                "again, or get a newer file"
            )
        if version > _NEWEST_VERSION:
            raise ModelFileError(
                f"{self._path} is of GGUF version {version}, and up to {_NEWEST_VERSION} can be read; upgrade paceline "
                "and llama-cpp-python, or get an older file"
            )
        if version < _OLDEST_VERSION:
            raise _DamagedError(f"there is no version {version}")

    def _tensors(
        self, num_tensors: int, alignment: Value
    ) -> tuple[dict[str, int], Counter[int], dict[str, tuple[int, int]]]:
        """Return types, the number of weights by type, and where tensors lie; check that all end within the file."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kinds: dict[str, int] = {}
        weights_by_type: Counter[int] = Counter()
        spans: dict[str, tuple[int, int]] = {}
        for _ in range(num_tensors):
            name = self._text()
            num_dimensions = int(self._scalar(_UINT32))
            if num_dimensions > _MAX_DIMENSIONS:
                raise _DamagedError(f"a tensor of {num_dimensions} dimensions")
            shape = [int(self._scalar(_UINT64)) for _ in range(num_dimensions)]
            kind, offset = int(self._scalar(_UINT32)), int(self._scalar(_UINT64))
            kinds[name] = kind
            weights_by_type[kind] += prod(shape)
            if kind in GGML_QUANT_SIZES:  # a newer type than the package knows is llama.cpp's to judge
                block, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
                spans[name] = offset, offset + prod(shape) // block * num_bytes
        if not weights_by_type:  # such a file need not be padded either
            return kinds, weights_by_type, {}
        if not isinstance(alignment, int) or alignment < 1:
            raise _DamagedError(f"an alignment of {alignment!r}")
        data = -(-self._offset // alignment) * alignment
        end = data + max((end for _, end in spans.values()), default=0)
        if end > len(self._data):
            raise _DamagedError(f"its tensors end at byte {end}, the file at {len(self._data)}")
        return kinds, weights_by_type, {name: (data + start, data + end) for name, (start, end) in spans.items()}

    def _array(self, key: str) -> tuple[list[Scalar] | None, int]:
        kind = int(self._scalar(_UINT32))
        length = self._count(f"items of {key[:_LONGEST_SHOWN]}")
        if kind == _STRING:
            texts = self.texts if key == self.wanted else None
            for _ in range(length):
                size = int(self._scalar(_UINT64))
                self._skip(size)
                if texts is not None:
                    texts.append(self._data[self._offset - size : self._offset])
            return None, length
        layout = self._layout(kind, key)
        if length > _LONGEST_KEPT_ARRAY:
            self._skip(length * layout.size)
            return None, length
        return [self._scalar(layout) for _ in range(length)], length

    def _value(self, kind: int, key: str) -> Scalar:
        return self._text() if kind == _STRING else self._scalar(self._layout(kind, key))

    def _layout(self, kind: int, key: str) -> struct.Struct:
        if kind not in _SCALARS:
            raise _DamagedError(f"{key[:_LONGEST_SHOWN]!r} has the unknown type {kind}")
        return _SCALARS[kind]

    def _count(self, of: str) -> int:
        count = int(self._scalar(_UINT64))
        if count > _MAX_ITEMS:
            raise _DamagedError(f"it says it has {count} {of}")
        return count

    def _text(self) -> str:
        start = self._offset + _UINT64.size
        self._skip(int(self._scalar(_UINT64)))
        return self._data[start : self._offset].decode("utf-8", errors="replace")

    def _scalar(self, layout: struct.Struct) -> int | float | bool:
        try:
            (value,) = layout.unpack_from(self._data, self._offset)
        except struct.error:
            raise _DamagedError(f"it ends within its header, at byte {len(self._data)}") from None
        self._offset += layout.size
        return value  # type: ignore[no-any-return]

    def _skip(self, num_bytes: int) -> None:
        self._offset += num_bytes
        if self._offset > len(self._data):
            raise _DamagedError(f"it ends within its header, at byte {len(self._data)}")
