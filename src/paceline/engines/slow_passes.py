"""Engines whose passes wait for something else than their rows: weights that come from a disk.

However few rows such a pass has, it takes as long as what it waits for; more rows cost nothing until computing them
takes longer than that. An engine that knows of it says so, so that such passes are counted before they are made: a
profile, say, has time for thousands of others, and for two of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from paceline.engines.base import Engine


class SlowPasses(Protocol):
    """What an engine says of its passes beyond the contract, where these wait."""

    @property
    def floor_s(self) -> float:
        """Seconds that a narrow pass took when the model was loaded, what it waited for included."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds that passes have waited by now."""
        ...

    @property
    def pass_share(self) -> float:
        """Share of the pass under way that is done; 0 between passes. Any thread may ask."""
        ...

    def set_dry(self, is_dry: bool) -> None:
        """Let passes go on without waiting, or wait again. What they compute means nothing then, but takes its time.

        It is finite, so that nothing else is spoilt by what of it stays in the cache.
        """
        ...


def slow_passes(engine: Engine) -> SlowPasses | None:
    """Return what an engine says of passes that wait; ``None`` where they do not."""
    found: SlowPasses | None = getattr(engine, "slow_passes", None)
    return found


@contextmanager
def dry(engine: Engine) -> Iterator[None]:
    """Make passes without waiting within the block, to see what their rows take. Of others, they are as always."""
    slow = slow_passes(engine)
    if slow is None:
        yield
        return
    try:
        slow.set_dry(True)
        yield
    finally:
        slow.set_dry(False)
