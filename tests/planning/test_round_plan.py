"""Which of a round's proposals are worth verifying."""

from __future__ import annotations

import pytest

from paceline.planning.auto.online_costs import OnlineCosts
from paceline.planning.auto.round_plan import RoundPlan
from tests.planning.helpers import smooth

ROW_S = 0.001


def round_of(requests: int) -> RoundPlan:
    """Return a round in which a row is worth half a token."""
    costs, pace = OnlineCosts(smooth(0.01, ROW_S)), 0.5 / ROW_S
    plain_s = costs.round_s(requests, 50, requests)
    return RoundPlan(costs, {}, requests, pace, 50, plain_s, headroom_s=1.0, draft_max=4, branches=0)


@pytest.mark.parametrize(("requests", "drafts", "worth"), [(1, 1, 0.1), (64, 4, 0.0), (64, 40, 4.0)])
def test_drafts_have_to_make_up_for_requests_that_end_apart(requests: int, drafts: int, worth: float) -> None:
    cut = round_of(requests).cut([(0.6, request, 1) for request in range(drafts)])
    assert cut.value == pytest.approx(worth)
    assert len(cut.kept) == (drafts if worth else 0)
    assert cut.gained == pytest.approx(0.6 * len(cut.kept))


@pytest.mark.parametrize(("requests", "fewest"), [(1, 1), (64, 6)])
def test_nothing_is_hoped_for_where_even_right_drafts_could_not(requests: int, fewest: int) -> None:
    planned = round_of(requests)
    assert [planned.may_pay(widest) for widest in range(1, 9)] == [widest >= fewest for widest in range(1, 9)]
