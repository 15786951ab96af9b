"""Writing GGUF files tensor by tensor, a few rows at a time, with what another file says about its model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from paceline.models.description import PROVENANCE_PREFIX

if TYPE_CHECKING:
    import gguf

    from paceline.models.gguf_file import Bytes, GGUFFile

StageReport = Callable[[str, int, int], None]
"""Called with a name of the stage, and how much of how much of it is done."""

Value = tuple[Any, "gguf.GGUFValueType", "gguf.GGUFValueType | None"]
"""A value of the metadata, its type, and its items' type."""

PIECE_BYTES: Final = 4 << 20
"""Most bytes of a tensor in memory."""

_ALIGNMENT: Final = 32

_NOT_COPIED: Final = ("GGUF.", "split.", PROVENANCE_PREFIX)
_NOT_COPIED_KEYS: Final = ("general.architecture", "general.alignment", "general.size_label")


class NewTensor(Protocol):
    """A tensor to write."""

    @property
    def name(self) -> str:
        """Name in the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""
        ...

    @property
    def kind(self) -> gguf.GGMLQuantizationType:
        """Type of the weights."""
        ...

    @property
    def num_bytes(self) -> int:
        """Length of all pieces together."""
        ...

    def pieces(self) -> Iterator[Bytes]:
        """Yield its bytes in order."""
        ...


def copy_metadata(file: GGUFFile) -> dict[str, Value]:
    """Return what a file says that holds for a model made from it, too: not its size, and not how it was made."""
    from gguf import GGUFValueType

    metadata: dict[str, Value] = {}
    for key, entry in file.fields.items():
        if key.startswith(_NOT_COPIED) or key in _NOT_COPIED_KEYS:
            continue
        items = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        if items is not None and not entry.data:  # the writer takes no empty arrays
            continue
        metadata[key] = (file.get(key), entry.types[0], items)
    return metadata


def type_value(value: int | str | bool) -> Value:
    from gguf import GGUFValueType

    if isinstance(value, bool):
        return value, GGUFValueType.BOOL, None
    if isinstance(value, int):
        return value, GGUFValueType.UINT32, None
    return value, GGUFValueType.STRING, None


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Value],
    tensors: Iterable[NewTensor],
    report: StageReport = lambda stage, done, total: None,
) -> None:
    """Write a file straight to ``path``, which has half of it where that fails."""
    from gguf import GGUFWriter

    tensors = list(tensors)
    writer = GGUFWriter(path, architecture)
    for key, (value, kind, items) in metadata.items():
        writer.add_key_value(key, value, kind, items)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.num_bytes, tensor.kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    total = sum(tensor.num_bytes for tensor in tensors)
    done = 0
    # The writer wants whole tensors, and one of a large model is a gigabyte: their bytes are appended here.
    with path.open("ab") as file:
        for tensor in tensors:
            _align(file)
            for piece in tensor.pieces():
                # Not ndarray.tofile, which makes a TypeError of an interrupt that comes at the wrong moment.
                file.write(np.ascontiguousarray(piece).data)
                done += piece.nbytes
                report("writing", done, total)
        _align(file)


def _align(file: IO[bytes]) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))
