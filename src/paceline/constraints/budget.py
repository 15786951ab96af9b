"""How much work one source may take, in steps that are counted: it gets equally far on every machine."""

from __future__ import annotations


class BudgetExceededError(Exception):
    """The steps of a budget are used up."""


class Budget:
    """Steps for work whose extent no size of the source tells.

    Args:
        steps: how many there are; each stands for a microsecond at most.
    """

    def __init__(self, steps: int) -> None:
        self._left = steps

    def take(self, steps: int) -> None:
        """Count steps, best before they are gone; raise where there are not so many left."""
        self._left -= steps
        if self._left < 0:
            raise BudgetExceededError
