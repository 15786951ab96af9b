"""Sizes as people read and write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.sizes import format_memory, format_seconds, parse_bytes, parse_count, parse_seconds


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("12G", 12 << 30),
        ("800M", 800 << 20),
        ("1.5 GiB", 3 << 29),
        ("2gb", 2 << 30),
        ("64k", 64 << 10),
        ("1T", 1 << 40),
        ("4096", 4096),
        ("100B", 100),
    ],
)
def test_memory_is_written_with_its_unit(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "12X", "-1G", "1e3M", "12 G B", "½G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a size: give a number and a unit, such as 12G or 800M"):
        parse_bytes(text)


@given(st.integers(0, 1 << 45))
def test_what_is_said_to_be_needed_is_enough(num_bytes: int) -> None:
    assert num_bytes <= parse_bytes(format_memory(num_bytes)) <= num_bytes + max(1 << 20, num_bytes // 5)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60m", 3600), ("1h30m", 5400), ("1h 30min", 5400), ("90s", 90), ("90", 90), ("0.5h", 1800), ("2M30S", 150)],
)
def test_times_are_written_with_their_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "soon", "-5m", "1d", "30m1h", "1e3s", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="60m"):
        parse_seconds(text)


def test_times_are_said_in_few_words() -> None:
    assert [format_seconds(seconds) for seconds in (42.3, 89, 720, 5400)] == ["42 s", "89 s", "12 min", "1 h 30 min"]


@pytest.mark.parametrize(
    ("text", "count"), [("32000", 32_000), ("32k", 32_000), ("32 K", 32_000), ("1.5M", 1_500_000), ("0", 0)]
)
def test_a_count_is_written_with_its_unit(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "k", "32kb", "-3", "1e3", "3G"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_count(text)
