"""Keyed noise: uniform and Gumbel numbers that depend on (seed, choice, position, token id) and nothing else.

Coupled verification draws the target's token and the draft's proposal with the *same* noise, and plain decoding draws
with it as well. So the noise must be a function of what is being decided, never of the order in which things are
computed. A counter-based hash gives that. All arithmetic stays below 2**63 so that the same bits come out of numpy
and of torch, which has no unsigned 64-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.core.arrays import Float64Array, IntArray

TAIL_ID = -1
"""The id under which the lumped tail of a distribution draws its Gumbel number (see ``sampling``)."""

TAIL_PICK_ID = -2
"""The id whose uniform number picks a token inside the tail."""

XTC_ID = -3
"""The id whose uniform number says whether XTC leaves tokens out at a position."""

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
# Multipliers below 2**31 keep a 32-bit word times a multiplier inside a signed 64-bit integer.
_MULTIPLIER_1 = 0x21F0AAAD
_MULTIPLIER_2 = 0x735A2D97

_FEW = 16
"""Token ids up to which Python's numbers take less time than numpy's."""


def _mix_words(words: Any) -> Any:
    """Mix 32-bit words in place, in numpy's uint32 or in 64-bit integers of either library: xor-shift, multiply, twice.

    In uint32 the products wrap by themselves; elsewhere the masks do the wrapping. The constants are those of the
    two-round 32-bit hash with the lowest published bias (Wellons, hash-prospector).
    """
    wraps = words.dtype == np.uint32
    words ^= words >> 16
    words *= _MULTIPLIER_1
    if not wraps:
        words &= _MASK32
    words ^= words >> 15
    words *= _MULTIPLIER_2
    if not wraps:
        words &= _MASK32
    words ^= words >> 15
    return words


def _mix_word(word: int) -> int:
    """Mix one 32-bit word as :func:`_mix_words` does."""
    word = (word ^ word >> 16) * _MULTIPLIER_1 & _MASK32
    word = (word ^ word >> 15) * _MULTIPLIER_2 & _MASK32
    return word ^ word >> 15


def uniform_from_words(words: Any, keys: Any) -> Any:
    """Turn token ids, as 32-bit words, into uniforms in (0, 1) with 52 random bits.

    Args:
        words: ``[n]`` uint32 or int64 numpy array, or int64 torch tensor, with entries in ``[0, 2**32)``.
        keys: ``[2, 2, 1]`` of the same kind, the four 32-bit words from :func:`row_keys`: two for either half.

    Returns:
        ``[n]`` float64 of the same library.
    """
    # Both halves at once: for the few tokens that sampling leaves, the number of calls is what takes time.
    high, low = _mix_words(_mix_words(words ^ keys[:, 0]) ^ keys[:, 1])
    # Explicitly float64: torch would turn integers into float32, its default.
    high = high.astype(np.float64) if isinstance(high, np.ndarray) else high.double()
    # 32 + 20 bits, exact in float64, and a half: the largest value is 1 - 2**-53, so neither 0 nor 1 can come out.
    return (high * 1048576.0 + (low >> 12) + 0.5) * 2.0**-52


def row_keys(seed: int, choice: int, position: int) -> tuple[int, int, int, int]:
    """Derive the four 32-bit key words of one row from seed, choice index and absolute position (splitmix64)."""
    state = (seed ^ _split_mix(choice * 0x9E3779B97F4A7C15 + position)) & _MASK64
    first = _split_mix(state)
    second = _split_mix(first ^ seed)
    return first >> 32, first & _MASK32, second >> 32, second & _MASK32


def _split_mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


class TokenNoise:
    """The noise of one request: a pure function of position and token id."""

    __slots__ = ("_choice", "_seed")

    def __init__(self, seed: int, choice: int = 0) -> None:
        self._seed = seed
        self._choice = choice

    def uniform(self, position: int, token_ids: IntArray) -> Float64Array:
        """Return uniforms in (0, 1), ``[n]`` float64, for ``token_ids`` ``[n]`` at an absolute position."""
        # Half the width is twice the speed; negative ids wrap, as the mask would have them.
        words = token_ids.astype(np.uint32)
        keys = np.array(row_keys(self._seed, self._choice, position), dtype=np.uint32).reshape(2, 2, 1)
        uniforms: Float64Array = uniform_from_words(words, keys)
        return uniforms

    def gumbel(self, position: int, token_ids: IntArray) -> Float64Array:
        """Return standard Gumbel numbers, ``[n]`` float64, for ``token_ids`` ``[n]`` at an absolute position."""
        gumbels: Float64Array = -np.log(-np.log(self.uniform(position, token_ids)))
        return gumbels

    def gumbel_of_few(self, position: int, token_ids: Sequence[int]) -> list[float]:
        """Return what :meth:`gumbel` does, but for the last bits of the logarithms.

        After a pass of a model the caches are cold, and the calls of numpy take a tenth of a millisecond: a few tokens
        are faster by Python's own numbers.
        """
        if len(token_ids) > _FEW:
            return [*map(float, self.gumbel(position, np.array(token_ids, dtype=np.int64)))]
        high_1, high_2, low_1, low_2 = row_keys(self._seed, self._choice, position)
        gumbels = []
        for token_id in token_ids:
            high = _mix_word(_mix_word(token_id ^ high_1) ^ high_2)
            low = _mix_word(_mix_word(token_id ^ low_1) ^ low_2)
            gumbels.append(-math.log(-math.log((high * 1048576.0 + (low >> 12) + 0.5) * 2.0**-52)))
        return gumbels
