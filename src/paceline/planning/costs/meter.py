"""What measuring may take, and what it has taken so far."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from paceline.core.clock import Clock
from paceline.core.errors import InputError

Report: TypeAlias = Callable[[float], None]
"""Is told the share that is done, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class ProfilingBudget:
    """How much measuring may take; it stops at whichever comes first. The defaults are for the first load of a model.

    Attributes:
        max_s: seconds, counted from the end of each model's first pass, which reads it from the disk.
        max_passes: passes of both models together, all counted; ``None`` for no limit. It does not hold within
        least_s: seconds. Forty passes of a tiny model are over before its caches are warm, and two or three of a width
            say little where each takes a millisecond.
    """

    max_s: float = 10.0
    max_passes: int | None = 40
    least_s: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.max_s < math.inf:
            raise InputError(f"{self.max_s} seconds to measure in: give more than 0")
        if self.max_passes is not None and self.max_passes < 1:
            raise InputError(f"{self.max_passes} passes to measure by: give at least 1")
        if not 0 <= self.least_s < math.inf:
            raise InputError(f"{self.least_s} seconds to measure in whatever the passes: give 0 or more")

    def less(self, seconds: float) -> ProfilingBudget:
        """Return what is left of it when so many seconds, fewer than there are, went to something else."""
        return dataclasses.replace(self, max_s=self.max_s - seconds)


FIRST_LOAD: Final = ProfilingBudget()
"""What measuring may take when a model is first loaded."""


class Meter:
    """Counts what measuring took, and says when to stop."""

    def __init__(self, clock: Clock, budget: ProfilingBudget, report: Report) -> None:
        self.clock = clock
        self.budget = budget
        self.passes = 0
        self.took_s = 0.0
        self._report = report
        self._started_s = clock.now_s()
        self._latest_s = 0.0

    def start(self) -> None:
        """Count the time from here on; the passes so far count, but say nothing of later ones."""
        self._started_s = self.clock.now_s()
        self._latest_s = 0.0

    def allows(self, share: float, pass_s: float | None = None) -> bool:
        """Return whether another pass, which takes ``pass_s`` or as long as the latest, stays within this share."""
        most = self.budget.max_passes
        elapsed_s = self.clock.now_s() - self._started_s
        if most is not None and self.passes + 1 > most * share and elapsed_s >= self.budget.least_s * share:
            return False
        expected_s = self._latest_s if pass_s is None else pass_s
        return elapsed_s + expected_s <= self.budget.max_s * share

    def passes_for(self, share: float) -> float:
        """Return how many passes this share of the budget is, at least 1."""
        most = self.budget.max_passes
        return math.inf if most is None else max(1.0, most * share)

    @contextlib.contextmanager
    def timing(self, times_s: list[float]) -> Iterator[None]:
        """Time the pass within, add its seconds to the list, and tell about progress."""
        started_s = self.clock.now_s()
        yield
        ended_s = self.clock.now_s()
        times_s.append(ended_s - started_s)
        self._latest_s = ended_s - started_s
        self.passes += 1
        most = self.budget.max_passes
        done = 0.0 if most is None else self.passes / most
        self._report(min(1.0, max(done, (ended_s - self._started_s) / self.budget.max_s)))

    def stop(self) -> None:
        self.took_s = self.clock.now_s() - self._started_s
