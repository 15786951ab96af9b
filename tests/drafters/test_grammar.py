"""What is drafted where a grammar leaves little choice, with grammars that are tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.request import Request
from paceline.core.tree import Evidence
from paceline.drafters.base import DraftBudget
from paceline.drafters.grammar import GrammarDrafter, Guess, Habits
from tests.automaton import FORBIDDEN, AutomatonConstraint
from tests.drafters.helpers import grow, proposals, settle
from tests.helpers import request_of

SIZE = 200
NAME, QUOTE, COLON, SPACE, LINE = 100, 101, 102, 103, 104
ANYTHING = dict.fromkeys(range(SIZE), 0)


def table(*states: dict[int, int]) -> AutomatonConstraint:
    """Return a grammar of states, each with the state that every token leads to."""
    rows = np.full((len(states), SIZE), FORBIDDEN)
    for state, leads in enumerate(states):
        for token_id, after in leads.items():
            rows[state, token_id] = after
    return AutomatonConstraint(rows)


def field() -> AutomatonConstraint:
    """Return a name that is forced, a choice of white space, a colon, and then any token, for ever."""
    return table({NAME: 1}, {QUOTE: 2}, {COLON: 3, SPACE: 3, LINE: 3}, ANYTHING)


def asked(constraint: AutomatonConstraint | None, request_id: int = 0) -> Request:
    return request_of([1], request_id=request_id, constraint=constraint)


def said(drafter: GrammarDrafter, request: Request, *token_ids: int) -> None:
    """Let the request say tokens, one in a round, as if nothing was drafted."""
    for token_id in token_ids:
        (tree,) = grow(drafter, [request], DraftBudget(1, min_probability=2.0))
        tree.keep([])
        settle(drafter, request, tree, [], token_id)


def chain(drafter: GrammarDrafter, request: Request, budget: DraftBudget) -> Sequence[int]:
    (tree,) = grow(drafter, [request], budget)
    assert set(tree.sources[1:]) <= {"grammar"}
    return tree.token_ids[1:]


def test_what_is_forced_is_drafted_and_no_more_is_known_at_first() -> None:
    drafter, request = GrammarDrafter(), asked(field())
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(8))
    assert tree.token_ids[1:] == [NAME, QUOTE]
    assert tree.evidence[1:] == [Evidence(match_length=2)] * 2
    assert chain(drafter, request, DraftBudget(1)) == [NAME]


def test_habits_go_on_where_nothing_is_forced_until_any_token_may_follow() -> None:
    drafter, request = GrammarDrafter(), asked(field())
    drafter.begin(request)
    said(drafter, request, NAME, QUOTE, SPACE, 7)
    assert chain(drafter, request, DraftBudget(8)) == [NAME, QUOTE, SPACE]
    said(drafter, request, NAME, QUOTE)
    (tree,) = grow(drafter, [request], DraftBudget(8))
    assert tree.token_ids[1:] == [SPACE]
    # Once, and nothing else there: one other is always possible.
    assert tree.evidence[1] == Evidence(1 / 2, match_length=1, count=1)
    assert chain(drafter, request, DraftBudget(8, min_probability=0.6)) == []


def test_an_answer_keeps_to_its_own_habits_and_begins_with_those_of_others() -> None:
    drafter, first, second = GrammarDrafter(), asked(field()), asked(field(), 1)
    for request in (first, second):
        drafter.begin(request)
    said(drafter, first, NAME, QUOTE, SPACE, 7, NAME, QUOTE)
    said(drafter, second, NAME, QUOTE)
    assert chain(drafter, second, DraftBudget(8)) == [SPACE]
    said(drafter, second, LINE, 7, NAME, QUOTE)
    assert chain(drafter, second, DraftBudget(8)) == [LINE]
    assert chain(drafter, first, DraftBudget(8)) == [SPACE]
    drafter.end(first)
    third = asked(field(), 2)
    drafter.begin(third)
    # Of equals the latest.
    assert chain(drafter, third, DraftBudget(8)) == [NAME, QUOTE, LINE]


def test_nothing_is_drafted_where_any_token_may_follow_or_there_is_no_grammar() -> None:
    drafter, free, wide = GrammarDrafter(), asked(None), asked(table(ANYTHING), 1)
    for request in (free, wide):
        drafter.begin(request)
        said(drafter, request, 5, 5, 5)
        assert chain(drafter, request, DraftBudget(8)) == []


def test_an_end_that_alone_may_follow_is_drafted_and_nothing_below_it() -> None:
    drafter, request = GrammarDrafter(), asked(table({NAME: 1}, {7: 2}, {}))
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(8))
    assert proposals(tree)[1:] == [([NAME], "grammar"), ([NAME, 7], "grammar")]


def test_habits_count_what_may_follow_now_and_keep_the_latest() -> None:
    habits, allowed = Habits(), np.zeros(5000, dtype=bool)
    for before, token_id in ((1, 10), (1, 10), (1, 11), (1, 12), (2, 12)):
        habits.add(before, token_id)
    assert habits.after(1, allowed) is None
    allowed[[11, 12]] = True
    assert habits.after(1, allowed) == Guess(12, 1, 2, after=True)
    assert habits.after(3, allowed) is None
    assert habits.altogether(allowed) == Guess(12, 2, 3, after=False)
    for token_id in range(20, 5000):
        habits.add(token_id, token_id)
    allowed[4999] = True
    assert habits.after(1, allowed) is None
    assert habits.altogether(allowed) == Guess(4999, 1, 1, after=False)
