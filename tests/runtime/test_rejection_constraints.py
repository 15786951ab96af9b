"""Rejection sampling under a grammar reproduces the target's distribution under it, by the enumeration of
``test_rejection.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.constraint import ConstraintKeeper
from paceline.core.tree import DraftTree
from paceline.core.verify import Proposal, RejectionVerifier
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import FixedPolicy
from tests.automaton import FORBIDDEN, AutomatonConstraint
from tests.helpers import softmax
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

NUM_TOKENS = 4
NO = FORBIDDEN
GRAMMARS = {
    "no token twice in a row": AutomatonConstraint(np.array([[NO, 2, 3], [NO, 2, 3], [1, NO, 3], [1, 2, NO]])),
    "two of three, then one": AutomatonConstraint(np.array([[NO, 1, 2], [3, NO, NO], [NO, 0, 3], [0, 1, 2]])),
    "one at a time": AutomatonConstraint(np.array([[NO, NO, 1], [2, NO, NO], [0, 0, NO]])),
    # What is said to be forced is allowed in state 0 and is not in state 1.
    "wrong about what is forced": AutomatonConstraint(np.array([[0, 1, 1], [NO, 0, 1]]), runs=[[1, 2, 1], [0, 1]]),
}


def constrained_text(logits: Float64Array, name: str, last: int) -> Distribution:
    """Return the distribution of a Markov model's text under a grammar, straight from both tables."""
    text: Distribution = {}
    for tokens in product(range(len(logits)), repeat=NUM_TOKENS):
        state, probability, before = GRAMMARS[name].fork(), 1.0, last
        for token_id in tokens:
            mask = state.mask()
            if not mask[token_id]:
                break
            probability *= softmax(np.where(mask, logits[before], -np.inf))[token_id]
            state.advance(token_id)
            before = token_id
        else:
            text[tokens] = float(probability)
    return text


def bias_under(name: str, make_drafters: MakeDrafters, policy: Policy) -> float:
    expected = constrained_text(TARGET_3, name, last=0)
    return bias(
        make_drafters,
        policy,
        num_tokens=NUM_TOKENS,
        prompt=(0, 1, 0),
        expected=expected,
        constraint=GRAMMARS[name],
    )


DRAFTERS: dict[str, MakeDrafters] = {
    "draft": lambda: [draft_of(DRAFT_3)],
    "grammar alone": list,
    **{name: MERGES[name] for name in ("forced before draft", "draft before forced", "suffix before draft")},
}


@pytest.mark.parametrize(
    ("name", "drafters", "siblings"),
    some_long(
        product(GRAMMARS, DRAFTERS, (1, 2)),
        quick=[(name, drafters, 1) for name, drafters in product(GRAMMARS, DRAFTERS)],
    ),
)
def test_drafts_under_a_grammar_are_exact(name: str, drafters: str, siblings: int) -> None:
    assert bias_under(name, DRAFTERS[drafters], FixedPolicy(2, siblings=siblings)) < EXACT


@pytest.mark.parametrize(("draft_size", "unshared_ids"), [(3, [1]), (2, [])])
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_draft_that_lacks_allowed_tokens_is_exact(name: str, draft_size: int, unshared_ids: list[int]) -> None:
    """A draft proposes nothing where the grammar allows no token that it has."""
    assert (
        bias_under(name, lambda: [draft_of(DRAFT_3[:, :draft_size], 3, unshared_ids)], FixedPolicy(2, p_min=0.5))
        < EXACT
    )


def test_the_enumeration_sees_drafts_that_are_not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio test against another distribution than the one that a proposal was drawn from."""
    name, propose = "no token twice in a row", RejectionVerifier.propose

    def masked_later(
        self: RejectionVerifier,
        logits: FloatArray,
        position: int,
        history: Sequence[int],
        count: int,
        *,
        margins: bool = False,
    ) -> list[Proposal]:
        proposals = propose(self, logits, position, history, count, margins=margins)
        return [replace(proposal, draft_probs=softmax(logits.astype(np.float64))) for proposal in proposals]

    monkeypatch.setattr(RejectionVerifier, "propose", masked_later)
    assert bias_under(name, DRAFTERS["draft"], FixedPolicy(2)) > 0.01


def test_forbidden_drafts_that_are_verified_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """That they are dropped saves rows: the walk would turn them down."""
    monkeypatch.setattr(ConstraintKeeper, "allowed_nodes", lambda self, tree, history: list(range(1, len(tree))))
    name = "no token twice in a row"
    assert bias_under(name, MERGES["forced before draft"], FixedPolicy(2)) < EXACT


def test_only_what_the_grammar_allows_is_left_of_a_tree() -> None:
    keeper = ConstraintKeeper(GRAMMARS["no token twice in a row"], 1)
    tree = DraftTree(0)
    first = tree.add(0, 1, "suffix")
    twice = tree.add(first, 1, "suffix")
    tree.add(twice, 2, "suffix")
    other = tree.add(first, 0, "suffix")
    assert keeper.allowed_nodes(tree, [0]) == [first, other]
    assert keeper.allowed_nodes(tree, [0, 1]) == []
