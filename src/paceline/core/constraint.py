"""What an answer may say: the contract of grammars, and where an answer is in one.

A constraint is a state of a grammar, and stands at one place of an answer. Before a row is sampled, tokens that may not
follow there are taken out of it, of the target's rows and of a draft model's alike. What may follow depends on the
tokens before it alone, drafted ancestors included. So drafts are judged by the same rows as plain decoding has::

    answer     {" name ": " Ada " }        each node of a draft tree has a state of its own
                └ one state ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.arrays import BoolArray


class Constraint(Protocol):
    """A state of a grammar over the token ids of one vocabulary."""

    def fork(self) -> Constraint:
        """Return the same state, to be moved on by itself."""
        ...

    def allows(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after the other; the state stays where it is."""
        ...

    def advance(self, token_id: int) -> None:
        """Move the state on by a token.

        Raises:
            ConstraintError: the token may not follow here, or the grammar takes too much time or memory.
        """
        ...

    def mask(self) -> BoolArray:
        """Return ``[vocab]`` which tokens may follow: borrowed, and read-only.

        End-of-generation tokens are among them where the answer may be over. Where it has to be they are alone.

        Raises:
            ConstraintError: the grammar takes too much time or memory.
        """
        ...

    def forced(self) -> Sequence[int]:
        """Return tokens that spell what has to follow, as far as that is certain; empty where there is a choice.

        Others may spell the same bytes, so these are drafts, and the model is asked.
        """
        ...
