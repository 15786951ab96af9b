"""Figures with 95% intervals: each method, and the data that it is for.

================  =====================================================  ======================================
function          data                                                   method
================  =====================================================  ======================================
:func:`estimate`  few noisy ratios, such as those of a bench's laps      percentile bootstrap of the median
:func:`share`     texts that have a property, of all texts               Wilson
:func:`ratio`     a sum over a count, both gathered text by text         ratio estimator, texts as the units
:func:`quotient`  two sums over few texts, such as seconds               Student's t of the logarithm over texts
================  =====================================================  ======================================
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from paceline.core.arrays import Float64Array

NORMAL_95 = 1.96
"""Standard errors to each side of a 95% interval."""

NO_ERROR = 1e-12
"""Errors up to this are rounding: the texts do not differ, as where every draft was accepted."""

DRAWS = 4000
"""Bootstrap samples: the ends of an interval then move by less than a tenth of its width from seed to seed."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median with its 95% interval, whose ends are ``None`` for a single value."""

    median: float
    low: float | None
    high: float | None
    count: int

    @property
    def interval(self) -> str:
        """Both ends in words."""
        return "-" if self.low is None or self.high is None else f"{self.low:.2f} to {self.high:.2f}"


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


@dataclass(frozen=True, slots=True)
class Share:
    """A share of texts with its 95% Wilson interval."""

    value: float | None
    low: float
    high: float
    hits: int
    texts: int


def share(hits: int, texts: int) -> Share:
    """Return a share with its 95% Wilson interval (E. B. Wilson, 1927)."""
    if not texts:
        return Share(None, 0.0, 1.0, 0, 0)
    square = NORMAL_95**2
    value = hits / texts
    middle = (value + square / (2 * texts)) / (1 + square / texts)
    spread = NORMAL_95 / (1 + square / texts) * math.sqrt(value * (1 - value) / texts + square / (4 * texts**2))
    # Rounding must not put the ends outside 0 to 1, nor away from a share of exactly 0 or 1.
    low = 0.0 if hits == 0 else middle - spread
    high = 1.0 if hits == texts else middle + spread
    return Share(value, low, high, hits, texts)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A sum over a count, both gathered text by text.

    Attributes:
        value: sum / count; ``None`` if nothing was counted.
        standard_error: of ``value``, with whole texts as the independent units, since what follows within one text
            goes together; ``None`` where they do not tell: fewer than two texts, or no difference between them.
        trials: the count.
        texts: how many texts gave any.
    """

    value: float | None
    standard_error: float | None
    trials: int
    texts: int


def ratio(texts: Sequence[tuple[float, int]]) -> Ratio:
    """Return the ratio of the sums to the counts of ``texts``, with its standard error.

    The error is the usual one of a ratio estimator over clusters: ``sqrt(m / (m - 1) * sum (s_t - r n_t)^2) / n``.
    """
    counted = [(total, count) for total, count in texts if count]
    trials = sum(count for _, count in counted)
    if not trials:
        return Ratio(None, None, 0, 0)
    value = sum(total for total, _ in counted) / trials
    if len(counted) < 2:
        return Ratio(value, None, trials, len(counted))
    squares = sum((total - value * count) ** 2 for total, count in counted)
    error = math.sqrt(len(counted) / (len(counted) - 1) * squares) / trials
    return Ratio(value, error if error > NO_ERROR else None, trials, len(counted))


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure over texts and its 95% interval over such texts; the ends are ``None`` for a single one."""

    value: float
    low: float | None
    high: float | None


def quotient(numerator: Float64Array, denominator: Float64Array) -> Interval:
    """Return the quotient of two sums over texts, ``[texts]`` each, with the interval that it has over texts.

    Texts differ by factors, so the interval is of the logarithm; and they are few, so it is by Student's t. For the
    error of a quotient see Cochran, *Sampling Techniques*, 3rd ed., chapter 6.
    """
    value = float(numerator.sum() / denominator.sum())
    count = len(numerator)
    if count == 1:
        return Interval(value, None, None)
    rest = numerator - value * denominator
    error = math.sqrt(count / (count - 1) * float(rest @ rest)) / float(numerator.sum())
    factor = math.exp(_student_t(count - 1) * error)
    return Interval(value, value / factor, value * factor)


def _student_t(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t, within 1% from 3 degrees of freedom on.

    By Abramowitz and Stegun, eq. 26.7.5.
    """
    z: float = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, 1))
