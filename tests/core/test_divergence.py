"""Hand-worked divergences: what may be called rounding, and what may not."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.divergence import first_difference, judge_divergence
from paceline.core.params import SamplingParams
from paceline.core.reasoning import ReasoningBudget
from paceline.core.sampling import RowSampler

GREEDY = RowSampler(SamplingParams(temperature=0.0), 1)


@pytest.mark.parametrize(
    ("plain", "speculative", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None)],
)
def test_first_difference(plain: list[int], speculative: list[int], index: int | None) -> None:
    assert first_difference(plain, speculative) == index


def test_a_tie_that_rounding_turns_is_a_near_tie() -> None:
    verdict = judge_divergence(
        4, np.array([1.0, 1.0004]), np.array([1.0, 0.9997]), GREEDY, [0], rounding=0.0, tolerance=0.001
    )
    assert (verdict.verdict, verdict.plain_token, verdict.speculative_token, verdict.index) == ("near-tie", 1, 0, 4)
    assert verdict.margin == pytest.approx(0.0004)
    assert verdict.logit_difference == pytest.approx(0.0007)


def test_an_exact_tie_is_a_near_tie() -> None:
    verdict = judge_divergence(
        4, np.array([1.0, 1.0]), np.array([1.0, 1.0 + 2.0**-20]), GREEDY, [0], rounding=0.0, tolerance=0.001
    )
    assert (verdict.plain_token, verdict.speculative_token, verdict.margin, verdict.verdict) == (0, 1, 0.0, "near-tie")


@pytest.mark.parametrize(
    ("plain", "speculative", "rounding"),
    [
        ([1.0, 1.1], [1.0, 0.9], 0.0),  # rows differ by more than rounding
        # Both rows have both tokens and prefer different ones by far more than the rows differ in any other entry.
        ([1.5, 1.0], [1.0, 1.5], 0.1),
        # Both rows give the same token: whatever made the runs differ, it was not rounding.
        ([1.0, 2.0], [1.0, 2.0], 0.0),
    ],
    ids=["different rows", "clear margin", "equal rows"],
)
def test_what_rounding_cannot_explain_is_a_bug(plain: list[float], speculative: list[float], rounding: float) -> None:
    verdict = judge_divergence(
        0, np.array(plain), np.array(speculative), GREEDY, [0], rounding=rounding, tolerance=0.001
    )
    assert verdict.verdict == "bug"


def test_measured_rounding_allows_twice_as_much() -> None:
    plain, speculative = np.array([1.0, 1.004]), np.array([1.0, 0.996])
    verdicts = [
        judge_divergence(0, plain, speculative, GREEDY, [0], rounding=rounding, tolerance=0.001)
        for rounding in (0.003, 0.005)
    ]
    assert [(verdict.allowed, verdict.verdict) for verdict in verdicts] == [(0.006, "bug"), (0.01, "near-tie")]


def test_a_token_at_the_border_of_a_truncation_is_a_near_tie() -> None:
    """Top-k keeps two of three; the second and third trade places by rounding, and the noise favours the loser."""
    plain, speculative = np.array([1.0, 0.99999, 0.99998]), np.array([1.0, 0.99998, 0.99999])
    for seed in range(200):
        params = SamplingParams(temperature=1.0, top_k=2, top_p=1.0, min_p=0.0, seed=seed)
        verdict = judge_divergence(0, plain, speculative, RowSampler(params, 1), [0], rounding=0.0, tolerance=0.001)
        if verdict.plain_token != verdict.speculative_token:
            assert verdict.margin is None
            assert verdict.verdict == "near-tie"
            return
    raise AssertionError("no seed made the rows disagree")


def test_what_a_reasoning_budget_forces_cannot_diverge() -> None:
    """The budget counts the answer's tokens and not the prompt's: of three tokens one is the answer's, or none."""
    budget = ReasoningBudget(1, (), (2,), begun=True)
    verdict = judge_divergence(
        1,
        np.array([1.0, 0.0, -1.0]),
        np.array([0.0, 1.0, -1.0]),
        RowSampler(SamplingParams(0.0, reasoning_budget=budget), 2),
        [0, 0, 1],
        rounding=0.0,
        tolerance=2.0,
    )
    assert (verdict.plain_token, verdict.speculative_token, verdict.verdict) == (2, 2, "bug")
    free = judge_divergence(
        0,
        np.array([1.0, 0.0, -1.0]),
        np.array([0.0, 1.0, -1.0]),
        RowSampler(SamplingParams(0.0, reasoning_budget=budget), 3),
        [0, 0, 1],
        rounding=0.0,
        tolerance=2.0,
    )
    assert (free.plain_token, free.speculative_token, free.verdict) == (0, 1, "near-tie")
