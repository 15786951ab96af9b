"""Log-probabilities of prompts are those of teacher forcing, however a prompt is read.

The scripted engine is exact, so each value has to be equal to the last bit.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.logprobs import LogprobParams, TokenLogprob, compute_prompt_logprob
from paceline.core.params import CacheParams, SamplingParams, StopRules
from paceline.core.request import Request
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import LogitFunction, ScriptedEngine, ScriptedVocabulary, random_model
from paceline.engines.sequence_pool import SequencePool
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime import postprocess
from paceline.runtime.loop import DecodingLoop
from tests.helpers import decode, drain, frozen
from tests.proofs import Tally
from tests.tiers import by_tier

NUM_SCENES = by_tier(100, quick=20)
SIZE = 12
MODEL = frozen(random_model(SIZE, seed=3, order=2, spread=2.0))
GREEDY = SamplingParams(0.0)


def expected_of(model: LogitFunction, prompt: Sequence[int], asked: LogprobParams) -> list[TokenLogprob]:
    """Return what the model says of each token, fed one after the other."""
    if asked.prompt_logprobs is None:
        return []
    return [compute_prompt_logprob(prompt[i], model(prompt[:i]), asked) for i in range(1, len(prompt))]


def loop_of(engine: ScriptedEngine, *drafters: Any, **limits: Any) -> DecodingLoop:
    policy = FixedPolicy(3) if drafters else NO_SPECULATION
    pool = SequencePool(engine, least_reuse=2)
    return DecodingLoop(engine, drafters, policy, clock=engine.clock, pool=pool, **limits)


def run(loop: DecodingLoop) -> None:
    drain(loop)


def test_equal_to_teacher_forcing_in_any_company() -> None:
    """Chunks of any size, beginnings that are shared, places that are lost, and passes that are cut short."""
    seen = Tally()
    for seed in range(NUM_SCENES):
        rng = random.Random(seed)
        model = frozen(random_model(SIZE, seed=seed, order=2))
        common = [rng.randrange(SIZE) for _ in range(rng.randint(0, 12))]
        prompts = [common + [rng.randrange(SIZE) for _ in range(rng.randint(1, 30))] for _ in range(5)]
        prompts += rng.choices(prompts, k=2)
        wanted: dict[int, LogprobParams] = {}
        max_rows = rng.choice((2, 7, 64))
        longest = max(map(len, prompts)) + 8
        cells = rng.choice((longest, longest + 20, None))
        vocabulary = ScriptedVocabulary.of_size(SIZE)
        engine = ScriptedEngine(model, vocabulary, max_rows=max_rows, max_outputs=min(max_rows, 8), cells=cells)
        loop = loop_of(engine, SuffixDrafter(1), growth=0, max_running=rng.choice((3, None)))
        _trip(engine, rng)
        requests: list[tuple[Request, Sequence[int], LogprobParams]] = []
        for prompt in prompts:
            asked = LogprobParams(rng.choice((None, 1)), prompt_logprobs=rng.choice((None, 0, 2, 50)))
            asked = wanted.setdefault(id(prompt), asked)
            params, rules = SamplingParams(1.0, seed=seed), StopRules(rng.randint(1, 8))
            cache = CacheParams(cache_prompt=rng.random() < 0.8, client=rng.choice("ab"))
            requests.append((loop.add(prompt, params, rules, cache=cache, logprobs=asked), prompt, asked))
            for _ in range(rng.randint(0, 3)):
                seen["rounds cut short"] += not _step(loop)
        while loop.active:
            seen["rounds cut short"] += not _step(loop)
            for one, _, _ in requests:
                if one.sequence >= 0 and one.prompt_logprobs and one.lists_prompt and rng.random() < 0.1:
                    loop._scheduler.rollback_round()
                    loop._scheduler.preempt(one)
                    seen["preempted while listed"] += 1
        for one, prompt_ids, asked in requests:
            assert one.prompt_logprobs == expected_of(model, prompt_ids, asked)
            plain = decode(ScriptedEngine(model, vocabulary), prompt_ids, one.params, one.rules)
            assert one.output_ids == [*plain.token_ids], "the text is what it is without them"
            seen["listed"] += len(one.prompt_logprobs)
            seen["reused"] += one.stats.cached_tokens > 0
        lists = [one.prompt_logprobs for one, _, _ in requests if one.prompt_logprobs]
        seen["shared"] += len(lists) - len({*map(id, lists)})
    hard = ("listed", "preempted while listed", "reused", "shared", "rounds cut short")
    seen.report("log-probabilities of prompts", dict.fromkeys(hard, NUM_SCENES // 4))


def _trip(engine: ScriptedEngine, rng: random.Random) -> None:
    """Have some passes and some commits of an engine fail."""
    for name in ("forward", "commit"):
        setattr(engine, name, functools.partial(_tripped, getattr(engine, name), rng))


def _tripped(call: Callable[..., Any], rng: random.Random, *arguments: Any) -> Any:
    if rng.random() < 0.04:
        raise RuntimeError("once")
    return call(*arguments)


def _step(loop: DecodingLoop) -> bool:
    try:
        loop.step()
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 64])
def test_every_size_of_chunk(max_rows: int) -> None:
    prompt, asked = [i * i % SIZE for i in range(11)], LogprobParams(prompt_logprobs=3)
    loop = loop_of(ScriptedEngine(MODEL, ScriptedVocabulary.of_size(SIZE), max_rows=max_rows))
    request = loop.add(prompt, GREEDY, StopRules(2), logprobs=asked)
    run(loop)
    assert request.prompt_logprobs == expected_of(MODEL, prompt, asked)


def test_a_beginning_that_is_at_hand_is_read_anew_and_kept_for_others() -> None:
    prompt, asked = [1, 5, 2, 7, 3, 1, 4], LogprobParams(prompt_logprobs=1)
    loop = loop_of(ScriptedEngine(MODEL, ScriptedVocabulary.of_size(SIZE)))
    plain = [LogprobParams(), asked, LogprobParams()]
    requests = []
    for each in plain:
        requests.append(loop.add(prompt, GREEDY, StopRules(2), logprobs=each))
        run(loop)
    assert [request.stats.cached_tokens for request in requests] == [0, 0, len(prompt) - 1]
    assert [request.stats.prompt_tokens for request in requests] == [len(prompt), len(prompt), 1]
    assert requests[1].prompt_logprobs == expected_of(MODEL, prompt, asked)
    assert requests[0].output_ids == requests[1].output_ids == requests[2].output_ids


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_of_several_answers_to_a_prompt_the_first_lists_it(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, asked = [i * i % SIZE for i in range(20)], LogprobParams(prompt_logprobs=2)
    listed: list[int] = []

    def counted(token_id: int, *arguments: Any) -> TokenLogprob:
        listed.append(token_id)
        return compute_prompt_logprob(token_id, *arguments)

    monkeypatch.setattr(postprocess, "compute_prompt_logprob", counted)
    loop = loop_of(ScriptedEngine(MODEL, ScriptedVocabulary.of_size(SIZE), max_rows=8))
    rules = StopRules(num_tokens)
    requests = [loop.add(prompt, SamplingParams(1.0, choice=i), rules, logprobs=asked) for i in range(4)]
    run(loop)
    assert len(listed) == len(prompt) - 1
    assert all(one.prompt_logprobs == expected_of(MODEL, prompt, asked) for one in requests)
    assert [one.stats.cached_tokens for one in requests] == [0, *[len(prompt) - 1] * 3]
    # Whoever shares nothing, or wants others, lists it again.
    for other, cache in (
        (asked, CacheParams(namespace="other")),
        (asked, CacheParams(cache_prompt=False)),
        (LogprobParams(prompt_logprobs=0), CacheParams()),
    ):
        listed.clear()
        pair = [
            loop.add(prompt, GREEDY, rules, logprobs=asked),
            loop.add(prompt, GREEDY, rules, cache=cache, logprobs=other),
        ]
        run(loop)
        assert len(listed) == 2 * (len(prompt) - 1)
        assert [one.prompt_logprobs for one in pair] == [expected_of(MODEL, prompt, each) for each in (asked, other)]


def test_beside_answers_few_rows_are_listed_at_a_time() -> None:
    engine = ScriptedEngine(MODEL, ScriptedVocabulary.of_size(SIZE))
    loop = loop_of(engine, prompt_rounds=float("inf"))
    loop.add([1], GREEDY, StopRules(50))
    loop.step()
    asking = loop.add([i % SIZE for i in range(100)], GREEDY, StopRules(1), logprobs=LogprobParams(prompt_logprobs=0))
    listed = []
    while not asking.num_output:
        loop.step()
        listed.append(len(asking.prompt_logprobs))
    assert listed == [32, 64, 96, 99]


def test_a_prompt_of_one_token_has_none() -> None:
    loop = loop_of(ScriptedEngine(MODEL, ScriptedVocabulary.of_size(SIZE)))
    request = loop.add([1], GREEDY, StopRules(2), logprobs=LogprobParams(prompt_logprobs=5))
    run(loop)
    assert (request.prompt_logprobs, request.num_output) == ([], 2)


def test_rows_that_are_no_numbers_end_the_request_and_no_other() -> None:
    def broken(tokens: Sequence[int]) -> Float64Array:
        return np.full(SIZE, np.nan) if tuple(tokens) == (1, 2) else MODEL(tokens)

    loop = loop_of(ScriptedEngine(broken, ScriptedVocabulary.of_size(SIZE)))
    asking = loop.add([1, 2, 3, 4], GREEDY, StopRules(2), logprobs=LogprobParams(prompt_logprobs=0))
    other = loop.add([1, 2, 3, 4], GREEDY, StopRules(2))
    run(loop)
    assert (asking.finish_reason, other.finish_reason) == ("error", "length")
    assert "largest logit is nan" in str(asking.error)


def test_nothing_is_listed_for_those_who_do_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(postprocess, "compute_prompt_logprob")
    engine = ScriptedEngine(MODEL, ScriptedVocabulary.of_size(SIZE), max_outputs=1)
    loop = loop_of(engine)
    request = loop.add([1, 2, 3], GREEDY, StopRules(3), logprobs=LogprobParams(2))
    run(loop)
    assert request.prompt_logprobs == []
