"""Probes: drafters that do not seem to pay are asked now and then all the same, to see whether that is still so."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from paceline.planning.auto.exploration import PROBE_SHARE

PROBES_IN_A_ROW: Final = 3
"""Probes that may follow one that was promising."""

_SHORTEST_STREAK: Final = 2
_LONGEST_STREAK: Final = 8


@dataclass(slots=True)
class ProbeBudget:
    """What one request has set aside for probes, in equal parts for each drafter.

    Attributes:
        saved_s: seconds, by drafter; negative where a probe went further than there was for it.
    """

    saved_s: dict[str, float] = field(default_factory=dict)

    def set_aside_s(self, plain_s: float) -> float:
        """Return what plain time brings each drafter."""
        return PROBE_SHARE * plain_s / max(len(self.saved_s), 1)

    def save(self, plain_s: float, most_s: float = math.inf) -> None:
        """Set aside of so much plain time; no drafter keeps more than ``most_s`` of it."""
        saved_s = self.set_aside_s(plain_s)
        for name in self.saved_s:
            self.saved_s[name] = min(self.saved_s[name] + saved_s, most_s)

    def pay(self, name: str, cost_s: float, *, leaving_s: float = 0.0) -> bool:
        """Take what a probe of a drafter costs and return true, if there is so much and ``leaving_s`` besides."""
        if self.saved_s[name] < cost_s + leaving_s:
            return False
        self.saved_s[name] -= cost_s
        return True

    def overdraw(self, name: str, cost_s: float, most_s: float) -> bool:
        """Take what following a probe costs and return true, unless over ``most_s`` is owed; later probes wait."""
        if self.saved_s[name] < -most_s:
            return False
        self.saved_s[name] -= cost_s
        return True


@dataclass(slots=True)
class ReentryTest:
    """Probes of the drafts of a model that was given up, and whether they are reason to probe again at once.

    Probes have to be rare, and so few tell little. One that was right against expectation is followed by others, of
    which one may be wrong; and so is a streak of right ones, as long as it lasts; if a streak ends before anything was
    worth verifying, the next one has to be longer. A long streak is not ended by one that was wrong.

    Attributes:
        probes_left: times the model may be asked all the same.
    """

    probes_left: int = 0
    _streak: int = 0
    _needed: int = _SHORTEST_STREAK
    _forgives: bool = False

    def add(self, chance: float, right: bool) -> None:
        """Count the verdict about a draft's first token, which was given ``chance``."""
        if right:
            is_surprise = chance < 0.5
            self._streak += 1
            self._forgives = self._forgives or is_surprise
            self.probes_left = PROBES_IN_A_ROW if is_surprise or self._streak >= self._needed else 0
            return
        if self._forgives:
            self._forgives, self.probes_left = False, max(self.probes_left, 1)
            return
        if self._streak >= 2 * self._needed:
            self._streak, self.probes_left = self._needed - 1, 1
            return
        if self._streak >= self._needed:
            self._needed = min(self._needed + 1, _LONGEST_STREAK)
        self._streak = self.probes_left = 0

    def confirm(self) -> None:
        """Take note that something of it was worth verifying; where it was right, it may be again."""
        self._needed = _SHORTEST_STREAK
        if self._streak:
            self._streak, self.probes_left = _SHORTEST_STREAK - 1, PROBES_IN_A_ROW
