"""A compiled grammar, and the state in it at which an answer is.

States of one grammar share its automata within llguidance, which grow as they are used. Where one answer takes too
much of them, the states of all others fail too. These go on with new automata: a state knows the tokens that led to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from paceline.constraints.llguidance_errors import is_resource_error, one_line_reason
from paceline.core.arrays import BoolArray
from paceline.core.deep_stack import with_deep_stack
from paceline.core.errors import ConstraintError
from paceline.core.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MAX_FORCED = 128
"""Tokens that are told at once of what has to follow."""

_MAX_ALIKE = 256
"""Tokens that may follow where all of them could begin with the same: no token has so many beginnings."""

_SLOW_S = 0.05
"""Seconds of processor time; a grammar where it takes longer to find what has to follow is not asked again."""

_FEW = 4
"""Tokens for which that is looked for, however long it takes."""

_STRAYED = 8
"""Tokens for which nothing is told of what has to follow, after a model began to spell it by others: it goes on so."""

_MAX_S = 1.0
"""Seconds of processor time that an answer may take above what its states are due."""

_STATE_S = 10e-3
"""Seconds of processor time that each state of an answer is due: more than masks of the largest schemas take."""

_TOKEN_S = 50e-9
"""Seconds that it is due for each token of the vocabulary: five times what strings of JSON take."""

_Path: TypeAlias = "tuple[_Path, int] | None"
"""The tokens that led to a state, the last one first: states that were one share what came before."""


class _TimeAllowance:
    """The processor time that the states of one answer may take together: other answers wait meanwhile.

    No count of llguidance's tells how long a mask took, so that the limits are far from what honest grammars take.
    """

    __slots__ = ("_left_s", "_state_s")

    def __init__(self, size: int) -> None:
        self._state_s = _STATE_S + size * _TOKEN_S
        self._left_s = _MAX_S

    @property
    def is_spent(self) -> bool:
        return self._left_s < 0

    def earn(self) -> None:
        self._left_s = min(self._left_s + self._state_s, _MAX_S)

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Take what the work within takes of this thread's time."""
        began_s = time.thread_time()
        try:
            yield
        finally:
            self._left_s -= time.thread_time() - began_s


class CompiledGrammar:
    """A compiled grammar. Any thread may use it.

    Args:
        name: what the grammar is to its user, for messages.
        vocabulary: the model's.
        spelled: returns tokens of bytes that go on with a text.
        build: makes llguidance's start state, with automata of its own. It is called here, and in a thread with much
            stack later.

    Attributes:
        size: number of token ids.
        is_slow: whether finding what has to follow took long, or failed.
        spoiled: the last generation of automata that a state took too much of; none at first.
    """

    def __init__(
        self,
        name: str,
        vocabulary: Vocabulary,
        spelled: Callable[[bytes], list[int]],
        build: Callable[[], LLMatcher],
    ) -> None:
        self.name = name
        self.size = vocabulary.size
        self.token_bytes = vocabulary.token_bytes
        self.spelled = spelled
        self.is_slow = False
        self.spoiled = -1
        self._build = build
        self._lock = threading.Lock()
        self._matcher = build()
        self._generation = 0

    def start(self) -> GrammarConstraint:
        allowance = _TimeAllowance(self.size)
        return GrammarConstraint(self, allowance, *self.fresh(allowance))

    @property
    def is_spoiled(self) -> bool:
        """Whether the next state needs new automata."""
        return self._generation <= self.spoiled

    def fresh(self, allowance: _TimeAllowance) -> tuple[LLMatcher, int]:
        """Return a start state with automata that are not spoiled, paid for by ``allowance``, and their generation."""
        with self._lock:
            if self.is_spoiled:
                self._matcher = with_deep_stack(lambda: self._build_timed(allowance))
                self._generation += 1
            return self._matcher.deep_copy(), self._generation

    def _build_timed(self, allowance: _TimeAllowance) -> LLMatcher:
        with allowance.spending():
            return self._build()

    def spoil(self, generation: int) -> None:
        with self._lock:
            self.spoiled = max(self.spoiled, generation)

    def excess(self) -> ConstraintError:
        return ConstraintError(
            f"{self.name} takes too much time or memory at this place of the answer: give one with fewer alternatives, "
            "optional parts and counted repetitions"
        )


class GrammarConstraint:
    """The :class:`~paceline.core.constraint.Constraint` of a compiled grammar.

    A state that raised is of no further use. Each may be in another thread.

    Args:
        allowance: processor time of the whole answer.
        matcher: where in the grammar the answer is; nobody else may move it.
        generation: of the matcher's automata.
    """

    __slots__ = ("_allowance", "_forced", "_generation", "_grammar", "_mask", "_matcher", "_path", "_silent")

    def __init__(
        self, grammar: CompiledGrammar, allowance: _TimeAllowance, matcher: LLMatcher, generation: int
    ) -> None:
        self._grammar = grammar
        self._allowance = allowance
        self._matcher = matcher
        self._generation = generation
        self._path: _Path = None
        self._mask: BoolArray | None = None
        self._forced: tuple[int, ...] | None = None
        # Tokens for which nothing is told yet.
        self._silent = 0

    def fork(self) -> GrammarConstraint:
        with self._allowance.spending():
            matcher = self._matcher.deep_copy()
        other = GrammarConstraint(self._grammar, self._allowance, matcher, self._generation)
        other._path, other._mask, other._forced = self._path, self._mask, self._forced
        other._silent = self._silent
        return other

    def allows(self, token_ids: Sequence[int]) -> int:
        with self._allowance.spending():
            return self._num_allowed(token_ids)

    def _num_allowed(self, token_ids: Sequence[int]) -> int:
        size = self._grammar.size
        known = next((i for i, token_id in enumerate(token_ids) if not 0 <= token_id < size), len(token_ids))
        if not known:
            return 0
        self._keep_up()
        return self._matcher.validate_tokens(list(token_ids[:known]))

    def advance(self, token_id: int) -> None:
        if not 0 <= token_id < self._grammar.size or (self._mask is not None and not self._mask[token_id]):
            raise self._rejection_error(token_id)
        self._allowance.earn()
        self._check_allowance()
        with self._allowance.spending():
            self._keep_up()
            if not self._matcher.consume_token(token_id) and not (
                self._recover() and self._matcher.consume_token(token_id)
            ):
                raise self._state_error() or self._rejection_error(token_id)
        self._path = self._path, token_id
        self._mask = None
        self._silent = max(self._silent - 1, 0)
        if self._forced and self._forced[0] != token_id:
            self._silent = _STRAYED
        # What was forced is so still, one token less, and finding out again would take as long as it is.
        self._forced = self._forced[1:] or None if self._forced and self._forced[0] == token_id else None

    def mask(self) -> BoolArray:
        """Return ``[size]`` which tokens may follow, read-only; an error where none may."""
        if self._mask is None:
            self._check_allowance()
            with self._allowance.spending():
                self._keep_up()
                mask = _compute_mask(self._matcher, self._grammar.size)
                if self._matcher.is_error() and self._recover():
                    mask = _compute_mask(self._matcher, self._grammar.size)
            if self._matcher.is_error() or not mask.any():
                raise self._state_error() or ConstraintError(
                    f"no token of this model's vocabulary can go on with an answer in {self._grammar.name}"
                )
            mask.flags.writeable = False
            self._mask = mask
        return self._mask

    def forced(self) -> Sequence[int]:
        """Return tokens that spell what has to follow; empty where there is a choice, or the model spells otherwise."""
        if self._silent:
            return ()
        if self._forced is None:
            with self._allowance.spending():
                self._forced = () if self._grammar.is_slow else self._find_forced()
        return self._forced

    def _find_forced(self) -> tuple[int, ...]:
        self._keep_up()
        began_s = time.thread_time()
        ahead = self._matcher.deep_copy()
        begun = self._begin_forced(ahead, began_s + _SLOW_S)
        if begun is not None:
            found = self._grammar.spelled(begun)[:_MAX_FORCED]
        else:
            ahead = self._matcher.deep_copy()
            # Masks look for no such bytes (see grammars.py), and tokens are made of those that were looked for.
            ahead.compute_ff_bytes()
            found = ahead.compute_ff_tokens()[:_MAX_FORCED]
        if self._spoils(ahead) or ahead.is_error() or time.thread_time() - began_s > _SLOW_S:
            self._grammar.is_slow = True
        return tuple(found[: self._num_allowed(found)])

    def _begin_forced(self, ahead: LLMatcher, until_s: float) -> bytes | None:
        """Return the beginning of what has to follow, if that is long; ``None`` where it has an end soon.

        llguidance looks for all of it, be it millions of bytes, and no other thread of Python's runs meanwhile.
        """
        found = bytearray()
        for step in range(_MAX_FORCED):
            may_follow = np.flatnonzero(_compute_mask(ahead, self._grammar.size)).tolist()
            if ahead.is_error():
                return b""
            if step > _FEW and time.thread_time() > until_s:
                break
            if not 0 < len(may_follow) <= _MAX_ALIKE:
                return None
            texts = {self._grammar.token_bytes(token_id): token_id for token_id in may_follow}
            least, most = min(texts), max(texts)
            # What begins the first and the last of them begins all that are between.
            certain = [text for text in texts if text and least.startswith(text) and most.startswith(text)]
            if not certain:
                return None
            found += max(certain, key=len)
            ahead.consume_token(texts[max(certain, key=len)])
        return bytes(found)

    def _check_allowance(self) -> None:
        if self._allowance.is_spent:
            raise self._grammar.excess()

    def _keep_up(self) -> None:
        """Go on with new automata if another state took too much of those there were."""
        if self._generation <= self._grammar.spoiled:
            self._renew()

    def _recover(self) -> bool:
        """Whether the state goes on with new automata, if it failed as too much was taken of those there were."""
        return self._spoils(self._matcher) and self._renew() and not self._spoils(self._matcher)

    def _renew(self) -> bool:
        self._matcher, self._generation = self._grammar.fresh(self._allowance)
        token_ids: list[int] = []
        path = self._path
        while path is not None:
            path, token_id = path
            token_ids.append(token_id)
        return not token_ids or self._matcher.consume_tokens(token_ids[::-1])

    def _spoils(self, matcher: LLMatcher) -> bool:
        """Whether a matcher of these automata failed as too much was taken of them, which is noted."""
        if "lexer error" not in matcher.get_error():
            return False
        self._grammar.spoil(self._generation)
        return True

    def _rejection_error(self, token_id: int) -> ConstraintError:
        return ConstraintError(f"token {token_id} is not allowed here by {self._grammar.name}")

    def _state_error(self) -> ConstraintError | None:
        """Return the error of a state that failed by itself, and not by what it was given."""
        error = self._matcher.get_error()
        self._spoils(self._matcher)
        if is_resource_error(error):
            return self._grammar.excess()
        if not error or "token" in error or "NoExtension" in error:
            return None
        return ConstraintError(f"an answer in {self._grammar.name} cannot go on: {one_line_reason(error)}")


def _compute_mask(matcher: LLMatcher, size: int) -> BoolArray:
    words = np.zeros((size + 31) // 32, dtype=np.int32)
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return np.unpackbits(words.view(np.uint8), count=size, bitorder="little").view(np.bool_)
