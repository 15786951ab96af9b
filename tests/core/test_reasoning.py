"""The reasoning budget against a state machine that is told one token after the other, and never looks back."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import SamplingError
from paceline.core.params import SamplingParams, VerifierName
from paceline.core.reasoning import BudgetKeeper, ReasoningBudget
from paceline.core.sampling import RowSampler
from paceline.core.tree import ROOT, DraftTree
from paceline.core.verify import make_verifier
from tests.reasoning_machine import Machine
from tests.tiers import by_tier

START, END = (7,), (8, 9)


def machine_after(budget: ReasoningBudget, answer: Sequence[int], ends: Sequence[int] = ()) -> Machine:
    """Return the machine that was told an answer, and asked to end its reasoning after so many tokens of it."""
    machine = Machine(budget)
    for length in range(len(answer) + 1):
        if length in ends:
            machine.end()
        if length < len(answer):
            machine.tell(answer[length])
    return machine


def forced_after(budget: ReasoningBudget, answer: Sequence[int], ends: Sequence[int] = ()) -> list[int | None]:
    """Return what is forced after each beginning of an answer, the empty one first."""
    machine, forced = Machine(budget), []
    for length in range(len(answer) + 1):
        if length in ends:
            machine.end()
        forced.append(machine.forced)
        if length < len(answer):
            machine.tell(answer[length])
    return forced


def markers(least: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 2), min_size=least, max_size=3).map(tuple)


@st.composite
def budgets(draw: st.DrawFn) -> ReasoningBudget:
    begun = draw(st.booleans())
    return ReasoningBudget(
        draw(st.one_of(st.none(), st.integers(0, 6))),
        draw(markers(0 if begun else 1)),
        draw(markers(1)),
        begun,
        draw(markers(0)),
    )


# Three token ids: markers come up by chance, overlap, and are part of each other.
TEXTS = st.lists(st.integers(0, 2), max_size=24)
SEEDS = st.integers(0, 2**32)
"""Of orders: hypothesis takes long to draw a permutation."""


@settings(max_examples=by_tier(1000, quick=200))
@given(budget=budgets(), prompt=TEXTS, answers=st.lists(TEXTS, min_size=1, max_size=6), seed=SEEDS)
def test_what_is_forced_is_a_function_of_the_history(
    budget: ReasoningBudget, prompt: list[int], answers: list[list[int]], seed: int
) -> None:
    """One keeper is asked of many texts, some of them beginnings of others, as drafts and roll-backs have it."""
    rng = random.Random(seed)
    keeper = BudgetKeeper(budget, len(prompt))
    before: list[int] = []
    for answer in answers:
        before = (before[: rng.randint(0, len(before))] + answer)[:40]
        expected = forced_after(budget, before)
        for length in rng.sample(range(len(before) + 1), len(before) + 1):
            text = [*prompt, *before[:length]]
            history: Sequence[int] = text if length % 2 else tuple(text)
            assert keeper.forced(history) == expected[length]


@settings(max_examples=by_tier(1000, quick=200))
@given(budget=budgets(), prompt=TEXTS, rounds=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6), seed=SEEDS)
def test_an_end_that_is_asked_for_is_a_function_of_the_history_and_its_place(
    budget: ReasoningBudget, prompt: list[int], rounds: list[tuple[list[int], list[int]]], seed: int
) -> None:
    """The answer grows, drafts branch off it, and now and then its reasoning is to end."""
    rng = random.Random(seed)
    keeper = BudgetKeeper(budget, len(prompt))
    answer: list[int] = []
    ends: list[int] = []
    for drafts in rounds:
        for draft in drafts:
            drafted = [*answer, *draft]
            expected = forced_after(budget, drafted, ends)
            lengths = range(len(answer), len(drafted) + 1)
            for length in rng.sample(lengths, len(lengths)):
                assert keeper.forced([*prompt, *drafted[:length]]) == expected[length]
        answer = drafted[: rng.randint(len(answer), len(drafted))]
        if rng.random() < 0.5:
            assert keeper.end([*prompt, *answer]) == machine_after(budget, answer, ends).is_open
            ends.append(len(answer))


def test_reasoning_without_a_limit_ends_where_that_is_asked_for() -> None:
    keeper = BudgetKeeper(ReasoningBudget(None, START, END), 1)
    before, within = [1, 2, 2], [1, 2, 2, 7, 3]
    may_force = [keeper.may_force]
    assert not keeper.end(before)
    assert keeper.forced([*before, 7]) is None
    may_force.append(keeper.may_force)
    assert keeper.end(within)
    assert [*may_force, keeper.may_force] == [False, False, True]
    assert [keeper.forced([*within, *(8, 9, 3)[:length]]) for length in range(4)] == [8, 9, None, None]
    # The next reasoning may be as long as it likes.
    after = [*within, 8, 9, 3, 7, *[3] * 50]
    assert keeper.forced(after) is None
    assert keeper.end(after)
    assert keeper.forced(after) == 8


def test_what_was_drafted_before_an_end_was_asked_for_counts_for_nothing() -> None:
    keeper = BudgetKeeper(ReasoningBudget(None, (), END, begun=True), 0)
    assert keeper.forced([3, 4, 8, 9, 3]) is None, "the draft ended the reasoning by itself"
    assert keeper.end([3])
    assert keeper.forced([3, 4, 8, 9, 3]) is None
    assert [keeper.forced(text) for text in ([3], [3, 8], [3, 8, 9])] == [8, 9, None]


def test_an_end_that_is_asked_for_is_completed_where_it_is_half_said() -> None:
    keeper = BudgetKeeper(ReasoningBudget(None, START, END), 0)
    assert keeper.end([7, 3, 8])
    assert keeper.end([7, 3, 8]), "it is still within its reasoning"
    assert keeper.forced([7, 3, 8]) == 9
    assert not keeper.end([7, 3, 8, 9])


def free(budget: ReasoningBudget, *answer: int, prompt: Sequence[int] = (7, 1)) -> bool:
    return BudgetKeeper(budget, len(prompt)).forced([*prompt, *answer]) is None


def test_an_answer_is_forced_where_its_budget_is_spent() -> None:
    budget = ReasoningBudget(2, START, END)
    keeper = BudgetKeeper(budget, 1)
    text = [7]
    said = []
    for token_id in (1, 7, 2, 2, None, None, 3, 7, 4, 5, None, None, 6):
        forced = keeper.forced(text)
        assert (forced is None) == (token_id is not None)
        said.append(forced)
        following = token_id if forced is None else forced
        assert following is not None
        text.append(following)
    assert [token_id for token_id in said if token_id is not None] == [8, 9, 8, 9]


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    budget = ReasoningBudget(3, START, END)
    for length in range(9):
        assert free(budget, *(7, 2, 8, 9, 2, 2, 2, 2)[:length])
        assert free(budget, *(2, 2, 2, 2, 2, 8, 9, 2)[:length])


def test_a_marker_of_the_prompt_counts_for_nothing() -> None:
    assert free(ReasoningBudget(0, START, END), prompt=(1, 7))
    assert free(ReasoningBudget(1, (7, 6), END), 6, 1, 1, prompt=(1, 7))


def test_a_budget_of_0_ends_what_the_prompt_began() -> None:
    keeper = BudgetKeeper(ReasoningBudget(0, (), END, begun=True), 2)
    assert [keeper.forced([1, 7, *(8, 9, 3, 3)[:length]]) for length in range(5)] == [8, 9, None, None, None]


def test_an_end_that_is_half_said_is_completed() -> None:
    keeper = BudgetKeeper(ReasoningBudget(2, (), END, begun=True), 0)
    assert [keeper.forced(text) for text in ([1, 8], [1, 8, 9], [1, 1], [8, 9, 1])] == [9, None, 8, None]


def test_a_message_is_said_before_the_end() -> None:
    keeper = BudgetKeeper(ReasoningBudget(1, START, END, True, forced=(5, 6, 8, 9)), 0)
    assert [keeper.forced([1, *(5, 6, 8, 9)[:length]]) for length in range(5)] == [5, 6, 8, 9, None]
    assert keeper.forced([5]) == 6, "the model has begun the message itself"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_nothing_speaks_against_a_forced_token(verifier: VerifierName, temperature: float) -> None:
    """Not the row, not a bias, not a penalty, not a truncation."""
    params = SamplingParams(
        temperature,
        top_k=1,
        logit_bias={8: -math.inf, 9: -math.inf},
        repeat_penalty=1.5,
        reasoning_budget=ReasoningBudget(1, START, END),
    )
    row = np.zeros(12)
    row[8] = -np.inf
    tree = DraftTree(7)
    node = tree.add(tree.add(tree.add(ROOT, 1, ""), 8, ""), 9, "")
    judge = make_verifier(verifier, RowSampler(params, 2))
    rows = {2: row}
    walk = judge.walk(tree, len(tree), lambda node: rows.get(node, np.eye(12)[1] * 50), [1, 2, 7])
    assert walk.path == [1, 2, node]
    assert walk.token_ids == [1, 8, 9, 1]
    (proposal,) = judge.propose(row, 5, [1, 2, 7, 1], 3, margins=True)
    assert proposal.token_id == 8
    if verifier == "coupled":
        assert proposal.margin == math.inf
    else:
        assert proposal.draft_probs is not None
        assert proposal.draft_probs[8] == 1.0


def test_without_a_budget_nothing_is_forced_and_no_history_read() -> None:
    sampler = RowSampler(SamplingParams(0.0))
    assert sampler.forced([1, 2, 3]) is None
    assert not sampler.reads_history
    assert RowSampler(SamplingParams(0.0, reasoning_budget=ReasoningBudget(1, START, END))).reads_history


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampler_reads_no_history_until_an_end_is_asked_for(temperature: float) -> None:
    params = SamplingParams(
        temperature, top_k=0, top_p=1.0, min_p=0.0, reasoning_budget=ReasoningBudget(None, START, END)
    )
    sampler, row = RowSampler(params, 1), np.eye(12)[3] * 50
    reads = [sampler.reads_history]
    assert sampler.emit(row, 2, ()) == 3
    assert not sampler.end_reasoning([1, 2])
    reads.append(sampler.reads_history)
    assert sampler.end_reasoning([1, 7])
    assert [*reads, sampler.reads_history] == [False, False, True]
    assert [sampler.emit(row, 2 + n, [1, 7, *END[:n]]) for n in range(3)] == [8, 9, 3]
    assert not RowSampler(SamplingParams(temperature)).end_reasoning([1, 7])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tokens": -1}, "a reasoning budget of -1 tokens: give 0 or more, or none at all"),
        ({"tokens": 2.0}, "the reasoning budget is 2.0, which is not a whole number"),
        ({"end": ()}, "needs the tokens that end the reasoning"),
        ({"start": ()}, "needs to know where reasoning starts: .* begun=True"),
        ({"start": "<think>"}, "start of the reasoning budget is '<think>': give a sequence of token ids"),
        ({"end": (8, -9)}, "end of the reasoning budget has token id -9: give ids of 0 or more"),
        ({"forced": 8}, "forced of the reasoning budget is 8: give a sequence"),
        ({"begun": "no"}, "begun of the reasoning budget is 'no'; give True or False"),
    ],
)
def test_budgets_that_cannot_be_kept(values: dict[str, Any], words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        ReasoningBudget(**{"tokens": 5, "start": START, "end": END, **values})


def test_a_budget_is_no_number() -> None:
    wrong: Any = 5
    with pytest.raises(SamplingError, match="the reasoning budget is 5: give a ReasoningBudget, or None"):
        SamplingParams(reasoning_budget=wrong)


def test_numbers_of_other_libraries_become_pythons_own() -> None:
    ids: Any = np.array([7])
    budget = ReasoningBudget(np.int64(3), ids, ids)  # type: ignore[arg-type]
    assert budget == ReasoningBudget(3, (7,), (7,))
    assert {type(number) for number in (budget.tokens, *budget.start)} == {int}
