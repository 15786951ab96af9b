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

_KEPT_AS: Final = {"alone": "solo", "beside": "co_proposal"}
"""Fields by their keys on disk."""


@dataclass(slots=True)
class Gain:
    """What asking a drafter adds to a round, in tokens, a model's passes paid for.

    Attributes:
        mean: over the latest rounds in which it was asked.
        variance: over these rounds.
        rounds: asked so far, up to :data:`GAIN_MEMORY`.
    """

    mean: float = 0.0
    variance: float = 0.0
    rounds: int = 0

    def add(self, gain: float) -> None:
        self.rounds = min(self.rounds + 1, GAIN_MEMORY)
        share = 1.0 / self.rounds
        surprise = gain - self.mean
        self.mean += share * surprise
        self.variance += share * ((1.0 - share) * surprise * surprise - self.variance)

    @property
    def upper_confidence(self) -> float:
        """The mean, and one standard error more: rare large gains look like none for a long time."""
        return self.mean + math.sqrt(self.variance / self.rounds) if self.rounds else 0.0


@dataclass(slots=True)
class Gains:
    """Of one drafter: where nothing of note was drafted before it was asked, and beside a co-proposal."""

    solo: Gain = field(default_factory=Gain)
    co_proposal: Gain = field(default_factory=Gain)

    def to_json(self) -> dict[str, Any]:
        return {key: dataclasses.asdict(getattr(self, name)) for key, name in _KEPT_AS.items()}

    @classmethod
    def from_json(cls, learned: Any) -> Gains:
        """Return the gains that :meth:`to_json` gave; one of several errors where they are none."""
        gains = cls(**{_KEPT_AS[key]: Gain(**gain) for key, gain in learned.items()})
        for gain in (gains.solo, gains.co_proposal):
            gain.mean, gain.variance = float(gain.mean), float(gain.variance)
            is_whole = isinstance(gain.rounds, int) and 0 <= gain.rounds <= GAIN_MEMORY
            if not is_whole or not abs(gain.mean) < math.inf or not 0 <= gain.variance < math.inf:
                raise ValueError(f"{gain} is none")
        return gains

    def copy(self) -> Gains:
        return Gains(
            *(dataclasses.replace(g, rounds=min(g.rounds, COPIED_ROUNDS)) for g in (self.solo, self.co_proposal))
        )

    def where(self, has_co_proposal: bool) -> Gain:
        """Return the one of the two that counts here."""
        return self.co_proposal if has_co_proposal else self.solo
