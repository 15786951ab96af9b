"""Whether native threads were lost in a fork: a process forked after a pass has none of the threads that passes need.

OpenMP keeps its threads from pass to pass. A fork copies the memory that says they are there, and not the threads, so
the child's first pass would wait for them forever.
"""

from __future__ import annotations

import os
from typing import Final

from paceline.core.errors import CapabilityError


class NativeThreads:
    """Whether this process has had native threads, and whether it lost them in a fork."""

    def __init__(self) -> None:
        self._used = False
        self._lost = False
        if hasattr(os, "register_at_fork"):  # not on Windows, which has no forks
            os.register_at_fork(after_in_child=self._after_fork)

    def use(self) -> None:
        """Note that a pass is made here; raise ``CapabilityError`` where its threads stayed behind in a fork."""
        if self._lost:
            raise CapabilityError(
                "this process was forked after a model had run in its parent, and the threads that run models stayed "
                "there: start processes with multiprocessing.get_context('spawn'), or load models after the fork only"
            )
        self._used = True

    def _after_fork(self) -> None:
        self._lost = self._lost or self._used
        self._used = False


native_threads: Final = NativeThreads()
"""One for all engines of the process, because they share OpenMP's threads."""
