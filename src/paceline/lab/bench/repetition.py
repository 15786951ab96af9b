"""Detecting text that repeats itself, which flatters every drafter."""

from __future__ import annotations

from collections.abc import Sequence

LOOPING_BELOW = 0.5
"""An answer loops if a smaller share of its 4-grams than this is distinct."""


def distinct_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Return distinct n-grams / n-grams of ``size`` tokens; 1 for a text too short to have any."""
    grams = [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_repetitive(token_ids: Sequence[int]) -> bool:
    return distinct_share(token_ids) < LOOPING_BELOW
