"""Thousands of requests whose consumers drop, cancel, interrupt and fail: no other answer is touched, and nothing left.

The scripted engine makes it quick; ``python -m benchmarks soak`` does the same on a real model.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
from benchmarks.soak import OFF_THE_MAIN_THREAD, SEQUENCES, Expected, misuse, misuse_in_threads

import paceline
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model
from tests.tiers import some_long

VOCABULARY = ScriptedVocabulary.of_size(30)
TARGET = random_model(30, seed=1, order=2)
DRAFT = blended_model(TARGET, random_model(30, seed=2, order=2), 0.3)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 9, 6, 7, 8]]


def scripted_model(max_sequences: int) -> tuple[paceline.Model, ScriptedEngine, ScriptedEngine]:
    target = ScriptedEngine(TARGET, VOCABULARY, max_sequences=max_sequences)
    draft = ScriptedEngine(DRAFT, VOCABULARY, max_sequences=max_sequences)
    drafters: list[Drafter] = [DraftModelDrafter(draft, target_vocab_size=30), SuffixDrafter()]
    return paceline.Model(target, drafters, paceline.FixedPolicy(3, siblings=2)), target, draft


@pytest.mark.parametrize("seed", some_long(range(4), quick=[0]))
def test_misuse_touches_no_other_answer_and_leaves_nothing_behind(seed: int) -> None:
    model, target, draft = scripted_model(SEQUENCES)
    with model:
        expected = [Expected.of(model, prompt, max_tokens=12) for prompt in PROMPTS]
        counts = misuse_in_threads(model, expected, requests=200, seed=10 * seed, threads=4)
        assert counts.total() == 800
        assert min(counts.values()) > 20, counts
        gc.collect()
        model.generate([1], max_tokens=1)  # what was dropped last is cancelled before
        assert not target._sequences
        assert not draft._sequences
        assert model.worker.call(lambda: not model.loop.active)


def test_misuse_from_one_thread_that_is_not_the_main_one() -> None:
    model, target, _ = scripted_model(SEQUENCES)
    with model, ThreadPoolExecutor(1) as pool:
        expected = [Expected.of(model, prompt, max_tokens=12) for prompt in PROMPTS]
        counts = pool.submit(misuse, model, expected, requests=200, seed=1, consumers=OFF_THE_MAIN_THREAD).result()
        assert counts.total() == 200
        gc.collect()
        model.generate([1], max_tokens=1)
        assert not target._sequences


def test_an_error_that_keeps_a_dropped_stream_in_a_cycle_fails_no_other_call() -> None:
    """As reported: the consumer keeps the error, that its traceback, that the frame, and that the stream."""
    model, target, _ = scripted_model(SEQUENCES)
    threshold = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        with model:
            expected = model.generate(PROMPTS[0], max_tokens=12, seed=3).token_ids
            for _ in range(150):
                consume_badly(model)
                assert model.generate(PROMPTS[0], max_tokens=12, seed=3).token_ids == expected
            gc.collect()
            model.generate([1], max_tokens=1)
            assert not target._sequences
    finally:
        gc.set_threshold(*threshold)


def consume_badly(model: paceline.Model) -> None:
    try:
        for _ in model.stream(PROMPTS[1], max_tokens=50, seed=4):
            raise ValueError("the consumer's own")
    except ValueError as error:
        kept = error  # noqa: F841 - a cycle: error, traceback, this frame, error
