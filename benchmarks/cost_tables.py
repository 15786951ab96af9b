"""Measured staircases, so that replays of different times and machines can be compared.

Milliseconds of a pass of a Llama of 1B shape by its rows, through llama.cpp on a CPU with 2 cores: the four kinds of
weights differ most in where a wider pass is worth its time. Whole profiles, as ``paceline profile --json`` writes them,
lie in ``costs/``: of an H100, where a row more is nearly free and a pass of the draft is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost

PASS_MS: Final[Mapping[str, Mapping[int, float]]] = {
    "Q4_0": {1: 16, 2: 26, 3: 37, 4: 24, 5: 36, 6: 46, 8: 44, 12: 63, 16: 62},
    "F16": {1: 50, 2: 61, 3: 64, 4: 69, 5: 76, 6: 76, 8: 97, 12: 110, 16: 127},
    "Q8_0": {1: 29, 2: 61, 3: 70, 4: 74, 5: 112, 6: 123, 8: 96, 12: 121, 16: 151},
    "Q4_K_M": {1: 18, 2: 26, 3: 36, 4: 43, 5: 55, 6: 66, 8: 71, 12: 92, 16: 85},
}


def measured_profile(name: str, draft_ms: float) -> CostProfile:
    """Return one of :data:`PASS_MS` as a profile, with a draft model whose narrow passes all take ``draft_ms``."""
    # A pass that catches up by many tokens is as much work as so many rows; a small model does 32 in the time of one.
    draft = {1: draft_ms, 32: draft_ms, 512: 16 * draft_ms}
    return CostProfile(_pass_cost(PASS_MS[name]), _pass_cost(draft))


def _pass_cost(milliseconds: Mapping[int, float]) -> PassCost:
    return PassCost(tuple(WidthCost.of(rows, [ms / 1e3]) for rows, ms in sorted(milliseconds.items())))
