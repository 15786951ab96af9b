"""What a policy that predicts reports: its predictions against what came of them, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class Reliability:
    """Predicted against actual acceptance, in bins of the predicted chance."""

    BINS = 10

    def __init__(self) -> None:
        self._count = [0] * self.BINS
        self._predicted = [0.0] * self.BINS
        self._accepted = [0] * self.BINS

    def add(self, chance: float, accepted: bool) -> None:
        """Count one verdict that was given ``chance``."""
        index = min(int(chance * self.BINS), self.BINS - 1)
        self._count[index] += 1
        self._predicted[index] += chance
        self._accepted[index] += accepted

    @property
    def trials(self) -> int:
        """Verdicts counted."""
        return sum(self._count)

    @property
    def error(self) -> float:
        """Expected calibration error: mean distance of predicted and actual, bins weighted by their verdicts."""
        gaps = (abs(predicted - hits) for predicted, hits in zip(self._predicted, self._accepted, strict=True))
        return sum(gaps) / self.trials if self.trials else 0.0

    def rows(self) -> list[tuple[float, float, int]]:
        """Return (mean predicted, share accepted, verdicts) of every bin that has any."""
        return [
            (predicted / count, hits / count, count)
            for predicted, hits, count in zip(self._predicted, self._accepted, self._count, strict=True)
            if count
        ]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """The ledger after a round.

    Attributes:
        tokens: emitted so far.
        debt_s: decoding time less plain time; negative is a gain.
        allowance_s: the most it may be.
    """

    tokens: int
    debt_s: float
    allowance_s: float


@dataclass(frozen=True, slots=True)
class PlannerReport:
    """What the planner has learned.

    Attributes:
        reliability: by drafter, predicted against actual acceptance.
        ledger: debt after every round, over all requests; the latest rounds only.
        debt_s: seconds lost so far against plain decoding; negative is a gain.
        plain_s: seconds that plain decoding would have taken.
        drift: how many times as long plain rounds take as when they were measured.
        remembered: drafters of which it started with what another policy had learned.
    """

    reliability: Mapping[str, Reliability]
    ledger: Sequence[LedgerEntry]
    debt_s: float
    plain_s: float
    drift: float
    remembered: Sequence[str]
