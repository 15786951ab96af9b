"""What counts as time that grows with length alone."""

from __future__ import annotations

import pytest

from tests.timing import assert_grows_with_length_alone


def test_time_that_grows_with_length_is_told_from_time_that_grows_faster() -> None:
    assert_grows_with_length_alone(lambda length: sum(range(length)), 1_000_000)
    with pytest.raises(AssertionError, match=r"^250: .* s, and 2000: .* s of processor time"):
        assert_grows_with_length_alone(lambda length: [sum(range(length)) for _ in range(length)], 2000)
