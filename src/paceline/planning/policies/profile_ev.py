"""Draft while a longer draft could still pay, by the draft's own probabilities and a table of what passes cost.

The rule was proposed for llama.cpp in discussion 10466 (and tried in pull request 17034): a draft of ``d`` tokens whose
sequence probability is ``P`` is worth ``P`` times the speed of a pass that wide, tokens over seconds. Drafting stops
when not even a draft that stays as probable could beat the best worth so far within a look-ahead of a few tokens, which
carries it across the steps of the cost. Verified is the draft of the best worth.

It takes the draft's probabilities at their word, counts a draft only if all of it is accepted, and leaves out what
drafting costs. Where several drafters propose, the chain of the best worth is verified.

Deviation: probabilities are those of the whole row, at the request's temperature (1 if greedy). llama.cpp's draft
sampler keeps the ten likeliest tokens and shares all probability among them, which is kinder to a draft that is unsure
of itself and right all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InputError, SamplingError
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.base import PolicyBase, RoundCosts, RoundRecord
from paceline.planning.policies.fixed import MAX_DRAFT


@dataclass(frozen=True, slots=True)
class ProfileEvPolicy(PolicyBase):
    """Maximises sequence probability times speed, round by round.

    Attributes:
        costs: what passes take, such as a :class:`~paceline.planning.costs.profile.CostProfile`.
        look_ahead: tokens further that a longer draft is sought.
        draft_max: longest draft.
    """

    costs: RoundCosts
    look_ahead: int = 5
    draft_max: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.draft_max <= MAX_DRAFT:
            raise InputError(f"drafts of up to {self.draft_max} tokens: give 1 to {MAX_DRAFT}")
        if not 1 <= self.look_ahead <= MAX_DRAFT:
            raise InputError(f"a look-ahead of {self.look_ahead} tokens: give 1 to {MAX_DRAFT}")

    def check(self, request: Request) -> None:
        """Refuse to cut drafts after they were drawn under rejection, where that would bias the text."""
        params = request.verifier.sampler.params
        if request.verifier.name == "rejection" and not params.greedy:
            raise SamplingError(
                f"policy profile-ev with rejection at temperature {params.temperature:g} would bias the text: "
                "use `verify='coupled'`, or another policy"
            )

    def begin(self, request: Request) -> None:
        """All requests are alike."""

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Ask for probabilities, up to the longest draft."""
        return [DraftBudget(self.draft_max, probability=True)] * len(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Go on while a longer draft could be worth more than the best so far."""
        return [job for job in jobs if self._could_gain(drafter, job)]

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Keep the path of the best worth."""
        for request, tree in zip(requests, trees, strict=True):
            context = len(request.token_ids) - 1
            probabilities = [1.0]
            best, best_node = self._speed(0, context), ROOT
            for node in range(1, len(tree)):
                probabilities.append(probabilities[tree.parents[node]] * _probability(tree, node))
                worth = probabilities[node] * self._speed(tree.depths[node], context)
                if worth > best:
                    best, best_node = worth, node
            path = _path_to(tree, best_node)
            if len(path) < tree.num_drafted:
                tree.keep(path)

    def observe(self, record: RoundRecord) -> None:
        """Learn nothing."""

    def end(self, request: Request) -> None:
        """Nothing is kept."""

    def _could_gain(self, drafter: Drafter, job: DraftJob) -> bool:
        tree = job.tree
        # Its chain ends in the latest node, unless it has not drafted yet or agreed with another drafter.
        node = len(tree) - 1 if tree.sources[-1] == drafter.name else ROOT
        context = len(job.request.token_ids) - 1
        probability, best = 1.0, self._speed(0, context)
        for depth, ancestor in enumerate(_path_to(tree, node), start=1):
            probability *= _probability(tree, ancestor)
            best = max(best, probability * self._speed(depth, context))
        depth = tree.depths[node]
        deepest = min(depth + self.look_ahead, job.budget.max_depth)
        return any(probability * self._speed(longer, context) > best for longer in range(depth + 1, deepest + 1))

    def _speed(self, depth: int, context: int) -> float:
        """Return tokens per second if a draft of ``depth`` tokens is accepted whole."""
        return (depth + 1) / self.costs.round_s(depth + 1, context)


def _path_to(tree: DraftTree, node: int) -> list[int]:
    path = []
    while node != ROOT:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def _probability(tree: DraftTree, node: int) -> float:
    # A drafter that says nothing about a token is taken to be sure of it.
    probability = tree.evidence[node].probability
    return 1.0 if probability is None else probability
