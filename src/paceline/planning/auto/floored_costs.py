"""Costs of passes that wait for something else than their rows, corrected by the rounds as they go by."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from paceline.planning.auto.online_costs import AS_MEASURED, OnlineCosts
from paceline.planning.base import FlooredRoundCosts
from paceline.planning.costs.profile import DriftTracker

_WAITED_SHARE: Final = 0.05
"""Of a round's time, from which on it was what the pass waited for that took it, and not a lock on the way."""

_WINDOW: Final = 5
"""Latest rounds by which it is judged how long passes wait."""


class FlooredCosts(OnlineCosts):
    """A cost profile with a floor: a pass takes what it waits for, or what its rows take if that is longer.

    The two are followed apart, as a disk and a processor become slower and faster for reasons of their own: a round
    that waited tells both what it waited for, which is all of it, and what its rows took, which is the rest. What plain
    rounds take is told by every round that waited, so none has to be made to find out.

    Args:
        measured: such as a :class:`~paceline.planning.costs.profile.CostProfile`, with a floor.
    """

    def __init__(self, measured: FlooredRoundCosts) -> None:
        super().__init__(measured.without_floor())
        self._measured_floor_s = measured.floor_s
        self._floor_drift = DriftTracker(window=_WINDOW)
        self._floor_ratios: deque[float] = deque((1.0 - AS_MEASURED, 1.0 + AS_MEASURED), maxlen=_WINDOW)

    @property
    def floor_s(self) -> float:
        """Seconds that passes take now, however few their rows are."""
        return self._measured_floor_s * self._floor_drift.factor

    @property
    def drift(self) -> float:
        """How many times as long plain rounds take now as when they were measured."""
        return self._floor_drift.factor if self.tells_plain else super().drift

    @property
    def plain_bounds(self) -> tuple[float, float]:
        """Factors from what a plain round should take to the least and the most of the latest rounds that waited."""
        if not self.tells_plain:
            return super().plain_bounds
        factor = self._floor_drift.factor
        return min(1.0, min(self._floor_ratios) / factor), max(1.0, max(self._floor_ratios) / factor)

    @property
    def tells_plain(self) -> bool:
        """Rounds with drafts tell what plain ones take where it is what these wait for."""
        return super()._rounds_s((1,), 0, 1)[0] < self.floor_s

    @property
    def is_doubtful(self) -> bool:
        """Nothing is in doubt that a plain round could say and others cannot."""
        return not self.tells_plain and super().is_doubtful

    def observe_round(self, rows: int, context: int, requests: int, actual_s: float, waited_s: float = 0.0) -> None:
        """Learn from a round of the target that took ``actual_s``, of which it waited ``waited_s``."""
        if actual_s > 0 and (waited_s > _WAITED_SHARE * actual_s or actual_s < self.floor_s):
            self._floor_drift.observe(self._measured_floor_s, actual_s)
            self._floor_ratios.append(actual_s / self._measured_floor_s)
        super().observe_round(rows, context, requests, actual_s - waited_s)

    def observe_prompt(self, rows: int, context: int, actual_s: float, waited_s: float = 0.0) -> None:
        """Learn from a pass that read nothing but prompt; what it waited says nothing of its rows."""
        super().observe_prompt(rows, context, actual_s - waited_s)

    def _rounds_s(self, widths: Iterable[int], context: int, requests: int) -> list[float]:
        floor_s = self.floor_s
        return [max(seconds, floor_s) for seconds in super()._rounds_s(widths, context, requests)]
