"""Drafting what a request's constraint forces: names and punctuation of JSON, mostly.

The grammar knows the bytes that have to follow, not the tokens that the model would spell them by. So the tokens are
drafts like all others: verified, and right for as long as the model spells them as its tokenizer does.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import Request
from paceline.core.tree import ROOT, Evidence
from paceline.drafters.base import Commit, DraftJob


class GrammarDrafter:
    """Proposes the tokens that spell what a constraint has follow; nothing for requests without one."""

    name = "grammar"
    end_ids: frozenset[int] = frozenset()

    def begin(self, request: Request) -> None:
        """There is nothing to take note of: the request's sampler knows where it is."""

    def unread(self, request: Request) -> None:
        """There is no model that would have to read."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Add the whole run to each tree."""
        for job in jobs:
            run = job.request.verifier.sampler.drafts(job.request.token_ids)
            node = ROOT
            for token_id in run[: job.budget.max_depth]:
                node = job.tree.add(node, token_id, self.name, Evidence(match_length=len(run)))
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """There is nothing to take note of."""

    def end(self, request: Request) -> None:
        """There is nothing to forget."""

    def close(self) -> None:
        """There is nothing to free."""
