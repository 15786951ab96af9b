"""What asking a drafter brings: tokens beyond what the round was worth without it, its own time paid for.

Of one that brings nothing: what the rare looks at its drafts say about whether that is still so.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Final

GAIN_MEMORY: Final = 25
"""Latest rounds that count."""

LOOKS_IN_A_ROW: Final = 3
"""Looks that may follow one that was promising."""

_SHORTEST_STREAK, _LONGEST_STREAK = 2, 8


@dataclass(slots=True)
class Gain:
    """What asking a drafter adds to a round, in tokens, its own time paid for.

    Attributes:
        mean: over the latest rounds in which it was asked.
        variance: likewise.
        rounds: asked so far, up to :data:`GAIN_MEMORY`.
    """

    mean: float = 0.0
    variance: float = 0.0
    rounds: int = 0

    def add(self, gain: float) -> None:
        """Count a round."""
        self.rounds = min(self.rounds + 1, GAIN_MEMORY)
        share = 1.0 / self.rounds
        surprise = gain - self.mean
        self.mean += share * surprise
        self.variance += share * ((1.0 - share) * surprise * surprise - self.variance)

    @property
    def hoped(self) -> float:
        """The mean, and one standard error more: rare large gains look like none for a long time."""
        return self.mean + math.sqrt(self.variance / self.rounds) if self.rounds else 0.0


@dataclass(slots=True)
class Gains:
    """Of one drafter: where nothing of note was drafted before it was asked, and beside something."""

    alone: Gain = field(default_factory=Gain)
    beside: Gain = field(default_factory=Gain)

    def copy(self) -> Gains:
        """Return gains that go on from here by themselves."""
        return Gains(dataclasses.replace(self.alone), dataclasses.replace(self.beside))


@dataclass(slots=True)
class Comeback:
    """Looks at the drafts of a model that was given up, and whether they are reason to look again at once.

    Looks have to be rare, and so few tell little. One that was right against expectation is followed by others, and so
    is a streak of right ones, as long as it lasts; if a streak ends before anything was worth verifying, the next one
    has to be longer.

    Attributes:
        looks_left: times the model may be asked all the same.
    """

    looks_left: int = 0
    _streak: int = 0
    _needed: int = _SHORTEST_STREAK

    def add(self, chance: float, right: bool) -> None:
        """Count the verdict about a draft's first token, which was given ``chance``."""
        if right:
            self._streak += 1
            self.looks_left = LOOKS_IN_A_ROW if chance < 0.5 or self._streak >= self._needed else 0
            return
        if self._streak >= self._needed:
            self._needed = min(self._needed + 1, _LONGEST_STREAK)
        self._streak = self.looks_left = 0

    def confirm(self) -> None:
        """Take note that something of it was worth verifying."""
        self._streak, self._needed = 0, _SHORTEST_STREAK
