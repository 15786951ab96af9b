"""A reasoning budget under rejection sampling: the distribution of the text is that of its definition, exactly.

Enumerated as in ``test_rejection.py``, with drafts that open a reasoning, spend its budget and end it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.reasoning import ReasoningBudget
from paceline.core.sampling import RowSampler
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import FixedPolicy
from tests.helpers import PLAIN_PARAMS, softmax
from tests.reasoning_machine import Machine
from tests.runtime.enumeration import (
    DRAFT_3,
    EXACT,
    MERGES,
    TARGET_3,
    Distribution,
    MakeDrafters,
    bias,
    draft_of,
)
from tests.tiers import some_long

BUDGETS = {
    "an end of two tokens": ReasoningBudget(1, (0,), (1, 2)),
    "a start of two tokens": ReasoningBudget(1, (1, 0), (2,)),
    "begun by the prompt": ReasoningBudget(2, (0,), (1, 0), begun=True),
    "nothing at all": ReasoningBudget(0, (2,), (1,), forced=(0, 1)),
}
NUM_TOKENS = 5


def budgeted_text(logits: Float64Array, budget: ReasoningBudget, last: int) -> Distribution:
    """Return the distribution of a Markov model's text under a budget, straight from its table."""
    probs = np.apply_along_axis(softmax, 1, logits)
    text: Distribution = {}
    for tokens in product(range(len(logits)), repeat=NUM_TOKENS):
        machine, probability, before = Machine(budget), 1.0, last
        for token_id in tokens:
            forced = machine.forced
            probability *= probs[before, token_id] if forced is None else float(forced == token_id)
            machine.tell(token_id)
            before = token_id
        if probability > 0.0:
            text[tokens] = probability
    return text


def bias_under(name: str, make_drafters: MakeDrafters, policy: Policy, prompt: Sequence[int] = (1, 0)) -> float:
    params = dataclasses.replace(PLAIN_PARAMS, reasoning_budget=BUDGETS[name])
    expected = budgeted_text(TARGET_3, BUDGETS[name], last=0)
    return bias(make_drafters, policy, num_tokens=NUM_TOKENS, prompt=prompt, expected=expected, params=params)


@pytest.mark.parametrize(
    ("name", "siblings"),
    some_long(product(BUDGETS, (1, 2)), quick=[*((name, 1) for name in BUDGETS), ("begun by the prompt", 2)]),
)
def test_a_draft_model_under_a_budget_is_exact(name: str, siblings: int) -> None:
    assert bias_under(name, lambda: [draft_of(DRAFT_3)], FixedPolicy(2, siblings=siblings)) < EXACT


@pytest.mark.parametrize(
    ("name", "drafters"),
    some_long(
        product(BUDGETS, ("forced before draft", "suffix before draft")),
        quick=[(name, "suffix before draft") for name in BUDGETS],
    ),
)
def test_several_drafters_under_a_budget_are_exact(name: str, drafters: str) -> None:
    """Drafters that know of no budget propose what it forbids."""
    assert bias_under(name, MERGES[drafters], FixedPolicy(2), prompt=(0, 1, 0)) < EXACT


@pytest.mark.parametrize(("draft_size", "unshared_ids"), [(3, [1]), (2, [])])
@pytest.mark.parametrize("name", BUDGETS)
def test_a_draft_that_lacks_the_end_is_exact(name: str, draft_size: int, unshared_ids: list[int]) -> None:
    """A draft proposes nothing where it has no such token, or another one of that id."""
    assert bias_under(name, lambda: [draft_of(DRAFT_3[:, :draft_size], 3, unshared_ids)], FixedPolicy(2)) < EXACT


def test_the_enumeration_sees_a_budget_that_drafts_do_not_count_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows below a draft that are judged as if the draft were not there."""
    keep = RowSampler.forced

    def wrong(self: RowSampler, history: list[int]) -> int | None:
        return keep(self, history[:-1])

    monkeypatch.setattr(RowSampler, "forced", wrong)
    assert bias_under("an end of two tokens", lambda: [draft_of(DRAFT_3)], FixedPolicy(2)) > 0.01
