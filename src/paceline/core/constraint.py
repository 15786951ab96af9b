"""What an answer may say: the contract of grammars, and where an answer is in one.

A constraint is a state of a grammar, and stands at one place of an answer. Before a row is sampled, tokens that may not
follow there are taken out of it, of the target's rows and of a draft model's alike. What may follow depends on the
tokens before it alone, drafted ancestors included. So drafts are judged by the same rows as plain decoding has::

    answer     {" name ": " Ada " }        each node of a draft tree has a state of its own
                └ one state ─┘
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np

from paceline.core.arrays import BoolArray
from paceline.core.errors import ConstraintError
from paceline.core.reasoning import BudgetKeeper, num_common
from paceline.core.tree import ROOT, DraftTree

_KEPT: Final = 256
"""States that are kept at least, the latest ones: more than a draft is deep."""


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


class ConstraintKeeper:
    """Says what may follow after any history of one request.

    An answer keeps to the grammar from its beginning, or from where the reasoning that it begins with is closed: the
    token after a marker of the end is under the grammar, though both may be drafts of one round.

    States along the latest history are kept. Another history is compared with the latest, token by token, and read only
    from where the two part. So what is said depends on the history alone.

    Args:
        start: the state at the beginning.
        num_prompt: tokens of every history that are the prompt.
        reasoning: knows where an answer reasons; ``None`` where none does.
        opening: tokens that open a reasoning at the beginning of an answer, which the grammar does not forbid; empty
            where none can be opened.
    """

    def __init__(
        self, start: Constraint, num_prompt: int, reasoning: BudgetKeeper | None = None, opening: Sequence[int] = ()
    ) -> None:
        self._start = start
        self._num_prompt = num_prompt
        self._reasoning = reasoning
        self._opening = tuple(opening)
        # Length of the history at which the grammar begins, the tokens read from there, and the states after the last
        # ones of these: one more than the tokens that they are of.
        self._begin = num_prompt
        self._read: list[int] = []
        self._states: list[Constraint] = [start]

    def mask(self, history: Sequence[int]) -> BoolArray | None:
        """Return ``[vocab]`` which tokens may follow; ``None`` where an answer reasons, and any may.

        Raises:
            ConstraintError: no token may follow.
        """
        history = _as_list(history)
        opening = self._next_of_opening(history)
        try:
            state = self._state(history)
            if state is None:
                return None
            mask = state.mask()
        except ConstraintError:
            if not opening or len(history) == self._num_prompt:
                raise
            # The marker is begun, which the grammar knows nothing of.
            mask = np.zeros_like(self._start.mask())
        if opening:
            mask = mask.copy()
            mask[opening[0]] = True
        return mask

    def allowed(self, history: Sequence[int]) -> BoolArray | None:
        """Return ``[vocab]`` which tokens may follow, for drafters; ``None`` where any may or none may."""
        try:
            return self.mask(history)
        except ConstraintError:
            return None

    def forced(self, history: Sequence[int]) -> Sequence[int]:
        """Return drafts that spell what has to follow; empty where there is a choice, or any token may follow.

        Where the grammar cannot go on there are none: the walk comes to that place, and ends this request alone.
        """
        history = _as_list(history)
        if self._next_of_opening(history):
            return ()
        try:
            state = self._state(history)
            return () if state is None else state.forced()
        except ConstraintError:
            return ()

    def allowed_nodes(self, tree: DraftTree, history: Sequence[int]) -> list[int]:
        """Return the drafted nodes that may follow, and whose parents may; ``history`` ends with the root."""
        kept = {ROOT}
        for node in range(ROOT + 1, len(tree)):
            parent = tree.parents[node]
            if parent in kept and self._allows([*history, *tree.path_tokens(parent)], tree.token_ids[node]):
                kept.add(node)
        return sorted(kept - {ROOT})

    def _allows(self, history: list[int], token_id: int) -> bool:
        opening = self._next_of_opening(history)
        if opening and token_id == opening[0]:
            return True
        try:
            state = self._state(history)
            return state is None or state.allows([token_id]) == 1
        except ConstraintError:
            return False

    def _next_of_opening(self, history: Sequence[int]) -> Sequence[int]:
        """Return the tokens that are left of the opening of a reasoning; empty where none is being opened."""
        written = len(history) - self._num_prompt
        if written >= len(self._opening) or tuple(history[self._num_prompt :]) != self._opening[:written]:
            return ()
        return self._opening[written:]

    def _state(self, history: list[int]) -> Constraint | None:
        begin = self._num_prompt if self._reasoning is None else self._reasoning.first_end(history)
        if begin is None:
            return None
        known = num_common(self._read, history, begin) if begin == self._begin else 0
        dropped = len(self._read) + 1 - len(self._states)
        if begin != self._begin or known < dropped:
            self._begin, known, dropped = begin, 0, 0
            del self._read[:], self._states[:]
            self._states.append(self._start)
        if known == len(history) - begin:
            return self._states[known - dropped]
        del self._read[known:], self._states[known - dropped + 1 :]
        for token_id in history[begin + known :]:
            state = self._states[-1].fork()
            state.advance(token_id)
            self._read.append(token_id)
            self._states.append(state)
            if len(self._states) > 2 * _KEPT:
                del self._states[:_KEPT]
        return self._states[-1]


def _as_list(history: Sequence[int]) -> list[int]:
    return history if isinstance(history, list) else list(history)
