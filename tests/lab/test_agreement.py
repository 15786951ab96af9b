"""Figures of pairs by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler, probabilities
from paceline.core.verify import CoupledVerifier
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary
from paceline.lab.agreement import coupled_acceptance, fit_width, measure_agreement, read_predicting_rows
from paceline.lab.answers import WrittenAnswer
from paceline.lab.task import Task
from tests.lab.doctor.helpers import engine, noisy_model, some_tokens


class TestCoupledAcceptance:
    @pytest.mark.parametrize(
        ("target_probs", "draft_probs", "chance"),
        [
            # i = 0: 1 / (max(1, 1) + max(1, 3)) = 1/4; i = 1: 1 / (max(1, 1/3) + max(1, 1)) = 1/2.
            ([0.5, 0.5], [0.25, 0.75], 1 / (1 + 3) + 1 / (1 + 1)),
            ([0.1, 0.2, 0.7], [0.1, 0.2, 0.7], 1.0),
            ([0.4, 0.6, 0.0], [0.0, 0.0, 1.0], 0.0),
        ],
        ids=["some", "equal", "disjoint"],
    )
    def test_by_hand(self, target_probs: list[float], draft_probs: list[float], chance: float) -> None:
        assert coupled_acceptance(np.array(target_probs), np.array(draft_probs)) == pytest.approx(chance)

    @pytest.mark.parametrize("seed", range(20))
    def test_equals_the_double_sum(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.full(30, 0.2), size=2)
        # Filters leave zeros, in places of their own for each.
        p[rng.random(30) < 0.3] = 0.0
        q[rng.random(30) < 0.3] = 0.0
        p, q = p / p.sum(), q / q.sum()
        both = [i for i in range(30) if p[i] > 0 and q[i] > 0]
        expected = sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(30)) for i in both)
        assert coupled_acceptance(p, q) == pytest.approx(expected, rel=1e-9)

    def test_stands_probabilities_whose_quotient_overflows(self) -> None:
        value = coupled_acceptance(np.array([1.0, 1e-200]), np.array([1e-200, 1.0]))
        assert 0.0 <= value < 1e-150

    @pytest.mark.parametrize("temperature", [0.0, 0.5, 0.8, 1.0])
    @pytest.mark.parametrize("filters", [{}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])
    def test_is_how_often_the_verifier_accepts(self, temperature: float, filters: dict[str, Any]) -> None:
        target_row, draft_row = noisy_model(3)([1]), noisy_model(3)([1]) + noisy_model(4, scale=1.5)([1])
        sampler = RowSampler(SamplingParams(temperature=temperature, seed=0, **filters))
        target_probs, draft_probs = (
            probabilities(sampler.candidates(row, ()), len(row), greedy=sampler.params.greedy)
            for row in (target_row, draft_row)
        )
        chance = coupled_acceptance(target_probs, draft_probs)
        verifier = CoupledVerifier(RowSampler(SamplingParams(temperature=temperature, seed=5, **filters)))
        trials = 4000
        hits = sum(
            verifier.sampler.emit(target_row, position, ()) == verifier.propose(draft_row, position, (), 1)[0].token_id
            for position in range(trials)
        )
        # Five standard errors: one false alarm in two million.
        assert abs(hits / trials - chance) <= 5 * math.sqrt(chance * (1 - chance) / trials)


class TestReadPredictingRows:
    def test_rows_are_those_of_the_model_in_passes_of_any_size(self) -> None:
        model, token_ids = noisy_model(1), some_tokens(150)
        for (max_rows, max_outputs), first in itertools.product(((512, None), (7, None), (512, 3)), (1, 2, 65, 149)):
            reader = engine(model, max_rows=max_rows, max_outputs=max_outputs)
            read = np.stack(list(read_predicting_rows(reader, token_ids, first)))
            expected = [model(token_ids[:index]) for index in range(first, len(token_ids))]
            assert np.array_equal(read, np.stack(expected))

    def test_frees_its_sequence(self) -> None:
        reader = engine(noisy_model(1), max_sequences=1)
        for _ in range(3):
            next(iter(read_predicting_rows(reader, some_tokens(200))))
            assert len(list(read_predicting_rows(reader, some_tokens(10)))) == 9


def test_draft_rows_have_the_targets_width() -> None:
    row = np.array([1.0, 2.0, 3.0])
    assert fit_width(row, 2).tolist() == [1.0, 2.0]
    assert fit_width(row, 4).tolist() == [1.0, 2.0, 3.0, -math.inf]


def test_a_draft_without_some_of_the_tokens_is_compared_as_it_drafts() -> None:
    """It reads an end in their place, and never says one of them."""
    target_row = np.array([0.0, 1.0, 2.0, 3.0])
    probs = np.exp(target_row) / np.exp(target_row).sum()
    read: list[tuple[int, ...]] = []

    def model(tokens: Sequence[int]) -> Float64Array:
        read.append(tuple(tokens))
        return np.array([0.0, 1.0, 2.0])

    vocabulary = ScriptedVocabulary.of_size(3, end_ids=[0])
    draft = ScriptedEngine(model, vocabulary, context_length=64, max_rows=64, max_outputs=None, max_sequences=1)
    places = tuple((np.arange(4), probs) for _ in range(2))
    written = WrittenAnswer(Task("code", "code:1", (1, 3, 2), 2), (3, 1), "length", places)
    agreed = measure_agreement(draft, [written], target_vocab_size=4, unshared_ids=(), temperature=1.0)
    assert (1, 0, 2, 0) in read
    theirs = probs_of(np.array([0.0, 1.0, 2.0, -np.inf]))
    assert agreed.overlap["all"].value == pytest.approx(np.minimum(probs, theirs).sum())
    assert agreed.same_top["all"].value == 0.0


def probs_of(row: Float64Array) -> Float64Array:
    """Return the distribution that tokens are drawn from at temperature 1."""
    sampler = RowSampler(SamplingParams(temperature=1.0, seed=0))
    return probabilities(sampler.candidates(row, ()), len(row), greedy=False)
