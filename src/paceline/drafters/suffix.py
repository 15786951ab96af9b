"""Drafting from a suffix automaton over a request's own text: the longest match, however long, with counts.

The automaton (Blumer et al. 1985) holds every substring of prompt and answer in linear space and grows by one token in
amortised constant time. Its suffix link from the state of the whole text leads to the longest suffix that occurred
before: what followed then is proposed now. Counts of what followed make the choice between continuations, and are the
evidence that policies weigh (compare SAM decoding, arXiv 2411.10666, which has no counts).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.core.tree import ROOT, Evidence
from paceline.drafters.base import Commit, DraftJob

_ROOT_STATE = 0
"""State of the empty suffix."""
COUNTED_LINKS = 4
"""Suffix links along which a new token is counted: longer matches decide, so a few suffice, and time stays bounded."""


class SuffixAutomaton:
    """All substrings of a growing token sequence, with counts of what followed them.

    States are integers. ``match`` is the state of the longest suffix of the text that occurred earlier in it, and
    ``match_length`` its length; 0 if the last token is new.
    """

    __slots__ = ("_counts", "_last", "_length", "_link", "_next", "match", "match_length")

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._counts: list[dict[int, int]] = [{}]
        self._last = _ROOT_STATE
        self.match = _ROOT_STATE
        self.match_length = 0

    def append(self, token_id: int) -> None:
        self._count(token_id)
        current = self._new_state(self._length[self._last] + 1, {}, {})
        state = self._last
        while state != -1 and token_id not in self._next[state]:
            self._next[state][token_id] = current
            state = self._link[state]
        if state == -1:
            self._link[current] = _ROOT_STATE
        else:
            target = self._next[state][token_id]
            if self._length[state] + 1 == self._length[target]:
                self._link[current] = target
            else:
                clone = self._new_state(self._length[state] + 1, dict(self._next[target]), dict(self._counts[target]))
                self._link[clone] = self._link[target]
                while state != -1 and self._next[state].get(token_id) == target:
                    self._next[state][token_id] = clone
                    state = self._link[state]
                self._link[target] = clone
                self._link[current] = clone
        self._last = current
        self.match = self._link[current]
        self.match_length = self._length[self.match]

    def continuation(self, state: int) -> tuple[int, int, int, int] | None:
        """Return what most often followed ``state``: (token, next state, its count, count of all continuations).

        Of equally frequent ones the most recently counted wins; ``None`` if nothing followed.
        """
        transitions = self._next[state]
        if not transitions:
            return None
        counts = self._counts[state]
        best, best_count, total = -1, 0, 0
        # Tokens that were never counted followed once, before the others; counts are in the order they last followed.
        for token_id in (*(token for token in transitions if token not in counts), *counts):
            count = counts.get(token_id, 1)
            total += count
            if count >= best_count:
                best, best_count = token_id, count
        return best, transitions[best], best_count, total

    def link(self, state: int) -> int:
        """Return the state of the longest suffix of ``state`` that occurs elsewhere too; the root's is the root."""
        return max(self._link[state], _ROOT_STATE)

    def length(self, state: int) -> int:
        """Return the length of the longest substring of ``state``."""
        return self._length[state]

    def _count(self, token_id: int) -> None:
        """Count ``token_id`` as what followed the longest matches of the text so far."""
        state = self.match
        for _ in range(COUNTED_LINKS):
            if state <= _ROOT_STATE:
                break
            counts = self._counts[state]
            # A transition that exists stands for one occurrence. Re-inserting moves the token to the end, so that
            # among equals the latest is found last.
            counts[token_id] = counts.pop(token_id, int(token_id in self._next[state])) + 1
            state = self._link[state]

    def _new_state(self, length: int, transitions: dict[int, int], counts: dict[int, int]) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._counts.append(counts)
        return len(self._length) - 1


class SuffixDrafter:
    """Proposes what followed the longest earlier occurrence of the text's end, in prompt and answer.

    Args:
        min_match: shortest match worth a proposal, in tokens.
    """

    name = "suffix"
    end_ids: frozenset[int] = frozenset()

    def __init__(self, min_match: int = 2) -> None:
        if min_match < 1:
            raise InputError(f"shortest suffix match of {min_match} tokens: the least is 1")
        self._min_match = min_match
        self._automata: dict[int, tuple[SuffixAutomaton, int]] = {}

    def begin(self, request: Request) -> None:
        self._automata[request.id] = (SuffixAutomaton(), 0)

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Propose whole continuations; a second call has nothing to add."""
        for job in jobs:
            automaton = self._follow(job.request)
            state, match_length = automaton.match, automaton.match_length
            if match_length < self._min_match:
                continue
            node = ROOT
            for _ in range(job.budget.max_depth):
                continuation = automaton.continuation(state)
                while continuation is None and automaton.length(automaton.link(state)) >= self._min_match:
                    # The proposal has come to the end of the text; go on as if it stood there already.
                    state = automaton.link(state)
                    continuation = automaton.continuation(state)
                if continuation is None:
                    break
                token_id, state, count, total = continuation
                # One unseen continuation is always possible (Laplace's rule), so a single sighting counts as 1/2.
                probability = count / (total + 1)
                if probability < job.budget.min_probability:
                    break
                node = job.tree.add(node, token_id, self.name, Evidence(probability, match_length, count))
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """Nothing to do: the text is read when it is next needed."""

    def end(self, request: Request) -> None:
        del self._automata[request.id]

    def close(self) -> None:
        self._automata.clear()

    def _follow(self, request: Request) -> SuffixAutomaton:
        """Bring the request's automaton up to its last token."""
        automaton, length = self._automata[request.id]
        token_ids = request.token_ids
        if length < len(token_ids):
            for index in range(length, len(token_ids)):
                automaton.append(token_ids[index])
            self._automata[request.id] = (automaton, len(token_ids))
        return automaton
