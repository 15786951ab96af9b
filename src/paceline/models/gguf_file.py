"""A GGUF file for reading: its metadata, checked for type, and its tensors, a few rows at a time.

Without weights and vocabulary, :mod:`~paceline.models.gguf_header` reads a file faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ModelFileError
from paceline.models.gguf_model import read_gguf_model

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import gguf

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a GGUF file; its weights are mapped, not read."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """Rows first, as in numpy and safetensors; in the file they come last."""
    kind: gguf.GGMLQuantizationType
    _data: npt.NDArray[Any]

    def floats(self, index: npt.NDArray[np.int64] | slice = slice(None)) -> Floats:
        """Return the tensor, or some of its first axis, as float32, dequantised."""
        from gguf.quants import dequantize

        try:
            values: Floats = dequantize(self._data[index], self.kind)
        except NotImplementedError:
            raise ModelFileError(
                f"{self.path}: {self.name} is stored as {self.kind.name}, which cannot be dequantised here; quantise "
                "it to another type first"
            ) from None
        return values.astype(np.float32, copy=False)

    def rows(self, start: int, stop: int) -> Floats:
        """Return ``[stop - start, ...]`` of its first axis as :meth:`floats` does."""
        return self.floats(slice(start, stop))

    def stored_rows(self) -> Bytes:
        """Return the rows as they lie in the file, ``[rows, bytes of a row]``."""
        data: Bytes = self._data.reshape(self.shape[0], -1).view(np.uint8)
        return data


class GGUFFile:
    """The content of one GGUF file, which is a whole model. Raises ``ModelFileError`` for anything else."""

    def __init__(self, path: Path, *, may_be_head: bool = False) -> None:
        self.path = path
        parts = len(read_gguf_model(path, may_be_head=may_be_head).paths)
        if parts > 1:
            raise ModelFileError(
                f"{path} is the first of {parts} parts of a split model, and one file is needed; join them with: "
                f"llama-gguf-split --merge {path.name} WHOLE.gguf"
            )
        try:
            self._reader = _reader(path)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, IndexError) as error:
            # Lengths are checked by now; left is what the package does not know, such as a new type of tensors.
            raise ModelFileError(f"{path} is damaged, or newer than the gguf package ({error})") from None

    @property
    def fields(self) -> Mapping[str, gguf.ReaderField]:
        """All metadata by key, as the ``gguf`` package has it."""
        return self._reader.fields  # type: ignore[no-any-return]

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        return {
            tensor.name: GGUFTensor(
                self.path,
                tensor.name,
                tuple(int(n) for n in reversed(tensor.shape)),
                tensor.tensor_type,
                tensor.data,
            )
            for tensor in self._reader.tensors
        }

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata, whatever its type."""
        field = self.fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"{self.path} has a damaged {key} ({error}); copy or download it again") from None

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{self.path} has {key} = {value!r}, and a text is needed")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the metadata; an array, one value a layer, must be constant."""
        value = self._required(key, default)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            kind = "differs between layers" if isinstance(value, list) else f"is {value!r}"
            raise ModelFileError(f"{self.path}: {key} {kind}, and one whole number is needed")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the metadata; a float32 is read as the shortest decimal that gives it."""
        value = self._required(key, default)
        if not isinstance(value, (int, float)):
            raise ModelFileError(f"{self.path} has {key} = {value!r}, and a number is needed")
        return float(str(np.float32(value)))

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path} lacks {key}; check the file with the tool that made it")
        return value


def _reader(path: Path) -> gguf.GGUFReader:
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        """Reads a plain view of the mapped file: a slice of a memmap costs twice as much, and it takes millions."""

        @property
        def data(self) -> Bytes:
            return self._data

        @data.setter
        def data(self, mapped: Bytes) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader(path)
