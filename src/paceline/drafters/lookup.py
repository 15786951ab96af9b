"""Prompt lookup: copy what followed the latest earlier occurrence of the last few tokens (as in transformers)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.core.tree import ROOT, Evidence
from paceline.drafters.base import Commit, DraftJob

FIRST_MATCH_PROBABILITY = 0.5
"""What one earlier sighting of a continuation counts as, by Laplace's rule."""


class _NgramIndex:
    """Where each n-gram of a growing text last ended, for n up to ``longest``."""

    __slots__ = ("_ends", "_longest", "length")

    def __init__(self, longest: int) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._longest = longest
        self.length = 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Index the n-grams of ``token_ids`` that end before its last token: those with a continuation."""
        for end in range(max(1, self.length), len(token_ids)):
            for n in range(1, min(self._longest, end) + 1):
                self._ends[tuple(token_ids[end - n : end])] = end
        self.length = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Return (index of what followed, n) for the longest n-gram at the text's end that occurred before."""
        for n in range(min(self._longest, len(token_ids) - 1), 0, -1):
            end = self._ends.get(tuple(token_ids[-n:]))
            if end is not None:
                return end, n
        return None


class LookupDrafter:
    """Copies from the request's own prompt and answer.

    Args:
        longest_match: most tokens compared; longer matches are not preferred over the latest.
        min_match: fewest tokens that must match.
    """

    name = "lookup"

    def __init__(self, longest_match: int = 4, min_match: int = 2) -> None:
        if not 1 <= min_match <= longest_match:
            raise InputError(f"lookup of {min_match} to {longest_match} tokens: give 1 or more, the shorter first")
        self._longest_match = longest_match
        self._min_match = min_match
        self._indices: dict[int, _NgramIndex] = {}

    def begin(self, request: Request) -> None:
        """Remember the request; its text is read when it first drafts."""
        self._indices[request.id] = _NgramIndex(self._longest_match)

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Propose whole continuations; a second call has nothing to add."""
        for job in jobs:
            token_ids = job.request.token_ids
            index = self._indices[job.request.id]
            index.follow(token_ids)
            found = index.find(token_ids)
            if found is None or found[1] < self._min_match or job.budget.min_probability > FIRST_MATCH_PROBABILITY:
                continue
            start, match_length = found
            evidence = Evidence(FIRST_MATCH_PROBABILITY, match_length, 1)
            node = ROOT
            period = len(token_ids) - start
            for offset in range(job.budget.max_depth):
                # Past the text's end the copy goes on with what it has copied.
                node = job.tree.add(node, token_ids[start + offset % period], self.name, evidence)
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """Nothing to do: the text is read when it is next needed."""

    def end(self, request: Request) -> None:
        """Forget the request."""
        del self._indices[request.id]

    def close(self) -> None:
        """Forget all requests."""
        self._indices.clear()
