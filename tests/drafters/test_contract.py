"""What every drafter promises, and what the loop and the policies rely on."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.following import FollowingDrafter
from paceline.drafters.lookup import LookupDrafter, PredictionDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.engines.sequence_pool import SequencePool
from paceline.vocabularies.mapping import TokenMapping
from tests.drafters.helpers import grow, proposals, random_path, settle
from tests.helpers import PLAIN_PARAMS, unsay
from tests.helpers import request_of as plain_request_of

VOCAB_SIZE = 6


def draft_model() -> DraftModelDrafter:
    # Two ids more than the target has, and often the likeliest: they must never be proposed.
    engine = ScriptedEngine(
        random_model(VOCAB_SIZE + 2, seed=1, order=2), ScriptedVocabulary.of_size(VOCAB_SIZE + 2), max_rows=7
    )
    pool = SequencePool(engine, max_idle=4, max_saved_bytes=1000, least_reuse=2)
    return DraftModelDrafter(engine, target_vocab_size=VOCAB_SIZE, pool=pool)


def translated() -> TranslatedDrafter:
    # Tokens of one character, as the target has them, and of two, which are never tokens to it.
    pieces = [chr(ord("!") + i).encode() for i in range(VOCAB_SIZE)]
    draft = ScriptedVocabulary([*pieces, *(pieces[i] + pieces[-1 - i] for i in range(3))])
    engine = ScriptedEngine(random_model(draft.size, seed=1, order=2), draft)
    mapping = TokenMapping(ScriptedVocabulary.of_size(VOCAB_SIZE), draft)
    return TranslatedDrafter(engine, mapping, pool=SequencePool(engine, max_idle=4, least_reuse=2))


MAKERS: dict[str, Callable[[], Drafter]] = {
    "draft": draft_model,
    "translated": translated,
    "suffix": lambda: SuffixDrafter(min_match=1),
    "lookup": lambda: LookupDrafter(3, 1),
    "prediction": lambda: PredictionDrafter(3, 1),
}

every_drafter = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())

REPETITIVE = [1, 2, 3, 1, 2, 3, 1, 2]
BUDGET = DraftBudget(max_depth=4, siblings=2)

request_of = functools.partial(plain_request_of, prediction=REPETITIVE)


@every_drafter
@settings(max_examples=60)
@given(data=st.data())
def test_budgets_are_never_exceeded(make: Callable[[], Drafter], data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1), min_size=1, max_size=3))
    budget = DraftBudget(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3)))
    drafter = make()
    requests = [request_of(text, PLAIN_PARAMS, request_id=index) for index, text in enumerate(texts)]
    for request in requests:
        drafter.begin(request)
    for text, request, tree in zip(texts, requests, grow(drafter, requests, budget), strict=True):
        assert request.token_ids == text, "drafters only read the request"
        assert max(tree.depths) <= budget.max_depth
        for node in range(len(tree)):
            assert len(tree.candidates(node)) <= budget.siblings
        assert all(0 <= token_id < VOCAB_SIZE for token_id in tree.token_ids)
        assert set(tree.sources[1:]) <= {drafter.name}


@every_drafter
def test_what_it_proposes_where_it_can(make: Callable[[], Drafter]) -> None:
    drafter = make()
    request = request_of(REPETITIVE)
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(3))
    assert tree.num_drafted == 3
    assert tree.depths == [0, 1, 2, 3]


def ending_draft() -> DraftModelDrafter:
    engine = ScriptedEngine(random_model(VOCAB_SIZE, seed=1, order=2), ScriptedVocabulary.of_size(VOCAB_SIZE, [2]))
    return DraftModelDrafter(engine, target_vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("make", [*MAKERS.values(), ending_draft], ids=[*MAKERS, "draft that ends"])
def test_nothing_is_proposed_below_the_ends_that_it_names(make: Callable[[], Drafter]) -> None:
    drafter = make()
    ends = 0
    for number, text in enumerate(itertools.product(range(VOCAB_SIZE), repeat=2)):
        request = request_of(text, request_id=number)
        drafter.begin(request)
        (tree,) = grow(drafter, [request], BUDGET)
        drafter.end(request)
        for node in range(1, len(tree)):
            if tree.token_ids[node] in drafter.end_ids:
                assert not tree.candidates(node)
                ends += tree.depths[node] < BUDGET.max_depth
    assert bool(ends) == bool(drafter.end_ids)


@every_drafter
def test_it_says_whether_it_has_a_model_and_where_it_ends(make: Callable[[], Drafter]) -> None:
    drafter = make()
    request = request_of(REPETITIVE)
    drafter.begin(request)
    has_model = drafter.unread(request) is not None
    assert has_model is isinstance(drafter, FollowingDrafter)
    assert drafter.end_ids == (ScriptedVocabulary.of_size(VOCAB_SIZE + 2).end_ids if has_model else frozenset())


@every_drafter
def test_p_min_holds_for_the_first_token_too(make: Callable[[], Drafter]) -> None:
    drafter = make()
    request = request_of(REPETITIVE)
    drafter.begin(request)
    assert grow(drafter, [request], DraftBudget(3, min_probability=1.0))[0].num_drafted == 0
    assert grow(drafter, [request], DraftBudget(3, min_probability=0.01))[0].num_drafted > 0


@every_drafter
@pytest.mark.parametrize("params", [SamplingParams(0.0), PLAIN_PARAMS], ids=["greedy", "sampled"])
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_history_is_all_that_matters(make: Callable[[], Drafter], params: SamplingParams, seed: int) -> None:
    """After rounds of any outcome, pruned or skipped, it proposes what a new drafter would for the same text."""
    rng = random.Random(seed)
    drafter = make()
    requests = [
        request_of(rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 12)), params, request_id=index) for index in range(3)
    ]
    for request in requests:
        drafter.begin(request)
    for _ in range(6):
        asked = [request for request in requests if rng.random() < 0.7]
        trees = dict(zip((r.id for r in asked), grow(drafter, asked, BUDGET), strict=True))
        for request in asked:
            fresh = make()
            fresh.begin(request)
            (expected,) = grow(fresh, [request], BUDGET)
            assert proposals(trees[request.id]) == proposals(expected)
        for request in requests:
            tree = trees.get(request.id, DraftTree(request.token_ids[-1]))
            if rng.random() < 0.3:
                tree.keep([node for node in range(1, len(tree)) if tree.depths[node] <= 2])
            if rng.random() < 0.8:  # else the pass failed: nobody is told
                settle(drafter, request, tree, random_path(rng, tree), rng.randrange(VOCAB_SIZE))
            if rng.random() < 0.2:  # ended, or taken back and begun anew with what stands of it
                drafter.end(request)
                unsay(request, rng.randint(request.num_prompt, len(request.token_ids)))
                drafter.begin(request)


@every_drafter
def test_a_request_that_ended_is_forgotten(make: Callable[[], Drafter]) -> None:
    drafter = make()
    request = request_of(REPETITIVE)
    drafter.begin(request)
    grow(drafter, [request], BUDGET)
    drafter.end(request)
    with pytest.raises(KeyError):
        grow(drafter, [request], BUDGET)
    # The same id again, with another text.
    again, expected = request_of([4, 5, 4]), make()
    drafter.begin(again)
    expected.begin(again)
    assert proposals(grow(drafter, [again], BUDGET)[0]) == proposals(grow(expected, [again], BUDGET)[0])


@every_drafter
def test_another_drafters_tokens_are_left_alone(make: Callable[[], Drafter]) -> None:
    drafter = make()
    request = request_of(REPETITIVE)
    drafter.begin(request)
    tree = DraftTree(request.token_ids[-1])
    node = tree.add(tree.add(ROOT, 3, "other"), 0, "other")
    job = DraftJob(request, tree, DraftBudget(3))
    while drafter.grow([job])[0]:
        pass
    assert tree.path_tokens(node) == [3, 0]
    assert tree.sources[1:3] == ["other", "other"]
    assert tree.candidates(ROOT)[0].node == 1
    assert len(tree.candidates(ROOT)) == 2


@every_drafter
def test_nothing_to_do_and_closing_twice(make: Callable[[], Drafter]) -> None:
    drafter = make()
    assert drafter.grow([]) == []
    drafter.begin(request_of(REPETITIVE))
    drafter.close()
    drafter.close()
