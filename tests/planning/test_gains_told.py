"""What the planner tells of each request: what plain decoding would have taken, and why nothing was drafted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.request import Request
from paceline.core.stats import OffReason, PlainTimes
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import Drift, replay
from paceline.planning.auto.online_costs import OnlineCosts
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import RoundCosts, RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION
from tests.planning.curves import CURVES, QUICK_CURVES, texts
from tests.planning.helpers import AroundAuto, Curve, Skill, smooth, synthetic

PLAIN_S = 0.05


class Watching(AroundAuto):
    """The planner, its requests, and what its rounds without prompts would have taken plainly, as ledgers count it."""

    def __init__(self, costs: RoundCosts) -> None:
        super().__init__(AutoPolicy(costs))
        self.requests: list[Request] = []
        self.booked_s = 0.0

    def begin(self, request: Request) -> None:
        self.requests.append(request)
        super().begin(request)

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        plain = super().plain_round(record)
        if record.requests and not record.prefill_rows:
            assert plain is not None
            assert plain.low_s <= plain.expected_s <= plain.high_s
            self.booked_s += sum(record.emitted) / len(record.requests) * plain.expected_s
        return plain

    def off_rounds(self) -> Counter[OffReason]:
        return sum((request.stats.off_rounds for request in self.requests), Counter())


def watched(recordings: Sequence[Recording], curve: Curve, concurrent: int = 1, drift: Drift | None = None) -> Watching:
    policy = Watching(curve)
    replay(recordings, policy, curve, concurrent=concurrent, drift=drift)
    return policy


def plain_times(request: Request) -> PlainTimes:
    plain = request.stats.plain
    assert plain is not None
    return plain


@pytest.mark.parametrize("right", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("name", QUICK_CURVES)
def test_what_requests_are_told_is_what_the_ledger_counts(name: str, right: float) -> None:
    policy = watched(texts(right, num_tokens=128), CURVES[name])
    told_s = sum(plain_times(request).expected_s for request in policy.requests)
    report = policy.auto.report()
    assert told_s == pytest.approx(policy.booked_s, rel=1e-9)
    assert report.plain_s == pytest.approx(told_s, rel=1e-9)
    taken_s = sum(request.stats.decode_s for request in policy.requests)
    assert report.plain_s + report.debt_s == pytest.approx(taken_s, rel=1e-9)


@pytest.mark.parametrize("right", [0.02, 0.9])
def test_of_several_requests_each_is_told_of_whole_rounds(right: float) -> None:
    """The ledger of all counts each request's part of a round; the requests count all of it, as they wait for it."""
    policy = watched(texts(right, num_tokens=100), CURVES["Q4_0"], concurrent=4)
    report = policy.auto.report()
    assert report.plain_s == pytest.approx(policy.booked_s, rel=1e-9)
    told_s = sum(plain_times(request).expected_s for request in policy.requests)
    # What ends earlier leaves fewer to share the rest.
    assert policy.booked_s <= told_s <= 4 * policy.booked_s
    taken_s = sum(request.stats.decode_s for request in policy.requests)
    assert told_s / taken_s >= (1.02 if right == 0.9 else 0.97)


@pytest.mark.parametrize("slower", [0.8, 1.0, 1.4])
@pytest.mark.parametrize("right", [0.3, 0.8])
def test_plain_decoding_takes_what_was_told_within_its_bounds(right: float, slower: float) -> None:
    """On a machine that is not as it was measured, and whose passes vary by a tenth."""
    recordings, curve = texts(right, num_tokens=300, count=6), CURVES["Q4_0"]
    rng = random.Random(7)
    noise: Drift = lambda now_s: slower * rng.uniform(0.95, 1.05)  # noqa: E731
    policy = watched(recordings, curve, drift=noise)
    plain = replay(recordings, NO_SPECULATION, curve, drift=lambda now_s: slower)
    # The first answer's bounds have to hold the profile still; the others know the machine.
    for request, by_hand in zip(policy.requests[1:], plain.requests[1:], strict=True):
        told = plain_times(request)
        assert told.low_s <= by_hand.decode_s <= told.high_s
        assert told.expected_s == pytest.approx(by_hand.decode_s, rel=0.05)
        assert told.high_s / told.low_s < 1.12


def test_plain_rounds_are_their_own_measure() -> None:
    policy = watched(texts(right=0.02, num_tokens=200), CURVES["F16"], drift=lambda now_s: 1.3)
    stats = policy.requests[-1].stats
    assert stats.off_rounds.total() > 0.95 * stats.rounds
    told = plain_times(policy.requests[-1])
    assert told.high_s / told.low_s < 1.01
    assert stats.gain == pytest.approx(1.0, abs=0.01)


def test_what_recording_a_pass_takes_is_no_plain_decoding() -> None:
    """Where a change of width costs time, the plain rounds after wide ones are longer than those of plain decoding."""
    recordings, curve = texts(0.9, num_tokens=200), replace(CURVES["graphs"], change_s=0.003)
    policy = watched(recordings, curve)
    plain = replay(recordings, NO_SPECULATION, curve)
    for request, by_hand in zip(policy.requests[1:], plain.requests[1:], strict=True):
        # The first plain round of each answer follows its prompt, in either case.
        assert plain_times(request).expected_s == pytest.approx(by_hand.decode_s, rel=0.02)


class TestBounds:
    def after(self, *ratios: float) -> tuple[float, float, float]:
        """Return low bound, estimate and high bound in plain rounds as measured, after some of that length."""
        costs = OnlineCosts(smooth(PLAIN_S, 0.001))
        measured_s = costs.round_s(1)
        for ratio in ratios:
            costs.observe_round(1, 0, 1, ratio * measured_s)
        low, high = costs.plain_bounds
        drift = costs.round_s(1) / measured_s
        assert low <= 1.0 <= high
        return low * drift, drift, high * drift

    def test_a_profile_alone_may_be_off_by_a_tenth(self) -> None:
        assert self.after() == pytest.approx((1 / 1.1, 1.0, 1.1))

    def test_plain_rounds_that_differ_more_widen_them(self) -> None:
        assert self.after(1.3, 0.8) == pytest.approx((0.8, 1.0, 1.3))

    def test_of_five_rounds_the_fastest_and_the_slowest_count(self) -> None:
        assert self.after(1.3, 1.2, 1.25, 1.22, 1.21) == pytest.approx((1.2, 1.22, 1.3))
        assert self.after(5.0, 1.2, 1.25, 1.22, 1.21, 1.2) == pytest.approx((1.2, 1.21, 1.25))

    def test_the_first_round_on_another_machine_may_be_off_by_a_tenth(self) -> None:
        costs = OnlineCosts(smooth(PLAIN_S, 0.001))
        measured_s, wide_s = costs.round_s(1), costs.round_s(4)
        for _ in range(5):
            costs.observe_round(1, 0, 1, measured_s)
        assert costs.plain_bounds == pytest.approx((1.0, 1.0))
        for _ in range(3):
            costs.observe_round(4, 0, 1, 2.0 * wide_s)
        assert costs.is_doubtful
        costs.observe_round(1, 0, 1, 2.0 * measured_s)
        assert costs.drift == pytest.approx(2.0)
        assert costs.plain_bounds == pytest.approx((1 / 1.1, 1.1))


class TestWhyNothingWasDrafted:
    def test_the_first_round_of_all_is_measured(self) -> None:
        policy = watched(texts(0.9, num_tokens=3, count=1), CURVES["Q4_0"])
        assert policy.requests[0].stats.off_rounds["measuring"] == 1
        assert policy.requests[0].stats.off_reason == "measuring"

    def test_no_draft_would_pay(self) -> None:
        """With so many requests that every row costs what it can bring."""
        policy = watched(texts(0.8, num_tokens=64, count=64), CURVES["F16"], concurrent=64)
        assert {request.stats.off_reason for request in policy.requests} == {"no_gain"}

    def test_no_draft_would_pay_while_one_decision_stands(self) -> None:
        policy = watched(texts(right=0.02), CURVES["Q4_0"])
        rounds = policy.off_rounds()
        assert rounds["no_gain"] > 0.6 * rounds.total()
        assert set(rounds) == {"no_gain", "losing", "measuring"}

    def test_an_answer_may_be_too_short_to_risk_anything(self) -> None:
        policy = watched(texts(0.02, num_tokens=8, count=6), CURVES["F16"])
        rounds = policy.off_rounds()
        assert rounds == Counter(short=rounds.total() - 1, measuring=1)

    def test_what_was_lost_already_forbids_to_risk_more(self) -> None:
        """A draft that was good and is useless now: what the answer may lose is used up before that is believed."""
        recordings = [
            synthetic(seed, {"draft": Skill(0.9)}, num_tokens=300, num_prompt=5, depth=16) for seed in range(3)
        ]
        useless = [synthetic(9, {"draft": Skill(0.0)}, num_tokens=100, num_prompt=5, depth=16)]
        policy = watched([*recordings, *useless], CURVES["steep line"])
        stats = policy.requests[-1].stats
        assert stats.num_drafted > 0
        assert stats.off_rounds.most_common(1)[0][0] == "losing"
        assert stats.gain is not None
        assert 0.95 <= stats.gain < 1.0
