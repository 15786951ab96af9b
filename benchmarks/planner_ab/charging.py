"""A policy in a replay whose own time counts, and a machine that changes in the middle of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

from benchmarks.stopwatch import DROPPED, PLAIN, SILENT, VERIFIED, Watched
from paceline.core.clock import VirtualClock
from paceline.core.request import Request
from paceline.drafters.base import DraftBudget
from paceline.lab.replaying.recording import Recording
from paceline.planning.base import Policy, RoundRecord

SLOWER: Final = 1.3
"""Factor on every pass of a machine that became slower."""

OwnTimes: TypeAlias = Mapping[str, Mapping[int, float]]
"""Microseconds that deciding a round takes, and learning from it: by what becomes of its drafts, and by requests."""

NO_TIME: Final[OwnTimes] = {kind: {1: 0.0} for kind in (PLAIN, SILENT, DROPPED, VERIFIED)}


def own_times_of(plain: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, OwnTimes]:
    """Return own times by models, read from JSON, whose keys are strings."""
    return {
        models: {kind: {int(count): us for count, us in by_requests.items()} for kind, by_requests in table.items()}
        for models, table in plain.items()
    }


class MidwayDrift:
    """A machine whose passes take :data:`SLOWER` times as long from the middle of one answer to that of the next."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._middles = [len(recording.token_ids) // 2 for recording in recordings]
        self._begun = 0
        self._is_past = False

    def begin(self) -> None:
        self._begun += 1
        self._is_past = False

    def reached(self, num_output: int) -> None:
        """Take note of how long the answer is by now."""
        self._is_past = num_output >= self._middles[self._begun - 1]

    def __call__(self, now_s: float) -> float:
        """Return the factor; where an answer is, says it, not the time."""
        changes = self._begun - 1 + self._is_past
        return SLOWER if changes % 2 else 1.0


class Charged(Watched):
    """A policy whose decisions move the clock, by ``factor`` times what they take in a replay."""

    def __init__(
        self, policy: Policy, clock: VirtualClock, own_times: OwnTimes, factor: float, drift: MidwayDrift | None = None
    ) -> None:
        super().__init__(policy)
        self._clock = clock
        self._own_times = own_times
        self._unit_s = factor * 1e-6
        self._drift = drift
        self._requests = 1
        self._charged_us = 0.0

    def begin(self, request: Request) -> None:
        if self._drift is not None:
            self._drift.begin()
        super().begin(request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        self._requests, self._charged_us = len(requests), 0.0
        return super().budgets(requests)

    def observe(self, record: RoundRecord) -> None:
        # What learning takes was charged before.
        if self._drift is not None and record.requests:
            self._drift.reached(record.requests[0].num_output)
        super().observe(record)

    def _became(self, kind: str) -> None:
        """Charge what a round of this kind takes, less what it was charged already."""
        by_requests = self._own_times[kind]
        most = max((count for count in by_requests if count <= self._requests), default=min(by_requests))
        further_us = by_requests[most] - self._charged_us
        if further_us > 0:
            self._clock.advance(further_us * self._unit_s)
            self._charged_us = by_requests[most]
