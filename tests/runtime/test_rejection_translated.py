"""Rejection sampling reproduces the target's distribution with a draft of another vocabulary too, by enumeration.

The target's tokens are ``a``, ``b`` and ``ab``. A draft's token is one of them, several, or part of one, so the drafts
of a round are split, merged and healed.
"""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.core.params import SamplingParams
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.scripted import ScriptedVocabulary, table_model
from paceline.planning.policies.fixed import FixedPolicy
from tests.runtime.enumeration import (
    EXACT,
    TARGET_3,
    bias,
    table,
    text_distribution,
    total_variation,
    translated_of,
)
from tests.tiers import some_long

TARGET = ScriptedVocabulary([b"a", b"b", b"ab"])
DRAFT_PIECES = (b"a", b"b", b"ba", b"aba", b"abb")


@pytest.mark.parametrize(
    ("depth", "siblings", "trees"),
    some_long([(1, 1, True), (2, 1, True), (2, 2, True), (3, 2, True), (3, 2, False)], quick=[(2, 2, True)]),
)
def test_every_vocabulary_is_exact(depth: int, siblings: int, trees: bool) -> None:
    cases: Counter[str] = Counter()
    for seed in range(3):
        drafters: list[TranslatedDrafter] = []

        def make_drafters(seed: int = seed, drafters: list[TranslatedDrafter] = drafters) -> list[TranslatedDrafter]:
            drafters.append(translated_of(table(5, 20 + seed), TARGET, DRAFT_PIECES))
            return drafters[-1:]

        assert (
            bias(
                make_drafters,
                FixedPolicy(depth, siblings=siblings),
                prompt=(1, 0),
                num_tokens=4,
                vocabulary=TARGET,
                trees=trees,
            )
            < EXACT
        )
        for drafter in drafters:
            cases += drafter.cases
    assert cases["healed"], cases
    assert (cases["split"] > 0, cases["merged"] > 0) == (depth > 1, depth > 1), cases


def test_processors_are_exact() -> None:
    """Penalties make rows depend on drafted ancestors, which are the target's tokens."""
    params = SamplingParams(1.5, top_k=0, top_p=0.8, min_p=0.1, repeat_penalty=1.4, frequency_penalty=0.3)
    model = table_model(TARGET_3)
    plain = text_distribution(model, 3, params=params, vocabulary=TARGET)
    spoken = text_distribution(
        model,
        3,
        lambda: [translated_of(table(5, 21), TARGET, DRAFT_PIECES)],
        FixedPolicy(2, siblings=2),
        params=params,
        vocabulary=TARGET,
    )
    assert total_variation(spoken, plain) < EXACT


@pytest.mark.parametrize("max_rows", [1, 2, 3])
def test_trees_larger_than_a_pass_are_exact(max_rows: int) -> None:
    """What is left of a tree is judged in the next round, in which nothing is drafted."""
    assert (
        bias(
            lambda: [translated_of(table(5, 22), TARGET, DRAFT_PIECES, max_rows=2)],
            FixedPolicy(3, siblings=2),
            num_tokens=3,
            vocabulary=TARGET,
            max_rows=max_rows,
        )
        < EXACT
    )
