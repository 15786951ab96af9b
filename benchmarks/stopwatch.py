"""The time that a policy takes, apart from all that happens around it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.base import Policy, PolicyBase, RoundRecord

VERIFIED, DROPPED, SILENT, PLAIN = "verified", "dropped", "nothing proposed", "nobody asked"

P = ParamSpec("P")
T = TypeVar("T")


class Stopwatch(PolicyBase):
    """A policy whose time is taken; an observer of rounds does not see what the parts of one take.

    Attributes:
        spent_s: seconds of all its decisions, of learning and of taking note of requests.
        times_us: microseconds of every round that decoded, learning from that round included, by what became of its
            drafts.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kind = PLAIN
        self._before_s = 0.0
        self.spent_s = 0.0
        self.times_us: dict[str, list[float]] = defaultdict(list)

    def check(self, request: Request) -> None:
        """Raise where the policy does."""
        self._timed(self._policy.check, request)

    def begin(self, request: Request) -> None:
        """Tell the policy."""
        self._timed(self._policy.begin, request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Take the time of a round's beginning."""
        self._before_s, self._kind = self.spent_s, PLAIN
        return self._timed(self._policy.budgets, requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Take the time of a decision."""
        chosen = self._timed(self._policy.choose, drafter, jobs)
        if chosen:
            self._kind = SILENT
        return chosen

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Take the time of the last decision, and see what is verified."""
        is_drafted = any(tree.num_drafted for tree in trees)
        self._timed(self._policy.select, requests, trees)
        if is_drafted:
            self._kind = VERIFIED if any(tree.num_drafted for tree in trees) else DROPPED

    def observe(self, record: RoundRecord) -> None:
        """Take the time of learning, and enter the round."""
        self._timed(self._policy.observe, record)
        if record.requests:
            self.times_us[self._kind].append(1e6 * (self.spent_s - self._before_s))
        self._before_s = self.spent_s

    def end(self, request: Request) -> None:
        """Tell the policy."""
        self._timed(self._policy.end, request)

    def _timed(self, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        started_s = time.perf_counter()
        result = method(*arguments, **named)
        self.spent_s += time.perf_counter() - started_s
        return result
