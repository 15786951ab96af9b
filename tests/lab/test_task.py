from __future__ import annotations

from paceline.lab.task import LOOPING_BELOW, distinct_share, is_repetitive


def test_counts_four_grams() -> None:
    # abcd bcda cdab dabc abcd: five 4-grams, four different ones.
    assert distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5


def test_of_one_token_again_and_again() -> None:
    assert distinct_share([7] * 256) == 1 / 253


def test_of_text_without_repeats() -> None:
    assert distinct_share(range(256)) == 1.0


def test_of_a_period_is_its_length() -> None:
    assert distinct_share(list(range(10)) * 25 + list(range(6))) == 10 / 253


def test_too_short_to_repeat() -> None:
    assert distinct_share([1, 1, 1]) == 1.0


def test_a_text_loops_below_the_share_and_not_at_it() -> None:
    assert is_repetitive([1, 2] * 20)
    assert not is_repetitive(list(range(40)))
    # Five 4-grams and then the same five again: ten, of which five differ, and the one in between.
    text = list(range(8)) + list(range(8))
    assert distinct_share(text) >= LOOPING_BELOW
    assert not is_repetitive(text)
