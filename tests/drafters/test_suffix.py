"""The automaton against brute force, and its size against the bounds of linear-time construction."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.tree import Evidence
from paceline.drafters.base import DraftBudget
from paceline.drafters.suffix import SuffixAutomaton, SuffixDrafter
from tests.drafters.helpers import grow
from tests.helpers import request_of, say

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40) | st.lists(st.integers(0, 9), min_size=1, max_size=40)


def automaton_of(text: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token_id in text:
        automaton.append(token_id)
    return automaton


def longest_earlier_suffix(text: Sequence[int]) -> int:
    """Return the length of the longest suffix of ``text`` that also ends somewhere before."""
    for length in range(len(text) - 1, 0, -1):
        suffix = list(text[-length:])
        if any(list(text[end - length : end]) == suffix for end in range(length, len(text))):
            return length
    return 0


def followers(text: Sequence[int], length: int) -> Counter[int]:
    """Return what followed the earlier occurrences of the last ``length`` tokens, and how often."""
    suffix = list(text[-length:])
    return Counter(text[end] for end in range(length, len(text)) if list(text[end - length : end]) == suffix)


@settings(max_examples=300)
@given(text=TEXTS)
def test_the_match_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token_id in enumerate(text, start=1):
        automaton.append(token_id)
        assert automaton.match_length == longest_earlier_suffix(text[:end])


@settings(max_examples=300)
@given(text=TEXTS)
def test_the_continuation_is_one_that_was_seen(text: list[int]) -> None:
    automaton = automaton_of(text)
    if automaton.match_length == 0:
        return
    seen = followers(text, automaton.match_length)
    found = automaton.continuation(automaton.match)
    assert found is not None
    token_id, _, count, total = found
    assert token_id in seen
    assert 1 <= count <= total
    assert count <= seen[token_id]


@settings(max_examples=300)
@given(text=TEXTS, depth=st.integers(1, 6), min_match=st.integers(1, 3))
def test_every_drafted_token_followed_its_context_before(text: list[int], depth: int, min_match: int) -> None:
    drafter = SuffixDrafter(min_match)
    request = request_of(text)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(depth))
    length = longest_earlier_suffix(text)
    if length < min_match:
        assert tree.num_drafted == 0
        return
    drafted = tree.token_ids[1:]
    assert 1 <= len(drafted) <= depth
    for taken in range(1, len(drafted) + 1):
        # At least ``min_match`` tokens of context and the drafted one stand in the text as they stand here.
        needle = [*text, *drafted[:taken]][-min_match - 1 :]
        assert any(text[i : i + len(needle)] == needle for i in range(len(text)))


def test_counts_decide_between_continuations() -> None:
    # "1 2" was followed by 3 three times and by 4 once.
    text = [1, 2, 3, 0, 1, 2, 3, 5, 1, 2, 4, 6, 1, 2, 3, 7, 1, 2]
    automaton = automaton_of(text)
    assert automaton.match_length == 2
    found = automaton.continuation(automaton.match)
    assert found is not None
    token_id, _, count, total = found
    assert (token_id, count, total) == (3, 3, 4)
    drafter = SuffixDrafter(min_match=2)
    request = request_of(text)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(1))
    assert tree.evidence[1] == Evidence(probability=3 / 5, match_length=2, count=3)


@pytest.mark.parametrize(
    ("followed_by", "best"),
    [([3, 4], 4), ([3, 3, 4], 3), ([3, 4, 4, 3], 3), ([4, 3, 3, 4, 5], 4), ([3, 4, 5, 4, 5], 5), ([3, 4, 4, 3, 4], 4)],
)
def test_the_most_frequent_continuation_wins_and_the_latest_of_equals(followed_by: list[int], best: int) -> None:
    # What stands before each "1 2" is new, so that "1 2" stays the longest match.
    text = [token for new, follower in enumerate(followed_by, start=10) for token in (new, 1, 2, follower)]
    automaton = automaton_of([*text, 99, 1, 2])
    assert automaton.match_length == 2
    found = automaton.continuation(automaton.match)
    assert found is not None
    assert found[0] == best
    assert (found[2], found[3]) == (followed_by.count(best), len(followed_by))


def test_text_is_followed_as_it_grows() -> None:
    """The second look appends the new tokens only, and sees what the first could not."""
    drafter = SuffixDrafter(min_match=2)
    request = request_of([1, 2, 3])
    drafter.begin(request)
    assert grow(drafter, [request], DraftBudget(4))[0].num_drafted == 0
    say(request, 1, 2)
    # Where the text ends, the draft goes on as if its own tokens stood there.
    assert grow(drafter, [request], DraftBudget(4))[0].token_ids[1:] == [3, 1, 2, 3]


def test_constant_text_is_drafted_to_the_full_depth() -> None:
    drafter = SuffixDrafter(min_match=2)
    request = request_of([4, 7, 7, 7, 7])
    drafter.begin(request)
    assert grow(drafter, [request], DraftBudget(6))[0].token_ids[1:] == [7] * 6


def test_short_matches_are_not_worth_it() -> None:
    drafter = SuffixDrafter(min_match=3)
    request = request_of([1, 2, 3, 1, 2])
    drafter.begin(request)
    assert grow(drafter, [request], DraftBudget(4))[0].num_drafted == 0
    with pytest.raises(InputError, match="0 tokens"):
        SuffixDrafter(min_match=0)


def lines_run(text: Sequence[int]) -> int:
    """Return how many lines of code it takes to follow ``text``: time without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        automaton_of(text)
    finally:
        sys.settrace(before)
    return count


LONG_TEXTS = {
    "one token": [0] * 2000,
    "two in turn": [0, 1] * 1000,
    "seven in turn": [i % 7 for i in range(2000)],
    "mixed": [(i * i + i // 3) % 5 for i in range(2000)],
    "one token, then others": [0] * 1000 + [i % 3 for i in range(1000)],
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS.keys())
def test_it_grows_in_linear_time_and_space(text: list[int]) -> None:
    """At most 2 n - 1 states and 3 n - 4 transitions (Blumer et al. 1985); twice the text takes twice the work."""
    automaton = automaton_of(text)
    assert len(automaton._length) <= 2 * len(text) - 1
    assert sum(map(len, automaton._next)) <= 3 * len(text) - 4
    assert lines_run(text) <= 60 * len(text)
    assert lines_run(text) <= 2.5 * lines_run(text[: len(text) // 2])
