"""A grammar for scripted engines: a finite automaton over token ids, given as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.core.arrays import BoolArray
from paceline.core.errors import ConstraintError

FORBIDDEN: Final = -1
"""Entry of a table where a token may not follow."""


class AutomatonConstraint:
    """Allows what a finite automaton does.

    Args:
        table: ``[states, vocab]`` the state after each token, or :data:`FORBIDDEN`; not changed.
        state: where it stands.
        runs: ``[states]`` what is said to be forced in each state, whether it is or not; by default what the table
            leaves no choice about.
    """

    def __init__(
        self, table: npt.NDArray[np.int64], state: int = 0, runs: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._table = table
        self._state = state
        self._runs = runs

    def fork(self) -> AutomatonConstraint:
        return AutomatonConstraint(self._table, self._state, self._runs)

    def allows(self, token_ids: Sequence[int]) -> int:
        state = self._state
        for count, token_id in enumerate(token_ids):
            state = int(self._table[state, token_id])
            if state == FORBIDDEN:
                return count
        return len(token_ids)

    def advance(self, token_id: int) -> None:
        state = int(self._table[self._state, token_id])
        if state == FORBIDDEN:
            raise ConstraintError(f"token {token_id} may not follow in state {self._state}")
        self._state = state

    def mask(self) -> BoolArray:
        mask: BoolArray = self._table[self._state] != FORBIDDEN
        return mask

    def forced(self) -> Sequence[int]:
        """As many tokens as there are states at most."""
        if self._runs is not None:
            return self._runs[self._state]
        run: list[int] = []
        state = self._state
        while len(run) < len(self._table):
            (allowed,) = np.nonzero(self._table[state] != FORBIDDEN)
            if len(allowed) != 1:
                break
            run.append(int(allowed[0]))
            state = int(self._table[state, run[-1]])
        return run
