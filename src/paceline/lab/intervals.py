"""Figures with how far they can be trusted: each method, and the data that it is for.

=================  ===================================================  ========================================
function           data                                                 method
=================  ===================================================  ========================================
:func:`bootstrap`  units that differ, such as texts or laps             percentile bootstrap of any statistic
:func:`estimate`   few noisy ratios, such as those of a bench's laps    the same, of the median
:func:`share`      texts that have a property, of all texts             Wilson
:func:`ratio`      a sum over a count, both gathered text by text       ratio estimator, texts as the units
:func:`depths`     products of such ratios, as of chains of drafts      jackknife: without one text after the other
:func:`quotient`   two sums over few texts, such as seconds             Student's t of the logarithm over texts
:func:`difference` a ratio before and after, on the same texts          ratio estimator of pairs, Student's t
=================  ===================================================  ========================================

What follows within one text goes together, so that texts, and not their tokens, are the units.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from paceline.core.arrays import Float64Array

NORMAL_95 = 1.96
"""Standard errors to each side of a 95% interval."""

NO_ERROR = 1e-12
"""Errors up to this are rounding: the texts do not differ, as where every draft was accepted."""

ALL = "all"
"""Name of the group that pools every kind of text."""

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
    low, high = bootstrap(np.sort(np.asarray(values, dtype=np.float64)), functools.partial(np.median, axis=1), seed)
    return Estimate(median, low, high, len(values))


def bootstrap(
    units: Float64Array, statistic: Callable[[Float64Array], Float64Array], seed: int = 0, draws: int = DRAWS
) -> tuple[float, float]:
    """Return the ends of the 95% percentile bootstrap interval of a statistic over units.

    Units ``[units]`` are drawn with replacement; ``statistic`` makes ``[draws]`` of ``[draws, units]``.
    """
    chosen = np.random.default_rng(seed).integers(len(units), size=(draws, len(units)))
    low, high = np.quantile(statistic(units[chosen]), (0.025, 0.975))
    return float(low), float(high)


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


class Tally:
    """Sums and counts, kept by kind of text and by text."""

    def __init__(self) -> None:
        self._texts: dict[str, list[tuple[float, int]]] = {}

    def add(self, kind: str, total: float, count: int) -> None:
        self._texts.setdefault(kind, []).append((float(total), int(count)))

    def groups(self) -> dict[str, list[tuple[float, int]]]:
        return self._texts | {ALL: [text for texts in self._texts.values() for text in texts]}

    def ratios(self) -> dict[str, Ratio]:
        return {group: ratio(texts) for group, texts in self.groups().items()}

    def totals(self) -> dict[str, float]:
        return {group: sum(total for total, _ in texts) for group, texts in self.groups().items()}

    def shares(self) -> dict[str, Share]:
        """Return the share of every kind and of all, where each text's sum is how many of its count have a property."""
        return {
            group: share(round(sum(total for total, _ in texts)), sum(count for _, count in texts))
            for group, texts in self.groups().items()
        }


@dataclass(frozen=True, slots=True)
class Depth:
    """Chain acceptance at one depth.

    Attributes:
        depth: 1 is the first draft token of a round.
        accepted: share of the drafts at this depth that were accepted, of those whose predecessors all were.
        survival: product of the shares down to here.
        survival_error: its standard error, by leaving out one text after the other; ``None`` as for ratios.
    """

    depth: int
    accepted: Ratio
    survival: float | None
    survival_error: float | None


def depths(texts: Sequence[Sequence[tuple[float, int]]]) -> list[Depth]:
    """Chain the acceptance at each depth, given that of all before, into survivals.

    ``texts`` is ``[depth][text]`` accepted and tested drafts; texts are in the same order at every depth.
    """
    counts = np.array(texts, dtype=np.float64)
    hits, trials = counts[..., 0], counts[..., 1]
    survivals = _survivals(hits.sum(axis=1), trials.sum(axis=1))
    num_texts = counts.shape[1]
    others = np.stack(
        [
            _survivals(hits.sum(axis=1) - hits[:, text], trials.sum(axis=1) - trials[:, text])
            for text in range(num_texts)
        ]
    )
    # A depth that no other text came to has no survival without the one that did, hence no error either.
    errors = np.sqrt((num_texts - 1) / num_texts * ((others - others.mean(axis=0)) ** 2).sum(axis=0))
    return [
        Depth(
            index + 1,
            ratio(at_depth),
            None if math.isnan(survivals[index]) else float(survivals[index]),
            float(errors[index]) if errors[index] > NO_ERROR else None,
        )
        for index, at_depth in enumerate(texts)
    ]


def _survivals(hits: Float64Array, trials: Float64Array) -> Float64Array:
    """Return the running product of hits / trials, ``[depth]``; NaN from where nothing was tested."""
    accepted: Float64Array = np.divide(hits, trials, out=np.full_like(hits, np.nan), where=trials > 0.0)
    return accepted.cumprod()


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


def difference(texts: Sequence[tuple[float, float, int]]) -> Interval:
    """Return by how much a ratio rose from before to after, ``texts`` having both sums and the count of each.

    What is hard in a text is hard before and after, so that the difference varies less than either.
    """
    paired = ratio([(after - before, count) for before, after, count in texts])
    if paired.value is None:
        raise ValueError("there is no difference of nothing")
    if paired.texts < 2:
        return Interval(paired.value, None, None)
    spread = _student_t(paired.texts - 1) * (paired.standard_error or 0.0)
    return Interval(paired.value, paired.value - spread, paired.value + spread)


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
