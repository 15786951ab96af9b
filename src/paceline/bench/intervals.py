"""Medians of few, noisy ratios, with bootstrap intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 4000
"""Bootstrap samples: the ends of an interval then move by less than a tenth of its width from seed to seed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median with its 95% interval, whose ends are ``None`` for a single value."""

    median: float
    low: float | None
    high: float | None
    count: int


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """Return the median of ``values`` with the percentile bootstrap interval over them.

    With five values this is nearly the range of all of them; that few tell no more.
    """
    if not values:
        raise ValueError("there is no median of nothing")
    median = statistics.median(values)
    if len(values) == 1:
        return Estimate(median, None, None, 1)
    data = np.sort(np.asarray(values, dtype=np.float64))
    chosen = np.random.default_rng(seed).integers(len(data), size=(DRAWS, len(data)))
    low, high = np.quantile(np.median(data[chosen], axis=1), (0.025, 0.975))
    return Estimate(median, float(low), float(high), len(data))
