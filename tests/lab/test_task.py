from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.lab.task import LOOPING_BELOW, distinct_share, is_repetitive


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [
        # abcd bcda cdab dabc abcd: five 4-grams, four different ones.
        ([1, 2, 3, 4, 1, 2, 3, 4], 4 / 5),
        ([7] * 256, 1 / 253),
        (range(256), 1.0),
        ([*range(10)] * 25 + [*range(6)], 10 / 253),
        ([1, 1, 1], 1.0),
    ],
    ids=["five", "one token", "no repeats", "a period is its length", "too short"],
)
def test_counts_four_grams(token_ids: Sequence[int], share: float) -> None:
    assert distinct_share(token_ids) == share


def test_a_text_loops_below_the_share_and_not_at_it() -> None:
    assert is_repetitive([1, 2] * 20)
    assert not is_repetitive(list(range(40)))
    # Five 4-grams and then the same five again: ten, of which five differ, and the one in between.
    text = list(range(8)) + list(range(8))
    assert distinct_share(text) >= LOOPING_BELOW
    assert not is_repetitive(text)
