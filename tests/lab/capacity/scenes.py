"""Loads and replicas of made-up costs, small enough to simulate in a blink."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.lab.capacity.grid import Cell
from paceline.lab.capacity.measuring import ServedCosts
from paceline.lab.capacity.simulate import Outcome, ReplicaSettings, simulate
from paceline.lab.capacity.traffic import Traffic, make_arrivals
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from tests.planning.helpers import Skill, synthetic

RECORDINGS = [
    synthetic(seed, {"suffix": Skill(0.7, silent=0.6, is_model=False), "draft": Skill(0.8)}, num_tokens=40)
    for seed in range(4)
]
"""Of a draft model that is often right."""


def costs(round_s: Callable[[int], float], draft_s: float = 0.002, **others: Any) -> ServedCosts:
    """Return costs by the rows of a pass, and of a level of the draft model."""
    widths = [1, 2, 4, 8, 16, 32, 64]
    target = PassCost(tuple(WidthCost.of(rows, [round_s(rows)]) for rows in widths))
    profile = CostProfile(target, PassCost((WidthCost.of(1, [draft_s]), WidthCost.of(64, [2 * draft_s]))))
    return ServedCosts(profile, **others)


def memory_bound(rows: int) -> float:
    """Return the seconds of a pass whose rows cost little, as on a GPU."""
    return 0.04 + 0.0005 * rows


def run(traffic: Traffic, settings: ReplicaSettings, replicas: int = 1, **options: Any) -> Outcome:
    """Simulate with plain decoding and without affinity, unless it is said otherwise."""
    asked = {"speculative": False, "affinity": False, "balance": settings.slots, **options}
    return simulate(make_arrivals(traffic, settings.recordings), settings, replicas, **asked)


def outcome(replicas: int, ttft_s: float, *, busy: float = 0.5, tpot_s: float = 0.05, read: int = 50) -> Outcome:
    """Return what one request of 100 tokens would have."""
    return Outcome(replicas, [ttft_s], [tpot_s], [tpot_s], 100, 100, read, 10.0, busy)


def found() -> dict[Cell, Outcome]:
    """Return a grid of made-up outcomes, in which more replicas, speculation and affinity all help."""
    cells = {}
    for replicas in (1, 2, 4):
        for affinity in (False, True) if replicas > 1 else (False,):
            for speculative in (False, True):
                # 2.4 s over the replicas, half of that with speculation, and three quarters with affinity.
                ttft_s = 2.4 / replicas * (0.5 if speculative else 1.0) * (0.75 if affinity else 1.0)
                cells[Cell("Poisson", replicas, speculative, affinity)] = outcome(
                    replicas, ttft_s, read=20 if affinity else 80
                )
    return cells
