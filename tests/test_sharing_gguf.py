"""Requests that share a real model say what each says alone: beginnings shared, a cache too small, eight threads.

Weights and cache are in F32, where passes of other widths and other places in the cache turn no near-tie.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline
from paceline.conversion.quantize import quantize_gguf
from paceline.drafters.registry import build_drafters
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.options import ModelOptions
from paceline.engines.sequence_pool import SequencePool
from paceline.models.embedded import embedded_draft, embedded_target
from tests.runtime.squeezing import Squeeze, at_random
from tests.tiers import by_tier

STEMS = ("INFO  server started on port 80\n" * 4, "def add(a, b):\n    return a + b\n\n" * 4)
NUM_REQUESTS = by_tier(24, quick=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[paceline.Model]:
    path = tmp_path_factory.mktemp("f32") / "target.gguf"
    quantize_gguf(embedded_target(), path, "F32")
    # Eight sequences of 256 tokens would take 2,048 cells.
    target = LlamaCppEngine(
        ModelOptions(
            path,
            context_length=256,
            max_sequences=8,
            threads=1,
            cells=512,
            flash_attention=False,
            cache_type_k="f32",
            cache_type_v="f32",
        )
    )
    draft = LlamaCppEngine(ModelOptions(embedded_draft(), context_length=256, max_sequences=8, branches=0, threads=1))
    drafters = build_drafters(["suffix", "draft"], target=target, draft=draft, draft_pool=SequencePool(draft))
    policy = paceline.FixedPolicy(3, siblings=2)
    with paceline.Model(target, drafters, policy, pool=SequencePool(target, least_reuse=8)) as model:
        yield model


def answer(model: paceline.Model, number: int, *, cache_prompt: bool) -> paceline.Generation:
    prompt = STEMS[number % 2] + f"{number} "
    options = paceline.GenerateOptions(
        max_tokens=20 + 5 * (number % 5),
        temperature=0.0 if number % 4 == 0 else 0.8,
        seed=number,
        speculate=number % 3 != 0,
        ignore_end=True,
        cache_prompt=cache_prompt,
    )
    return model.generate(prompt, **options)


def tokens(answers: Sequence[paceline.Generation]) -> list[list[int]]:
    return [list(answer.token_ids) for answer in answers]


def test_requests_from_eight_threads_say_what_each_says_alone(model: paceline.Model) -> None:
    alone = [answer(model, number, cache_prompt=False) for number in range(NUM_REQUESTS)]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda number: answer(model, number, cache_prompt=True), range(NUM_REQUESTS)))
    assert tokens(together) == tokens(alone)
    assert sum(each.stats.cached_tokens for each in together) > 20 * NUM_REQUESTS
    # And once more, with all of them in memory.
    warm = [answer(model, number, cache_prompt=True) for number in range(NUM_REQUESTS)]
    assert tokens(warm) == tokens(alone)
    assert all(each.stats.cached_tokens > 0 for each in warm)


def test_requests_that_lose_their_place_say_the_same(model: paceline.Model) -> None:
    """Six answers of up to 200 tokens do not fit into 512 cells."""
    options = paceline.GenerateOptions(max_tokens=200, temperature=0.8, ignore_end=True, cache_prompt=False)
    alone, streams = [], []
    for seed in range(6):
        options["seed"] = seed
        alone.append(model.generate("Once", **options))
    for seed in range(6):
        options["seed"] = seed
        streams.append(model.stream("Once", **options))
    together = [stream.result() for stream in streams]
    assert tokens(together) == tokens(alone)
    assert sum(each.stats.preemptions for each in together) >= 3


def test_requests_whose_cache_is_squeezed_say_the_same(model: paceline.Model) -> None:
    """Of eight answers each but the oldest may lose its place in any round, while its prompt is read too."""
    asked = [
        (
            STEMS[number % 2] + f"{number} ",
            paceline.GenerateOptions(max_tokens=40, temperature=0.8, seed=number, ignore_end=True, logprobs=2),
        )
        for number in range(8)
    ]
    alone = [model.generate(prompt, **options) for prompt, options in asked]
    squeeze = Squeeze(at_random(random.Random(5)))
    model.worker.call(lambda: squeeze.put_on(model.loop, model.target))
    try:
        streams = [model.stream(prompt, **options) for prompt, options in asked]
        together = [stream.result() for stream in streams]
    finally:
        model.worker.call(squeeze.take_off)
    assert tokens(together) == tokens(alone)
    assert [each.text for each in together] == [each.text for each in alone]
    for one, other in zip(together, alone, strict=True):
        assert [each.logprob for each in one.logprobs] == pytest.approx(
            [each.logprob for each in other.logprobs], abs=1e-3
        )
    assert squeeze.num_requests >= 6
    assert all(squeeze.cases[case] for case in ("with drafts", "before it went on", "three times and more"))
