"""A least length, further end tokens and tokens that are allowed are the same with drafts and without.

All three are functions of a row and of what stands before it, so whatever was drafted, the text is that of plain
decoding, and under rejection its distribution.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.errors import InputError, SamplingError
from paceline.core.params import LLAMA_CPP_ORDER, TRANSFORMERS_ORDER, SamplingParams, StopRules
from paceline.core.processors import LateTokens
from paceline.core.sampling import FewCandidates, RowSampler
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model, table_model
from paceline.planning.policies.fixed import FixedPolicy
from tests.helpers import ForcedDrafter, ScribblingDrafter, decode, frozen, softmax
from tests.proofs import Tally, chi_square
from tests.tiers import by_tier

NUM_SCENES = by_tier(150, quick=40)
END = 4


def test_equal_to_plain_decoding() -> None:
    seen = Tally(scenes=NUM_SCENES)
    for seed in range(NUM_SCENES):
        rng = random.Random(seed)
        size = rng.choice((6, 12, 40))
        model = frozen(random_model(size, seed=seed, order=2, spread=2.0))
        vocabulary = ScriptedVocabulary.of_size(size, end_ids=[END])
        allowed = sorted({END, *rng.sample(range(size), rng.randint(2, size - 2))})
        params = SamplingParams(
            rng.choice((0.0, 0.7, 1.3)),
            top_k=rng.choice((0, 5)),
            min_p=rng.choice((0.0, 0.05)),
            repeat_penalty=rng.choice((1.0, 1.3)),
            logit_bias=rng.choice(({}, {END: 2.0})),
            seed=seed,
            order=rng.choice((LLAMA_CPP_ORDER, TRANSFORMERS_ORDER)),
            allowed_token_ids=rng.choice((None, tuple(allowed))),
        )
        most = rng.randint(1, 24)
        rules = StopRules(
            most,
            stop=rng.choice(((), ("#", "$%"))),
            min_tokens=rng.randint(0, most),
            stop_token_ids=rng.choice(((), (5,))),
            include_stop=rng.random() < 0.5,
        )
        prompt = [rng.randrange(size) for _ in range(rng.randint(1, 6))]
        plain = decode(ScriptedEngine(model, vocabulary), prompt, params, rules)
        draft = blended_model(model, random_model(size, seed=1), 0.3)
        drafters: list[Any] = [
            DraftModelDrafter(ScriptedEngine(frozen(draft), ScriptedVocabulary.of_size(size)), target_vocab_size=size),
            ScribblingDrafter(
                rng, size, {tuple(prompt): plain.token_ids}, branching=True, luck=rng.choice((0.5, 0.9)), most_nodes=9
            ),
            SuffixDrafter(1),
        ]
        policy = FixedPolicy(rng.randint(1, 5), siblings=rng.randint(1, 3))
        drafted = decode(ScriptedEngine(model, vocabulary), prompt, params, rules, drafters=drafters, policy=policy)
        assert [*drafted.token_ids] == [*plain.token_ids]
        assert drafted.text == plain.text
        assert drafted.finish_reason == plain.finish_reason
        ends = [i for i, one in enumerate(plain.token_ids) if one in (END, *rules.stop_token_ids)]
        assert plain.finish_reason == "length" or len(plain.token_ids) > rules.min_tokens
        assert not ends or ends == [len(plain.token_ids) - 1], "a token that ends an answer is its last one"
        assert params.allowed_token_ids is None or set(plain.token_ids) <= set(allowed)
        seen["equal to plain decoding"] += 1
        seen[str(plain.finish_reason)] += 1
        seen["drafted"] += sum(source != "target" for source in drafted.sources)
        seen["least"] += rules.min_tokens > 0 and plain.finish_reason in ("end", "stop")
    least = NUM_SCENES // 20 + 1
    seen.report("lossless, with least lengths", dict.fromkeys(("end", "stop", "length", "drafted", "least"), least))


def test_under_rejection_the_distribution_is_that_of_what_is_left() -> None:
    """By enumeration of all texts of two tokens, and chi-square at 1e-6, where drafts propose what is left out."""
    size, end = 4, 3
    logits = np.log(np.array([[0.1, 0.2, 0.3, 0.4], [0.3, 0.1, 0.2, 0.4], [0.25, 0.25, 0.1, 0.4], [0.25] * 4]))
    params = SamplingParams(1.0, 0, 1.0, 0.0, allowed_token_ids=(0, 2, end))
    rules = StopRules(2, min_tokens=1)

    def probs_of(row: Float64Array, allowed: Sequence[int]) -> Float64Array:
        kept = np.full(size, -math.inf)
        kept[list(allowed)] = row[list(allowed)]
        return softmax(kept)

    expected: dict[tuple[int, ...], float] = {}
    first = probs_of(logits[1], (0, 2))
    for one, two in itertools.product((0, 2), (0, 2, end)):
        expected[one, two] = first[one] * probs_of(logits[one], (0, 2, end))[two]
    engine = ScriptedEngine(table_model(logits), ScriptedVocabulary.of_size(size, end_ids=[end]))
    drafter = ForcedDrafter(lambda request: [[1, end], [end], [2, 0]])
    counts: Counter[tuple[int, ...]] = Counter()
    num = 3000
    for seed in range(num):
        seeded = SamplingParams(1.0, 0, 1.0, 0.0, allowed_token_ids=params.allowed_token_ids, seed=seed)
        answer = decode(
            engine, [1], seeded, rules, drafters=[drafter], policy=FixedPolicy(2, siblings=3), verifier="rejection"
        )
        counts[tuple(answer.token_ids)] += 1
    assert set(counts) <= set(expected)
    assert chi_square([counts[text] for text in expected], [num * p for p in expected.values()]) > 1e-6


@pytest.mark.parametrize("order", [LLAMA_CPP_ORDER, TRANSFORMERS_ORDER])
@pytest.mark.parametrize("size", [50, 3000])
def test_few_candidates_choose_as_the_processors_do(order: tuple[str, ...], size: int) -> None:
    rng = np.random.default_rng(size)
    few = 0
    for seed in range(150):
        allowed = tuple(np.flatnonzero(rng.random(size) < 0.5).tolist()) if seed % 2 else None
        params = SamplingParams(0.9, 20, 0.95, 0.02, seed=seed, order=order, allowed_token_ids=allowed)
        assert FewCandidates.suits(params)
        row = rng.normal(0.0, 3.0, size).astype(np.float32)
        late = LateTokens((int(row.argmax()), 7), 10)
        sampler, slow = RowSampler(params, 4, late=late), RowSampler(params, 4, late=late)
        slow._few = None
        for history in ([1] * 9, [1] * 10):
            chosen = sampler.emit(row, len(history), history)
            assert chosen == slow.emit(row, len(history), history)
            assert allowed is None or chosen in allowed
            assert len(history) == 10 or chosen not in late.token_ids
            few += chosen == row.argmax()
    assert few > 10, "the largest is often chosen once it may be"


class TestByHand:
    def test_an_end_comes_once_it_may(self) -> None:
        table = np.zeros((6, 6))
        table[:, END] = 9.0
        table[:, 2] = 1.0
        engine = ScriptedEngine(table_model(table), ScriptedVocabulary.of_size(6, end_ids=[END]))
        for least in range(4):
            answer = decode(engine, [0], SamplingParams(0.0), StopRules(9, min_tokens=least))
            assert [*answer.token_ids] == [2] * least + [END]

    def test_what_has_nothing_else_follow_ends_all_the_same(self) -> None:
        table = np.full((6, 6), -math.inf)
        table[:, END] = 0.0
        engine = ScriptedEngine(table_model(table), ScriptedVocabulary.of_size(6, end_ids=[END]))
        answer = decode(engine, [0], SamplingParams(0.8), StopRules(9, min_tokens=5))
        assert ([*answer.token_ids], answer.finish_reason) == ([END], "end")

    @pytest.mark.parametrize(
        ("least", "include", "text"), [(0, False, "!"), (0, True, '!"#'), (3, False, '!"#!'), (2, True, '!"#')]
    )
    def test_a_stop_text_counts_once_it_may(self, least: int, include: bool, text: str) -> None:
        table = np.roll(np.eye(3), 1, axis=1)
        engine = ScriptedEngine(table_model(table), ScriptedVocabulary.of_size(3))
        rules = StopRules(9, stop=('"#',), min_tokens=least, include_stop=include)
        assert decode(engine, [2], SamplingParams(0.0), rules).text == text

    @pytest.mark.parametrize("include", [False, True])
    def test_a_token_that_is_to_end_it(self, include: bool) -> None:
        table = np.roll(np.eye(4), 1, axis=1)
        engine = ScriptedEngine(table_model(table), ScriptedVocabulary.of_size(4))
        rules = StopRules(9, stop_token_ids=(2,), include_stop=include, ignore_end=True)
        answer = decode(engine, [3], SamplingParams(0.0), rules)
        assert ([*answer.token_ids], answer.finish_reason) == ([0, 1, 2], "end")
        assert answer.text == ('!"#' if include else '!"')

    def test_what_cannot_be(self) -> None:
        with pytest.raises(InputError, match=r"at least 5 tokens of at most 4: lower `min_tokens`"):
            StopRules(4, min_tokens=5)
        with pytest.raises(SamplingError, match="allowed_token_ids is empty"):
            SamplingParams(allowed_token_ids=())
        with pytest.raises(SamplingError, match="a token id in allowed_token_ids is"):
            SamplingParams(allowed_token_ids=("a",))  # type: ignore[arg-type]
        engine = ScriptedEngine(table_model(np.eye(4)), ScriptedVocabulary.of_size(4))
        with pytest.raises(InputError, match="token id 9 of allowed_token_ids is not in the vocabulary of 4"):
            decode(engine, [0], SamplingParams(allowed_token_ids=(9,)), StopRules(1))
        with pytest.raises(InputError, match="token id 9 of stop_token_ids is not in the vocabulary of 4"):
            decode(engine, [0], SamplingParams(), StopRules(1, stop_token_ids=(9,)))
        with pytest.raises(SamplingError, match="no token of `allowed_token_ids` is possible here"):
            RowSampler(SamplingParams(allowed_token_ids=(1,))).emit(np.array([0.0, -math.inf]), 0, [])
