"""What asking a drafter brings, and what looks at one that was given up are reason for."""

from __future__ import annotations

from paceline.planning.gains import LOOKS_IN_A_ROW, Comeback


def test_a_look_that_was_right_against_expectation_is_followed_by_more() -> None:
    comeback = Comeback()
    comeback.add(chance=0.2, right=True)
    assert comeback.looks_left == LOOKS_IN_A_ROW
    comeback.add(chance=0.3, right=False)
    assert comeback.looks_left == 0


def test_a_streak_is_followed_however_likely_it_was_and_has_to_be_longer_after_one_that_came_to_nothing() -> None:
    comeback = Comeback()

    def looks_after(*verdicts: bool) -> int:
        for right in verdicts:
            comeback.add(chance=0.8, right=right)
        return comeback.looks_left

    assert looks_after(True) == 0
    assert looks_after(True) == LOOKS_IN_A_ROW
    assert looks_after(False, True, True) == 0
    assert looks_after(True) == LOOKS_IN_A_ROW
    comeback.confirm()
    assert looks_after(False, True, True) == LOOKS_IN_A_ROW
