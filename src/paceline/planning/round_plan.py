"""One round while it is planned: what its drafts are worth at the round's pace, and which of them.

All of a round's requests share its time, so their proposals stand in one line. A drafter's chain is followed beyond its
end by what its tokens are on average, because a level that is worth nothing by itself may be on the way to ones that
are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftJob
from paceline.planning.online_costs import OnlineCosts
from paceline.planning.survival import GrownTree

Proposal: TypeAlias = tuple[float, int, int]
"""(Survival, request, node) of a drafted token."""


@dataclass(slots=True)
class RequestPlan:
    """One request in the round that is being planned.

    Attributes:
        request: whose.
        blind: whether nothing may depend on what is drawn; its tree is verified as it is.
        num_output: tokens of the answer before the round.
        tree: its survivals, as the tree was grown; ``None`` before anything was drafted.
        num_proposals: in the tree when ``tree`` was made.
        beside: by drafter asked, whether something of note had been drafted before.
        looks: drafters that are asked only to see what they say.
    """

    request: Request
    blind: bool
    num_output: int
    tree: GrownTree | None = None
    num_proposals: int = 0
    beside: dict[str, bool] = field(default_factory=dict)
    looks: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
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

    def alone(self) -> Front:
        """Return it as if nothing else were drafted."""
        return dataclasses.replace(self, others=())


@dataclass(frozen=True, slots=True)
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
        plain_s: seconds of the round without drafts.
        headroom_s: what the round may lose at worst.
        draft_max: deepest draft.
        branches: most branches of all trees together.
        most_rows: drafted rows that can be verified within the headroom.
        blocked: whether there are none.
        predicted_draft_s: by drafter, what its passes should take.
        asked: by drafter, the requests it was asked for.
        value_before: by drafter, what the round was worth before it was asked.
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
    predicted_draft_s: dict[str, float] = field(default_factory=dict)
    asked: dict[str, list[int]] = field(default_factory=dict)
    value_before: dict[str, float] = field(default_factory=dict)
    _seconds: list[float] = field(default_factory=list)

    def seconds(self, extra_rows: int) -> float:
        """Return what the round takes with so many rows more than requests."""
        while len(self._seconds) <= extra_rows:
            rows = self.requests + len(self._seconds)
            self._seconds.append(self.costs.round_s(rows, self.context, self.requests))
        return self._seconds[extra_rows]

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
        spent_s = self.draft_s
        survivals = [front.survival for front in fronts]
        for level in range(1, self.draft_max + 1):
            added = 0.0
            for index, front in enumerate(fronts):
                survivals[index] *= front.ahead[level - 1]
                other = front.others[level - 1] if level <= len(front.others) else 0.0
                if survivals[index] > other:
                    added += survivals[index] - other
            gained += added
            rows += len(fronts)
            if rows > self.most_rows:
                break
            extra_s = self.seconds(rows) - self.plain_s
            if spent_s + level * level_s + extra_s <= self.headroom_s or self.blocked:
                best = max(best, gained - self.pace * (extra_s + level * level_s))
            if added < 0.01 * len(fronts):
                break
        return best

    def ranked(self) -> list[Proposal]:
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
        taken: set[tuple[int, int]] = set()
        has_child: set[tuple[int, int]] = set()
        ranked = []
        for negative, request_id, node in nodes:
            tree = self.plans[request_id].tree
            assert tree is not None
            parent = tree.parents[node]
            if parent != ROOT and (request_id, parent) not in taken:
                continue
            if (request_id, parent) in has_child:
                if branches == 0:
                    continue
                branches -= 1
            has_child.add((request_id, parent))
            taken.add((request_id, node))
            ranked.append((-negative, request_id, node))
        return ranked

    def cut(self, ranked: Sequence[Proposal], allowed_s: float = math.inf) -> Cut:
        """Return the first so many of the ranked proposals that are worth most together.

        Args:
            ranked: what can be verified, best first.
            allowed_s: seconds by which the round may be longer than a plain one.
        """
        best, best_count, best_gained, gained = 0.0, 0, 0.0, 0.0
        spent_s = self.draft_s
        for count, (survival, _, _) in enumerate(ranked, start=1):
            gained += survival
            extra_s = self.seconds(count) - self.plain_s
            value = gained - self.pace * extra_s
            # What drafting took is gone either way: it leaves less to lose, but forbids nothing that is free.
            if value > best and extra_s <= max(allowed_s - spent_s, 0.0):
                best, best_count, best_gained = value, count, gained
        return Cut(ranked[:best_count], best_gained, best)


def front_of(tree: DraftTree, name: str) -> int:
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
