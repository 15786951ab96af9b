"""What passes cost, and recordings of texts, for the planner to decide about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.cost_tables import PASS_MS

from paceline.lab.replaying.recording import Recording
from tests.planning.helpers import Curve, Skill, synthetic, table


def line(fixed_s: float, row_s: float) -> Curve:
    """Return a straight line, with a draft model that takes a millisecond and reads fifty tokens in another."""
    return Curve(lambda rows: fixed_s + row_s * rows, lambda rows: 0.001 * (0.98 + 0.02 * rows))


CURVES = {name: table(milliseconds, draft_ms=1.0) for name, milliseconds in PASS_MS.items()} | {
    "line": line(0.02, 0.002),
    "steep line": line(0.01, 0.01),
    # An 8b in Q4_0 on an H100: llama.cpp drops its CUDA graph where the width changes.
    "graphs": replace(
        table({1: 3.0, 2: 3.6, 3: 3.7, 4: 3.9, 6: 4.7, 8: 5.6, 12: 7.5, 16: 7.6, 32: 9.1, 64: 11.9}, draft_ms=0.76),
        change_s=0.0013,
    ),
}

QUICK_CURVES = ("Q4_0", "graphs")
"""A staircase with cliffs both ways, and the one on which a change of width costs."""


def texts(
    right: float | Callable[[int], float], num_tokens: int = 256, count: int = 4, **skill: float
) -> list[Recording]:
    skills = {"draft": Skill(right)}
    return [synthetic(seed, skills, num_tokens=num_tokens, num_prompt=100, depth=16) for seed in range(count)]
