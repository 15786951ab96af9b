"""A place in a grammar, as llguidance keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.constraints.reasons import is_excess, reason_of
from paceline.core.arrays import BoolArray
from paceline.core.errors import ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GuidedConstraint:
    """The :class:`~paceline.core.constraint.Constraint` of a compiled grammar.

    A state that raised is of no further use. States share nothing that changes, so each may be in another thread.

    Args:
        matcher: where in the grammar the answer is; nobody else may move it.
        name: what the grammar is to its user, for messages.
        size: number of token ids.
        mask: ``[size]`` which tokens may follow, where that is known.
    """

    __slots__ = ("_mask", "_matcher", "_name", "_size")

    def __init__(self, matcher: LLMatcher, *, name: str, size: int, mask: BoolArray | None = None) -> None:
        self._matcher = matcher
        self._name = name
        self._size = size
        self._mask = mask

    def fork(self) -> GuidedConstraint:
        """Return the same state, to be moved on by itself."""
        return GuidedConstraint(self._matcher.deep_copy(), name=self._name, size=self._size, mask=self._mask)

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
        # Of a copy, as what takes too long to find out leaves a state that is of no further use.
        return self._matcher.deep_copy().compute_ff_tokens()

    def _failure(self, refused: str) -> ConstraintError:
        error = self._matcher.get_error()
        if is_excess(error):
            return ConstraintError(
                f"{self._name} takes too much time or memory at this place of the answer: give one with fewer "
                "alternatives, optional parts and counted repetitions"
            )
        # What is refused for no such reason has no more to it than that.
        return ConstraintError(refused if not error or "token" in error else f"{refused}: {reason_of(error)}")
