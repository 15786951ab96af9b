"""Steps of a recurrent model's pass are dealt out so that what may be stepped back can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engines.llama_cpp.native_calls import deal_steps


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([1], [([0], 0)]),
        ([200], [([0], 0)]),
        ([4, 4, 4], [([0, 1, 2], 0)]),
        ([5, 3, 1], [([0, 1, 2], 5)]),
        ([1, 1, 9], [([0, 1], 0), ([2], 9)]),  # 16 pads would cost more than a graph run
        ([2, 9], [([0, 1], 9)]),  # both may be stepped back
        ([200, 4, 2], [([0], 0), ([1, 2], 4)]),
        ([200, 4, 1, 2], [([0, 2], 0), ([1, 3], 4)]),
        ([200, 1, 1], [([0], 0), ([1, 2], 1)]),
        ([200, 100], [([0, 1], 0)]),
    ],
)
def test_what_is_dealt_out(lengths: list[int], calls: list[tuple[list[int], int]]) -> None:
    assert [(list(call.steps), call.rows) for call in deal_steps(lengths, 16)] == calls


def test_without_snapshots_nothing_is_padded() -> None:
    assert [(list(call.steps), call.rows) for call in deal_steps([1, 200, 3], 0)] == [([0, 1, 2], 0)]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 16))
def test_what_may_be_stepped_back_is_evenly_in_the_last_call(lengths: list[int], max_rollback: int) -> None:
    calls = deal_steps(lengths, max_rollback)
    assert sorted(step for call in calls for step in call.steps) == list(range(len(lengths)))
    assert all(list(call.steps) == sorted(call.steps) for call in calls)
    last = calls[-1]
    may_be_stepped_back = {step for step, length in enumerate(lengths) if 1 < length <= max_rollback + 1}
    if may_be_stepped_back or len(lengths) == 1:
        assert last.even
        assert may_be_stepped_back <= set(last.steps)
    for call in calls:
        rows = [max(lengths[step], call.rows) for step in call.steps]
        assert call.even == (len(set(rows)) == 1)
        if call.rows:
            # As many rows as the engine has room for, whatever it pads.
            assert sum(rows) <= len(lengths) * (max_rollback + 1)
