from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.tree import Evidence
from paceline.drafters.base import DraftBudget
from paceline.drafters.lookup import FIRST_MATCH_PROBABILITY, LookupDrafter
from tests.core.helpers import request_of
from tests.drafters.helpers import grow


def reference(text: Sequence[int], longest: int, shortest: int, depth: int) -> tuple[int, list[int]]:
    """Return the match length and what followed the latest earlier occurrence of the longest n-gram that has one."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if list(text[end - n : end]) == list(text[-n:]):
                # The copy goes on with what it has copied when it comes to the end of the text.
                extended = list(text)
                for offset in range(depth):
                    extended.append(extended[end + offset])
                return n, extended[len(text) :]
    return 0, []


@settings(max_examples=300)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    cut=st.integers(1, 40),
    shortest=st.integers(1, 3),
    extra=st.integers(0, 3),
    depth=st.integers(1, 6),
)
def test_it_copies_what_followed_the_latest_match(
    text: list[int], cut: int, shortest: int, extra: int, depth: int
) -> None:
    drafter = LookupDrafter(shortest + extra, shortest)
    # The text comes in two parts: the index has to grow with it.
    request = request_of(text[:cut])
    drafter.begin(request)
    for rest in ([], text[cut:]):
        request.token_ids.extend(rest)
        match_length, copied = reference(request.token_ids, shortest + extra, shortest, depth)
        (tree,) = grow(drafter, [request], DraftBudget(depth))
        assert tree.token_ids[1:] == copied
        assert set(tree.evidence[1:]) <= {Evidence(FIRST_MATCH_PROBABILITY, match_length, 1)}


def test_the_latest_match_wins_over_an_earlier_one() -> None:
    drafter = LookupDrafter(2, 1)
    request = request_of([1, 2, 7, 1, 2, 8, 1, 2])
    drafter.begin(request)
    assert grow(drafter, [request], DraftBudget(2))[0].token_ids[1:] == [8, 1]


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (3, 0)])
def test_lengths_out_of_order(longest: int, shortest: int) -> None:
    with pytest.raises(InputError, match=f"lookup of {shortest} to {longest}"):
        LookupDrafter(longest, shortest)
