from __future__ import annotations

import random

import pytest

from paceline.bench.intervals import estimate


def test_of_equal_values_the_interval_is_a_point() -> None:
    found = estimate([1.25] * 7)
    assert (found.median, found.low, found.high, found.count) == (1.25, 1.25, 1.25, 7)


def test_of_five_values_the_interval_is_nearly_their_range() -> None:
    """The median of five draws is the smallest with probability 0.058 and the next smallest or less with 0.317."""
    found = estimate([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.median, found.low, found.high) == (3.0, 1.0, 5.0)


def test_one_value_has_no_interval() -> None:
    found = estimate([0.9])
    assert (found.median, found.low, found.high, found.count) == (0.9, None, None, 1)


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
