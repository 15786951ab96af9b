"""Measured staircases, so that replays of different times and machines can be compared.

Milliseconds of a pass of a Llama of 1B shape by its rows, through llama.cpp on a CPU with 2 cores: the four kinds of
weights differ most in where a wider pass is worth its time. Whole profiles, as ``paceline profile --json`` writes them,
lie in ``costs/``: of such a processor, quiet and beside a process that spins, and of an H100, where a row more is
nearly free and a pass of the draft is not.
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


STREAMED_FLOOR_MS: Final = 1200
"""What reading the weights of one pass takes: 500 MB of a model of 1,050 MB, at 419 MB a second."""

GRAPH_STEPS_MS: Final[Mapping[int, float]] = {
    1: 3.0, 2: 3.6, 3: 3.7, 4: 3.9, 6: 4.7, 8: 5.6, 12: 7.5, 16: 7.6, 32: 9.1, 64: 11.9
}  # fmt: skip
GRAPH_CHANGE_MS: Final = 1.3


def measured_profile(name: str, draft_ms: float) -> CostProfile:
    """Return one of :data:`PASS_MS` as a profile, with a draft model whose narrow passes all take ``draft_ms``."""
    # A pass that catches up by many tokens is as much work as so many rows; a small model does 32 in the time of one.
    draft = {1: draft_ms, 32: draft_ms, 512: 16 * draft_ms}
    return CostProfile(_pass_cost(PASS_MS[name]), _pass_cost(draft))


def _pass_cost(milliseconds: Mapping[int, float]) -> PassCost:
    return PassCost(tuple(WidthCost.of(rows, [ms / 1e3]) for rows, ms in sorted(milliseconds.items())))


def _straight_line() -> CostProfile:
    widths = (*range(1, 17), 24, 32, 48, 64, 128, 512)
    draft = {rows: 0.98 + 0.02 * rows for rows in widths}
    return CostProfile(_pass_cost({rows: 20.0 + 2.0 * rows for rows in widths}), _pass_cost(draft))


def _streamed() -> CostProfile:
    # As wide as a pass can be before computing takes longer than reading.
    computed = {rows: 29.0 + 9.0 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)}
    target = {rows: max(STREAMED_FLOOR_MS, ms) for rows, ms in computed.items()}
    return CostProfile(_pass_cost(target), _pass_cost({1: 20.0, 4: 30.0, 16: 75.0, 64: 280.0, 512: 2200.0}))


def _graph_steps() -> CostProfile:
    draft = {1: 0.76, 2: 0.80, 8: 0.85, 64: 1.2, 512: 3.0}
    return CostProfile(_pass_cost(GRAPH_STEPS_MS), _pass_cost(draft), change_s=GRAPH_CHANGE_MS / 1e3)


COMPUTED: Final[Mapping[str, CostProfile]] = {
    "q4_0-cheap-rows": measured_profile("Q4_0", 1.0),
    "straight-line": _straight_line(),
    "streamed": _streamed(),
    "graph-steps": _graph_steps(),
}
"""Profiles that are put together: a minute in which four rows of Q4_0 took hardly longer than one; every row as dear as
the next; weights that are read from a disk while they are used, so that a pass takes as long as that whatever its rows;
and steps of a GPU that replays what it recorded of the pass before, and takes longer where the width changes."""
