"""Draft length by the share accepted: longer while drafts are kept, shorter while they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.base import PolicyBase, RoundRecord
from paceline.planning.policies.fixed import MAX_DRAFT


@dataclass(slots=True)
class AcceptRatioPolicy(PolicyBase):
    """Moves each request's draft length by one token a round, by the share of its last draft that was accepted.

    It knows no costs: a draft that is accepted is lengthened even where a wider pass costs more than it gives, and it
    never stops drafting, as it could not find out when to start again.

    Attributes:
        start: tokens of a request's first draft.
        shorten_below: share accepted under which the next draft is one token shorter, but never none.
        lengthen_from: share accepted from which it is one token longer.
        draft_max: longest draft.
    """

    start: int = 4
    shorten_below: float = 0.5
    lengthen_from: float = 0.8
    draft_max: int = 16
    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.draft_max <= MAX_DRAFT:
            raise InputError(f"drafts of {self.start} to {self.draft_max} tokens: give 1 to {MAX_DRAFT}, ascending")
        if not 0.0 <= self.shorten_below <= self.lengthen_from <= 1.0:
            raise InputError(
                f"shares of {self.shorten_below:g} to shorten and {self.lengthen_from:g} to lengthen: "
                "give 0 to 1, ascending"
            )

    def check(self, request: Request) -> None:
        """Lossless everywhere: a draft's length depends on rounds that are over."""

    def begin(self, request: Request) -> None:
        """Start anew."""
        self._lengths[request.id] = self.start

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Return each request's length."""
        return [DraftBudget(self._lengths[request.id]) for request in requests]

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Take all the budget allows."""
        return list(jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Verify everything."""

    def observe(self, record: RoundRecord) -> None:
        """Move the lengths of the requests that drafted."""
        for request, tree, path in zip(record.requests, record.trees, record.paths, strict=True):
            depth = max(tree.depths)
            if depth == 0:
                continue
            share = len(path) / depth
            length = self._lengths[request.id] + (share >= self.lengthen_from) - (share < self.shorten_below)
            self._lengths[request.id] = min(max(length, 1), self.draft_max)

    def end(self, request: Request) -> None:
        """Forget the request."""
        del self._lengths[request.id]
