"""Time as the loop sees it: injected, so that anything that plans by it can be tested in virtual time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time."""

    def now_s(self) -> float:
        """Return monotonic seconds from an arbitrary start."""
        ...


class WallClock:
    """The machine's own monotonic clock."""

    now_s = staticmethod(time.perf_counter)


class VirtualClock:
    """A clock that moves only when told to; the scripted engine advances it by its cost curve."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def advance(self, duration_s: float) -> None:
        if duration_s < 0:
            raise ValueError(f"time cannot go back by {-duration_s} s")
        self._now_s += duration_s
