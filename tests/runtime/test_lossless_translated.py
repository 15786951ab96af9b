"""With a draft of another vocabulary too, coupled speculative decoding is plain decoding, token for token.

The scenes are those of :mod:`tests.runtime.test_lossless`. Both vocabularies are random segmentations of bytes: tokens
of several characters, of parts of characters, several ids of the same bytes, bytes that one of them has no token for.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

from paceline.drafters.following import FollowingDrafter
from paceline.drafters.translated import TranslatedDrafter
from paceline.engines.scripted import LogitFunction, ScriptedVocabulary
from paceline.vocabularies.mapping import TokenMapping
from tests.drafters.segmentations import random_pieces, translating_model
from tests.helpers import frozen
from tests.proofs import Tally
from tests.runtime.scenes import PARTIAL, Scene, Setup, check_scene, draft_engine, draft_pool, play
from tests.tiers import by_tier

CASES = ("aligned", "split", "merged", "healed", "none", "unreadable")
MAX_TOKENS = 250
"""Ids of a vocabulary: the scripted tokenizer tries one after the other."""


def test_translated_is_plain() -> None:
    tally, levels = Tally(), Counter[str]()

    def check(scene: Scene) -> None:
        drafters: list[TranslatedDrafter] = []
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
            drafters.append(TranslatedDrafter(engine, TokenMapping(vocabulary, draft), pool=draft_pool(rng, engine)))
            return drafters[-1]

        check_scene(scene, tally, pieces=random_pieces(rng, rng.choice((6, 12, 30))), draft_model=make_draft)
        for drafter in drafters:
            levels.update(drafter.cases)

    play("translated", by_tier(420, quick=40), check)
    assert set(levels) <= set(CASES)
    tally.update(levels)
    least = {"equal to plain decoding": by_tier(5000, quick=200), PARTIAL: by_tier(1000, quick=20), "preempted": 1}
    # Few scenes may have none of the last two, which have tests of their own.
    tally.report("lossless, with translated drafts", least | dict.fromkeys(CASES[: by_tier(6, quick=4)], 1))
