"""One round while it is planned: what its drafts are worth at the round's pace, and which of them.

All of a round's requests share its time, so their proposals stand in one line. A drafter's chain is followed beyond its
end by what its tokens are on average, because a level that is worth nothing by itself may be on the way to ones that
are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from paceline.core.request import Request
from paceline.core.stats import OffReason
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftJob
from paceline.planning.auto.online_costs import OnlineCosts
from paceline.planning.auto.survival import NEGLIGIBLE, GrownTree

_CERTAIN: Final = 0.95
"""Share of drafted tokens that are right at best."""

_UNEVEN_SHARE: Final = 0.04
"""Tokens that drafts have to be worth, for every other request of a round: requests that get ahead end early, and leave
fewer to share what a pass costs however narrow it is, which the pace of the round does not know."""

Proposal: TypeAlias = tuple[float, int, int]
"""(Survival, request, node) of a drafted token."""


@dataclass(slots=True)
class RequestPlan:
    """One request in the round that is being planned.

    Attributes:
        draw_independent: whether nothing may depend on what is drawn; its tree is verified as it is.
        num_output: tokens of the answer before the round.
        draft: what was drafted; ``None`` before any drafter was asked.
        tree: its survivals, as the tree was grown; ``None`` before anything was drafted.
        num_proposals: in the tree when ``tree`` was made.
        num_prunings: of the tree before ``tree`` was made.
        has_co_proposal: by drafter asked, whether something of note had been drafted before.
        probed: drafters that are asked only to see what they say.
    """

    request: Request
    draw_independent: bool
    num_output: int
    draft: DraftTree | None = None
    tree: GrownTree | None = None
    num_proposals: int = 0
    num_prunings: int = 0
    has_co_proposal: dict[str, bool] = field(default_factory=dict)
    probed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Front:
    """The end of a chain that a model could extend.

    Attributes:
        job: whose; ``None`` where it does not matter.
        survival: of the last token of the chain.
        ahead: chances of the next ones.
        others: best survivals, at the depths below, of what is drafted already.
    """

    job: DraftJob | None
    survival: float
    ahead: Sequence[float]
    others: Sequence[float]

    def by_itself(self) -> Front:
        """Return it as if nothing else were drafted."""
        return Front(self.job, self.survival, self.ahead, ())


@dataclass(slots=True)
class Cut:
    """The proposals of a round that are worth verifying.

    Attributes:
        kept: these, best first.
        gained: tokens expected of them.
        value: what they are worth, in tokens: their rows paid for, the drafting not.
    """

    kept: Sequence[Proposal]
    gained: float
    value: float


@dataclass(slots=True)
class RoundPlan:
    """The round that is being planned, and what can be made of it.

    Attributes:
        costs: what passes take.
        plans: by request id.
        requests: that take part, with a plan or without.
        pace: tokens a second that a second must be worth.
        context: tokens in the target's cache.
        plain_s: seconds of plain decoding's rounds, which is what may not be lost against.
        headroom_s: what the round may lose at worst.
        draft_max: deepest draft.
        branches: most branches of all trees together.
        most_rows: drafted rows that can be verified within the headroom.
        blocked: whether there are none.
        draw_independent_branches: trees of draw-independent requests that may branch.
        paid: draw-independent requests whose drafts are a probe, paid for with all that it takes.
        predicted_draft_s: by drafter, what its passes should take.
        asked: by drafter, the requests it was asked for.
        prefill_tokens: by drafter asked for the first time for some of the requests, tokens of theirs that it reads.
        value_before: by drafter, what the round was worth before it was asked.
        off: by request with drafts worth their rows that could not be afforded, why not.
    """

    costs: OnlineCosts
    plans: dict[int, RequestPlan]
    requests: int
    pace: float
    context: int
    plain_s: float
    headroom_s: float
    draft_max: int
    branches: int
    most_rows: float = math.inf
    blocked: bool = False
    draw_independent_branches: int = 0
    paid: set[int] = field(default_factory=set)
    predicted_draft_s: dict[str, float] = field(default_factory=dict)
    asked: dict[str, list[int]] = field(default_factory=dict)
    prefill_tokens: dict[str, int] = field(default_factory=dict)
    value_before: dict[str, float] = field(default_factory=dict)
    off: dict[int, OffReason] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)
    _standing: Cut | None = None
    _of_standing: tuple[int, int] = (-1, -1)

    def seconds(self, extra_rows: int) -> float:
        """Return what the round takes with so many rows more than requests; see :meth:`OnlineCosts.next_rounds_s`."""
        return self.staircase(extra_rows)[extra_rows]

    def staircase(self, widest: int) -> Sequence[float]:
        """Return what the round takes, by rows more than requests, at least up to ``widest``."""
        seconds = self._seconds
        if len(seconds) <= widest:
            widths = range(self.requests + len(seconds), self.requests + widest + 1)
            seconds += self.costs.next_rounds_s(widths, self.context, self.requests)
        return seconds

    def may_pay(self, widest: int) -> bool:
        """Return whether up to ``widest`` drafted rows would be worth their time if hardly any of them were wrong."""
        seconds, least = self.staircase(widest), self.least_value
        return any(_CERTAIN * rows > self.pace * (seconds[rows] - seconds[0]) + least for rows in range(widest, 0, -1))

    def limit(self, widest: int) -> None:
        """Find the most drafted rows, up to ``widest``, that the headroom allows, and what seconds are worth then."""
        plain_s, headroom_s = self.plain_s, self.headroom_s
        if self.seconds(widest) - plain_s <= headroom_s:
            return
        # The best round may be out of reach: then a second is worth what it brings within reach.
        self.pace = self.requests / plain_s
        within = (rows for rows in range(widest, 0, -1) if self.seconds(rows) - plain_s <= headroom_s)
        most_rows = next(within, 0)
        self.blocked = not most_rows
        # Where nothing is within reach, what is probed is followed as far as it goes, for counterfactual credit.
        self.most_rows = most_rows or math.inf

    @property
    def least_value(self) -> float:
        """Tokens that drafts have to be worth to be verified at all."""
        return _UNEVEN_SHARE * (self.requests - 1)

    @property
    def draft_s(self) -> float:
        """Seconds that the drafts asked for so far should take."""
        return sum(self.predicted_draft_s.values())

    def value_ahead(self, fronts: Sequence[Front], gained: float, rows: int, level_rows: int) -> float:
        """Return what a round is worth if some number of further levels is drafted, the best number.

        Args:
            fronts: the chains that grow.
            gained: tokens expected of the rows there are.
            rows: drafted rows there are.
            level_rows: rows of a pass of the draft.
        """
        level_s = self.costs.draft_s(level_rows, self.context)
        best = -math.inf
        chains = [(front.ahead, front.others) for front in fronts]
        survivals = [front.survival for front in fronts]
        pace, without_s = self.pace, self.seconds(0)
        longest_s = math.inf if self.blocked else self.plain_s + self.headroom_s - self.draft_s
        for level in range(self.draft_max):
            added = 0.0
            for index, (ahead, others) in enumerate(chains):
                survival = survivals[index] = survivals[index] * ahead[level]
                other = others[level] if level < len(others) else 0.0
                if survival > other:
                    added += survival - other
            gained += added
            rows += len(chains)
            if rows > self.most_rows:
                break
            round_s = self.seconds(rows) + (level + 1) * level_s
            if round_s <= longest_s:
                best = max(best, gained - pace * (round_s - without_s))
            if added < NEGLIGIBLE * len(chains):
                break
        return best

    def most_worth(
        self,
        fronts: Sequence[Front],
        value: float,
        together: tuple[float, int],
        own: tuple[float, int],
        other_rows: int,
    ) -> int:
        """Return of how many chains further levels are worth most together; 0 if that is not more than ``value``.

        Args:
            fronts: the chains, the most promising first.
            value: what has to be exceeded, such as what the round is worth without.
            together: tokens expected, and drafted rows, of what is worth verifying with what leads to the fronts.
            own: those of what leads to the fronts.
            other_rows: of a pass of the draft, for chains that grow in any case.
        """
        by_themselves = [front.by_itself() for front in fronts]
        best, best_count = value, 0
        step = max(1, len(fronts) // 8)
        for number in range(len(fronts), 0, -step):
            level_rows = other_rows + number
            ahead_of = max(
                self.value_ahead(fronts[:number], *together, level_rows),
                self.value_ahead(by_themselves[:number], *own, level_rows),
            )
            if ahead_of > best:
                best, best_count = ahead_of, number
        return best_count

    def standing(self) -> Cut:
        """Return the best cut of what is drafted so far, whether it can be afforded or not."""
        plans = self.plans.values()
        drafted = (sum(plan.num_prunings for plan in plans), sum(plan.num_proposals for plan in plans))
        if self._standing is None or self._of_standing != drafted:
            self._standing, self._of_standing = self.cut(self.rank()), drafted
        return self._standing

    def affordable(self) -> Cut:
        """Return the best cut of those by which no more than the headroom can be lost."""
        # What drafting took is gone either way: it leaves less to lose, but forbids nothing that is free.
        longest_s = self.plain_s + max(self.headroom_s - self.draft_s, 0.0)
        standing = self.standing()
        if self.seconds(len(standing.kept)) <= longest_s:
            return standing
        return self.cut(self.rank(), longest_s)

    def rank(self) -> list[Proposal]:
        """Return what can be verified, best first and parents before children."""
        nodes = [
            (-survival, request_id, node)
            for request_id, plan in self.plans.items()
            if plan.tree is not None
            for node, survival in enumerate(plan.tree.survivals)
            if node != ROOT
        ]
        nodes.sort()
        branches = self.branches
        # By request, children taken of each node; -1 of one that is not taken itself. A root is always verified.
        children: dict[int, list[int]] = {}
        ranked = []
        for negative, request_id, node in nodes:
            tree = self.plans[request_id].tree
            assert tree is not None
            taken = children.get(request_id)
            if taken is None:
                taken = children[request_id] = [0] + [-1] * (len(tree.parents) - 1)
            parent = tree.parents[node]
            if taken[parent] < 0:
                continue
            if taken[parent] > 0:
                if branches == 0:
                    continue
                branches -= 1
            taken[parent] += 1
            taken[node] = 0
            ranked.append((-negative, request_id, node))
        return ranked

    def cut(self, ranked: Sequence[Proposal], longest_s: float = math.inf) -> Cut:
        """Return the first so many ranked proposals that are worth most together, in at most ``longest_s``."""
        best, best_count, best_gained, gained = self.least_value, 0, 0.0, 0.0
        seconds, pace = self.staircase(len(ranked)), self.pace
        # A round without drafts may be a change itself, which plain decoding does not know.
        without_s = seconds[0]
        for count, (survival, _, _) in enumerate(ranked, start=1):
            gained += survival
            value = gained - pace * (seconds[count] - without_s)
            if value > best and seconds[count] <= longest_s:
                best, best_count, best_gained = value, count, gained
        return Cut(ranked[:best_count], best_gained, best if best_count else 0.0)


def find_front(tree: DraftTree, name: str) -> int:
    """Return the end of a drafter's own chain: at every node its first proposal leads on."""
    node = ROOT
    while True:
        for candidate in tree.candidates(node):
            if candidate.source == name:
                node = candidate.node
                break
        else:
            return node


def others(plan: RequestPlan, front: int) -> list[float]:
    """Return the best survivals of a tree at the depths below a node."""
    tree = plan.tree
    if tree is None:
        return []
    first = tree.depths[front] + 1
    best: list[float] = []
    for depth, survival in zip(tree.depths, tree.survivals, strict=True):
        below = depth - first
        if below >= 0:
            best.extend([0.0] * (below + 1 - len(best)))
            best[below] = max(best[below], survival)
    return best
