"""What asking a drafter brings: tokens beyond what the round was worth without it, a model's passes paid for."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Final

GAIN_MEMORY: Final = 25
"""Latest rounds that count."""

COPIED_ROUNDS: Final = 8
"""What is known of other requests counts as so many rounds of a new one's own."""


@dataclass(slots=True)
class Gain:
    """What asking a drafter adds to a round, in tokens, a model's passes paid for.

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

    @classmethod
    def from_json(cls, learned: Any) -> Gains:
        """Return the gains whose :func:`dataclasses.asdict` this is.

        Raises:
            ValueError: they are none.
            TypeError: likewise.
            OverflowError: likewise.
        """
        gains = cls(**{name: Gain(**gain) for name, gain in learned.items()})
        for gain in (gains.alone, gains.beside):
            gain.mean, gain.variance = float(gain.mean), float(gain.variance)
            is_whole = isinstance(gain.rounds, int) and 0 <= gain.rounds <= GAIN_MEMORY
            if not is_whole or not abs(gain.mean) < math.inf or not 0 <= gain.variance < math.inf:
                raise ValueError(f"{gain} is none")
        return gains

    def copy(self) -> Gains:
        """Return gains that go on from here by themselves."""
        return Gains(*(dataclasses.replace(g, rounds=min(g.rounds, COPIED_ROUNDS)) for g in (self.alone, self.beside)))

    def where(self, is_beside: bool) -> Gain:
        """Return the one of the two that counts here."""
        return self.beside if is_beside else self.alone
