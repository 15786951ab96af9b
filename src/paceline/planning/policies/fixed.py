"""Policies set by hand: a fixed draft length, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InputError, SamplingError
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.base import RoundRecord

MAX_DRAFT = 128
MAX_SIBLINGS = 16


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Always draft to the same limits.

    Attributes:
        draft_max: most tokens to draft along one path; 0 decodes plainly.
        draft_min: a path shorter than this is not verified at all.
        p_min: see :attr:`~paceline.drafters.base.DraftBudget.min_probability`. It applies to the first token too: a
            draft that starts below it is not verified.
        siblings: alternatives a draft model proposes for each position.
    """

    draft_max: int = 5
    draft_min: int = 0
    p_min: float = 0.0
    siblings: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.draft_max <= MAX_DRAFT:
            raise InputError(f"draft-max {self.draft_max} is out of range: give 0 (no drafts) to {MAX_DRAFT}")
        if not 0 <= self.draft_min <= self.draft_max:
            raise InputError(f"draft-min {self.draft_min} is out of range: give 0 to draft-max, {self.draft_max}")
        if not 0.0 <= self.p_min <= 1.0:
            raise InputError(f"draft-p-min {self.p_min:g} is out of range: give 0 (keep all drafts) to 1")
        if not 1 <= self.siblings <= MAX_SIBLINGS:
            raise InputError(f"{self.siblings} draft siblings are out of range: give 1 (a chain) to {MAX_SIBLINGS}")

    def check(self, request: Request) -> None:
        """Refuse to drop short drafts under rejection, where that would bias the text.

        How long a drawn draft gets depends on the tokens drawn, so dropping it for its length would make whether a
        token is verified depend on that token.
        """
        verifier = request.verifier
        if verifier.name == "rejection" and not verifier.sampler.params.greedy and self.draft_min > 1:
            raise SamplingError(
                f"draft-min {self.draft_min} with rejection at temperature {verifier.sampler.params.temperature:g} "
                "would bias the text: use --verify coupled, or a draft-min of 0 or 1"
            )

    def begin(self, request: Request) -> None:
        """All requests are alike."""

    @property
    def speculates(self) -> bool:
        """Whether anything is ever drafted."""
        return self.draft_max > 0

    def most_branches(self, num_drafters: int) -> int:
        """Return how many branches one request's tree can have beside its first path."""
        return self.draft_max * (self.siblings - 1) + max(num_drafters - 1, 0)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Return the same budget for every request."""
        if not self.speculates:
            return [None] * len(requests)
        return [DraftBudget(self.draft_max, self.siblings, self.p_min)] * len(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Take all the budget allows."""
        return list(jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Drop paths shorter than ``draft_min``."""
        if self.draft_min <= 1:
            return
        for tree in trees:
            keep: set[int] = set()
            for node in range(len(tree) - 1, 0, -1):
                if tree.depths[node] >= self.draft_min or node in keep:
                    keep.update((node, tree.parents[node]))
            if len(keep | {0}) < len(tree):
                tree.keep(keep)

    def observe(self, record: RoundRecord) -> None:
        """Learn nothing."""

    def end(self, request: Request) -> None:
        """Nothing is kept."""


NO_SPECULATION = FixedPolicy(draft_max=0)
"""Plain decoding: the same loop, every tree just its root."""
