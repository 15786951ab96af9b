"""What tests tell when they pass: what each of them compared, and how much was proved in all.

Each of the processes that share the tests has its own; ``conftest.py`` adds them up and prints them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

LINES: list[str] = []
COUNTS: Counter[str] = Counter()

PROVED = ("scenes", "equal to plain decoding", "with partial rejection", "cut short")
"""Cases of tallies that are added up."""


class Tally(Counter[str]):
    """What a proof by examples compared, and how often each hard case came up."""

    def report(self, what: str, least: Mapping[str, float]) -> None:
        """Tell of it, and fail where a case came up too rarely."""
        line = f"{what}: {dict(self)}"
        LINES.append(line)
        COUNTS.update({case: self[case] for case in PROVED})
        for case, number in least.items():
            assert self[case] >= number, f"{case}: {line}"


def chi_square(counts: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray | None = None) -> float:
    """Return the p-value of counts, by default where all of them are equally likely."""
    from scipy import stats

    COUNTS["chi-square tests"] += 1
    return float(stats.chisquare(counts, expected).pvalue)
