"""Engines whose passes wait for something else than their rows: weights that come from a disk.

However few rows such a pass has, it takes as long as what it waits for; more rows cost nothing until computing them
takes longer than that. The engine says so, and callers count such passes beforehand: a cost profile has time for
thousands of others, and for two of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from paceline.engines.base import Engine


class SlowPasses(Protocol):
    """What an engine with such passes offers beyond the contract."""

    @property
    def floor_s(self) -> float:
        """Seconds of a narrow pass when the model was loaded, waiting included."""
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
        """Make *dry* passes, which do not wait, or waiting ones again.

        What a dry pass computes means nothing and takes its usual time. It is finite, so that nothing else is spoilt by
        what of it stays in the cache.
        """
        ...


def slow_passes(engine: Engine) -> SlowPasses | None:
    """Return :class:`SlowPasses` of an engine; ``None`` where passes do not wait."""
    found: SlowPasses | None = getattr(engine, "slow_passes", None)
    return found


@contextmanager
def dry(engine: Engine) -> Iterator[None]:
    """Make passes without waiting within the block, to time what their rows take.

    Engines without such passes are unchanged.
    """
    slow = slow_passes(engine)
    if slow is None:
        yield
        return
    try:
        slow.set_dry(True)
        yield
    finally:
        slow.set_dry(False)
