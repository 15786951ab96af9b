"""Processors against plain reference code, and the head-and-tail Gumbel argmax against the softmax it stands for."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.core import processors
from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.errors import EngineError, SamplingError
from paceline.core.noise import TAIL_ID, XTC_ID, TokenNoise
from paceline.core.params import LLAMA_CPP_ORDER, LOWEST_TEMPERATURE, OFF, TRANSFORMERS_ORDER, SamplingParams
from paceline.core.processors import Candidates, LateTokens, build_processors
from paceline.core.sampling import FewCandidates, RowSampler, largest_probability, probabilities
from paceline.core.verify import CoupledVerifier, RejectionVerifier
from paceline.engines.scripted import ScriptedVocabulary
from tests.automaton import FORBIDDEN, AutomatonConstraint
from tests.helpers import PLAIN_PARAMS, softmax
from tests.proofs import chi_square
from tests.timing import assert_grows_with_length_alone

ALPHA = 1e-6
"""False-alarm rate of each chi-square test; the seeds are fixed."""

HEAD_SIZE = 512


@pytest.fixture(autouse=True, scope="module")
def small_head() -> Iterator[None]:
    """Let vocabularies of some hundreds have a tail, which otherwise takes thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.core.sampling.HEAD_SIZE", HEAD_SIZE)
        yield


def sampling(**values: object) -> SamplingParams:
    """Return parameters with every filter off but those given."""
    settings_: dict[str, object] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **values}
    return SamplingParams(**settings_)  # type: ignore[arg-type]


def reference(params: SamplingParams, logits: Float64Array, history: Sequence[int]) -> dict[int, float]:
    """Run the processors as their definitions say, one token at a time."""
    row = dict(enumerate(float(logit) for logit in logits))
    for name in params.order:
        if name == "logit_bias":
            row = {i: logit + params.logit_bias.get(i, 0.0) for i, logit in row.items()}
        elif name == "penalties" and params.penalty_last_n != 0:
            recent = list(history) if params.penalty_last_n < 0 else list(history)[-params.penalty_last_n :]
            for i in row.keys() & set(recent):
                logit = row[i] / params.repeat_penalty if row[i] > 0 else row[i] * params.repeat_penalty
                row[i] = logit - params.presence_penalty - params.frequency_penalty * recent.count(i)
        elif name == "dry" and name in params.active:
            for i, length in repeated_lengths(params, history).items():
                if i in row:
                    penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
                    row[i] -= min(penalty, 1e9)
        elif name not in params.active:
            continue
        elif name == "top_n_sigma":
            finite = [logit for logit in row.values() if logit > -math.inf]
            least = max(finite) - params.top_n_sigma * statistics.pstdev(finite)
            row = {i: logit for i, logit in row.items() if logit >= least - 1e-12}
        elif name == "typical_p":
            probs = probabilities_of(row)
            entropy = -math.fsum(p * math.log(p) for p in probs.values())
            mass, kept = 0.0, []
            for i in sorted(probs, key=lambda i: (abs(-math.log(probs[i]) - entropy), i)):
                kept.append(i)
                mass += probs[i]
                if mass > params.typical_p:
                    break
            row = {i: row[i] for i in sorted(kept)}
        elif name == "xtc":
            probs = probabilities_of(row)
            above = [i for i in probs if probs[i] >= params.xtc_threshold]
            coin = TokenNoise(params.seed, params.choice).uniform(len(history), np.array([XTC_ID]))[0]
            if coin <= params.xtc_probability and len(above) > 1:
                stays = min(above, key=lambda i: (probs[i], i))
                row = {i: logit for i, logit in row.items() if i == stays or i not in above}
        elif name == "top_k" and params.top_k:
            least = sorted(row.values(), reverse=True)[min(params.top_k, len(row)) - 1]
            row = {i: logit for i, logit in row.items() if logit >= least}
        elif name == "top_p" and params.top_p < 1.0:
            top = max(row.values())
            weights = {i: math.exp(logit - top) for i, logit in row.items()}
            goal, mass, kept = params.top_p * math.fsum(weights.values()), 0.0, []
            for i in sorted(weights, key=lambda i: (-weights[i], i)):
                kept.append(i)
                mass += weights[i]
                if mass >= goal:
                    break
            row = {i: row[i] for i in sorted(kept)}
        elif name == "min_p" and params.min_p > 0.0:
            least = max(row.values()) + math.log(params.min_p)
            row = {i: logit for i, logit in row.items() if logit >= least}
        elif name == "temperature" and params.dynatemp_range == 0.0:
            row = {i: logit / params.temperature for i, logit in row.items()}
        elif name == "temperature":
            probs = probabilities_of(row)
            if len(probs) < 2:
                continue
            share = -math.fsum(p * math.log(p) for p in probs.values()) / math.log(len(probs))
            low, high = max(0.0, params.temperature - params.dynatemp_range), params.temperature + params.dynatemp_range
            temperature = low + (high - low) * share**params.dynatemp_exponent
            top = max(row.values())
            row = {i: (logit - top) / temperature for i, logit in row.items()}
    return row


def check_candidates(candidates: Candidates, expected: dict[int, float], params: SamplingParams) -> None:
    ids = range(len(candidates.logits)) if candidates.ids is None else candidates.ids.tolist()
    assert list(ids) == sorted(expected)
    # Where the temperature follows the distribution, logits are known up to a constant.
    shift = max(expected.values()) - candidates.logits.max() if params.dynatemp_range else 0.0
    wanted = [expected[i] for i in sorted(expected)]
    assert (candidates.logits + shift).tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def probabilities_of(row: dict[int, float]) -> dict[int, float]:
    """Return the probabilities of those that are not banned."""
    finite = {i: logit for i, logit in row.items() if logit > -math.inf}
    total = math.fsum(math.exp(logit - max(finite.values())) for logit in finite.values())
    return {i: math.exp(logit - max(finite.values())) / total for i, logit in finite.items()}


def repeated_lengths(params: SamplingParams, history: Sequence[int]) -> dict[int, int]:
    """Return which tokens would prolong a repetition, and of how many tokens, by trying each."""
    recent = list(history) if params.dry_penalty_last_n < 0 else list(history)[-params.dry_penalty_last_n :]
    found: dict[int, int] = {}
    for place in range(1, len(recent)):
        length = 0
        while length < place and recent[place - 1 - length] == recent[-1 - length]:
            length += 1
        if params.dry_allowed_length <= length < len(recent):
            found[recent[place]] = max(length, found.get(recent[place], 0))
    return found if len(recent) > params.dry_allowed_length else {}


def rare_filters() -> st.SearchStrategy[dict[str, Any]]:
    some = st.sampled_from
    return st.fixed_dictionaries(
        {
            "top_n_sigma": some((-1.0, 0.9, 1.7)),
            "typical_p": some((1.0, 0.41, 0.87)),
            "dynatemp_range": some((0.0, 0.3, 0.7)),
            "dynatemp_exponent": some((0.7, 1.0, 2.0)),
            "dry_multiplier": some((0.0, 0.8)),
            "dry_base": some((1.0, 1.75)),
            "dry_allowed_length": some((0, 1, 2)),
            "dry_penalty_last_n": some((0, 3, 64, -1)),
            "xtc_probability": some((0.0, 0.5, 1.0)),
            "xtc_threshold": some((0.0, 0.1, 0.3, 0.6)),
        }
    )


@st.composite
def sampling_cases(draw: st.DrawFn) -> tuple[SamplingParams, Float64Array, list[int]]:
    size = draw(st.integers(2, 24))
    # Thirds make ties common, and every processor has to break them by id.
    logits = np.array(draw(st.lists(st.integers(-12, 12), min_size=size, max_size=size))) / 3.0
    some = st.sampled_from
    biases = draw(st.dictionaries(st.integers(0, size - 1), some((-1.5, 0.7, 4.0)), max_size=3))
    order = draw(some((LLAMA_CPP_ORDER, TRANSFORMERS_ORDER)) | st.permutations(LLAMA_CPP_ORDER).map(tuple))
    if order[0] == "logit_bias" and size > 3:
        biases[draw(st.integers(0, size - 1))] = -math.inf
    params = SamplingParams(
        temperature=draw(some((0.0, 0.5, 1.0, 2.0))),
        top_k=draw(some((0, 1, 3, 40))),
        top_p=draw(some((1.0, 0.37, 0.71, 0.93))),
        min_p=draw(some((0.0, 0.05, 0.3))),
        repeat_penalty=draw(some((1.0, 0.8, 1.3))),
        presence_penalty=draw(some((0.0, 0.4, -0.4))),
        frequency_penalty=draw(some((0.0, 0.15))),
        penalty_last_n=draw(some((0, 2, 64, -1))),
        logit_bias=biases,
        seed=draw(st.integers(0, 99)),
        order=order,
        **draw(st.just({}) | rare_filters()),
    )
    return params, logits, draw(st.lists(st.integers(0, size + 2), max_size=8))


@settings(max_examples=400)
@given(case=sampling_cases())
def test_processors_match_their_definitions(case: tuple[SamplingParams, Float64Array, list[int]]) -> None:
    params, logits, history = case
    logits.setflags(write=False)
    candidates = RowSampler(params).candidates(logits, history)
    expected = reference(params, logits, history)
    check_candidates(candidates, expected, params)
    probs = probabilities(candidates, len(logits), greedy=params.greedy)
    if params.greedy:
        assert probs.argmax() == min(i for i in expected if expected[i] == max(expected.values()))
        assert probs.max() == 1.0
    else:
        weights = np.zeros(len(logits))
        weights[list(expected)] = softmax(np.array(list(expected.values())))
        assert probs == pytest.approx(weights, abs=1e-12)


@settings(max_examples=300)
@given(case=sampling_cases(), position=st.integers(0, 50))
def test_ranking_starts_with_the_token_that_is_emitted(
    case: tuple[SamplingParams, Float64Array, list[int]], position: int
) -> None:
    """A draft that agrees with the target proposes what the target emits; siblings are different tokens."""
    params, logits, history = case
    sampler = RowSampler(params)
    emitted = sampler.emit(logits, position, history)
    assert probabilities(sampler.candidates(logits, history), len(logits), greedy=params.greedy)[emitted] > 0.0
    for count in (1, 2, 3, 50):
        ranked = sampler.rank(sampler.candidates(logits, history), position, count)
        assert ranked[0] == emitted
        assert len(set(ranked)) == len(ranked) <= count


@settings(max_examples=300)
@given(case=sampling_cases(), position=st.integers(0, 50))
def test_margins_are_differences_of_scores(case: tuple[SamplingParams, Float64Array, list[int]], position: int) -> None:
    """Against scores added up here: the first's lead over the best of the others, and what the others lack."""
    params, logits, history = case
    sampler = RowSampler(params)
    candidates = sampler.candidates(logits, history)
    ids = np.arange(len(candidates.logits)) if candidates.ids is None else candidates.ids
    noise = 0.0 if params.greedy else sampler.noise.gumbel(position, ids)
    scores = dict(zip(ids.tolist(), (candidates.logits + noise).tolist(), strict=True))
    for count in (1, 2, 50):
        ranked = sampler.ranked_with_margins(candidates, position, count)
        assert [token_id for token_id, _ in ranked] == sampler.rank(candidates, position, count)
        for index, (token_id, margin) in enumerate(ranked):
            others = [score for other, score in scores.items() if other != token_id]
            assert margin == pytest.approx(scores[token_id] - max(others, default=-math.inf), abs=1e-9)
            assert margin >= 0.0 if index == 0 else margin <= 0.0


def test_a_tail_without_probability_is_no_runner_up() -> None:
    """As behind a bias: what remains underflows."""
    sampler = RowSampler(sampling(logit_bias={7: 1e9}))
    candidates = sampler.candidates(np.zeros(4 * HEAD_SIZE), ())
    assert sampler.rank(candidates, 0, 3) == [7]
    assert [token_id for token_id, _ in sampler.ranked_with_margins(candidates, 0, 3)] == [7]


def test_the_margin_of_a_token_of_the_tail() -> None:
    """A flat row of four times what the head holds: the tail wins often, by its score over the head's best."""
    sampler = RowSampler(PLAIN_PARAMS)
    candidates = sampler.candidates(np.linspace(0.0, 0.1, 4 * HEAD_SIZE), ())
    tail_wins = 0
    for position in range(50):
        row = sampler.perturb(candidates, position)
        assert row.tail is not None
        best = float(row.scores.max())
        ((token_id, margin),) = sampler.ranked_with_margins(candidates, position, 1)
        if token_id not in row.ids:
            tail_wins += 1
            assert margin == pytest.approx(row.tail.score() - best)
        assert margin > 0.0
    assert 25 < tail_wins < 48


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0])
    assert RowSampler(SamplingParams(0.0)).emit(row, 0, ()) == 1
    assert RowSampler(SamplingParams(0.0, logit_bias={3: 1.0})).emit(row, 0, ()) == 1
    assert RowSampler(SamplingParams(0.0)).rank(RowSampler(SamplingParams(0.0)).candidates(row, ()), 0, 3) == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("kept", [None, [0, 3, 7, 40]])
def test_biases_are_added_in_the_type_of_the_logits(kept: list[int] | None) -> None:
    """To the bit as one by one, where Python's numbers take the type of the row."""
    rng = np.random.default_rng(5)
    biases = {int(token): float(rng.normal(scale=7)) for token in rng.permutation(60)[:40]} | {3: -math.inf}
    (add,) = build_processors(sampling(temperature=0.0, logit_bias=biases, order=LLAMA_CPP_ORDER))
    for dtype in (np.float32, np.float64):
        row: FloatArray = rng.normal(scale=5, size=50).astype(dtype)
        ids = None if kept is None else np.array(kept)
        candidates = Candidates(ids, row if ids is None else row[ids], owned=False)
        expected = candidates.logits.copy()
        for index, token_id in enumerate(range(50) if ids is None else kept or []):
            if token_id in biases:
                expected[index] += biases[token_id]
        added = add(candidates, ()).logits
        assert added.dtype == dtype
        assert added.tobytes() == expected.tobytes()


def test_no_logit_overflows_at_the_bounds() -> None:
    row = np.array([30.0, -30.0, 5.0, 0.0], dtype=np.float32)
    for order in itertools.permutations(("logit_bias", "penalties", "temperature")):
        params = SamplingParams(
            1e-20, logit_bias={0: 1e9, 1: -1e9}, repeat_penalty=1e-6, order=(*order, "top_k", "top_p", "min_p")
        )
        assert RowSampler(params).emit(row, 5, (0, 1, 2, 3)) == 0


def test_greedy_leaves_truncation_out() -> None:
    """As the parameters say: the largest logit after bias and penalties, wherever truncation stands in the order."""
    order = ("top_k", "logit_bias", "penalties", "top_p", "min_p", "temperature")
    params = SamplingParams(0.0, top_k=1, repeat_penalty=4.0, order=order)
    assert RowSampler(params).emit(np.array([2.0, 1.0]), 1, [0]) == 1


def test_order_decides_what_truncation_sees() -> None:
    """At temperature 2, 0.6/0.4 becomes about 0.55/0.45: top-p 0.58 keeps one token before it and two after it."""
    row = np.log([0.6, 0.4])
    llama = RowSampler(sampling(temperature=2.0, top_p=0.58, order=LLAMA_CPP_ORDER)).candidates(row, ())
    transformers = RowSampler(sampling(temperature=2.0, top_p=0.58, order=TRANSFORMERS_ORDER)).candidates(row, ())
    assert llama.ids is not None
    assert llama.ids.tolist() == [0]
    assert transformers.ids is not None
    assert transformers.ids.tolist() == [0, 1]


def test_penalties_count_recent_tokens() -> None:
    params = sampling(repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, penalty_last_n=3)
    row = np.array([4.0, -1.0, 3.0, 0.0])
    # Of the history's last three tokens, 0 stands once and 1 twice; token 2 is too long ago and 9 is no token here.
    after = RowSampler(params).candidates(row, [9, 2, 2, 0, 1, 1]).logits
    assert after.tolist() == [4.0 / 2 - 0.5 - 0.25, -1.0 * 2 - 0.5 - 0.5, 3.0, 0.0]
    assert row.tolist() == [4.0, -1.0, 3.0, 0.0], "the engine's row is borrowed"


def test_top_p_looks_further_when_the_first_look_is_not_enough() -> None:
    size = processors.TOP_P_FIRST_LOOK * 20
    # The later, the likelier, but by so little that nine tenths of the mass are nine tenths of the tokens.
    row = np.arange(size) * 1e-9
    kept = RowSampler(sampling(top_p=0.9)).candidates(row, ()).ids
    assert kept is not None
    assert kept.tolist() == list(range(size // 10, size))


def test_banned_tokens_are_never_emitted() -> None:
    row = np.array([9.0, 0.0, 0.0])
    for temperature in (0.0, 1.0):
        sampler = RowSampler(sampling(temperature=temperature, logit_bias={0: -math.inf}))
        assert 0 not in {sampler.emit(row, position, ()) for position in range(200)}
        ranked = sampler.rank(sampler.candidates(row, ()), 0, 3)
        assert sorted(ranked) == [1, 2], "not as a runner-up either"


@settings(max_examples=200)
@given(case=sampling_cases(), seed=st.integers(0, 10**6))
def test_a_row_that_is_banned_for_the_most_part_is_what_its_other_tokens_are(
    case: tuple[SamplingParams, Float64Array, list[int]], seed: int
) -> None:
    params, logits, history = case
    places = np.sort(np.random.default_rng(seed).choice(9 * HEAD_SIZE, size=len(logits) + 3, replace=False)).tolist()
    row = np.full(9 * HEAD_SIZE, -np.inf)
    row[places[: len(logits)]] = logits
    row.setflags(write=False)
    biases = {places[token_id]: bias for token_id, bias in params.logit_bias.items()}
    spread = dataclasses.replace(params, logit_bias=biases)
    candidates = RowSampler(spread).candidates(row, [places[token_id] for token_id in history])
    expected = {places[token_id]: logit for token_id, logit in reference(params, logits, history).items()}
    assert candidates.ids is not None
    check_candidates(candidates, expected, params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [3, 600])
@pytest.mark.parametrize("defaults", [True, False])
def test_nothing_left_to_emit_is_an_error(temperature: float, size: int, defaults: bool) -> None:
    bans = dict.fromkeys(range(size), -math.inf)
    params = (
        SamplingParams(temperature, logit_bias=bans) if defaults else sampling(temperature=temperature, logit_bias=bans)
    )
    with pytest.raises(SamplingError, match="-inf"):
        RowSampler(params).emit(np.zeros(size), 0, ())


def test_draws_follow_the_softmax_within_the_head() -> None:
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    sampler = RowSampler(PLAIN_PARAMS)
    counts = np.bincount([sampler.emit(np.log(probs), position, ()) for position in range(20_000)], minlength=4)
    assert chi_square(counts, probs * 20_000) > ALPHA


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_draws_follow_the_softmax_in_head_and_tail(dtype: type[np.float64]) -> None:
    """Flat logits over more tokens than have noise of their own: a third of the draws come out of the tail."""
    size, num_draws = HEAD_SIZE + 300, 12_000
    row = np.random.default_rng(1).normal(0.0, 0.05, size).astype(dtype)
    sampler = RowSampler(PLAIN_PARAMS)
    perturbed = sampler.perturb(sampler.candidates(row, ()), 0)
    assert perturbed.tail is not None
    counts = np.bincount([sampler.emit(row, position, ()) for position in range(num_draws)], minlength=size)
    expected = softmax(row.astype(np.float64)) * num_draws
    assert chi_square(counts, expected) > ALPHA
    in_head = np.isin(np.arange(size), perturbed.ids)
    assert stats.binomtest(int(counts[in_head].sum()), num_draws, expected[in_head].sum() / num_draws).pvalue > ALPHA
    # And the tail is cut where it should be: at the largest logits.
    assert row[in_head].min() >= row[~in_head].max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-9), (np.float32, 1e-5)])
def test_the_tail_scores_like_one_token_with_its_summed_probability(dtype: type[np.float64], tolerance: float) -> None:
    row = np.random.default_rng(2).normal(0.0, 1.0, HEAD_SIZE + 300).astype(dtype)
    sampler = RowSampler(PLAIN_PARAMS)
    for position in range(20):
        tail = sampler.perturb(sampler.candidates(row, ()), position).tail
        assert tail is not None
        smallest = np.sort(row.astype(np.float64))[:300]
        noise = float(sampler.noise.gumbel(position, np.array([TAIL_ID]))[0])
        score = math.log(np.exp(smallest).sum()) + noise
        assert tail.beats(score - tolerance)
        assert not tail.beats(score + tolerance)
        assert tail.score_bound >= score


def test_far_tokens_are_left_to_the_tail() -> None:
    """Few tokens near the top, many hopeless ones that together still win now and then."""
    size, num_draws = 3000, 6000
    row = np.full(size, -14.5 + 4.0)
    row[:2] = (4.0, 3.0)
    row[2:] += np.log(100.0)
    row[2:] -= 4.7
    sampler = RowSampler(PLAIN_PARAMS)
    assert sampler.perturb(sampler.candidates(row, ()), 0).ids.tolist() == [0, 1]
    counts = np.bincount([sampler.emit(row, position, ()) for position in range(num_draws)], minlength=size)
    probs = softmax(row)
    observed = [counts[0], counts[1], counts[2:].sum()]
    assert chi_square(observed, [num_draws * p for p in (probs[0], probs[1], probs[2:].sum())]) > ALPHA


@pytest.mark.parametrize("seed", range(3))
def test_coupled_acceptance_has_its_closed_form(seed: int) -> None:
    """``sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)`` for the first token, within 4 standard errors (alarm rate 6e-5)."""
    rng = np.random.default_rng(seed)
    target, draft = rng.normal(0.0, 1.5, 6), rng.normal(0.0, 1.5, 6)
    p, q = softmax(target), softmax(draft)
    exact = sum(1.0 / np.maximum(p / p[i], q / q[i]).sum() for i in range(6))
    verifier = CoupledVerifier(RowSampler(PLAIN_PARAMS))
    num_draws = 8000
    agreed = sum(
        verifier.propose(draft, position, (), 1)[0].token_id == verifier.sampler.emit(target, position, ())
        for position in range(num_draws)
    )
    assert abs(agreed / num_draws - exact) < 4 * math.sqrt(exact * (1 - exact) / num_draws)
    total_variation = np.abs(p - q).sum() / 2
    assert exact >= (1 - total_variation) / (1 + total_variation)


@pytest.mark.parametrize("probability", [0.3, 0.8])
def test_xtc_leaves_out_as_often_as_it_says_whatever_is_drawn(probability: float) -> None:
    """Its coin is keyed as the noise is: were they one, what is drawn would depend on whether tokens are left out."""
    probs = np.array([0.45, 0.3, 0.15, 0.1])
    sampler = RowSampler(sampling(xtc_probability=probability, xtc_threshold=0.2))
    num_draws = 20_000
    drawn, cut = [], []
    for position in range(num_draws):
        candidates = sampler.candidates(np.log(probs), range(position))
        drawn.append(sampler.rank(candidates, position, 1)[0])
        cut.append(candidates.ids is not None)
    counts = np.array([np.bincount(np.array(drawn)[np.array(cut) == side], minlength=4) for side in (False, True)])
    left = np.array([0.0, 0.3, 0.15, 0.1]) / 0.55
    expected = num_draws * np.array([(1 - probability) * probs, probability * left])
    assert counts[1, 0] == 0
    assert chi_square(np.delete(counts.ravel(), 4), np.delete(expected.ravel(), 4)) > ALPHA
    # Neither does a coin depend on the one before.
    pairs = np.bincount(2 * np.array(cut[:-1:2]) + np.array(cut[1::2]), minlength=4)
    both = num_draws / 2 * np.outer((1 - probability, probability), (1 - probability, probability)).ravel()
    assert chi_square(pairs, both) > ALPHA


def test_greedy_decoding_takes_the_likeliest_of_what_xtc_and_typical_p_leave() -> None:
    row = np.log([0.5, 0.3, 0.15, 0.05])
    assert RowSampler(sampling(temperature=0.0, xtc_probability=1.0)).emit(row, 0, ()) == 2
    # 1.14 nats are to be expected, and 1.20, the surprise of the second, is nearest.
    assert RowSampler(sampling(temperature=0.0, typical_p=0.2)).emit(row, 0, ()) == 1
    assert RowSampler(sampling(temperature=0.0, dynatemp_range=0.5)).params.greedy is False


def test_dynamic_temperature_follows_the_entropy() -> None:
    sampler = RowSampler(sampling(temperature=0.0, dynatemp_range=0.6))
    flat, sure = np.zeros(8), np.array([800.0, 0.0, -5.0])
    assert sampler.temperature(flat, ()) == pytest.approx(0.6)
    assert sampler.temperature(sure, ()) == LOWEST_TEMPERATURE
    assert sampler.candidates(sure, ()).ids == [0]
    cold = RowSampler(sampling(temperature=0.0, dynatemp_range=1.0, dynatemp_exponent=100.0))
    near = np.array([1.5, 1.0, 0.0], dtype=np.float32)
    assert 0.0 < cold.temperature(near, ()) < 1e-5
    assert probabilities(cold.candidates(near, ()), 3, greedy=False).tolist() == [1.0, 0.0, 0.0]
    assert RowSampler(sampling(temperature=0.7)).temperature(flat, ()) == 0.7


def test_dry_takes_no_more_than_a_logit_can_lose() -> None:
    params = sampling(temperature=1e-20, dry_multiplier=100.0, dry_base=100.0, repeat_penalty=100.0)
    row = np.array([3.0, 1.0], dtype=np.float32)
    for order in (LLAMA_CPP_ORDER, ("dry", *(name for name in LLAMA_CPP_ORDER if name != "dry"))):
        candidates = RowSampler(dataclasses.replace(params, order=order)).candidates(row, [0] * 64)
        assert np.isfinite(candidates.logits).all()
        assert candidates.logits.argmax() == 1
    # Nothing else may follow.
    alone = AutomatonConstraint(np.array([[0, FORBIDDEN]]))
    assert RowSampler(params, constraint=alone).emit(row, 64, [0] * 64) == 0


@pytest.mark.parametrize("period", [1, 2, 7, 10**9])
def test_the_time_of_dry_grows_with_what_it_searches_alone(period: int) -> None:
    sampler = RowSampler(sampling(dry_multiplier=1.0, dry_base=1.0, dry_penalty_last_n=-1))
    row = np.zeros(10)
    assert_grows_with_length_alone(
        lambda length: sampler.candidates(row, [place % period % 10 for place in range(length)]), 1 << 14
    )


def test_positions_are_independent_of_each_other() -> None:
    probs = np.array([0.5, 0.3, 0.2])
    sampler = RowSampler(PLAIN_PARAMS)
    tokens = [sampler.emit(np.log(probs), position, ()) for position in range(20_001)]
    pairs = np.zeros((3, 3))
    np.add.at(pairs, (tokens[:-1], tokens[1:]), 1)
    assert chi_square(pairs.ravel(), np.outer(probs, probs).ravel() * 20_000) > ALPHA


def test_largest_probability() -> None:
    logits = np.random.default_rng(0).normal(size=50)
    assert largest_probability(logits) == pytest.approx(softmax(logits).max())


def test_probabilities_cut_and_pad_to_another_width() -> None:
    sampler = RowSampler(PLAIN_PARAMS)
    candidates = sampler.candidates(np.log([0.5, 0.3, 0.2]), ())
    assert probabilities(candidates, 5, greedy=False) == pytest.approx([0.5, 0.3, 0.2, 0.0, 0.0])
    assert probabilities(candidates, 2, greedy=False) == pytest.approx([0.625, 0.375])


def test_seed_and_choice_are_what_changes_the_draws() -> None:
    row = np.zeros(50)

    def draws(seed: int, choice: int) -> list[int]:
        sampler = RowSampler(sampling(seed=seed, choice=choice))
        return [sampler.emit(row, position, ()) for position in range(20)]

    rng = random.Random(0)
    assert draws(1, 0) == draws(1, 0)
    assert len({tuple(draws(rng.getrandbits(64), choice)) for choice in range(10)}) == 10


@pytest.mark.parametrize(
    ("given", "seed"), [(-5, 2**32 - 5), (-(2**31), 2**31), (-(2**32) - 2, 2**32 - 2), (2**32 - 1, 2**32 - 1)]
)
def test_a_negative_seed_is_one_of_32_bits(given: int, seed: int) -> None:
    assert sampling(seed=given).seed == seed


@pytest.mark.parametrize("given", [-1, -1 - 2**32])
def test_a_seed_of_which_all_bits_are_set_is_drawn(given: int) -> None:
    seeds = {sampling(seed=given).seed for _ in range(5)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"top_p": 0.0}, "top-p 0"),
        ({"min_p": 1.5}, "min-p 1.5"),
        ({"repeat_penalty": 0.0}, "repeat penalty 0"),
        ({"penalty_last_n": -2}, "penalty last-n -2"),
        ({"seed": 2**64}, "seed 18446744073709551616"),
        ({"logit_bias": {3: math.nan}}, "logit bias nan"),
        ({"logit_bias": {-3: 1.0}}, "logit bias 1.0 for token -3"),
        ({"order": ("top_k", "magic")}, "processor order top_k,magic"),
        ({"order": ("top_k", "top_k")}, "processor order top_k,top_k"),
        ({"order": ("top_nonsense",)}, "processor order top_nonsense"),
        ({"top_n_sigma": math.inf}, "top-n-sigma inf"),
        ({"typical_p": 1.5}, "typical-p 1.5"),
        ({"dynatemp_range": -0.5}, "dynatemp range -0.5"),
        ({"dynatemp_exponent": math.nan}, "dynatemp exponent nan"),
        ({"dry_multiplier": -1.0}, "DRY multiplier -1.0"),
        ({"dry_base": 0.5}, "DRY base 0.5"),
        ({"dry_allowed_length": -1}, "DRY allowed length -1"),
        ({"dry_penalty_last_n": -2}, "DRY penalty last-n -2"),
        ({"dry_sequence_breakers": ("",)}, "a DRY sequence breaker of 0 bytes"),
        ({"dry_sequence_breakers": ("é" * 21,)}, "a DRY sequence breaker of 42 bytes"),
        ({"dry_sequence_breakers": ("x",) * 65}, "65 DRY sequence breakers"),
        ({"xtc_probability": 1.1}, "XTC probability 1.1"),
        ({"xtc_threshold": -0.1}, "XTC threshold -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        # What logits may overflow by.
        ({"temperature": 5e-324}, "too low to divide by"),
        ({"temperature": 9e-21}, "too low to divide by"),
        ({"repeat_penalty": 9e-7}, "out of range"),
        ({"logit_bias": {1: 1.1e9}}, r"from -1e\+09 to 1e\+09"),
        ({"logit_bias": {1: -1.1e9}}, r"from -1e\+09 to 1e\+09"),
        ({"logit_bias": {1: math.inf}}, r"from -1e\+09 to 1e\+09"),
        ({"logit_bias": {2**31: 1.0}}, "give the id of a token"),
        ({"logit_bias": {2**31: 1}}, "give the id of a token"),
    ],
)
def test_values_out_of_range(values: dict[str, object], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        sampling(**values)


EDGES: dict[str, Sequence[float]] = {
    "temperature": (0.0, 1e-20, 1.0, 100.0),
    "top_k": (0, 1, 2**31 - 1),
    "top_p": (5e-324, 0.5, 1.0),
    "min_p": (0.0, 5e-324, 0.5, 1.0),
    "repeat_penalty": (1e-6, 1.0, 100.0),
    "presence_penalty": (-100.0, 0.0, 100.0),
    "penalty_last_n": (-1, 0, 1, 64),
    "top_n_sigma": (-1.0, 0.0, 5e-324, 1.0, 2.0**30),
    "typical_p": (0.0, 5e-324, 0.5, 1.0),
    "dynatemp_range": (0.0, 5e-324, 1.0, 100.0),
    "dynatemp_exponent": (0.0, 1.0, 100.0),
    "dry_multiplier": (0.0, 5e-324, 100.0),
    "dry_base": (1.0, 100.0),
    "dry_allowed_length": (0, 1, 2**31 - 1),
    "dry_penalty_last_n": (-1, 0, 1, 64),
    "xtc_probability": (0.0, 5e-324, 0.5, 1.0),
    "xtc_threshold": (0.0, 5e-324, 0.5, 0.50001, 1.0),
}


@pytest.mark.filterwarnings("error")
def test_at_all_edges_a_row_gives_one_of_its_tokens_or_an_error_that_says_why() -> None:
    rng, numbers = random.Random(5), np.random.default_rng(5)
    vocabulary = ScriptedVocabulary.of_size(90, [89, 3])
    chosen = 0
    for _ in range(1500):
        values: dict[str, Any] = {name: rng.choice(some) for name, some in EDGES.items() if rng.random() < 0.5}
        order = ["logit_bias", *OFF]
        values["order"] = rng.choice((LLAMA_CPP_ORDER, rng.sample(order, rng.randint(0, len(order)))))
        if rng.random() < 0.3:
            values["logit_bias"] = {rng.randrange(90): rng.choice((-math.inf, -1e9, 1e9)) for _ in range(4)}
        if rng.random() < 0.2:
            values["allowed_token_ids"] = rng.sample(range(100), 5)
        sampler = RowSampler(
            SamplingParams(seed=rng.getrandbits(30), **values),
            late=LateTokens((89, 3), rng.choice((0, 1000))),
            vocabulary=vocabulary,
        )
        size = rng.choice((1, 90, 90, 4 * HEAD_SIZE)) if "infill" not in values["order"] else 90
        row = numbers.normal(0.0, rng.choice((0.0, 1.0, 30.0, 1000.0)), size).astype(rng.choice((np.float32, float)))
        row[numbers.random(size) < rng.choice((0.0, 0.0, 0.95, 1.0))] = -np.inf
        if rng.random() < 0.05:
            row[rng.randrange(size)] = rng.choice((math.nan, math.inf))
        history = [rng.randrange(min(size, 4)) for _ in range(rng.choice((1, 3, 50)))]
        try:
            token_id = sampler.emit(row, len(history), history)
            candidates = sampler.candidates(row, history)
            assert candidates.find(token_id) is not None
            for count in (1, 3):
                ranked = sampler.ranked_with_margins(candidates, len(history), count)
                assert [one for one, _ in ranked] == sampler.rank(candidates, len(history), count)
                assert ranked[0][0] == token_id
            assert row[token_id] > -np.inf or token_id in vocabulary.end_ids
            chosen += 1
        except (SamplingError, EngineError):
            pass
    assert chosen >= 800


def test_a_step_that_an_order_leaves_out_is_off_and_biases_act_anyway() -> None:
    params = SamplingParams(0.3, top_k=1, min_p=0.9, typical_p=0.1, logit_bias={1: -math.inf}, order=("top_p",))
    assert params.order == ("logit_bias", "top_p")
    assert params.active == ("logit_bias", "top_p")
    assert params == SamplingParams(
        1.0, top_k=0, min_p=0.0, logit_bias={1: -math.inf}, order=("logit_bias", "top_p"), seed=params.seed
    )
    assert not dataclasses.replace(params, temperature=0.0).greedy, "without the step nothing is as cold as that"


@pytest.mark.parametrize("multiplier", [5e-324, 1e-300, 1e-6, 100.0])
def test_dry_takes_a_bounded_amount_by_any_multiplier(multiplier: float) -> None:
    params = sampling(dry_multiplier=multiplier, dry_base=100.0, dry_penalty_last_n=-1)
    left = RowSampler(params).candidates(np.zeros(3), [1] * 5000).logits
    assert left[0] == left[2] == 0.0
    assert -1.000001e9 < left[1] < -1e-20


PIECES = [b"re", b"return", b"x", b"y", b"z", b"", b"xy", b"<end>"]
"""Of the tokens of a gap: the last but two adds nothing, and the last one ends the answer."""


@pytest.mark.parametrize(
    ("probs", "left"),
    [
        # 3 x 0.05 x 8 > 0.95: the gap is filled.
        ([0.9, 0.01, 0.01, 0.01, 0.01, 0.005, 0.005, 0.05], {7}),
        # "return" and "re" are one, the likelier of them; what has a fifth of all stays beside the end.
        ([0.1, 0.2, 0.1, 0.11, 0.3, 0.1, 0.08, 0.01], {1, 4, 7}),
        # So are "x" and "xy"; nothing else has a fifth.
        ([0.05, 0.05, 0.3, 0.15, 0.15, 0.1, 0.19, 0.01], {2, 7}),
        # Nothing has a fifth: nobody knows what comes, and the answer ends.
        ([0.1, 0.098, 0.1, 0.198, 0.198, 0.198, 0.098, 0.01], {7}),
    ],
)
def test_infill_ends_an_answer_or_keeps_likely_tokens(probs: list[float], left: set[int]) -> None:
    vocabulary = ScriptedVocabulary(PIECES, [7])
    row = np.log(probs)
    params = sampling(order=("infill",))
    candidates = RowSampler(params, vocabulary=vocabulary).candidates(row, [0])
    assert {*np.flatnonzero(probabilities(candidates, 8, greedy=False)).tolist()} == left
    for held in (
        RowSampler(params, vocabulary=vocabulary, late=LateTokens((7,), 5)),
        RowSampler(dataclasses.replace(params, logit_bias={7: -math.inf}), vocabulary=vocabulary),
        RowSampler(dataclasses.replace(params, allowed_token_ids=(*range(7),)), vocabulary=vocabulary),
        RowSampler(params),
    ):
        assert len(np.flatnonzero(probabilities(held.candidates(row, [0]), 8, greedy=False))) >= 7


def test_infill_ends_an_answer_though_no_end_is_left() -> None:
    row = np.log([0.16, 0.16, 0.16, 0.16, 0.16, 0.15, 0.04, 0.01])
    vocabulary = ScriptedVocabulary([*map(str.encode, "abcdefgh")], [7])
    assert RowSampler(sampling(top_k=6, order=("top_k", "infill")), vocabulary=vocabulary).emit(row, 1, [0]) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_without_the_token_that_infill_ends_with_proposes_nothing(temperature: float) -> None:
    params = sampling(temperature=temperature, order=("infill", "temperature"))
    verifier = RejectionVerifier(RowSampler(params, vocabulary=ScriptedVocabulary.of_size(90, [89])))
    with pytest.raises(SamplingError, match="none of the first 50 tokens may follow"):
        verifier.propose(np.zeros(50), 1, [0], 2)
    (proposal,) = verifier.propose(np.zeros(90), 1, [0], 2)
    assert proposal.token_id == 89


@given(
    size=st.sampled_from([1, 40, 1024, 1025, 4096, 4097, 16_383, 16_385, 50_000]),
    count=st.sampled_from([1, 2, 40, 700, 4096]),
    levels=st.sampled_from([1, 3, 50, 10**6]),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=60)
def test_the_largest_values_are_found_with_all_that_tie_at_the_border(
    size: int, count: int, levels: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(0, levels, size).astype(np.float32)
    if seed % 3 == 0:
        # Banned: one of ten is left, or of a row that stands for few tokens, one of a thousand.
        values[rng.random(size) < (0.9 if seed % 2 else 0.999)] = -np.inf
    count = min(count, size)
    threshold = np.sort(values)[size - count]
    assert processors.largest(values, count).tolist() == np.flatnonzero(values >= threshold).tolist()


def test_what_few_candidates_choose_is_what_processors_and_noise_do() -> None:
    """By plain numbers or not: the same token for every seed, near ties, at every border of truncation, and of bans.

    Many rows are of steps of a quarter, so that borders and scores tie, and of some each entry is off by a rounding,
    which a division or an exponential function may round away; then, as where rounding might decide, nothing is chosen
    by plain numbers.
    """
    rng = np.random.default_rng(8)
    decided = {"steps": 0, "smooth": 0, "off by a rounding": 0}
    for case in range(3000):
        size = int(rng.choice([2, 40, 128, 129, 700, 5000]))
        kind = ("steps", "smooth", "smooth", "off by a rounding")[case // 3 % 4]
        row = rng.normal(0.0, rng.choice([0.5, 2.0, 4.0]), size) + rng.choice([-20.0, 0.0, 30.0])
        row[rng.integers(0, size, 3)] += rng.exponential(4.0)
        if kind != "smooth":
            row = np.round(4.0 * row) / 4.0
        if kind == "off by a rounding":
            row *= 1.0 + rng.integers(0, 3, size) * 2.0**-23
        if case % 7 == 0:
            row[rng.random(size) < 0.7] = -np.inf
            row[0] = 1.0
        logits: FloatArray = row.astype(np.float64 if case % 5 == 0 else np.float32)
        logits.setflags(write=False)
        history = rng.integers(0, size, 30).tolist()
        params = SamplingParams(
            temperature=float(rng.choice([0.3, 0.8, 1.0, 1.5])),
            top_k=int(rng.choice([0, 1, 5, 40, 200])),
            top_p=float(rng.choice([0.5, 0.95, 1.0])),
            min_p=float(rng.choice([0.0, 0.05, 0.25, 1.0])),
            repeat_penalty=float(rng.choice([1.0, 1.0, 1.3])),
            dry_multiplier=float(rng.choice([0.0, 0.0, 0.8])),
            dry_allowed_length=0,
            logit_bias={int(rng.integers(size)): 2.0} if case % 4 == 0 else {},
            order=LLAMA_CPP_ORDER if case % 2 else TRANSFORMERS_ORDER,
            seed=case,
        )
        sampler = RowSampler(params)
        ((token_id, margin),) = sampler.ranked_with_margins(sampler.candidates(logits, history), case, 1)
        with pytest.MonkeyPatch.context() as patch:
            # What is left to processors counts for nothing here.
            patch.setattr(sampler, "candidates", lambda *_: Candidates(np.array([-1]), np.zeros(1), owned=True))
            found, lead = sampler.best(logits, case, history)
        if found == -1:
            continue
        decided[kind] += 1
        assert found == token_id
        assert lead == pytest.approx(margin, abs=1e-3 if logits.dtype == np.float32 else 1e-9)
        assert sampler.emit(logits, case, history) == token_id
    assert decided["smooth"] > 700
    assert min(decided.values()) > 200


@pytest.mark.parametrize(
    ("params", "least"),
    [(SamplingParams(0.8, top_p=0.1), 1e-9), (SamplingParams(1.5, top_k=1, order=TRANSFORMERS_ORDER), 1.5 + 2.0**-23)],
    ids=["exponential function", "division"],
)
def test_logits_that_rounding_makes_equal_are_equal(params: SamplingParams, least: float) -> None:
    """By top-p the one with the lowest id stays, and by top-k all that are as large as the least of the largest."""
    row = np.array([least, np.nextafter(np.float32(least), np.float32(2.0))], dtype=np.float32)
    assert row[0] < row[1]
    for seed in range(20):
        sampler = RowSampler(dataclasses.replace(params, seed=seed))
        assert sampler.emit(row, 0, ()) == sampler.rank(sampler.candidates(row, ()), 0, 1)[0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(0.8), SamplingParams(0.8, order=TRANSFORMERS_ORDER)])
@pytest.mark.parametrize("is_forbidden", [False, True])
def test_what_is_no_number_is_refused(params: SamplingParams, value: float, is_forbidden: bool) -> None:
    row = -np.arange(3 * HEAD_SIZE, dtype=np.float32)
    row[7] = value
    states = np.zeros((1, len(row)), dtype=np.int64)
    states[0, 7] = FORBIDDEN
    sampler = RowSampler(params, constraint=AutomatonConstraint(states) if is_forbidden else None)
    with pytest.raises(EngineError, match="largest logit"):
        sampler.emit(row, 0, ())


def test_a_row_without_any_candidate_is_refused() -> None:
    with pytest.raises(EngineError, match="largest logit is -inf"):
        RowSampler(SamplingParams(0.8)).emit(np.full(3 * HEAD_SIZE, -np.inf, dtype=np.float32), 0, ())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_p_keeps_what_a_stable_sort_would(dtype: type[np.float64]) -> None:
    """However many tokens it keeps, and of those that tie at the border the lowest ids."""
    rng = np.random.default_rng(6)
    (cut,) = build_processors(sampling(top_p=0.9))
    for size, scale in ((30, 1.0), (3000, 0.1), (3000, 3.0), (20_000, 0.05), (20_000, 2.0)):
        for steps in (0.5, 1e-9):
            row: FloatArray = (np.round(rng.normal(0.0, scale, size) / steps) * steps).astype(dtype)
            weights = np.exp(row - row.max())
            order = np.argsort(-weights, kind="stable")
            mass = np.cumsum(weights[order], dtype=np.float64)
            count = int(np.searchsorted(mass, 0.9 * float(weights.sum(dtype=np.float64)))) + 1
            kept = cut(Candidates(None, row, owned=False), ()).ids
            assert kept is not None
            assert kept.tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize(
    "values", [{"top_n_sigma": 1.0}, {"typical_p": 0.9}, {"xtc_probability": 0.5}, {"dynatemp_range": 0.5}]
)
def test_few_candidates_leave_filters_that_they_do_not_know_to_the_processors(values: dict[str, Any]) -> None:
    params = sampling(temperature=0.8, top_k=40)
    assert FewCandidates.suits(params)
    assert not FewCandidates.suits(dataclasses.replace(params, **values))
