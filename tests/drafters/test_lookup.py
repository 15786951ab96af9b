from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import InputError
from paceline.core.tree import Evidence
from paceline.drafters import lookup
from paceline.drafters.base import DraftBudget
from paceline.drafters.lookup import (
    CLEAR_COPY_LENGTH,
    COPY_LENGTH,
    FIRST_MATCH_PROBABILITY,
    LONGEST_CHANGE,
    RESUMED_LENGTH,
    SHORT_CHANGE,
    LookupDrafter,
    PredictionDrafter,
)
from tests.drafters.helpers import grow
from tests.helpers import request_of, say

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def reference(text: Sequence[int], longest: int, shortest: int) -> tuple[int, int] | None:
    """Return where the latest earlier occurrence of the longest n-gram that has one ends, and its length."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if list(text[end - n : end]) == list(text[-n:]):
                return end, n
    return None


def continued(text: Sequence[int], start: int, depth: int) -> list[int]:
    """Return what followed ``start``; the copy goes on with what it has copied when it comes to the end of the text."""
    extended = list(text)
    for offset in range(depth):
        extended.append(extended[start + offset])
    return extended[len(text) :]


def repeated(text: Sequence[int], start: int) -> int:
    """Return how many tokens before ``start`` are those at the text's end."""
    length = 0
    while length < start and text[start - 1 - length] == text[-1 - length]:
        length += 1
    return length


def proposed(prompt: Sequence[int], answer: Sequence[int] = (), depth: int = 4) -> tuple[list[int], Evidence | None]:
    """Return what a drafter proposes behind an answer, and on what evidence."""
    drafter, request = LookupDrafter(), request_of(prompt)
    drafter.begin(request)
    say(request, *answer)
    (tree,) = grow(drafter, [request], DraftBudget(depth))
    return tree.token_ids[1:], tree.evidence[1] if len(tree) > 1 else None


@settings(max_examples=300)
@given(prompt=TEXTS, shortest=st.integers(1, 3), extra=st.integers(0, 3), depth=st.integers(1, 6))
def test_it_copies_what_followed_the_latest_match(prompt: list[int], shortest: int, extra: int, depth: int) -> None:
    drafter, request = LookupDrafter(shortest + extra, shortest), request_of(prompt)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(depth))
    found = reference(prompt, shortest + extra, shortest)
    if found is None:
        assert len(tree) == 1
        return
    start, n = found
    assert tree.token_ids[1:] == continued(prompt, start, depth)
    match_length = max(n, min(repeated(prompt, start), COPY_LENGTH))
    assert set(tree.evidence[1:]) == {Evidence(FIRST_MATCH_PROBABILITY, match_length, 1)}


@settings(max_examples=300)
@given(
    prompt=TEXTS,
    parts=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8),
    passage=st.lists(st.integers(0, 3)),
)
def test_what_it_proposes_depends_on_the_text_alone(
    prompt: list[int], parts: list[list[int]], passage: list[int]
) -> None:
    # A passage that comes again and again, changed by what stands between, is followed, left and found again.
    prompt = prompt + passage
    drafter, request = LookupDrafter(), request_of(prompt)
    drafter.begin(request)
    for part in parts:
        say(request, *part, *passage[len(part) :])
        (tree,) = grow(drafter, [request], DraftBudget(5))
        answer = request.token_ids[len(prompt) :]
        proposals, evidence = proposed(prompt, answer, 5)
        assert tree.token_ids[1:] == proposals
        assert evidence is None or set(tree.evidence[1:]) == {evidence}


@settings(max_examples=300)
@given(prompt=TEXTS, passage=st.lists(st.integers(0, 9), min_size=20, max_size=40), changed=st.data())
def test_proposals_follow_an_earlier_occurrence_of_the_text_s_end(
    prompt: list[int], passage: list[int], changed: st.DataObject
) -> None:
    answer = list(passage)
    for place in sorted(changed.draw(st.sets(st.integers(0, len(passage) - 1), max_size=4)), reverse=True):
        answer[place : place + changed.draw(st.integers(0, 3))] = changed.draw(st.lists(st.integers(0, 9), max_size=3))
    text = [*prompt, *passage, *answer]
    proposals, evidence = proposed([*prompt, *passage], answer, 6)
    starts = [s for s in range(1, len(text)) if continued(text, s, 6) == proposals]
    assert evidence is None or any(text[s - 1] == text[-1] for s in starts)
    # Where nothing is unusual about the place, it takes as many tokens as ever.
    assert evidence is None or evidence.resumed or any(repeated(text, s) >= 2 for s in starts)


PASSAGE = list(range(100, 180))
"""A passage in which no token comes twice."""


def test_a_copy_is_followed_though_its_last_tokens_came_again_later() -> None:
    later = [1, *PASSAGE[6:10], 2, 3]
    copied = PASSAGE[:10]
    # Within the copy the latest occurrence of its last four tokens is not where it is from.
    proposals, evidence = proposed([*PASSAGE, *later], copied)
    assert proposals == PASSAGE[10:14]
    assert evidence == Evidence(FIRST_MATCH_PROBABILITY, 10, 1)
    # Without a copy it is.
    assert proposed([*PASSAGE, *later], PASSAGE[6:10])[0] == [2, 3, *PASSAGE[6:8]]


@pytest.mark.parametrize(
    ("left_out", "put_in"), [(1, [1]), (0, [1, 2, 3]), (3, []), (2, [1, 2, 3, 4])], ids=["word", "in", "out", "both"]
)
def test_behind_a_change_one_token_near_there_takes_up_a_long_copy(left_out: int, put_in: list[int]) -> None:
    copied, on = CLEAR_COPY_LENGTH, CLEAR_COPY_LENGTH + left_out
    answer = [*PASSAGE[:copied], *put_in, PASSAGE[on]]
    proposals, evidence = proposed(PASSAGE, answer)
    assert proposals == PASSAGE[on + 1 : on + 5]
    assert evidence == Evidence(FIRST_MATCH_PROBABILITY, 1, 1, resumed=True)
    # From the third token on it is the same copy again, and as long as both together.
    resumed = RESUMED_LENGTH + 1
    proposals, evidence = proposed(PASSAGE, [*PASSAGE[:copied], *put_in, *PASSAGE[on : on + resumed]])
    assert proposals == PASSAGE[on + resumed : on + resumed + 4]
    assert evidence == Evidence(FIRST_MATCH_PROBABILITY, copied + resumed, 1)


@pytest.mark.parametrize(
    ("copied", "put_in", "least"),
    [(CLEAR_COPY_LENGTH - 1, 1, 2), (CLEAR_COPY_LENGTH, SHORT_CHANGE, 2), (CLEAR_COPY_LENGTH, SHORT_CHANGE - 1, 1)],
    ids=["a short copy", "a long change", "a short change"],
)
def test_one_token_says_little_behind_a_short_copy_or_a_long_change(copied: int, put_in: int, least: int) -> None:
    for length in (1, 2):
        proposals, evidence = proposed(PASSAGE, [*PASSAGE[:copied], *range(put_in), *PASSAGE[copied : copied + length]])
        assert bool(proposals) == (length >= least)
        assert evidence is None or evidence.resumed


@pytest.mark.parametrize(("changed", "resumed"), [(LONGEST_CHANGE - 2, True), (LONGEST_CHANGE - 1, False)])
def test_a_copy_is_over_behind_a_change_that_is_too_long(changed: int, resumed: bool) -> None:
    copied = COPY_LENGTH
    answer = [*PASSAGE[:copied], *range(changed), *PASSAGE[copied : copied + 2]]
    proposals, evidence = proposed(PASSAGE, answer)
    assert proposals == PASSAGE[copied + 2 : copied + 6]
    assert evidence == Evidence(FIRST_MATCH_PROBABILITY, 2, 1, resumed=resumed)


def test_near_a_copy_a_match_is_preferred_to_one_elsewhere_unless_that_is_longer() -> None:
    passage = [*PASSAGE[:12], 1, 2, 50, 51]
    elsewhere = [*range(200, 240), 1, 2, 60, 61]
    prompt, copy = [*passage, *elsewhere], PASSAGE[:10]
    proposals, evidence = proposed(prompt, [*copy, 1, 2], 1)
    assert (proposals, evidence) == ([50], Evidence(FIRST_MATCH_PROBABILITY, 2, 1, resumed=True))
    proposals, evidence = proposed(prompt, [*copy, 239, 1, 2], 1)
    assert (proposals, evidence) == ([60], Evidence(FIRST_MATCH_PROBABILITY, 3, 1))


def test_of_equal_matches_near_a_copy_the_one_where_it_would_stand_wins() -> None:
    passage = [*PASSAGE[:20], 1, 2, 3, 4, 1, 5, 6]
    # New words are taken to stand in the place of as many.
    for put_in, then in (([9], 2), ([9, 9, 9, 9], 5)):
        assert proposed(passage, [*PASSAGE[:20], *put_in, 1], 1)[0] == [then]


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (3, 0)])
def test_lengths_out_of_order(longest: int, shortest: int) -> None:
    with pytest.raises(InputError, match=f"lookup of {shortest} to {longest}"):
        LookupDrafter(longest, shortest)


def predicted(
    prediction: Sequence[int], answer: Sequence[int] = (), depth: int = 4, prompt: Sequence[int] = (7,)
) -> tuple[list[int], Evidence | None]:
    """Return what the drafter of predictions proposes behind an answer, and on what evidence."""
    drafter, request = PredictionDrafter(), request_of(prompt, prediction=prediction)
    drafter.begin(request)
    say(request, *answer)
    (tree,) = grow(drafter, [request], DraftBudget(depth))
    return tree.token_ids[1:], tree.evidence[1] if len(tree) > 1 else None


def test_a_prediction_is_proposed_from_its_beginning_and_to_its_end() -> None:
    proposals, evidence = predicted(PASSAGE)
    assert proposals == PASSAGE[:4]
    assert evidence == Evidence(FIRST_MATCH_PROBABILITY, 0, 1)
    proposals, evidence = predicted(PASSAGE, PASSAGE[:5])
    assert proposals == PASSAGE[5:9]
    assert evidence == Evidence(FIRST_MATCH_PROBABILITY, 5, 1)
    assert predicted(PASSAGE, PASSAGE[:-2])[0] == PASSAGE[-2:]
    assert predicted(PASSAGE, PASSAGE)[0] == []
    assert predicted(PASSAGE, [*PASSAGE, *PASSAGE[:2]])[0] == PASSAGE[2:6], "told once more"


@pytest.mark.parametrize("opening", [[1], [1, 2, 3, 4, 5, 6], list(range(40))], ids=["space", "fence", "sentence"])
def test_an_answer_may_open_with_something_else(opening: list[int]) -> None:
    num_told = 1 if len(opening) < SHORT_CHANGE else 2
    assert predicted(PASSAGE, [*opening, *PASSAGE[:num_told]])[0] == PASSAGE[num_told : num_told + 4]
    # What the prediction opens with may be missing, too.
    assert predicted(PASSAGE, [*opening, *PASSAGE[5 : 5 + num_told]])[0] == PASSAGE[5 + num_told : 9 + num_told]


@pytest.mark.parametrize("place", [1, 10, 30])
@pytest.mark.parametrize(
    ("left_out", "put_in"), [(1, 1), (0, 1), (0, 5), (1, 0), (6, 0), (20, 3), (40, 0), (0, 200), (30, 200)]
)
def test_a_prediction_is_found_again_behind_a_change(place: int, left_out: int, put_in: int) -> None:
    answer = [*PASSAGE[:place], *range(1000, 1000 + put_in)]
    start = place + left_out
    # Near the change one token will do; elsewhere, and behind a longer one, it takes two.
    num_told = 1 if left_out <= 20 and put_in + 1 <= SHORT_CHANGE else 2
    proposals, evidence = predicted(PASSAGE, [*answer, *PASSAGE[start : start + num_told]])
    assert proposals == PASSAGE[start + num_told : start + num_told + 4]
    assert evidence is not None
    assert evidence.resumed is (num_told == 1 or (left_out <= 30 and put_in < LONGEST_CHANGE))
    # As a change is written there is nothing to propose.
    assert put_in < 2 or predicted(PASSAGE, answer)[0] == []


def test_answers_that_are_predicted_alike_share_what_is_known_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    index = lookup._NgramIndex.follow

    def counted(self: Any, token_ids: Sequence[int], length: int) -> None:
        read.append(length)
        index(self, token_ids, length)

    monkeypatch.setattr(lookup._NgramIndex, "follow", counted)
    drafter = PredictionDrafter()
    requests = [request_of([7], request_id=number, prediction=PASSAGE) for number in range(3)]
    answers = [PASSAGE[:5], [1, *PASSAGE[20:22]], [1000, 1001]]
    for request, answer in zip(requests, answers, strict=True):
        drafter.begin(request)
        say(request, *answer)
    for _ in range(2):
        trees = grow(drafter, requests, DraftBudget(4))
        assert [tree.token_ids[1:] for tree in trees] == [predicted(PASSAGE, answer)[0] for answer in answers]
        del read[1:]
    assert read == [len(PASSAGE)]
    for request in requests:
        drafter.end(request)
    drafter.begin(requests[0])
    assert read == [len(PASSAGE)] * 2, "nothing is kept of answers that are over"


def test_what_is_nearest_to_the_change_is_gone_on_with() -> None:
    rows = [token for row in range(12) for token in (1, 2, 3, 500 + row, 4)]
    # In each row the number is another one: the next row is told, not the last one that looks the same.
    for row in range(1, 11):
        told = [token for number in range(row) for token in (1, 2, 3, 900 + number, 4)]
        assert predicted(rows, told)[0] == [1, 2, 3, 500 + row], row


def test_only_the_prediction_is_proposed() -> None:
    repeated = [1, 2, 3, 4] * 5
    assert predicted(PASSAGE, repeated, prompt=repeated)[0] == []
    assert predicted([5], [5], prompt=[5, 6, 5])[0] == []
    # Nothing goes on from its end into the answer.
    assert predicted([8, 9], [1, 9, 1], prompt=[8])[0] == []


@settings(max_examples=300)
@given(prediction=TEXTS, parts=st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=8), depth=st.integers(1, 6))
def test_proposals_are_parts_of_the_prediction_whenever_it_is_asked(
    prediction: list[int], parts: list[list[int]], depth: int
) -> None:
    drafter, request = PredictionDrafter(), request_of([7, 7], prediction=prediction)
    drafter.begin(request)
    # Parts of the prediction itself come again and again, between others.
    for number, part in enumerate(parts):
        say(request, *part, *prediction[number : number + len(part)])
        (tree,) = grow(drafter, [request], DraftBudget(depth))
        answer = request.token_ids[2:]
        proposals, evidence = predicted(prediction, answer, depth)
        assert tree.token_ids[1:] == proposals
        if evidence is None:
            continue
        assert set(tree.evidence[1:]) == {evidence}
        starts = [s for s in range(len(prediction)) if prediction[s : s + depth] == proposals]
        assert starts
        # Its first token is not behind anything.
        assert not answer or any(s > 0 and prediction[s - 1] == answer[-1] for s in starts)
