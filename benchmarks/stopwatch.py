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


class Watched(PolicyBase):
    """A policy whose calls pass through here; :meth:`_became` hears what a round's drafts have come to by then."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def check(self, request: Request) -> None:
        self._call(self._policy.check, request)

    def begin(self, request: Request) -> None:
        self._call(self._policy.begin, request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        budgets = self._call(self._policy.budgets, requests)
        self._became(PLAIN)
        return budgets

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        chosen = self._call(self._policy.choose, drafter, jobs)
        if chosen:
            # Who is asked may have nothing to say.
            self._became(SILENT)
        return chosen

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        is_drafted = any(tree.num_drafted for tree in trees)
        self._call(self._policy.select, requests, trees)
        if is_drafted:
            self._became(VERIFIED if any(tree.num_drafted for tree in trees) else DROPPED)

    def observe(self, record: RoundRecord) -> None:
        self._call(self._policy.observe, record)

    def end(self, request: Request) -> None:
        self._call(self._policy.end, request)

    def _call(self, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return method(*arguments, **named)

    def _became(self, kind: str) -> None:
        raise NotImplementedError


class Stopwatch(Watched):
    """A policy whose time is taken; an observer of rounds does not see what the parts of one take.

    Attributes:
        spent_s: seconds of all its decisions, of learning and of taking note of requests.
        times_us: microseconds of every round that decoded, learning from that round included, by what became of its
            drafts.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._kind = PLAIN
        self._before_s = 0.0
        self.spent_s = 0.0
        self.times_us: dict[str, list[float]] = defaultdict(list)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        self._before_s = self.spent_s
        return super().budgets(requests)

    def observe(self, record: RoundRecord) -> None:
        super().observe(record)
        if record.requests:
            self.times_us[self._kind].append(1e6 * (self.spent_s - self._before_s))
        self._before_s = self.spent_s

    def _call(self, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        started_s = time.perf_counter()
        result = method(*arguments, **named)
        self.spent_s += time.perf_counter() - started_s
        return result

    def _became(self, kind: str) -> None:
        self._kind = kind
