"""Back-off: one decision not to draft that stands for up to 32 plain rounds of a single request.

Where nothing is worth drafting, nothing has to be decided until the next probe of a draft is due. With passes of a
millisecond, deciding and booking every round anew would cost more than such probes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.planning.base import RoundRecord

MAX_BACKOFF_ROUNDS: Final = 32
"""Rounds after which a decision is made again in any case: what a request saw longer ago says less than what others
did, and it may be worth asking again."""


@dataclass(slots=True)
class Backoff:
    """Rounds that are booked together.

    Attributes:
        longest: rounds that it may take.
        rounds: done so far, the one that was decided about included.
        tokens: emitted by these rounds.
        actual_s: seconds of these rounds.
        plain_s: seconds of these rounds without deciding.
    """

    longest: int
    rounds: int = 0
    tokens: int = 0
    actual_s: float = 0.0
    plain_s: float = 0.0

    @classmethod
    def until(cls, missing_s: float, saved_s: float) -> Backoff | None:
        """Return a back-off for as many rounds as save ``missing_s`` at ``saved_s`` each; ``None`` if not worth one."""
        longest = int(min(missing_s / saved_s, MAX_BACKOFF_ROUNDS))
        return cls(longest) if longest > 1 else None

    @property
    def over(self) -> bool:
        """Whether something has to be decided again."""
        return self.rounds >= self.longest

    def add(self, record: RoundRecord) -> None:
        """Take note of a round; of one that a prompt shared, the time says nothing."""
        if record.prefill_rows:
            return
        self.rounds += 1
        self.tokens += record.emitted[0]
        self.actual_s += record.round_s
        self.plain_s += record.round_s - record.draft_s
