"""The types that converted weights are stored in, F32, F16 and BF16, and the way between each and float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import gguf
import numpy as np
import numpy.typing as npt

from paceline.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.models.gguf_file import Bytes, Floats


class WeightType(NamedTuple):
    """One type of weights, by its names in both formats."""

    name: str
    """Name in safetensors and GGUF."""
    config_name: str
    """Name in torch and ``config.json``."""
    item_bytes: int
    file_type: int
    """``general.file_type`` of a GGUF file whose matrices are of this type."""


WEIGHT_TYPES: Final = {
    "F32": WeightType("F32", "float32", 4, int(gguf.LlamaFileType.ALL_F32)),
    "F16": WeightType("F16", "float16", 2, int(gguf.LlamaFileType.MOSTLY_F16)),
    "BF16": WeightType("BF16", "bfloat16", 2, int(gguf.LlamaFileType.MOSTLY_BF16)),
}
"""Types in which weights can be stored, by GGUF's names."""


def weight_type(name: str) -> WeightType:
    if name.upper() not in WEIGHT_TYPES:
        raise InputError(f"weights cannot be stored as {name!r}; choose from {', '.join(WEIGHT_TYPES)}")
    return WEIGHT_TYPES[name.upper()]


def stored_type(shape: Sequence[int], wanted: WeightType) -> WeightType:
    """Return the type of a tensor of this shape: norms stay float32, being few and touching everything."""
    return WEIGHT_TYPES["F32"] if len(shape) == 1 else wanted


def decode(raw: Bytes, name: str) -> Floats:
    """Return the flat float32 values of the bytes of a safetensors tensor of type ``name``."""
    if name == "BF16":  # the upper half of a float32, which numpy has no type for
        wide: npt.NDArray[np.uint32] = raw.view(np.dtype("<u2")).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    values: npt.NDArray[Any] = raw.view(np.dtype("<f4" if name == "F32" else "<f2"))
    return values.astype(np.float32, copy=False)


def encode(values: Floats, kind: WeightType, tensor: str) -> Bytes:
    """Return the bytes of ``values`` as ``kind``, rounded to the nearest; ``tensor`` is its name, for the error.

    Raises ``InputError`` for a finite value beyond what F16 can hold.
    """
    if kind.name == "F16":
        with np.errstate(over="ignore"):
            halves = values.astype(np.dtype("<f2"))
        if np.isinf(halves).any() and np.isfinite(values[np.isinf(halves)]).any():
            raise InputError(
                f"{tensor} has a value of {np.abs(values[np.isfinite(values)]).max():g}, and F16 ends at 65504; "
                "choose BF16 or F32"
            )
        return np.ascontiguousarray(halves).reshape(-1).view(np.uint8)
    flat = np.ascontiguousarray(values, dtype=np.dtype("<f4")).reshape(-1)
    if kind.name == "F32":
        return flat.view(np.uint8)
    bits = flat.view(np.uint32)
    # To the nearest, ties to even: adding can carry into the upper half, which is kept.
    upper = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype("<u2")
    not_numbers = np.isnan(flat)
    if not_numbers.any():  # adding could have made them infinite
        upper[not_numbers] = (bits[not_numbers] >> np.uint32(16)).astype("<u2") | np.uint16(0x40)
    rounded: Bytes = upper.view(np.uint8)
    return rounded
