"""Figures of pairs by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from benchmarks.pair.logit_rows import row_acceptance

from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.core.verify import CoupledVerifier
from paceline.lab.agreement import coupled_acceptance
from tests.lab.doctor.helpers import noisy_model


class TestCoupledAcceptance:
    def test_by_hand(self) -> None:
        # i = 0: 1 / (max(1, 1) + max(1, 3)) = 1/4; i = 1: 1 / (max(1, 1/3) + max(1, 1)) = 1/2.
        value = coupled_acceptance(np.array([0.5, 0.5]), np.array([0.25, 0.75]))
        assert value == pytest.approx(1 / (1 + 3) + 1 / (1 + 1))

    def test_equal_distributions_always_agree(self) -> None:
        probs = np.random.default_rng(0).dirichlet(np.full(50, 0.3))
        assert coupled_acceptance(probs, probs) == pytest.approx(1.0)

    def test_disjoint_distributions_never_agree(self) -> None:
        assert coupled_acceptance(np.array([0.4, 0.6, 0.0]), np.array([0.0, 0.0, 1.0])) == 0.0

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
        chance = row_acceptance(
            target_row, draft_row, RowSampler(SamplingParams(temperature=temperature, seed=0, **filters))
        )
        verifier = CoupledVerifier(RowSampler(SamplingParams(temperature=temperature, seed=5, **filters)))
        trials = 4000
        hits = sum(
            verifier.sampler.emit(target_row, position, ()) == verifier.propose(draft_row, position, (), 1)[0].token_id
            for position in range(trials)
        )
        # Five standard errors: one false alarm in two million.
        assert abs(hits / trials - chance) <= 5 * math.sqrt(chance * (1 - chance) / trials)
