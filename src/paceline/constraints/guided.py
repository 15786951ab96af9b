"""A place in a grammar, as llguidance keeps it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.constraints.reasons import is_excess, reason_of
from paceline.core.arrays import BoolArray
from paceline.core.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher


_MOST_FORCED = 128
"""Tokens that are told at once of what has to follow."""

_SLOW_S = 0.05
"""Seconds; a grammar where it takes longer to find what has to follow is not asked again."""


@dataclass(slots=True)
class Forcing:
    """Whether what has to follow is looked for: one for all states of a grammar, as it is drafts alone."""

    is_slow: bool = False


class GuidedConstraint:
    """The :class:`~paceline.core.constraint.Constraint` of a compiled grammar.

    A state that raised is of no further use. Each may be in another thread.

    Args:
        matcher: where in the grammar the answer is; nobody else may move it.
        name: what the grammar is to its user, for messages.
        size: number of token ids.
        mask: ``[size]`` which tokens may follow, where that is known.
        forced: what has to follow, where that is known.
        forcing: of the grammar; ``None`` for its first state.
    """

    __slots__ = ("_forced", "_forcing", "_mask", "_matcher", "_name", "_size")

    def __init__(
        self,
        matcher: LLMatcher,
        *,
        name: str,
        size: int,
        mask: BoolArray | None = None,
        forced: tuple[int, ...] | None = None,
        forcing: Forcing | None = None,
    ) -> None:
        self._matcher = matcher
        self._name = name
        self._size = size
        self._mask = mask
        self._forced = forced
        self._forcing = forcing or Forcing()

    def fork(self) -> GuidedConstraint:
        """Return the same state, to be moved on by itself."""
        return GuidedConstraint(
            self._matcher.deep_copy(),
            name=self._name,
            size=self._size,
            mask=self._mask,
            forced=self._forced,
            forcing=self._forcing,
        )

    def allows(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after the other."""
        known = next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < self._size), len(token_ids))
        return self._matcher.validate_tokens(list(token_ids[:known])) if known else 0

    def advance(self, token_id: int) -> None:
        """Move the state on by a token.

        Raises:
            ConstraintError: the token may not follow here, or the grammar takes too much time or memory.
        """
        if not 0 <= token_id < self._size or (self._mask is not None and not self._mask[token_id]):
            raise ConstraintError(f"token {token_id} may not follow here in an answer that keeps to {self._name}")
        self._mask = None
        # What was forced is so still, one token less, and finding out again would take as long as it is.
        self._forced = self._forced[1:] or None if self._forced and self._forced[0] == token_id else None
        if not self._matcher.consume_token(token_id):
            raise self._failure(f"token {token_id} may not follow here in an answer that keeps to {self._name}")

    def mask(self) -> BoolArray:
        """Return ``[size]`` which tokens may follow, read-only.

        Raises:
            ConstraintError: no token may, or the grammar takes too much time or memory.
        """
        if self._mask is None:
            words = np.zeros((self._size + 31) // 32, dtype=np.int32)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            mask = np.unpackbits(words.view(np.uint8), count=self._size, bitorder="little").view(np.bool_)
            if self._matcher.is_error() or not mask.any():
                raise self._failure(f"no token of this model's vocabulary can go on with an answer in {self._name}")
            mask.flags.writeable = False
            self._mask = mask
        return self._mask

    def forced(self) -> Sequence[int]:
        """Return tokens that spell what has to follow; empty where there is a choice."""
        if self._forced is None:
            self._forced = () if self._forcing.is_slow else self._find_forced()
        return self._forced

    def _find_forced(self) -> tuple[int, ...]:
        began = time.perf_counter()
        # Of a copy, as what takes too long to find out leaves a state that is of no further use.
        ahead = self._matcher.deep_copy()
        # Masks look for no such bytes (see grammars.py), and tokens are made of those that were looked for.
        ahead.compute_ff_bytes()
        found = ahead.compute_ff_tokens()[:_MOST_FORCED]
        self._forcing.is_slow = time.perf_counter() - began > _SLOW_S
        return tuple(found[: self.allows(found)])

    def _failure(self, refused: str) -> ConstraintError:
        error = self._matcher.get_error()
        if is_excess(error):
            return ConstraintError(
                f"{self._name} takes too much time or memory at this place of the answer: give one with fewer "
                "alternatives, optional parts and counted repetitions"
            )
        # What is refused for no such reason has no more to it than that.
        return ConstraintError(refused if not error or "token" in error else f"{refused}: {reason_of(error)}")
