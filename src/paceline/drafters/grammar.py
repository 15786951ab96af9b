"""Drafting what a request's constraint forces, and how this model goes on where the constraint leaves little choice.

A grammar knows the bytes that have to follow, not the tokens that the model would spell them by; and between two names
it allows white space that the model writes as it always does. Both are drafts like all others: verified, and right for
as long as the model keeps to its tokenizer and to its habits::

    answer     {"name":·"Ada",·"age":·
    drafted     ···^^^^^^^   ^^^^^^^^^    forced: name, age      by habit: ":, ·", ":, ·

A place is narrow where a small part of the vocabulary may follow. What the model said in narrow places is counted, of
each answer and of all answers; in other places this drafter has nothing to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from paceline.core.arrays import BoolArray
from paceline.core.request import Request
from paceline.core.sampling import RowSampler
from paceline.core.tree import ROOT, Evidence
from paceline.drafters.base import Commit, DraftJob

NAME: Final = "grammar"
"""Name of this drafter in reports."""

_NARROW: Final = 0.25
"""Share of the vocabulary that may follow in a narrow place at most. Within a text nearly all of it may."""

_FEW: Final = 32
"""Tokens that are few in any vocabulary."""

_KEPT: Final = 1024
"""Tokens of which it is kept what followed them, the latest ones."""


class Guess(NamedTuple):
    """A token that may follow by habit.

    Attributes:
        token_id: the token.
        times: how often it was said there.
        total: how often any was said there that may follow now.
        after: whether ``there`` is after the same token; else it is in any narrow place.
    """

    token_id: int
    times: int
    total: int
    after: bool

    @property
    def evidence(self) -> Evidence:
        """What is known of it; one unseen token is always possible, by Laplace's rule."""
        return Evidence(self.times / (self.total + 1), match_length=int(self.after), count=self.times)


class Habits:
    """What was said in narrow places: after each token, and altogether."""

    def __init__(self) -> None:
        self._after: dict[int, dict[int, int]] = {}
        self._altogether: dict[int, int] = {}

    def add(self, before: int, token_id: int) -> None:
        # Latest last: the oldest is evicted first, and among equals the latest is guessed.
        followers = self._after.pop(before, {})
        self._after[before] = followers
        for counts in (followers, self._altogether):
            counts[token_id] = counts.pop(token_id, 0) + 1
            if len(counts) > _KEPT:
                del counts[next(iter(counts))]
        if len(self._after) > _KEPT:
            del self._after[next(iter(self._after))]

    def after(self, before: int, allowed: BoolArray) -> Guess | None:
        """Return which of the tokens that may follow now did so most often after this one; ``None`` if none did."""
        return _likeliest(self._after.get(before, {}), allowed, after=True)

    def altogether(self, allowed: BoolArray) -> Guess | None:
        """Return which of the tokens that may follow now was said most often in narrow places; ``None`` if none was."""
        return _likeliest(self._altogether, allowed, after=False)


class GrammarDrafter:
    """Proposes what a constraint forces, and what its habits are in between; nothing for requests without one."""

    name = NAME
    end_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self._of_all = Habits()
        self._own: dict[int, Habits] = {}

    def begin(self, request: Request) -> None:
        self._own[request.id] = Habits()

    def unread(self, request: Request) -> None:
        """There is no model that would have to read."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Add a chain to each tree, as long as there is something to propose."""
        for job in jobs:
            history, node = list(job.request.token_ids), ROOT
            most = len(history) + job.budget.max_depth
            while len(history) < most:
                proposed = self._next(job.request, history)[: most - len(history)]
                for token_id, evidence in proposed:
                    if evidence.probability is not None and evidence.probability < job.budget.min_probability:
                        proposed = []
                        break
                    node = job.tree.add(node, token_id, self.name, evidence)
                    history.append(token_id)
                if not proposed:
                    break
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """Count what was said in narrow places."""
        history, sampler = request.token_ids, request.verifier.sampler
        for length in range(len(history) - len(commit.token_ids), len(history)):
            if _narrow(sampler, history[:length]) is not None:
                for habits in (self._own[request.id], self._of_all):
                    habits.add(history[length - 1], history[length])

    def end(self, request: Request) -> None:
        self._own.pop(request.id, None)

    def close(self) -> None:
        self._own.clear()
        self._of_all = Habits()

    def _next(self, request: Request, history: list[int]) -> list[tuple[int, Evidence]]:
        """Return what to propose after a history: all that is forced, or one habitual token."""
        sampler = request.verifier.sampler
        allowed = _narrow(sampler, history)
        if allowed is None:
            return []
        forced = sampler.drafts(history)
        if forced:
            return [(token_id, Evidence(match_length=len(forced))) for token_id in forced]
        if np.count_nonzero(allowed) == 1:
            return [(int(allowed.argmax()), Evidence(match_length=1))]
        own, of_all = self._own[request.id], self._of_all
        guess = (
            own.after(history[-1], allowed)
            or of_all.after(history[-1], allowed)
            or own.altogether(allowed)
            or of_all.altogether(allowed)
        )
        return [(guess.token_id, guess.evidence)] if guess is not None else []


def _narrow(sampler: RowSampler, history: Sequence[int]) -> BoolArray | None:
    """Return ``[vocab]`` which tokens may follow a history; ``None`` where the place is not narrow, or none may."""
    allowed = sampler.allowed(history)
    if allowed is None:
        return None
    return allowed if 0 < np.count_nonzero(allowed) <= max(_NARROW * len(allowed), _FEW) else None


def _likeliest(counts: dict[int, int], allowed: BoolArray, *, after: bool) -> Guess | None:
    best, most, total = -1, 0, 0
    for token_id, count in counts.items():
        if allowed[token_id]:
            total += count
            if count >= most:
                best, most = token_id, count
    return Guess(best, most, total, after) if most else None
