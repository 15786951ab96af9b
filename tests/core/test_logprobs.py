"""Log-probabilities of one row, worked out by hand and held against plain reference code."""

from __future__ import annotations

import dataclasses
import math
import pickle
import random
import tracemalloc
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.core.logprobs import MAX_LOGPROBS, LogprobParams, TokenLogprob, compute_logprob
from paceline.core.params import SamplingParams
from paceline.core.reasoning import ReasoningBudget
from paceline.core.sampling import RowSampler
from tests.helpers import PLAIN_PARAMS, softmax

# Probabilities 1/8, 4/8, 1/8, 2/8.
ROW = np.log(np.array([1.0, 4.0, 1.0, 2.0])) + 7.0


def probs_of(
    token_id: int,
    count: int,
    sampling: Mapping[str, Any] | None = None,
    *,
    row: Float64Array = ROW,
    history: list[int] | None = None,
    post_sampling: bool = True,
) -> tuple[float, list[tuple[int, float]]]:
    """Return the probability of an emitted token, and those of the likeliest ones."""
    sampler = RowSampler(dataclasses.replace(PLAIN_PARAMS, **sampling or {}))
    found = compute_logprob(token_id, row, history or [], sampler, LogprobParams(count, post_sampling))
    assert found.token_id == token_id
    return math.exp(found.logprob), [(one, math.exp(logprob)) for one, logprob in found.top]


def near(prob: float) -> Any:
    return pytest.approx(prob, rel=1e-12)


def all_near(*expected: tuple[int, float]) -> list[tuple[int, Any]]:
    return [(token_id, near(prob)) for token_id, prob in expected]


class TestByHand:
    def test_the_models_own(self) -> None:
        own, top = probs_of(3, 4, post_sampling=False)
        assert own == near(2 / 8)
        assert top == all_near((1, 4 / 8), (3, 2 / 8), (0, 1 / 8), (2, 1 / 8)), "the lowest id first among equals"

    def test_no_processor_changes_the_models_own(self) -> None:
        strict = {"temperature": 0.5, "top_k": 1, "logit_bias": {1: -math.inf}, "repeat_penalty": 2.0}
        for sampling in (strict, {**strict, "temperature": 0.0}):
            own, top = probs_of(1, 2, sampling, history=[1, 3], post_sampling=False)
            assert (own, top) == (near(4 / 8), all_near((1, 4 / 8), (3, 2 / 8)))

    @pytest.mark.parametrize("count", range(6))
    def test_as_many_are_listed_as_are_asked_for_and_there_are(self, count: int) -> None:
        own, top = probs_of(2, count, post_sampling=False)
        assert own == near(1 / 8)
        assert [token_id for token_id, _ in top] == [1, 3, 0, 2][:count]

    def test_after_temperature(self) -> None:
        # At 0.5 the weights are squared: 1, 16, 1, 4.
        own, top = probs_of(3, 2, {"temperature": 0.5})
        assert (own, top) == (near(4 / 22), all_near((1, 16 / 22), (3, 4 / 22)))

    def test_what_a_truncation_drops_is_not_listed(self) -> None:
        own, top = probs_of(1, 4, {"top_k": 2})
        assert (own, top) == (near(4 / 6), all_near((1, 4 / 6), (3, 2 / 6)))
        own, top = probs_of(0, 4, {"top_k": 2})
        assert (own, len(top)) == (0.0, 2)

    def test_bias_and_penalties(self) -> None:
        # Token 1 is banned, and token 3 halved: 1, 0, 1, 1.
        sampling = {"logit_bias": {1: -math.inf}, "presence_penalty": math.log(2.0)}
        own, top = probs_of(3, 4, sampling, history=[3])
        # Sorted, as all are equal but for rounding.
        assert (own, sorted(top)) == (near(1 / 3), all_near((0, 1 / 3), (2, 1 / 3), (3, 1 / 3)))
        assert probs_of(1, 0, sampling, history=[3]) == (0.0, [])

    def test_greedily_one_token_is_certain(self) -> None:
        assert probs_of(1, 4, {"temperature": 0.0}) == (1.0, [(1, 1.0)])
        assert probs_of(3, 4, {"temperature": 0.0, "logit_bias": {1: -9.0}}) == (1.0, [(3, 1.0)])
        assert probs_of(0, 2, {"temperature": 0.0}, row=np.zeros(3)) == (1.0, [(0, 1.0)])

    def test_a_forced_token_is_certain_and_has_the_models_own_probability_beside(self) -> None:
        sampling = {"reasoning_budget": ReasoningBudget(2, (), (0,), begun=True)}
        assert probs_of(0, 4, sampling, history=[3, 3]) == (1.0, [(0, 1.0)])
        own, top = probs_of(0, 1, sampling, history=[3, 3], post_sampling=False)
        assert (own, top) == (near(1 / 8), all_near((1, 4 / 8)))
        own, _ = probs_of(3, 0, sampling, history=[3])
        assert own == near(2 / 8), "free before the budget is spent"

    def test_what_the_model_bans_has_no_probability_and_is_not_listed(self) -> None:
        row = np.array([0.0, -math.inf, -800.0, -700.0])
        found = compute_logprob(1, row, [], RowSampler(PLAIN_PARAMS), LogprobParams(4))
        assert found == TokenLogprob(1, -math.inf, ((0, 0.0), (3, -700.0)))

    def test_large_logits_neither_overflow_nor_vanish(self) -> None:
        row = np.array([3e38, 3e38], dtype=np.float32)
        half = math.log(0.5)
        assert compute_logprob(1, row, [], RowSampler(PLAIN_PARAMS), LogprobParams(1)) == TokenLogprob(
            1, half, ((0, half),)
        )
        found = compute_logprob(0, ROW - 1e4, [], RowSampler(PLAIN_PARAMS), LogprobParams(0))
        assert found.logprob == pytest.approx(math.log(1 / 8), abs=1e-11)


@pytest.mark.parametrize("seed", range(40))
def test_against_a_softmax_of_everything(seed: int) -> None:
    """Borrowed rows of any size, with ties, in both float types, and any filters."""
    rng = random.Random(seed)
    size = rng.choice((2, 30, 700, 1500, 20_000))
    row: Any = np.random.default_rng(seed).normal(0.0, rng.choice((0.5, 3.0)), size)
    row = np.round(row, rng.choice((0, 1, 8))).astype(rng.choice((np.float32, np.float64)))
    row.setflags(write=False)
    params = SamplingParams(
        rng.choice((0.7, 1.0)),
        top_k=rng.choice((0, 5, 40)),
        top_p=rng.choice((0.9, 1.0)),
        repeat_penalty=1.3,
        logit_bias={1: -math.inf},
    )
    sampler, history = RowSampler(params), [rng.randrange(size) for _ in range(5)]
    asked = LogprobParams(rng.choice((1, 7, 50)), post_sampling_probs=seed % 2 == 1)
    probs = softmax(row.astype(np.float64))
    if asked.post_sampling_probs:
        candidates = sampler.candidates(row, history)
        ids = np.arange(size) if candidates.ids is None else candidates.ids
        probs = np.zeros(size)
        probs[ids] = softmax(candidates.logits.astype(np.float64))
    order = sorted(np.flatnonzero(probs).tolist(), key=lambda token_id: (-probs[token_id], token_id))
    for token_id in (order[0], order[-1]):
        found = compute_logprob(token_id, row, history, sampler, asked)
        assert math.exp(found.logprob) == pytest.approx(probs[token_id], rel=1e-9)
        assert [one for one, _ in found.top] == order[: asked.logprobs]
        listed = [math.exp(logprob) for _, logprob in found.top]
        assert listed == pytest.approx(probs[order[: asked.logprobs]], rel=1e-9)


def test_options_and_their_limits() -> None:
    assert LogprobParams() == LogprobParams(None, False)
    assert LogprobParams(**{"logprobs": np.int64(MAX_LOGPROBS)}) == LogprobParams(MAX_LOGPROBS)  # type: ignore[arg-type]
    assert type(LogprobParams(np.int64(3)).logprobs) is int  # type: ignore[arg-type]
    for count in (-1, MAX_LOGPROBS + 1):
        with pytest.raises(InputError, match=rf"^logprobs {count} is out of range: give a value from 0 to 1000 \("):
            LogprobParams(count)
    assert fields_of(LogprobParams)[0].json_names == ("logprobs", "n_probs")


def test_what_is_listed_takes_little_memory() -> None:
    top = tuple((number, -number / 7) for number in range(1000))
    found = TokenLogprob(3, -0.5, top)
    assert (found.top, found.num_top, found) == (top, 1000, TokenLogprob(3, -0.5, list(top)))
    assert hash(found) == hash(TokenLogprob(3, -0.5, top))
    assert found != TokenLogprob(3, -0.5, top[1:])
    assert repr(TokenLogprob(3, -0.5, ((1, -2.0),))) == "TokenLogprob(token_id=3, logprob=-0.5, top=((1, -2.0),))"
    assert pickle.loads(pickle.dumps(found)) == found
    tracemalloc.start()
    many = [TokenLogprob(3, -0.5, top) for _ in range(100)]
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < len(many) * 1000 * 16
