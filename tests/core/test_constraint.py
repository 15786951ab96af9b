"""The keeper of a constraint against one that reads every history from its beginning."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.core import constraint
from paceline.core.constraint import ConstraintKeeper
from paceline.core.errors import ConstraintError
from paceline.core.params import SamplingParams
from paceline.core.reasoning import BudgetKeeper, ReasoningBudget
from paceline.core.sampling import RowSampler
from tests.automaton import FORBIDDEN, AutomatonConstraint
from tests.proofs import COUNTS

SIZE = 5
LINE = np.array([[1, FORBIDDEN, 0], [FORBIDDEN, 0, FORBIDDEN]])
"""0 is followed by 1, and 2 by anything but 1."""


def mask_of(keeper: ConstraintKeeper, history: list[int]) -> list[bool] | str | None:
    try:
        mask = keeper.mask(history)
    except ConstraintError:
        return "nothing"
    return None if mask is None else mask.tolist()


def random_automaton(rng: random.Random) -> AutomatonConstraint:
    COUNTS["automata"] += 1
    states = rng.randint(1, 4)
    return AutomatonConstraint(
        np.array([[rng.choice((FORBIDDEN, rng.randrange(states))) for _ in range(SIZE)] for _ in range(states)])
    )


@pytest.mark.parametrize("kept", [1, 3, 256])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_said_depends_on_the_history_alone(seed: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "_KEPT", kept)
    rng = random.Random(seed)
    automaton = random_automaton(rng)
    budget = (
        ReasoningBudget(rng.choice((None, 2)), (1,), (2,), begun=rng.random() < 0.5) if rng.random() < 0.6 else None
    )
    opening = budget.start if budget is not None and not budget.begun else ()

    def keeper() -> ConstraintKeeper:
        reasoning = None if budget is None else BudgetKeeper(budget, 2, opens_once=True)
        return ConstraintKeeper(automaton, 2, reasoning, opening)

    one = keeper()
    history = [0, 0]
    for _ in range(200):
        # Go on with a token, mostly one that may follow, or go back and take another branch.
        mask = mask_of(keeper(), history)
        assert mask_of(one, history) == mask
        if rng.random() < 0.25 or mask == "nothing":
            del history[rng.randint(2, len(history)) :]
            continue
        allowed = range(SIZE) if mask is None else [token_id for token_id in range(SIZE) if mask[token_id]]
        history.append(rng.choice(allowed) if allowed and rng.random() < 0.95 else rng.randrange(SIZE))


def test_the_grammar_begins_behind_the_reasoning() -> None:
    keeper = ConstraintKeeper(
        AutomatonConstraint(LINE), 1, BudgetKeeper(ReasoningBudget(None, (), (2,), begun=True), 1, opens_once=True)
    )
    assert keeper.mask([2]) is None
    assert keeper.mask([2, 1, 1]) is None
    assert mask_of(keeper, [2, 1, 1, 2]) == [True, False, True]
    assert mask_of(keeper, [2, 1, 1, 2, 0]) == [False, True, False]
    assert keeper.forced([2, 1, 1, 2, 0]) == [1]
    assert keeper.forced([2, 1]) == ()


def test_an_answer_may_begin_with_a_reasoning_or_with_the_grammar() -> None:
    budget = ReasoningBudget(None, (1, 1), (2,))
    keeper = ConstraintKeeper(AutomatonConstraint(LINE), 1, BudgetKeeper(budget, 1, opens_once=True), budget.start)
    assert mask_of(keeper, [0]) == [True, True, True], "1 opens a reasoning"
    assert mask_of(keeper, [0, 1]) == [False, True, False], "it is half open"
    assert keeper.mask([0, 1, 1]) is None
    assert mask_of(keeper, [0, 1, 1, 0, 2]) == [True, False, True]
    # Behind the beginning a marker is text.
    assert mask_of(keeper, [0, 2]) == [True, False, True]
    assert mask_of(keeper, [0, 0]) == [False, True, False]
    assert mask_of(keeper, [0, 0, 1]) == [True, False, True]


def test_what_is_forbidden_has_no_probability() -> None:
    sampler = RowSampler(SamplingParams(0.0), 1, AutomatonConstraint(LINE))
    row = np.array([1.0, 5.0, 3.0])
    assert sampler.is_constrained
    assert sampler.reads_history
    assert sampler.emit(row, 1, [0]) == 2
    assert sampler.emit(row, 2, [0, 0]) == 1
    assert sampler.mask(row, [0]).tolist() == [1.0, -np.inf, 3.0]
    assert row.tolist() == [1.0, 5.0, 3.0]


def test_a_row_that_lacks_what_is_allowed_is_refused() -> None:
    sampler = RowSampler(SamplingParams(), 1, AutomatonConstraint(LINE))
    with pytest.raises(ConstraintError, match="the grammar allows no token here that the model could produce"):
        sampler.mask(np.array([1.0]), [0, 0])


def test_rows_wider_than_the_grammar_have_their_surplus_forbidden() -> None:
    sampler = RowSampler(SamplingParams(0.0), 1, AutomatonConstraint(LINE))
    assert sampler.emit(np.array([1.0, 0.0, 2.0, 9.0, 9.0]), 1, [0]) == 2
