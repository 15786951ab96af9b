"""Policies by request: the one that the model was loaded with, and beside it fixed lengths of requests' own.

Requests of both share rounds and passes. To the loaded policy those with lengths of their own look like requests of
plain decoding, and a round in which they drafted looks like one that a prompt shared: what such a round took says
nothing of the loaded policy's drafts, and what was accepted of these still does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from paceline.core.params import SpeculationParams
from paceline.core.request import Request
from paceline.core.stats import OffReason, PlainTimes
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.base import Policy, PolicyBase, RoundRecord
from paceline.planning.policies.fixed import FixedPolicy, check_unbiased

_MODEL = "draft"
"""Drafter that a fixed policy asks alone unless others are named, as where a model is loaded with one."""


class RoutingPolicy(PolicyBase):
    """Hands every request to its policy.

    Of what a policy decides a loop asks this one; what the policy is, and what it has learned, the loaded one says.

    Drafts of a request's own length are chains: an engine has as many branches as the loaded policy may ask for.

    Args:
        loaded: for requests that ask for nothing else.
        drafters: the loop's.
    """

    def __init__(self, loaded: Policy, drafters: Sequence[Drafter]) -> None:
        self._loaded = loaded
        self._has_model = any(drafter.name == _MODEL for drafter in drafters)
        # By request, of those that have one of their own.
        self._own: dict[int, FixedPolicy] = {}
        # Whether the loaded policy lets anything be drafted in this round, and whether another one asked a drafter.
        self._loaded_drafts = self._own_drafts = False

    @property
    def speculates(self) -> bool:
        """As the loaded policy."""
        return self._loaded.speculates

    def check(self, request: Request) -> None:
        """Raise where the request's policy, or a limit that it sets itself, would bias the text."""
        check_unbiased(request, request.speculation.draft_min)
        if _has_own(request):
            make_fixed(request.speculation)
        else:
            self._loaded.check(request)

    def begin(self, request: Request) -> None:
        """Let the loaded policy know of every request: they share what rounds take."""
        self._loaded.begin(request)
        if _has_own(request):
            self._own[request.id] = make_fixed(request.speculation)

    def end(self, request: Request) -> None:
        """Forget the request."""
        self._own.pop(request.id, None)
        self._loaded.end(request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Return each budget of the request's own policy."""
        if not self._own:
            return self._loaded.budgets(requests)
        self._loaded_drafts = self._own_drafts = False
        budgets = list(self._loaded.budgets(requests))
        for index, request in enumerate(requests):
            own = self._own.get(request.id)
            if own is not None:
                (budgets[index],) = own.budgets((request,))
            elif budgets[index] is not None:
                self._loaded_drafts = True
        return budgets

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Choose trees of the loaded policy's as that says, and chains of one drafter."""
        if not self._own:
            return self._loaded.choose(drafter, jobs)
        loaded = [job for job in jobs if job.request.id not in self._own]
        chosen = {job.request.id for job in self._loaded.choose(drafter, loaded)} if loaded else set()
        own = {job.request.id for job in jobs if job.request.id in self._own and self._may_draft(drafter, job)}
        self._own_drafts = self._own_drafts or bool(own)
        return [job for job in jobs if job.request.id in chosen or job.request.id in own]

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Let the loaded policy drop what it finds not worth verifying of its own."""
        if not self._own:
            self._loaded.select(requests, trees)
        elif self._loaded_drafts:
            loaded = [index for index, request in enumerate(requests) if request.id not in self._own]
            self._loaded.select([requests[index] for index in loaded], [trees[index] for index in loaded])

    def observe(self, record: RoundRecord) -> None:
        """Let the loaded policy learn what is to be learned."""
        self._loaded.observe(self._without_own(record) if self._own else record)

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        """Return what the loaded policy says: it saw all rounds, and its costs are those of the engine."""
        return self._loaded.plain_round(record)

    def off_reason(self, request: Request) -> OffReason:
        """Return the reason of the request's own policy."""
        return self._own.get(request.id, self._loaded).off_reason(request)

    def _may_draft(self, drafter: Drafter, job: DraftJob) -> bool:
        if self._has_model and job.request.speculation.drafters is None and drafter.name != _MODEL:
            return False
        return not job.tree.num_drafted or job.tree.sources[-1] == drafter.name

    def _without_own(self, record: RoundRecord) -> RoundRecord:
        """Return a round as the loaded policy is to see it."""
        own_rows = sum(
            tree.num_drafted
            for request, tree in zip(record.requests, record.trees, strict=True)
            if request.id in self._own
        )
        is_shared, self._own_drafts = self._own_drafts or own_rows > 0, False
        if not is_shared or not record.requests:
            return record
        trees, paths = list(record.trees), list(record.paths)
        for index, request in enumerate(record.requests):
            if request.id in self._own:
                trees[index], paths[index] = DraftTree(trees[index].token_ids[ROOT]), ()
        # Drafters are asked for all requests at once: what that took is not the loaded policy's to judge them by.
        drafting_s = sum(record.draft_seconds.values())
        return dataclasses.replace(
            record,
            trees=trees,
            paths=paths,
            prefill_rows=record.prefill_rows + max(own_rows, 1),
            draft_s=record.draft_s - drafting_s,
            draft_seconds={},
            round_s=record.round_s - drafting_s,
        )


def make_fixed(speculation: SpeculationParams) -> FixedPolicy:
    """Return the fixed policy that a request's options make.

    Raises:
        InputError: a length is out of range.
    """
    lengths = {} if speculation.draft_max is None else {"draft_max": speculation.draft_max}
    return FixedPolicy(draft_min=speculation.draft_min, p_min=speculation.p_min, **lengths)


def _has_own(request: Request) -> bool:
    """Return whether a request drafts, and not as the loaded policy says."""
    speculation = request.speculation
    return speculation.speculate and not speculation.follows_policy
