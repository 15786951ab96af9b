"""Rejection sampling reproduces the target's distribution: exactly, by enumeration, and statistically.

The enumeration runs the real code (draft, propose, walk, residuals, the whole loop) once for every way its dice can
fall. Only the dice are replaced: each asks a :class:`Chooser`, which takes one branch after the other and multiplies
the probabilities. What comes out is the exact distribution of the text, and any bias shows, however small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core import verify
from paceline.core.arrays import Float64Array
from paceline.core.errors import SamplingError
from paceline.core.params import (
    TRANSFORMERS_ORDER,
    VERIFIER_NAMES,
    SamplingParams,
    SpeculationParams,
    StopRules,
    VerifierName,
)
from paceline.core.request import Request
from paceline.core.sampling import RowSampler
from paceline.core.tree import DraftTree
from paceline.core.verify import RejectionVerifier
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, table_model
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import PLAIN_PARAMS, ForcedDrafter, decode, drain, softmax
from tests.proofs import chi_square
from tests.runtime.enumeration import (
    DRAFT_3,
    DRAFT_4,
    EXACT,
    MERGES,
    REJECTION,
    TARGET_3,
    TARGET_4,
    Distribution,
    MakeDrafters,
    bias,
    draft_of,
    forced,
    markov_text,
    table,
    text_distribution,
    total_variation,
    translated_of,
)
from tests.tiers import some_long

ALPHA = 1e-6
"""False-alarm rate of each chi-square test. Seeds are fixed, so a test that passes once passes always."""


def test_plain_decoding_by_enumeration() -> None:
    assert total_variation(text_distribution(table_model(TARGET_3), 3), markov_text(TARGET_3, 4)) < EXACT


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2])
def test_draft_model_is_exact(siblings: int, depth: int) -> None:
    assert bias(lambda: [draft_of(DRAFT_3)], FixedPolicy(depth, siblings=siblings), num_tokens=4) < EXACT


def test_four_siblings_over_four_tokens_are_exact() -> None:
    spoken = text_distribution(
        table_model(TARGET_4), 4, lambda: [draft_of(DRAFT_4)], FixedPolicy(1, siblings=4), num_tokens=3
    )
    assert total_variation(spoken, markov_text(TARGET_4, 3)) < EXACT


def test_stopping_below_p_min_is_exact() -> None:
    """Where to stop is decided from the distribution, before a token is drawn."""
    largest = np.apply_along_axis(softmax, 1, DRAFT_3).max(axis=1)
    p_min = float(np.sort(largest)[1])
    assert largest.min() < p_min, "some positions have to be drafted and others not"
    assert bias(lambda: [draft_of(DRAFT_3)], FixedPolicy(2, p_min=p_min, siblings=2)) < EXACT


@pytest.mark.parametrize("asked", [{}, {"policy": "fixed", "draft_max": 2}], ids=["loaded", "fixed"])
@pytest.mark.parametrize("name", ["draft", "suffix before draft", "draft before lookup"])
def test_what_a_request_asks_for_is_exact(name: str, asked: dict[str, Any]) -> None:
    """A p-min of its own, by the policy of the model and by one of its own, alone and beside requests of the other."""
    make_drafters = {"draft": lambda: [draft_of(DRAFT_3)], **MERGES}[name]
    largest = np.apply_along_axis(softmax, 1, DRAFT_3).max(axis=1)
    p_min = float(np.sort(largest)[1])
    assert largest.min() < p_min, "some positions have to be drafted and others not"
    drafters = tuple(drafter.name for drafter in make_drafters())
    for num_requests in (1, 2):
        assert (
            bias(
                make_drafters,
                FixedPolicy(2),
                prompt=(0, 1, 0, 1),
                num_tokens=3,
                num_requests=num_requests,
                speculation=replace(REJECTION, drafters=drafters, p_min=p_min, draft_min=1, **asked),
            )
            < EXACT
        )


@pytest.mark.parametrize("prediction", [(1, 2, 0, 1), (0, 0, 0)])
@pytest.mark.parametrize(
    ("name", "trees"), [("", True), ("", False), ("draft", True), ("draft", False), ("suffix before draft", True)]
)
def test_what_a_request_predicts_is_exact(name: str, trees: bool, prediction: tuple[int, ...]) -> None:
    """Before and behind places where the answer differs, beside other drafters, and where a chain is all there is."""
    make_drafters: dict[str, MakeDrafters] = {"": lambda: [], "draft": lambda: [draft_of(DRAFT_3)], **MERGES}
    assert (
        bias(
            make_drafters[name],
            FixedPolicy(2, siblings=1 + trees),
            prompt=(0, 1, 0, 1),
            num_tokens=4 if name == "" else 3,
            speculation=replace(REJECTION, prediction=prediction),
            trees=trees,
        )
        < EXACT
    )


@pytest.mark.parametrize("draft_size", [2, 5])
def test_draft_with_another_width_is_exact(draft_size: int) -> None:
    """Draft vocabularies are padded differently; their surplus is never proposed, what they lack is recovered."""
    logits = table(5, 7)[:, :draft_size]
    assert bias(lambda: [draft_of(logits, 3)], FixedPolicy(2, siblings=2), num_tokens=3) < EXACT


@pytest.mark.parametrize("unshared_ids", [[0], [1], [0, 2], [2]])
def test_draft_that_shares_some_tokens_is_exact(unshared_ids: list[int]) -> None:
    """What is judged against is the distribution over the shared tokens, which proposals are drawn from."""
    assert (
        bias(lambda: [draft_of(DRAFT_3, unshared_ids=unshared_ids)], FixedPolicy(2, siblings=3), num_tokens=3) < EXACT
    )


def test_draft_that_stops_at_an_end_token_is_exact() -> None:
    def make_drafters() -> list[Drafter]:
        engine = ScriptedEngine(table_model(DRAFT_3), ScriptedVocabulary.of_size(3, end_ids=[2]))
        return [DraftModelDrafter(engine, target_vocab_size=3)]

    assert bias(make_drafters, FixedPolicy(2), end_ids=[2]) < EXACT


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("name", MERGES)
def test_several_drafters_in_one_tree_are_exact(name: str, trees: bool) -> None:
    if name == "forced" and not trees:
        pytest.skip("it branches by itself")
    make_drafters = MERGES[name]
    num_tokens = 3 if name == "two drafts" else 4
    if name.startswith("forced") and not trees:

        def make_drafters() -> Sequence[Drafter]:
            return [ForcedDrafter(lambda request: forced(request)[:1]), draft_of(DRAFT_3)]

    assert bias(make_drafters, FixedPolicy(2), prompt=(0, 1, 0, 1), trees=trees, num_tokens=num_tokens) < EXACT


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(0.7, top_k=2, top_p=1.0, min_p=0.0),
        SamplingParams(1.5, top_k=0, top_p=0.8, min_p=0.1, repeat_penalty=1.4, frequency_penalty=0.3),
        SamplingParams(1.0, 0, 1.0, 0.0, presence_penalty=1.0, logit_bias={0: -np.inf, 2: 0.5}),
        SamplingParams(0.0, repeat_penalty=1.3),
        SamplingParams(1.0, 0, 1.0, 0.0, xtc_probability=0.5, xtc_threshold=0.2, seed=5),
        SamplingParams(0.0, xtc_probability=0.5, xtc_threshold=0.2, seed=5),
        SamplingParams(1.0, 0, 1.0, 0.0, dry_multiplier=0.8, dry_allowed_length=1, dry_sequence_breakers=()),
        SamplingParams(1.0, 0, 1.0, 0.0, top_n_sigma=1.1, dynatemp_range=0.7),
        SamplingParams(0.9, 0, 1.0, 0.0, typical_p=0.6, order=TRANSFORMERS_ORDER),
        SamplingParams(
            temperature=0.8,
            top_k=2,
            min_p=0.05,
            top_n_sigma=1.3,
            typical_p=0.9,
            dynatemp_range=0.4,
            dry_multiplier=0.5,
            dry_base=1.2,
            dry_allowed_length=0,
            xtc_probability=0.4,
            seed=3,
        ),
        SamplingParams(0.9, top_k=2, min_p=0.01, order=("top_k", "infill", "min_p", "temperature")),
    ],
    ids=[
        *("top-k", "truncation and penalties", "bias", "greedy", "xtc", "greedy xtc", "dry", "n-sigma and dynatemp"),
        *("typical", "all of these", "infill"),
    ],
)
def test_processors_are_exact(params: SamplingParams) -> None:
    """Penalties make rows depend on drafted ancestors; a wrong history would show."""
    model = table_model(TARGET_3)
    plain = text_distribution(model, 3, params=params, end_ids=[2])
    spoken = text_distribution(
        model, 3, lambda: [draft_of(DRAFT_3)], FixedPolicy(2, siblings=2), params=params, end_ids=[2]
    )
    assert total_variation(spoken, plain) < EXACT


def test_draft_context_that_overflows_is_exact() -> None:
    assert bias(lambda: [draft_of(DRAFT_3, context_length=3)], FixedPolicy(2), prompt=(0, 1, 2, 0)) < EXACT


@pytest.mark.parametrize("max_rows", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["forced before draft", "two drafts"])
def test_trees_larger_than_a_pass_are_exact(name: str, max_rows: int) -> None:
    """Which drafts a full pass leaves out must not depend on what was drawn."""
    assert bias(MERGES[name], FixedPolicy(2, siblings=2), max_rows=max_rows, num_tokens=3) < EXACT


@pytest.mark.parametrize(
    ("name", "num_tokens", "cells"),
    [
        *[("forced before draft", 4, cells) for cells in (4, 5, 6, 7)],
        *[("two drafts", 3, cells) for cells in (3, 4, 5)],
    ],
)
def test_refused_passes_are_exact(name: str, num_tokens: int, cells: int) -> None:
    """Whether a tree fits the cache depends on its size, and that on what was drawn."""
    assert bias(MERGES[name], FixedPolicy(2), cells=cells, num_tokens=num_tokens) < EXACT


@pytest.mark.parametrize("limits", [{"max_rows": 9}, {"max_rows": 3}, {"max_rows": 5, "max_outputs": 2}, {"cells": 9}])
def test_requests_beside_it_change_nothing(limits: dict[str, Any]) -> None:
    assert (
        bias(lambda: [SuffixDrafter(1), draft_of(DRAFT_3)], FixedPolicy(2), num_requests=3, num_tokens=3, **limits)
        < EXACT
    )


class TestTheEnumerationCanFail:
    """Faults that are easy to make, and that the enumeration has to see."""

    def bias(self, policy: Policy, make_drafters: MakeDrafters = lambda: [draft_of(DRAFT_3)]) -> float:
        return bias(make_drafters, policy, num_tokens=3)

    def test_residual_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "_residual", lambda target_probs, draft_probs, token_id: target_probs)
        assert self.bias(FixedPolicy(1)) > 0.01

    def test_residual_left_out_between_siblings_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two siblings both judged against the whole target."""
        residual = verify._residual

        def wrong(target_probs: Float64Array, draft_probs: Float64Array | None, token_id: int) -> Float64Array:
            assert draft_probs is not None
            return residual(target_probs, None, token_id)

        monkeypatch.setattr(verify, "_residual", wrong)
        assert self.bias(FixedPolicy(1, siblings=2)) > 0.01

    def test_siblings_drawn_with_the_first_distribution(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drawn without replacement but judged as if drawn with it."""
        propose = RejectionVerifier.propose

        def wrong(*arguments: Any, **options: Any) -> list[verify.Proposal]:
            proposals = propose(*arguments, **options)
            return [verify.Proposal(p.token_id, proposals[0].draft_probs) for p in proposals]

        monkeypatch.setattr(RejectionVerifier, "propose", wrong)
        assert self.bias(FixedPolicy(1, siblings=2)) > 0.01

    def test_dropping_tokens_for_their_own_probability(self) -> None:
        class Picky(FixedPolicy):
            def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
                for tree in trees:
                    unlikely = {
                        c.node
                        for c in tree.candidates(0)
                        if c.draft_probs is not None and c.draft_probs[c.token_id] < 0.3
                    }
                    tree.keep(set(range(len(tree))) - unlikely)

        assert self.bias(Picky(1)) > 0.01

    def test_draft_min_where_drafts_stop_at_end_tokens(self) -> None:
        """Why :meth:`FixedPolicy.check` refuses a draft-min above 1 under rejection."""

        def make_drafters() -> list[Drafter]:
            engine = ScriptedEngine(table_model(DRAFT_3), ScriptedVocabulary.of_size(3, end_ids=[2]))
            return [DraftModelDrafter(engine, target_vocab_size=3)]

        class Unchecked(FixedPolicy):
            def check(self, request: Request) -> None:
                pass

        assert bias(make_drafters, Unchecked(2, 2), num_tokens=4) > 0.01
        with pytest.raises(SamplingError, match="draft-min 2"):
            text_distribution(table_model(TARGET_3), 3, make_drafters, FixedPolicy(2, 2))

    @pytest.mark.parametrize("asked", [{}, {"policy": "fixed", "draft_max": 2}], ids=["loaded", "fixed"])
    def test_a_draft_min_of_a_request(self, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """What a draft ends with decides how long it is, so that it would decide whether it is verified."""

        def make_drafters() -> list[Drafter]:
            engine = ScriptedEngine(table_model(DRAFT_3), ScriptedVocabulary.of_size(3, end_ids=[2]))
            return [DraftModelDrafter(engine, target_vocab_size=3)]

        def spoken() -> Distribution:
            speculation = replace(REJECTION, draft_min=2, **asked)
            policy = FixedPolicy(2)
            return text_distribution(
                table_model(TARGET_3), 3, make_drafters, policy, end_ids=[2], speculation=speculation
            )

        with pytest.raises(SamplingError, match="draft-min 2 with rejection at temperature 1 would bias"):
            spoken()
        monkeypatch.setattr("paceline.planning.policies.by_request.check_unbiased", lambda request, draft_min: None)
        assert total_variation(spoken(), markov_text(TARGET_3, 4)) > 0.01


NUM_SEEDS = 4000
NUM_TOKENS = 5
"""The prompt's pass emits the first, so that the next round drafts at depths 1 to 3."""


def spoken_texts(
    make_drafters: MakeDrafters,
    policy: Policy,
    *,
    verifier: VerifierName = "rejection",
    prompt: Sequence[int] = (0,),
) -> Iterator[tuple[int, ...]]:
    """Decode one text for each of many seeds through the real loop, many requests at a time."""
    engine = ScriptedEngine(table_model(TARGET_3), ScriptedVocabulary.of_size(3), max_rows=4096)
    deepest = 0
    for first in range(0, NUM_SEEDS, 50):
        loop = DecodingLoop(engine, make_drafters(), policy, clock=engine.clock)
        requests = [
            loop.add(
                prompt,
                SamplingParams(1.0, 0, 1.0, 0.0, seed=seed),
                StopRules(NUM_TOKENS, ignore_end=True),
                SpeculationParams(verify=verifier),
            )
            for seed in range(first, first + 50)
        ]
        drain(loop)
        for request in requests:
            deepest = max(deepest, *request.stats.accepted_by_depth, 0)
            yield tuple(request.output_ids)
    assert not make_drafters() or deepest == 2, "three drafts have to be accepted in a row now and then"


def chi_square_alarm(texts: Iterator[tuple[int, ...]], expected: Distribution) -> float:
    """Return the p-value of a chi-square test of the joint distribution of whole texts; rare texts are pooled."""
    seen: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for text in texts:
        seen[text] += 1
    assert seen.keys() <= expected.keys()
    frequent = [text for text, prob in expected.items() if prob * NUM_SEEDS >= 5]
    counts = [seen[text] for text in frequent]
    means = [expected[text] * NUM_SEEDS for text in frequent]
    counts.append(NUM_SEEDS - sum(counts))
    means.append(NUM_SEEDS - sum(means))
    return chi_square(counts, means)


STATISTICAL: dict[str, tuple[MakeDrafters, FixedPolicy]] = {
    "chain": (lambda: [draft_of(DRAFT_3)], FixedPolicy(5)),
    "siblings and p-min": (lambda: [draft_of(DRAFT_3)], FixedPolicy(4, p_min=0.5, siblings=2)),
    "suffix and draft": (lambda: [SuffixDrafter(1), draft_of(DRAFT_3)], FixedPolicy(4, siblings=2)),
    "translated": (lambda: [translated_of(table(5, 8, 3.0))], FixedPolicy(4, siblings=2)),
}


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
@pytest.mark.parametrize("name", some_long(STATISTICAL, quick=["suffix and draft"]))
def test_texts_follow_the_target(name: str, verifier: VerifierName) -> None:
    """The real dice through the whole loop at depth 3 (false-alarm rate 1e-6 each): five tokens, jointly."""
    make_drafters, policy = STATISTICAL[name]
    texts = spoken_texts(make_drafters, policy, verifier=verifier, prompt=(0, 1, 0, 1))
    assert chi_square_alarm(texts, markov_text(TARGET_3, NUM_TOKENS, last=1)) > ALPHA


def test_the_chi_square_sees_a_missing_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_residual", lambda target_probs, draft_probs, token_id: target_probs)
    texts = spoken_texts(*STATISTICAL["chain"])
    assert chi_square_alarm(texts, markov_text(TARGET_3, NUM_TOKENS)) < ALPHA


def test_seeds_reproduce_a_rejection_run() -> None:
    def run(seed: int) -> list[int]:
        engine = ScriptedEngine(table_model(TARGET_4), ScriptedVocabulary.of_size(4))
        params = SamplingParams(1.0, 0, 1.0, 0.0, seed=seed)
        return decode(
            engine,
            [1],
            params,
            StopRules(30),
            drafters=[draft_of(DRAFT_4)],
            policy=FixedPolicy(3),
            verifier="rejection",
        ).token_ids

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("probs", [[0.25, 0.0, 0.5, 0.25, 0.0], [0.0, 1.0], [0.1] * 10, [0.0, 0.3, 0.0, 0.7]])
def test_draw_inverts_the_cumulated_distribution(probs: list[float]) -> None:
    """Each token owns exactly its share of the uniforms in [0, 1), and one without mass owns none."""

    class Dice:
        def __init__(self) -> None:
            self.value = 0.0

        def random(self) -> float:
            return self.value

    verifier: Any = RejectionVerifier(RowSampler(PLAIN_PARAMS))
    verifier._rng = dice = Dice()
    edges = np.concatenate(([0.0], np.cumsum(probs)))
    for token_id, prob in enumerate(probs):
        if prob > 0:
            for inside in (1e-9, 0.5, 1 - 1e-9):
                dice.value = (edges[token_id] + inside * prob) / edges[-1]
                assert verifier._draw(np.array(probs)) == token_id
    for dice.value in (0.0, np.nextafter(1.0, 0.0)):
        assert probs[verifier._draw(np.array(probs))] > 0
