"""Grows one draft tree for each decoding request: as far as policy and budget allow, by the drafters in turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.clock import Clock
from paceline.core.request import Request
from paceline.core.stats import OffReason
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.drafters.grammar import GrammarDrafter
from paceline.drafters.lookup import PredictionDrafter
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import drop_short_paths
from paceline.runtime.pass_budget import PassBudget


@dataclass(slots=True)
class Drafts:
    """What was drafted for one round.

    Attributes:
        requests: those that decode.
        trees: ``[requests]``
        seconds: of each drafter that was asked.
        off: by id of the requests for which nothing was drafted, why.
    """

    requests: Sequence[Request]
    trees: Sequence[DraftTree]
    seconds: dict[str, float] = field(default_factory=dict)
    off: dict[int, OffReason] = field(default_factory=dict)

    def of(self, requests: Sequence[Request]) -> Drafts:
        trees = {request.id: tree for request, tree in zip(self.requests, self.trees, strict=True)}
        return Drafts(requests, [trees[request.id] for request in requests], self.seconds, self.off)


class Drafting:
    """Grows trees, and keeps those that still have to be judged.

    Args:
        drafters: asked in this order; the first to propose a token owns it.
    """

    def __init__(self, drafters: Sequence[Drafter], policy: Policy, budget: PassBudget, clock: Clock) -> None:
        self._drafters = drafters
        self._grammar = GrammarDrafter()
        self._prediction = PredictionDrafter()
        self._policy = policy
        self._budget = budget
        self._clock = clock
        # Drafts that had no room in the last pass and have to be judged in the next, by request.
        self._unjudged: dict[int, DraftTree] = {}

    def grow(self, requests: Sequence[Request], num_prompts: int) -> Drafts:
        """Return a tree for each request, of its root alone where nothing is drafted.

        Args:
            requests: those that decode.
            num_prompts: requests whose prompt is read in the same pass.
        """
        plainly = not self._budget.may_draft(num_prompts)
        trees = [self._unjudged.get(request.id) or DraftTree(request.token_ids[-1]) for request in requests]
        drafts = Drafts(requests, trees)
        if not plainly and (self._drafters or any(map(self.drafters_of, requests))):
            self._draft(drafts, len(requests) + num_prompts)
        for request, tree in zip(requests, trees, strict=True):
            if not tree.num_drafted:
                drafts.off[request.id] = self._why_off(request, drafts.off.get(request.id), plainly=plainly)
        return drafts

    def _draft(self, drafts: Drafts, num_sharing: int) -> None:
        requests, trees = drafts.requests, drafts.trees
        budgets = self._policy.budgets(requests)
        if not any(budgets):
            return
        jobs = []
        for request, tree, budget in zip(requests, trees, budgets, strict=True):
            if budget is not None and request.speculation.speculate and not tree.num_drafted:
                limited = self._limit(request, budget, num_sharing)
                if limited.max_depth > 0:
                    jobs.append(DraftJob(request, tree, limited))
                elif budget.max_depth > 0:
                    drafts.off[request.id] = self._budget.why_no_draft(request)
        passed_over: set[int] = set()
        drafters: Sequence[Drafter] = (self._grammar, self._prediction, *self._drafters)
        for drafter in drafters:
            growing = [job for job in jobs if drafter in self.drafters_of(job.request)]
            self._ask(drafter, growing, drafts.seconds, passed_over)
        for job in jobs:
            if not job.tree.num_drafted and job.request.id not in passed_over:
                drafts.off[job.request.id] = "no_match"
        if jobs:
            self._policy.select(requests, trees)
            for job in jobs:
                had_drafts = job.tree.num_drafted > 0
                drop_short_paths(job.tree, job.request.speculation.draft_min)
                if had_drafts and not job.tree.num_drafted:
                    drafts.off[job.request.id] = "draft_min"

    def drafters_of(self, request: Request) -> Sequence[Drafter]:
        """Return the drafters that may draft for a request; the others hear nothing of it."""
        asked, wanted = request.speculation, request.speculation.drafters
        if not asked.speculate:
            return ()
        if wanted is None and not asked.prediction and not _is_constrained(request):
            return self._drafters
        own = [self._prediction] if asked.prediction else []
        drafters: Sequence[Drafter] = (*own, *self._drafters)
        named = [drafter for drafter in drafters if wanted is None or drafter.name in wanted]
        # What a grammar forces is drafted whichever drafters are named, and first, as it is the surest.
        return [self._grammar, *named] if _is_constrained(request) else named

    def keep(self, request: Request, tree: DraftTree) -> None:
        """Keep what is left of a tree for the request's next round."""
        self._unjudged[request.id] = tree

    def forget(self, request: Request) -> None:
        self._unjudged.pop(request.id, None)

    def _why_off(self, request: Request, found: OffReason | None, *, plainly: bool) -> OffReason:
        """Return why nothing was drafted for a request; ``found`` stood in the way once the policy had allowed it."""
        if not request.speculation.speculate or not self._policy.speculates:
            return "asked"
        if not self.drafters_of(request):
            return "no_drafters"
        return "prompts" if plainly else found or self._policy.off_reason(request)

    def _ask(
        self, drafter: Drafter, jobs: Sequence[DraftJob], seconds: dict[str, float], passed_over: set[int]
    ) -> None:
        """Let one drafter grow the trees, for as long as the policy finds it worth its time.

        Adds to ``seconds``, and to ``passed_over`` the requests for which the drafter could be asked and was not.
        """
        name, growing = drafter.name, list(jobs)
        if not self._budget.trees:
            growing = [job for job in growing if job.tree.num_drafted == 0]
        if growing:
            asked = self._policy.choose(drafter, growing)
            if len(asked) < len(growing):
                passed_over.update({job.request.id for job in growing} - {job.request.id for job in asked})
            growing = asked
        asked = growing
        while growing:
            started_s = self._clock.now_s()
            more = drafter.grow(growing)
            seconds[name] = seconds.get(name, 0.0) + self._clock.now_s() - started_s
            growing = [job for job, can_grow in zip(growing, more, strict=True) if can_grow]
            if growing:
                growing = self._policy.choose(drafter, growing)
        for job in asked:
            _drop_forbidden(job)

    def _limit(self, request: Request, budget: DraftBudget, num_sharing: int) -> DraftBudget:
        """Cut what the policy allows to what was asked for and what fits."""
        asked = request.speculation
        depth = min(budget.max_depth, self._budget.max_draft(request, num_sharing))
        if asked.draft_max is not None:
            depth = min(depth, asked.draft_max)
        if depth < asked.draft_min:
            depth = 0
        siblings = budget.siblings if self._budget.trees else 1
        p_min = max(budget.min_probability, asked.p_min)
        if depth == budget.max_depth and siblings == budget.siblings and p_min == budget.min_probability:
            return budget
        return dataclasses.replace(budget, max_depth=max(depth, 0), siblings=siblings, min_probability=p_min)


def _is_constrained(request: Request) -> bool:
    return request.verifier.sampler.is_constrained


def _drop_forbidden(job: DraftJob) -> None:
    """Drop what the request's constraint forbids: no row of a pass is spent on it, and others may draft in its place.

    A drafter that draws its proposals draws none of them, so nothing that was drawn is dropped.
    """
    if _is_constrained(job.request) and job.tree.num_drafted:
        allowed = job.request.verifier.sampler.allowed_nodes(job.tree, job.request.token_ids)
        if len(allowed) < job.tree.num_drafted:
            job.tree.keep(allowed)
