"""With a draft of another vocabulary too, coupled speculative decoding is plain decoding, token for token.

The scenes are those of :mod:`tests.runtime.test_lossless`. Both vocabularies are random segmentations of bytes: tokens
of several characters, of parts of characters, several ids of the same bytes, bytes that one of them has no token for.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings

from paceline.drafters.following import FollowingDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.scripted import LogitFunction, ScriptedVocabulary
from paceline.vocabularies.mapping import TokenMapping
from tests.conftest import SUMMARY_LINES
from tests.drafters.segmentations import random_pieces, translating_model
from tests.helpers import frozen
from tests.runtime.scenes import Scene, Setup, Tally, check_scene, draft_engine, draft_pool, scenes
from tests.tiers import by_tier

NUM_SCENES = by_tier(420, quick=40)
MIN_REQUESTS = by_tier(5000, quick=200)
MIN_PARTIAL = by_tier(1000, quick=20)
CASES = ("aligned", "split", "merged", "healed", "none", "unreadable")
MAX_TOKENS = 250
"""Ids of a vocabulary: the scripted tokenizer tries one after the other."""


class Cases:
    """What became of the drafts of all scenes."""

    def __init__(self) -> None:
        self.scenes = Tally()
        self.levels: Counter[str] = Counter()
        self.drafters: list[TranslatedDrafter] = []

    def collect(self) -> None:
        for drafter in self.drafters:
            self.levels += drafter.cases
        self.drafters.clear()


@pytest.fixture(scope="module")
def cases() -> Cases:
    return Cases()


@settings(max_examples=NUM_SCENES)
@given(scene=scenes())
def test_translated_is_plain(scene: Scene, cases: Cases) -> None:
    rng = random.Random(scene.seed)
    setups = tuple(
        dataclasses.replace(setup, drafters=(*(n for n in setup.drafters if n != "draft"), "draft")[-2:])
        for setup in scene.setups
    )
    # Long drafts, of which several tokens become one, need room.
    calm = scene.calm or rng.random() < 0.5
    scene = dataclasses.replace(scene, calm=calm, vocab_size=min(scene.vocab_size, MAX_TOKENS), setups=setups)

    def make_draft(
        scene: Scene, setup: Setup, rng: random.Random, target: LogitFunction, vocabulary: ScriptedVocabulary
    ) -> FollowingDrafter[Any]:
        pieces = random_pieces(rng, rng.choice((6, 12, 30)))
        end_ids = rng.sample(range(len(pieces)), rng.randint(0, 2))
        draft = ScriptedVocabulary(pieces, end_ids)
        model = translating_model(rng, target, vocabulary, draft, setup.draft_distance, scene.spread)
        engine = draft_engine(scene, rng, frozen(model), draft)
        drafter = TranslatedDrafter(engine, TokenMapping(vocabulary, draft), pool=draft_pool(rng, engine))
        cases.drafters.append(drafter)
        return drafter

    check_scene(scene, cases.scenes, pieces=random_pieces(rng, rng.choice((6, 12, 30))), draft_model=make_draft)
    cases.collect()


def test_every_case_came_up(cases: Cases, request: pytest.FixtureRequest) -> None:
    if not cases.scenes.finished:
        pytest.skip("the property test did not run")
    levels = cases.levels
    line = (
        f"translated: {cases.scenes.finished} requests equal to plain decoding, {cases.scenes.partial} of them with "
        f"partial rejection, {cases.scenes.preemptions} preempted, ended by {dict(cases.scenes.reasons)}; levels "
        f"{dict(sorted(levels.items()))}; drafts did not read {cases.scenes.reused_tokens} tokens again"
    )
    request.config.stash[SUMMARY_LINES].append(line)
    assert cases.scenes.finished >= MIN_REQUESTS, line
    assert cases.scenes.partial >= MIN_PARTIAL, line
    # Few scenes may have none of the last two, which have tests of their own.
    assert set(CASES[: by_tier(6, quick=4)]) <= set(levels) <= set(CASES), line
    assert cases.scenes.preemptions > 0, line
