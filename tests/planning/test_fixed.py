from __future__ import annotations

import pytest

from paceline.core.errors import InputError, SamplingError
from paceline.core.params import SamplingParams, VerifierName
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, DraftJob
from paceline.drafters.lookup import LookupDrafter
from paceline.planning.policies.fixed import MAX_DRAFT, MAX_SIBLINGS, NO_SPECULATION, FixedPolicy
from tests.helpers import PLAIN_PARAMS, request_of


def test_every_request_gets_the_same_budget() -> None:
    policy = FixedPolicy(draft_max=4, p_min=0.3, siblings=2)
    requests = [request_of([1]), request_of([2])]
    budget = DraftBudget(max_depth=4, siblings=2, min_probability=0.3)
    assert policy.budgets(requests) == [budget, budget]
    jobs = [DraftJob(request, DraftTree(1), budget) for request in requests]
    assert policy.choose(LookupDrafter(), jobs) == jobs


def test_no_speculation_has_no_budgets() -> None:
    assert NO_SPECULATION.budgets([request_of([1])]) == [None]
    assert not NO_SPECULATION.speculates
    assert FixedPolicy(4, siblings=3).most_branches(2) == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1,), "draft-max -1"),
        ((MAX_DRAFT + 1,), f"draft-max {MAX_DRAFT + 1}"),
        ((3, 4), "draft-min 4 .* draft-max, 3"),
        ((3, -1), "draft-min -1"),
        ((3, 0, 1.5), "draft-p-min 1.5"),
        ((3, 0, 0.0, 0), "0 draft siblings"),
        ((3, 0, 0.0, MAX_SIBLINGS + 1), f"{MAX_SIBLINGS + 1} draft siblings"),
    ],
)
def test_values_out_of_range(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        FixedPolicy(*values)


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


def test_paths_shorter_than_draft_min_are_dropped() -> None:
    tree = DraftTree(0)
    long = tree.add(tree.add(tree.add(ROOT, 1, "d"), 2, "d"), 3, "d")
    tree.add(tree.parents[long], 4, "d")  # as deep as the other
    tree.add(tree.add(ROOT, 5, "d"), 6, "d")
    tree.add(ROOT, 7, "d")
    FixedPolicy(5, draft_min=3).select([request_of([0])], [tree])
    assert paths(tree) == {(1,), (1, 2), (1, 2, 3), (1, 2, 4)}
    FixedPolicy(5, draft_min=4).select([request_of([0])], [tree])
    assert paths(tree) == set()


@pytest.mark.parametrize("draft_min", [0, 1])
def test_a_draft_min_of_one_drops_nothing(draft_min: int) -> None:
    tree = DraftTree(0)
    tree.add(ROOT, 1, "d")
    FixedPolicy(5, draft_min=draft_min).select([request_of([0])], [tree])
    assert paths(tree) == {(1,)}


@pytest.mark.parametrize(
    ("verifier", "temperature", "draft_min", "refused"),
    [
        ("coupled", 1.0, 3, False),
        ("rejection", 0.0, 3, False),
        ("rejection", 1.0, 1, False),
        ("rejection", 1.0, 2, True),
    ],
)
def test_draft_min_is_refused_where_it_would_bias_the_text(
    verifier: VerifierName, temperature: float, draft_min: int, refused: bool
) -> None:
    params = PLAIN_PARAMS if temperature else SamplingParams(0.0)
    request = request_of([0], params, verifier=verifier)
    policy = FixedPolicy(4, draft_min=draft_min)
    if refused:
        with pytest.raises(SamplingError, match=f"draft-min {draft_min} with rejection at temperature 1"):
            policy.check(request)
    else:
        policy.check(request)
