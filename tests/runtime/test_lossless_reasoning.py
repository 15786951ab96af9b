"""Answers whose reasoning is cut short by a budget are those of plain decoding, in the scenes of ``test_lossless.py``.

Markers are picked from what a request says without a budget, so that most answers open a reasoning. Some of its control
tokens are spelled out in the text.
"""

from __future__ import annotations

from collections import Counter

from paceline.core.request import Request
from paceline.planning.base import Policy, RoundRecord
from tests.helpers import WatchingPolicy
from tests.proofs import Tally
from tests.reasoning_machine import Machine
from tests.runtime.amended import with_budget
from tests.runtime.scenes import EVERY_END, Scene, check_scene, play
from tests.tiers import by_tier

MIN_CASES = {
    **EVERY_END,
    "reached inside a draft": by_tier(2000, quick=300),
    "end partly drafted": by_tier(700, quick=130),
    "end split between rounds": by_tier(600, quick=150),
    "start split between rounds": by_tier(400, quick=70),
    "drafts refuted by the budget": by_tier(500, quick=80),
    "ended by itself": by_tier(1500, quick=200),
    "opened again": by_tier(3000, quick=400),
    "preempted": by_tier(500, quick=100),
}
"""Rounds or requests of each hard case that the examples have to show: every way in which a budget and drafts meet."""


class ReasoningWatch(WatchingPolicy):
    """Another policy, and a count of how budgets and drafts met."""

    def __init__(self, inner: Policy, cases: Counter[str]) -> None:
        super().__init__(inner)
        self._cases = cases

    def count(self, record: RoundRecord) -> None:
        super().count(record)
        for request, tree, path, emitted in zip(
            record.requests, record.trees, record.paths, record.emitted, strict=True
        ):
            if request.params.reasoning_budget is not None:
                stands = tree.candidates(path[-1] if path else 0)
                self._count(request, request.num_output - emitted, min(len(path), emitted), bool(stands))

    def _count(self, request: Request, before: int, num_accepted: int, drafted_more: bool) -> None:
        """Count a round that began after ``before`` tokens of the answer and accepted ``num_accepted`` more."""
        budget = request.params.reasoning_budget
        assert budget is not None
        machine, answer = Machine(budget), request.output_ids
        forced, opened, ended = [], [], []
        for token_id in answer:
            was_open = machine.is_open
            forced.append(machine.forced is not None)
            machine.tell(token_id)
            opened.append(machine.is_open and not was_open)
            ended.append(was_open and not machine.is_open and not forced[-1])
        drafted_to = before + num_accepted
        round_ = range(before, len(answer))
        starts = [at for at in round_ if forced[at] and not (at and forced[at - 1])]
        cases = self._cases
        cases["reached inside a draft"] += any(before < at <= drafted_to for at in starts)
        cases["end partly drafted"] += (
            num_accepted > 0 and drafted_to < len(answer) and forced[drafted_to - 1] and forced[drafted_to]
        )
        cases["end split between rounds"] += num_accepted > 0 and before > 0 and forced[before - 1] and forced[before]
        cases["drafts refuted by the budget"] += drafted_to < len(answer) and forced[drafted_to] and drafted_more
        cases["ended by itself"] += any(ended[before:])
        cases["opened again"] += any(opened[at] and any(opened[:at]) for at in round_)
        cases["start split between rounds"] += num_accepted > 0 and any(
            opened[at] and at - len(budget.start) + 1 < before < at + 1 for at in range(before, drafted_to)
        )


def test_reasoning_under_a_budget_is_plain() -> None:
    tally = Tally()

    def check(scene: Scene) -> None:
        check_scene(scene, tally, amend=with_budget, watch=lambda inner: ReasoningWatch(inner, tally))

    play("reasoning", by_tier(300, quick=80), check)
    tally.report("lossless, under reasoning budgets", MIN_CASES)
