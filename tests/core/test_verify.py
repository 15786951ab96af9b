"""Both verifiers on small cases worked out by hand; their distributions are proved in ``test_rejection``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.params import VERIFIER_NAMES, SamplingParams, VerifierName
from paceline.core.sampling import RowSampler
from paceline.core.tree import ROOT, DraftTree
from paceline.core.verify import CoupledVerifier, RejectionVerifier, make_verifier
from tests.helpers import PLAIN_PARAMS

GREEDY = SamplingParams(0.0)


def rows_by_token(tree: DraftTree, rows: dict[int, list[float]]) -> tuple[Callable[[int], Float64Array], list[int]]:
    """Return rows that depend on a node's token, and the list of nodes that were asked for."""
    asked: list[int] = []

    def row_logits(node: int) -> Float64Array:
        asked.append(node)
        return np.array(rows[tree.token_ids[node]])

    return row_logits, asked


SUCCESSOR = {0: [0.0, 9.0, 0.0, 0.0], 1: [0.0, 0.0, 9.0, 0.0], 2: [0.0, 0.0, 0.0, 9.0], 3: [9.0, 0.0, 0.0, 0.0]}
"""Greedily, 0 is followed by 1, 1 by 2, 2 by 3 and 3 by 0."""


@pytest.mark.parametrize("name", VERIFIER_NAMES)
class TestGreedyWalks:
    @pytest.mark.parametrize(
        ("drafts", "path", "token_ids", "reached_leaf"),
        [
            ([], [], [1], True),
            ([[1, 2]], [1, 2], [1, 2, 3], True),
            ([[1, 0, 1]], [1], [1, 2], False),
            ([[3]], [], [1], False),
            ([[2, 3], [1, 2]], [3, 4], [1, 2, 3], True),
        ],
        ids=["none", "all accepted and a bonus", "some and a recovered", "turned down at once", "the second sibling"],
    )
    def test_by_hand(
        self, drafts: list[list[int]], path: list[int], token_ids: list[int], reached_leaf: bool, name: VerifierName
    ) -> None:
        tree = DraftTree(0)
        for draft in drafts:
            node = ROOT
            for token_id in draft:
                node = tree.add(node, token_id, "d")
        row_logits, asked = rows_by_token(tree, SUCCESSOR)
        walk = make_verifier(name, RowSampler(GREEDY)).walk(tree, len(tree), row_logits, [0])
        assert (walk.path, walk.token_ids, walk.reached_leaf) == (path, token_ids, reached_leaf)
        assert asked == [ROOT, *path], "rows are read only where the walk goes"

    def test_drafted_ancestors_count_for_penalties(self, name: VerifierName) -> None:
        """With every seen token ruled out, 0 1 2 must be followed by 3, at each depth by its own history."""
        flat = {token: [4.0, 3.0, 2.0, 1.0] for token in range(4)}
        tree = DraftTree(0)
        tree.add(tree.add(ROOT, 1, "d"), 2, "d")
        row_logits, _ = rows_by_token(tree, flat)
        params = SamplingParams(0.0, presence_penalty=50.0)
        walk = make_verifier(name, RowSampler(params)).walk(tree, 3, row_logits, [0])
        assert walk.token_ids == [1, 2, 3]


def test_coupled_proposes_what_the_target_emits_if_they_agree() -> None:
    verifier = CoupledVerifier(RowSampler(PLAIN_PARAMS))
    row = np.random.default_rng(0).normal(size=30)
    for position in range(100):
        tree = DraftTree(0)
        for proposal in verifier.propose(row, position, (), 2):
            assert proposal.draft_probs is None
            tree.add(ROOT, proposal.token_id, "d")
        history = [0] * position
        assert verifier.walk(tree, 3, lambda node: row, history).path == [1]


class ScriptedDice:
    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def random(self) -> float:
        return self._values.pop(0)


def with_dice(*values: float) -> RejectionVerifier:
    verifier: Any = RejectionVerifier(RowSampler(PLAIN_PARAMS))
    verifier._rng = ScriptedDice(*values)
    result: RejectionVerifier = verifier
    return result


TARGET_PROBS, DRAFT_PROBS = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])


class TestRejectionByHand:
    """Token 1 was drafted: accepted below 0.3 / 0.6 = 1/2, else norm(max(p - q, 0)) = (1, 0, 0)."""

    def tree(self) -> DraftTree:
        tree = DraftTree(2)
        tree.add(ROOT, 1, "d", draft_probs=DRAFT_PROBS)
        return tree

    def test_accepted_below_the_ratio(self) -> None:
        # The second number draws the bonus token: 0.81 lies in token 2's share [0.8, 1).
        walk = with_dice(0.499, 0.81).walk(self.tree(), 2, lambda node: np.log(TARGET_PROBS), [2])
        assert (walk.path, walk.token_ids, walk.reached_leaf) == ([1], [1, 2], True)

    def test_turned_down_above_it(self) -> None:
        walk = with_dice(0.501, 0.999).walk(self.tree(), 2, lambda node: np.log(TARGET_PROBS), [2])
        assert (walk.path, walk.token_ids, walk.reached_leaf) == ([], [0], False)

    def test_accepted_without_a_row_of_its_own(self) -> None:
        """A pass without room for the node still judges it; what hangs below is left for the next."""
        walk = with_dice(0.499).walk(self.tree(), 1, lambda node: np.log(TARGET_PROBS), [2])
        assert (walk.path, walk.token_ids, walk.unread_node) == ([], [1], 1)

    def test_siblings_meet_the_residual(self) -> None:
        """After 0 is turned down the target is norm(max(p - q, 0)); token 1 then meets q without 0."""
        target, draft = np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.3, 0.1])
        without_first = np.array([0.0, 0.75, 0.25])
        tree = DraftTree(2)
        tree.add(ROOT, 0, "d", draft_probs=draft)
        tree.add(ROOT, 1, "d", draft_probs=without_first)
        # Residual: (0, 0.2, 0.2) / 0.4 = (0, 0.5, 0.5). Token 1 is accepted below 0.5 / 0.75 = 2/3.
        first = 0.34  # above 0.2 / 0.6 = 1/3
        accepted = with_dice(first, 0.66, 0.0).walk(tree, 3, lambda node: np.log(target), [2])
        assert accepted.path == [2]
        # Then norm(max((0, 0.5, 0.5) - (0, 0.75, 0.25), 0)) = (0, 0, 1).
        turned_down = with_dice(first, 0.67, 0.0).walk(tree, 3, lambda node: np.log(target), [2])
        assert (turned_down.path, turned_down.token_ids) == ([], [2])

    def test_a_deterministic_proposal_is_accepted_with_the_target_probability(self) -> None:
        tree = DraftTree(2)
        tree.add(ROOT, 1, "suffix")
        rows = np.log(TARGET_PROBS)
        assert with_dice(0.299, 0.0).walk(tree, 2, lambda node: rows, [2]).path == [1]
        # Without token 1 the target is (5/7, 0, 2/7).
        assert with_dice(0.301, 5 / 7 - 1e-6).walk(tree, 2, lambda node: rows, [2]).token_ids == [0]
        assert with_dice(0.301, 5 / 7 + 1e-6).walk(tree, 2, lambda node: rows, [2]).token_ids == [2]

    def test_equal_distributions_never_turn_down(self) -> None:
        tree = DraftTree(2)
        tree.add(ROOT, 1, "d", draft_probs=TARGET_PROBS)
        almost_one = float(np.nextafter(1.0, 0.0))
        probs = np.exp(np.log(TARGET_PROBS))
        assert with_dice(almost_one, 0.0).walk(tree, 2, lambda node: np.log(probs), [2]).token_ids[0] in (0, 1, 2)

    def test_proposals_come_without_replacement(self) -> None:
        proposals = with_dice(0.3, 0.0, 0.0).propose(np.log(DRAFT_PROBS), 5, (), 3)
        assert [p.token_id for p in proposals] == [1, 0, 2]
        expected = [[0.2, 0.6, 0.2], [0.5, 0.0, 0.5], [0.0, 0.0, 1.0]]
        for proposal, probs in zip(proposals, expected, strict=True):
            assert proposal.draft_probs == pytest.approx(np.array(probs))

    def test_no_more_proposals_than_tokens(self) -> None:
        assert len(RejectionVerifier(RowSampler(PLAIN_PARAMS)).propose(np.log(DRAFT_PROBS), 5, (), 9)) == 3
        assert len(RejectionVerifier(RowSampler(GREEDY)).propose(np.log(DRAFT_PROBS), 5, (), 9)) == 1
