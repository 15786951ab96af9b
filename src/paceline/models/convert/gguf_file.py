"""A GGUF file for reading: its metadata, checked for type, and its tensors, a few rows at a time."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt

from paceline.core.errors import InputError, ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.convert.dtypes import Floats


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a GGUF file."""

    path: Path
    name: str
    shape: tuple[int, ...]
    """Rows first, as numpy and safetensors have it; the file has it the other way round."""
    _stored: gguf.ReaderTensor

    def rows(self, start: int, stop: int) -> Floats:
        """Return ``[stop - start, ...]`` of its first axis as float32, dequantised.

        Raises:
            InputError: its quantisation is unknown to the ``gguf`` package.
        """
        try:
            values: Floats = gguf.quants.dequantize(self._stored.data[start:stop], self._stored.tensor_type)
        except NotImplementedError:
            raise InputError(
                f"{self.path}: {self.name} is stored as {self._stored.tensor_type.name}, which cannot be dequantised "
                "here; quantise it to another type first"
            ) from None
        return np.asarray(values, dtype=np.float32).reshape((stop - start, *self.shape[1:]))


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The reader on a plain view of the mapped file: a slice of a memmap costs twice as much, and it takes millions."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data = mapped.view(np.ndarray)


class GGUFFile:
    """The content of one GGUF file.

    Args:
        path: of the file.

    Raises:
        ModelFileError: missing, truncated, of another format, or one part of several.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        _check_start(path)
        try:
            self._reader = _Reader(path)
            self._check_whole()
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
            # What the reader raises where a length or an offset leads out of the file.
            raise ModelFileError(f"{path} is truncated or damaged ({error}); copy or download it again") from None
        if self.get("split.count", 1) > 1:
            raise InputError(
                f"{path} is one of {self.get('split.count')} parts; join them with llama-gguf-split --merge"
            )

    def _check_whole(self) -> None:
        size = self.path.stat().st_size
        for tensor in self._reader.tensors:
            if tensor.data_offset + tensor.n_bytes > size:
                raise ValueError(f"{tensor.name} goes on past the end")

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """All tensors by name."""
        return {
            tensor.name: GGUFTensor(self.path, tensor.name, tuple(int(n) for n in reversed(tensor.shape)), tensor)
            for tensor in self._reader.tensors
        }

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata, whatever its type."""
        field = self._reader.fields.get(key)
        if field is None:
            return default
        try:
            return field.contents()
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"{self.path} has a damaged {key} ({error}); copy or download it again") from None

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string of the metadata."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise ModelFileError(f"{self.path} has {key} = {value!r}, and a text is needed")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a whole number of the metadata; arrays, one value a layer, are refused unless they are constant."""
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


def _check_start(path: Path) -> None:
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except FileNotFoundError:
        raise ModelFileError(f"there is no file {path}; give the path of a .gguf file") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    if start[:4] != b"GGUF":
        found = f"it starts with {start[:4]!r}" if start else "it is empty"
        raise ModelFileError(f"{path} is not a GGUF file: {found}")
    if start[4:6] == b"\0\0":
        raise InputError(f"{path} is a big-endian GGUF file; convert a little-endian one")
