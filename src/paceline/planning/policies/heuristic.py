"""The heuristic schedule of transformers' assisted generation, for comparison.

As in transformers 5.23 (``generation/candidate_generator.py``, ``AssistedCandidateGenerator``): after a round whose
candidates all matched the next may be two tokens longer, after any other one token shorter, but at least one; and the
assistant stops after a token in which its confidence is below a threshold of 0.4. The length outlives a request, as
with ``num_assistant_tokens_schedule="heuristic"``. It starts at 20 tokens, the default there.

Deviations: confidence is the largest probability of the row, at the request's temperature, where transformers takes the
proposed token's own, since under rejection whether a token is verified must not depend on which was drawn. The
threshold stays as it is; transformers moves it by the ROC curve of past rounds if scikit-learn is installed.
"""

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
class HeuristicPolicy(PolicyBase):
    """Two tokens longer after a draft accepted whole, one shorter after any other.

    Attributes:
        start: tokens of the first draft.
        confidence: a draft model goes on until its largest probability is below this; that token is verified still.
        draft_max: longest draft.
    """

    start: int = 20
    confidence: float = 0.4
    draft_max: int = MAX_DRAFT
    _length: int = field(default=0, init=False, repr=False)
    _lengths: dict[int, int] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.draft_max <= MAX_DRAFT:
            raise InputError(f"drafts of {self.start} to {self.draft_max} tokens: give 1 to {MAX_DRAFT}, ascending")
        if not 0.0 <= self.confidence <= 1.0:
            raise InputError(f"a confidence of {self.confidence:g} is out of range: give 0 (never stop) to 1")
        self._length = self.start

    def check(self, request: Request) -> None:
        """Lossless everywhere: what stops a draft is known before its next token is drawn."""

    def begin(self, request: Request) -> None:
        """Start with the length that came of the latest round of any request."""
        self._lengths[request.id] = self._length

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        return [DraftBudget(self._lengths[request.id], probability=True) for request in requests]

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Stop after a token of this drafter that it was not sure of."""
        return [job for job in jobs if self._is_sure(drafter, job.tree)]

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Verify everything."""

    def observe(self, record: RoundRecord) -> None:
        for request, tree, path in zip(record.requests, record.trees, record.paths, strict=True):
            depth = max(tree.depths)
            if depth == 0:
                continue
            length = self._lengths[request.id] + (2 if len(path) == depth else -1)
            self._length = self._lengths[request.id] = min(max(length, 1), self.draft_max)

    def end(self, request: Request) -> None:
        """Forget the request, but not the length."""
        del self._lengths[request.id]

    def _is_sure(self, drafter: Drafter, tree: DraftTree) -> bool:
        if tree.sources[-1] != drafter.name:
            return True
        probability = tree.evidence[-1].probability
        return probability is None or probability >= self.confidence
