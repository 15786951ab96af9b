"""What is set aside for probes, and what those at a draft that was given up are reason for."""

from __future__ import annotations

import pytest

from paceline.planning.auto.exploration import PROBE_SHARE
from paceline.planning.auto.probes import PROBES_IN_A_ROW, ProbeBudget, ReentryTest


def test_every_drafter_has_its_part_of_what_is_set_aside() -> None:
    probes = ProbeBudget({"suffix": 0.0, "draft": -1.0})
    probes.save(100.0)
    assert probes.set_aside_s(100.0) == 100.0 * PROBE_SHARE / 2
    assert probes.saved_s == pytest.approx({"suffix": 50.0 * PROBE_SHARE, "draft": -1.0 + 50.0 * PROBE_SHARE})
    probes.save(1e6, most_s=1.0)
    assert probes.saved_s == {"suffix": 1.0, "draft": 1.0}


def test_a_look_is_paid_for_or_not_taken() -> None:
    probes = ProbeBudget({"draft": 1.0})
    assert probes.pay("draft", 0.75)
    assert not probes.pay("draft", 0.5)
    assert probes.saved_s == {"draft": 0.25}


def test_a_look_that_was_right_against_expectation_is_followed_by_more() -> None:
    reentry_test = ReentryTest()
    reentry_test.add(chance=0.2, right=True)
    assert reentry_test.probes_left == PROBES_IN_A_ROW
    reentry_test.probes_left -= 1
    reentry_test.add(chance=0.3, right=False)
    assert reentry_test.probes_left == PROBES_IN_A_ROW - 1
    reentry_test.add(chance=0.3, right=False)
    assert reentry_test.probes_left == 0


def test_one_that_was_wrong_after_the_last_of_the_looks_is_followed_by_one_more() -> None:
    reentry_test = ReentryTest()
    reentry_test.add(chance=0.2, right=True)
    reentry_test.probes_left = 0
    reentry_test.add(chance=0.3, right=False)
    assert reentry_test.probes_left == 1


def test_a_streak_is_followed_however_likely_it_was_and_has_to_be_longer_after_one_that_came_to_nothing() -> None:
    reentry_test = ReentryTest()

    def probes_after(*verdicts: bool) -> int:
        for right in verdicts:
            reentry_test.add(chance=0.8, right=right)
        return reentry_test.probes_left

    assert probes_after(True) == 0
    assert probes_after(True) == PROBES_IN_A_ROW
    assert probes_after(False, True, True) == 0
    assert probes_after(True) == PROBES_IN_A_ROW
    reentry_test.confirm()
    assert probes_after(False, True, True) == PROBES_IN_A_ROW


def test_what_was_worth_verifying_and_right_is_reason_to_look_again() -> None:
    reentry_test = ReentryTest()
    reentry_test.add(chance=0.8, right=True)
    assert reentry_test.probes_left == 0
    reentry_test.confirm()
    assert reentry_test.probes_left == PROBES_IN_A_ROW
    reentry_test.add(chance=0.8, right=False)
    reentry_test.confirm()
    assert reentry_test.probes_left == 0


def test_a_long_streak_is_not_ended_by_one_that_was_wrong() -> None:
    reentry_test = ReentryTest()
    for _ in range(6):
        reentry_test.add(chance=0.8, right=True)
    reentry_test.add(chance=0.8, right=False)
    assert reentry_test.probes_left == 1
    reentry_test.add(chance=0.8, right=True)
    assert reentry_test.probes_left == PROBES_IN_A_ROW
    for _ in range(2):
        reentry_test.add(chance=0.8, right=False)
    assert reentry_test.probes_left == 0
