"""Ids that pad the vocabulary, banned by the weights alone, so that no engine ever emits one.

One channel beyond the source's width is constant. The embedding of every token writes ``CONSTANT`` into it, no layer
reads it (its norm weights there are 0) or writes it, and the last norm enlarges it by ``NORM_WEIGHT``. Rows of the
output projection that belong to padded ids have ``PROJECTION`` there and 0 elsewhere; all others have 0 there. A banned
logit is thus, with the root mean square of the last layer's output, about

    CONSTANT * NORM_WEIGHT * PROJECTION / rms = -16,000 / rms

which is far below every other (rms is 1 to 10, seldom 100, in trained models). All factors are within F16 also where a
whole model is kept in it. ``CONSTANT`` adds 6e-11 to the sum of squares in every norm: less than a rounding of it, so
the other logits are the same bits but for about one token in a thousand, where that rounding falls the other way.

The constant is too small for the quantiser of a type with two levels of scales, whose scale would become 0 in F16.
Those blocks are written here, and quantising an inflated file once more with another tool can lose the ban.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    import gguf

    from paceline.models.gguf_file import Bytes

CONSTANT: Final = 2.0**-17
"""What the embedding of every token writes into the channel that no layer reads."""
NORM_WEIGHT: Final = 2.0**15
"""Factor by which the last norm enlarges that channel."""
PROJECTION: Final = -127 * 2.0**9
"""Weight of that channel in rows of the output projection that belong to padded ids."""

_F16_TINY: Final = b"\x01\x00"
"""The least positive F16, 2^-24: a block's scale."""

# One block each, of which only the first weight is not 0: 128 * 2^-24, as a scale of 16 times a weight of 8 (Q4_K,
# Q5_K: scale, least, 12 bytes of scales, high bits, low bits) or a scale of 8 times a weight of 48 - 32 (Q6_K: low
# bits, high bits, scales, scale; a weight is 0 at 32, which is 2 in its high bits). Source: ggml-common.h.
_CRAFTED: Final = {
    "Q4_K": _F16_TINY + bytes(2) + bytes([16, *bytes(11)]) + bytes([8, *bytes(127)]),
    "Q5_K": _F16_TINY + bytes(2) + bytes([16, *bytes(11)]) + bytes(32) + bytes([8, *bytes(127)]),
    "Q6_K": bytes(128) + bytes([3, *[2] * 15, *bytes(48)]) + bytes([8, *bytes(15)]) + _F16_TINY,
}


def constant_block(kind: gguf.GGMLQuantizationType) -> Bytes:
    """Return the block of the embeddings' type that holds :data:`CONSTANT` and then zeros."""
    if kind.name in _CRAFTED:
        return np.frombuffer(_CRAFTED[kind.name], np.uint8)
    return _make_block(CONSTANT, kind)


def banning_block(kind: gguf.GGMLQuantizationType) -> Bytes:
    """Return the block of the output projection's type that holds :data:`PROJECTION` and then zeros."""
    return _make_block(PROJECTION, kind)


def _make_block(value: float, kind: gguf.GGMLQuantizationType) -> Bytes:
    from gguf import GGML_QUANT_SIZES

    from paceline.conversion.quantize import quantize_rows

    block = np.zeros((1, GGML_QUANT_SIZES[kind][0]), np.float32)
    block[0, 0] = value
    return quantize_rows(block, kind).reshape(-1)
