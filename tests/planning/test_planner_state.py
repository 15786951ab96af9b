"""What the planner keeps of rounds that are over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.planning.auto.gains import COPIED_ROUNDS, Gains
from paceline.planning.auto.learned import DrafterState
from paceline.planning.auto.ledger import Ledger
from paceline.planning.auto.planner_state import PlannerState
from paceline.planning.auto.probes import PROBES_IN_A_ROW, ReentryTest
from paceline.planning.auto.round_plan import RequestPlan, RoundPlan
from paceline.planning.auto.survival import GrownTree
from paceline.planning.base import RoundRecord
from tests.drafters.scripted_heads import block_head, drafter_of, target
from tests.helpers import request_of
from tests.planning.helpers import smooth


def test_a_head_that_says_blocks_is_judged_by_margins_and_priced_by_the_clock() -> None:
    drafter = drafter_of(target(), block_head())
    met = PlannerState(smooth(0.01, 0.001)).meet(drafter, request_of([1, 2]))
    assert (met.is_model, met.says_margins) == (False, True)


def test_what_one_text_showed_of_a_drafter_counts_for_few_rounds_of_the_next() -> None:
    of_all = Gains()
    for _ in range(100):
        of_all.solo.add(1.0)
    own = of_all.copy()
    for _ in range(COPIED_ROUNDS):
        own.solo.add(0.0)
    assert own.solo.mean == pytest.approx(0.5)
    assert of_all.solo.mean == 1.0


def test_what_a_short_prompt_took_to_read_says_nothing_of_long_ones() -> None:
    planner = PlannerState(smooth(0.01, 0.001))
    draft = planner.drafters["draft"] = DrafterState.new("draft", is_model=True)

    def answer(share: float, debt_s: float) -> bool:
        request = cast(Request, SimpleNamespace(id=1))
        ledger = Ledger(0.1)
        planner.begin(request, ledger)
        planner.requests[1].invested["draft"] = share
        ledger.book(10, 1.0 + debt_s, 1.0)
        planner.end(request)
        return draft.paid

    assert answer(0.05, debt_s=-0.1)
    assert not answer(0.05, debt_s=0.1)
    assert not answer(0.005, debt_s=-0.1)
    assert answer(0.05, debt_s=-0.1)
    assert answer(0.005, debt_s=0.1)


def test_reading_a_prompt_is_no_part_of_what_asking_takes() -> None:
    planner = PlannerState(smooth(0.01, 0.001))
    suffix = planner.drafters["suffix"] = DrafterState.new("suffix", is_model=False)

    def learn(spent_s: float, *, reads: bool) -> float:
        planned = RoundPlan(planner.costs, {}, 1, 100.0, 50, 0.011, 0.05, draft_max=4, branches=0)
        planned.asked["suffix"] = [1]
        if reads:
            planned.prefill_tokens["suffix"] = 1000
        record = RoundRecord([], [], [], [], 0, 0, spent_s, 0.0, {"suffix": spent_s}, 0.011, 0.011 + spent_s)
        planner.learn(planned, record)
        return suffix.ask_s

    before_s = suffix.read_token_s
    assert learn(0.02, reads=True) == 0.0
    assert suffix.read_token_s == pytest.approx((before_s + 0.00002) / 2)
    assert learn(0.00002, reads=False) == pytest.approx(0.000002)
    assert learn(0.02, reads=True) == pytest.approx(0.000002)


def test_what_deciding_takes_is_known_from_the_first_round_on() -> None:
    planner = PlannerState(smooth(0.01, 0.001))
    planner.observe_deciding(0.0004)
    assert planner.deciding_s == 0.0004
    planner.observe_deciding(0.0002)
    assert planner.deciding_s == pytest.approx(0.0003)


@pytest.mark.parametrize(("source", "probes"), [("suffix", 0), ("draft", PROBES_IN_A_ROW)])
def test_looks_are_confirmed_by_what_was_verified_of_that_drafter_alone(source: str, probes: int) -> None:
    planner = PlannerState(smooth(0.01, 0.001))
    request = cast(Request, SimpleNamespace(id=1, num_prompt=1, token_ids=[1, 2, 3]))
    planner.begin(request, Ledger(0.1))
    reentry_test = planner.requests[1].reentry_tests["draft"] = ReentryTest()
    reentry_test.add(0.9, right=True)
    assert reentry_test.probes_left == 0
    planned = RoundPlan(planner.costs, {}, 1, 100.0, 50, 0.011, 0.05, draft_max=4, branches=0)
    planned.plans[1] = RequestPlan(request, False, 0, tree=GrownTree((-1,), (1,), (0,), [], [1.0]))
    tree = DraftTree(1)
    tree.add(ROOT, 2, source=source)
    planner.learn(planned, RoundRecord([request], [tree], [], [], 0, 0, 0.0, 0.0, {}, 0.011, 0.011))
    assert reentry_test.probes_left == probes
