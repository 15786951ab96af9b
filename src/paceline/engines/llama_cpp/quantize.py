"""Turning one GGUF file into another of a different quantisation."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import llama_cpp.llama_cpp as api
import numpy as np
import numpy.typing as npt

from paceline.core.errors import InputError, ModelFileError
from paceline.engines.llama_cpp import native
from paceline.engines.threads import usable_cores
from paceline.output import check_parent, whole_file

if TYPE_CHECKING:
    from pathlib import Path


def file_types() -> dict[str, int]:
    """Return the file types llama.cpp can write, by their usual names (``F16``, ``Q4_K_M``, ...)."""
    prefixes = ("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_")
    return {
        name.removeprefix(prefix): int(getattr(api, name))
        for name in vars(api)
        for prefix in prefixes
        if name.startswith(prefix)
    }


def quantize_gguf(source: Path, destination: Path, file_type: str, *, allow_requantize: bool = True) -> None:
    """Write ``source`` again with other weights; ``destination`` appears only when it is complete.

    Args:
        source: a GGUF file.
        destination: file to write or replace.
        file_type: such as ``"F16"``, ``"Q8_0"`` or ``"Q4_K_M"``; see :func:`file_types`.
        allow_requantize: also start from weights that are quantised already, with the loss of both.

    Raises:
        InputError: the file type is unknown, or the destination cannot be written.
        ModelFileError: the source cannot be read.
    """
    known = file_types()
    if file_type.upper() not in known:
        raise InputError(f"file type {file_type!r} is unknown; choose from {', '.join(known)}")
    native.check_model_file(source)
    check_parent(destination)
    native.initialize()
    parameters = api.llama_model_quantize_default_params()
    parameters.ftype = known[file_type.upper()]
    parameters.allow_requantize = allow_requantize
    parameters.nthread = usable_cores()
    with whole_file(destination) as partial, native.log.watch() as lines:
        status = api.llama_model_quantize(os.fsencode(source), os.fsencode(partial), ctypes.byref(parameters))
        if status != 0:
            why = native.reason(lines)
            raise ModelFileError(f"{source} could not be written as {file_type} to {destination}: {why}")


def quantize_rows(values: npt.NDArray[np.float32], tensor_type: int) -> npt.NDArray[np.uint8]:
    """Return float32 rows as llama.cpp stores them in a tensor type, without an importance matrix.

    Args:
        values: ``[rows, columns]``; the columns are a multiple of the type's block.
        tensor_type: ggml's number for the type, which is ``gguf.GGMLQuantizationType``'s too.

    Returns:
        ``[rows, bytes of a row]``.
    """
    values = np.ascontiguousarray(values, np.float32)
    rows, columns = values.shape
    row_bytes = native.row_bytes(tensor_type, columns)
    out = np.empty((rows, row_bytes), np.uint8)
    written = native.quantize_chunk(tensor_type, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    assert written == out.nbytes
    return out
