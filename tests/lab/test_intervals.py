"""Intervals hold what they are for, about as often as they say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from scipy import stats

from paceline.lab.intervals import ALL, Tally, _student_t, depths, difference, estimate, quotient, ratio, share


@pytest.mark.parametrize(
    ("values", "median", "low", "high"),
    [
        ([1.25] * 7, 1.25, 1.25, 1.25),
        # The median of five draws is the smallest with probability 0.058 and the next smallest or less with 0.317.
        ([1.0, 2.0, 3.0, 4.0, 5.0], 3.0, 1.0, 5.0),
        ([0.9], 0.9, None, None),
    ],
    ids=["equal", "five", "one"],
)
def test_intervals_by_hand(values: list[float], median: float, low: float | None, high: float | None) -> None:
    found = estimate(values)
    assert (found.median, found.low, found.high, found.count) == (median, low, high, len(values))


def test_the_order_of_the_values_and_the_run_do_not_matter() -> None:
    rng = random.Random(3)
    values = [rng.gauss(1.0, 0.1) for _ in range(31)]
    found = estimate(values)
    assert found == estimate(values) == estimate(sorted(values)) == estimate(values[::-1])
    assert found.low is not None
    assert found.low < found.median


def test_the_interval_covers_the_median_about_as_often_as_it_says() -> None:
    """Of 200 samples of 25, the interval held the true median; binomial with 0.95 is below 0.89 once in 3,000."""
    rng = random.Random(1)
    covered = 0
    for _ in range(200):
        found = estimate([rng.gauss(1.0, 0.1) for _ in range(25)])
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.0 <= found.high
    assert covered >= 178


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="nothing"):
        estimate([])


class TestRatios:
    def test_by_hand(self) -> None:
        # 3 of 6; the texts are 2 - 1, 1 - 1.5 and 0 - 0.5 off what that makes of their counts.
        value = ratio([(2, 2), (1, 3), (0, 1)])
        assert value.value == 0.5
        assert value.standard_error == pytest.approx(math.sqrt(3 / 2 * (1.0**2 + 0.5**2 + 0.5**2)) / 6)
        assert (value.trials, value.texts) == (6, 3)

    def test_of_texts_of_one_trial_is_the_usual_error(self) -> None:
        hits = [1] * 30 + [0] * 70
        value = ratio([(hit, 1) for hit in hits])
        assert value.standard_error == pytest.approx(np.std(hits, ddof=1) / math.sqrt(100))

    def test_of_texts_alike_inside_is_wider_than_of_their_tokens(self) -> None:
        by_text = ratio([(50, 50), (0, 50)] * 5)
        by_token = ratio([(hit, 1) for hit in [1, 0] * 250])
        assert by_text.standard_error is not None
        assert by_token.standard_error is not None
        assert by_text.standard_error > 6 * by_token.standard_error

    def test_texts_without_trials_do_not_count(self) -> None:
        assert ratio([(1, 2), (0, 0), (2, 2)]) == ratio([(1, 2), (2, 2)])

    def test_without_error_where_texts_do_not_tell(self) -> None:
        assert ratio([(1, 2)]).standard_error is None
        assert ratio([(4, 4), (9, 9)]).standard_error is None

    def test_of_nothing(self) -> None:
        assert ratio([]).value is None


class TestShares:
    def test_wilson_interval(self) -> None:
        # Newcombe (1998), table I: 81 of 263 and 0 of 20.
        value = share(81, 263)
        assert [value.low, value.high] == pytest.approx([0.2553, 0.3662], abs=1e-4)
        assert share(0, 20).low == 0.0
        assert share(0, 20).high == pytest.approx(0.1611, abs=1e-4)
        assert share(20, 20).high == 1.0

    def test_share_of_nothing(self) -> None:
        assert share(0, 0).value is None


class TestTally:
    def test_pools_kinds(self) -> None:
        tally = Tally()
        tally.add("code", 3, 4)
        tally.add("logs", 1, 4)
        ratios = tally.ratios()
        assert {group: value.value for group, value in ratios.items()} == {"code": 0.75, "logs": 0.25, ALL: 0.5}


class TestDepths:
    def test_chains_shares(self) -> None:
        chain = depths([[(6, 10), (2, 10)], [(3, 6), (1, 2)], [(0, 3), (1, 1)]])
        assert [at_depth.depth for at_depth in chain] == [1, 2, 3]
        assert [at_depth.accepted.value for at_depth in chain] == [0.4, 0.5, 0.25]
        assert [at_depth.survival for at_depth in chain] == pytest.approx([0.4, 0.2, 0.05])

    def test_error_leaves_out_text_after_text(self) -> None:
        first, second = depths([[(6, 10), (2, 10)], [(3, 6), (2, 2)]])
        # Two texts: each survival without the other is that text's own; the error is half their distance.
        assert first.survival_error == pytest.approx((0.6 - 0.2) / 2)
        assert second.survival_error == pytest.approx((0.6 * 0.5 - 0.2 * 1.0) / 2)

    def test_depth_that_was_never_reached(self) -> None:
        chain = depths([[(0, 10), (0, 5)], [(0, 0), (0, 0)], [(0, 0), (0, 0)]])
        assert chain[0].survival == 0.0
        assert (chain[1].accepted.value, chain[1].survival, chain[2].survival) == (None, None, None)


@pytest.mark.parametrize("texts", [3, 4, 12])
def test_a_quotient_has_the_interval_of_other_texts(texts: int) -> None:
    """Texts of several lengths whose gains are spread around a known one."""
    rng = np.random.default_rng(texts)
    held = 0
    for _ in range(400):
        seconds = rng.uniform(4.0, 8.0, texts)
        interval = quotient(1.5 * np.exp(0.2 * rng.normal(size=texts) - 0.02) * seconds, seconds)
        assert interval.low is not None
        assert interval.high is not None
        held += interval.low <= 1.5 <= interval.high
    assert 0.92 < held / 400 < 0.98


@pytest.mark.parametrize("freedom", [3, 4, 7, 15, 40])
def test_quantiles_of_student(freedom: int) -> None:
    assert _student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_a_difference_is_of_pairs() -> None:
    """Texts that differ by far more than each of them changed."""
    texts = [(10.0, 12.0, 100), (50.0, 53.0, 100), (70.0, 72.0, 100), (90.0, 91.0, 100)]
    found = difference(texts)
    assert found.value == pytest.approx(0.02)
    assert found.low is not None
    assert found.high is not None
    error = np.std([0.02, 0.03, 0.02, 0.01], ddof=1) / math.sqrt(4)
    assert found.high - found.value == pytest.approx(stats.t.ppf(0.975, 3) * error, rel=0.02)
    assert found.value - found.low == pytest.approx(found.high - found.value)
    assert difference(texts[:1]).low is None
    assert difference([(5.0, 6.0, 10)] * 4).low == pytest.approx(0.1)
    with pytest.raises(ValueError, match="nothing"):
        difference([])
