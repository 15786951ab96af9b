"""Turning one GGUF file into another of a different quantisation."""

from __future__ import annotations

import ctypes
import os
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.atomic_output import atomic_file, check_parent
from paceline.core.errors import InputError, ModelFileError
from paceline.engines.llama_cpp import native
from paceline.engines.threads import usable_cores
from paceline.models.gguf_header import read_gguf_header

# Behind the engine's package, which says what to do where the library does not load.
import llama_cpp.llama_cpp as api  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path

_BUFFER_BYTES: Final = 256 << 20
"""Most memory for the rows at hand. llama.cpp takes up to 8 GiB, more than a user has who quantises a model to fit."""

_SIZE_SAID: Final = re.compile(r"quant size *= *(\d+(?:\.\d+)?) MiB")


def file_types() -> dict[str, int]:
    """Return the file types llama.cpp can write, by their usual names (``F16``, ``Q4_K_M``, ...)."""
    prefixes = ("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_")
    return {
        name.removeprefix(prefix): int(getattr(api, name))
        for name in vars(api)
        for prefix in prefixes
        if name.startswith(prefix)
    }


def quantize_gguf(source: Path, destination: Path, file_type: str) -> None:
    """Write ``source`` again with other weights; ``destination`` appears only when it is complete.

    The type is such as ``"F16"``, ``"Q8_0"`` or ``"Q4_K_M"`` (:func:`file_types`). Weights that are quantised already
    are taken, too, with the loss of both.

    Raises ``InputError`` for an unknown type, and where the destination cannot be written.
    """
    check_parent(destination)
    with atomic_file(destination) as partial:
        quantize_into(partial, source, file_type)


def quantize_into(path: Path, source: Path, file_type: str) -> None:
    """As :func:`quantize_gguf`, straight into ``path``, which has half a file where that fails."""
    number = _number(file_type)
    native.check_model_file(source)
    native.initialize()
    parameters = _parameters(number)
    with native.log.watch() as lines:
        status = api.llama_model_quantize(os.fsencode(source), os.fsencode(path), ctypes.byref(parameters))
        if status != 0:
            raise _error(f"{source} could not be written as {file_type}", native.reason(lines))


def quantized_bytes(source: Path, file_type: str) -> int | None:
    """Return how large a file :func:`quantize_gguf` would write, within 1 % or 10 kB; ``None`` if llama.cpp keeps it.

    Nothing of the weights is read; it takes a millisecond or so.
    """
    number = _number(file_type)
    native.check_model_file(source)
    native.initialize()
    parameters = _parameters(number)
    parameters.dry_run = True
    with native.log.listen() as pieces:
        status = api.llama_model_quantize(os.fsencode(source), b"", ctypes.byref(parameters))
    said = "".join(pieces)
    if status != 0 or "require an imatrix" in said:
        raise _error(f"{source} cannot be written as {file_type}", native.reason(said.strip().splitlines()))
    size = _SIZE_SAID.search(said)
    if size is None:
        return None
    # The header hardly changes.
    starts = [start for start, _ in read_gguf_header(source).spans.values()]
    return round(float(size[1]) * (1 << 20)) + min(starts, default=0)


def _number(file_type: str) -> int:
    known = file_types()
    if file_type.upper() not in known:
        raise InputError(f"file type {file_type!r} is unknown; choose from {', '.join(known)}")
    return known[file_type.upper()]


def _parameters(number: int) -> Any:
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = number
    parameters.allow_requantize = True
    parameters.nthread = usable_cores()
    parameters.max_buf_size = _BUFFER_BYTES
    return parameters


def _error(what: str, why: str) -> InputError:
    if "imatrix" in why:
        return InputError(f"{what}: that type takes an importance matrix; choose another, such as Q2_K or Q4_0")
    if "invalid output file type" in why:
        return InputError(f"{what}: llama.cpp reads that type and writes none; choose another, such as Q2_K or Q4_0")
    if "iostream" in why:
        return InputError(f"{what}: the disk is full, or does not take it; free some, or choose another place")
    return ModelFileError(f"{what}: {why}")


def quantize_rows(values: npt.NDArray[np.float32], tensor_type: int) -> npt.NDArray[np.uint8]:
    """Return float32 rows ``[rows, columns]`` as llama.cpp stores them, ``[rows, bytes of a row]``.

    No importance matrix is used. The columns are a multiple of the type's block; ``tensor_type`` is ggml's number for
    the type, which is ``gguf.GGMLQuantizationType``'s too.
    """
    values = np.ascontiguousarray(values, np.float32)
    rows, columns = values.shape
    row_bytes = native.row_bytes(tensor_type, columns)
    out = np.empty((rows, row_bytes), np.uint8)
    written = native.quantize_chunk(tensor_type, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    assert written == out.nbytes
    return out
