"""The scenes of ``test_lossless`` with heads, which draft from the target's states: no draft changes a text.

A state says how long the text is and its latest tokens, so that a head can be as good as wanted, and knows when it is
given a state that is not of the token before.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array, FloatArray
from paceline.drafters.following import FollowingDrafter
from paceline.drafters.head import BlockHeadDrafter, CacheHeadDrafter, HeadDrafter
from paceline.engines.scripted import (
    HeadRow,
    LogitFunction,
    ScriptedEngine,
    ScriptedVocabulary,
    blended_model,
    random_model,
)
from paceline.engines.state_track import StateTrack
from tests.helpers import BlockHead, CacheHead, CountingPool, frozen
from tests.proofs import Tally
from tests.runtime.scenes import PARTIAL, CountingEngine, Scene, Setup, check_scene, play
from tests.tiers import by_tier

KNOWN = 4
"""Latest tokens that a state says."""


def state_of(tokens: Sequence[int]) -> FloatArray:
    return np.array([len(tokens), *([-1] * KNOWN + list(tokens))[-KNOWN:]], np.float32)


def tokens_of_state(state: FloatArray) -> list[int]:
    return [int(each) for each in state[1:] if each >= 0]


def tokens_of(row: HeadRow) -> list[int]:
    """The latest tokens that a head reads, the row's own last."""
    token_id, state = row
    return [*tokens_of_state(state), token_id]


def own_state(rows: Sequence[HeadRow]) -> FloatArray:
    length = int(rows[-1][1][0])
    return np.array([length + 1, *([-1] * KNOWN + tokens_of(rows[-1]))[-KNOWN:]], np.float32)


class Targets:
    """Makes targets that hold states, and heads of the latest of them.

    Args:
        kind: of the heads: they have a cache of their own, read that of the target, or say blocks.
    """

    def __init__(self, kind: str) -> None:
        self.latest: CountingEngine | None = None
        self._kind = kind

    def make(self, model: LogitFunction, vocabulary: ScriptedVocabulary, **limits: Any) -> CountingEngine:
        self.latest = CountingEngine(model, vocabulary, state_of=state_of, state_width=1 + KNOWN, **limits)
        return self.latest

    def make_head(
        self, scene: Scene, setup: Setup, rng: random.Random, target: LogitFunction, vocabulary: ScriptedVocabulary
    ) -> FollowingDrafter[Any]:
        """Return a head that knows the target as well as the setup says, and not all of its tokens."""
        assert self.latest is not None
        other = random_model(scene.vocab_size, seed=rng.getrandbits(32), order=2, spread=scene.spread)
        blend = frozen(blended_model(target, other, setup.draft_distance))
        share = rng.choice((0.0, 0.0, 0.3))
        unknown = [token_id for token_id in range(1, scene.vocab_size) if rng.random() < share]

        def say(rows: Sequence[HeadRow]) -> Float64Array:
            for before, row in itertools.pairwise(rows):
                assert row[1][0] == before[1][0] + 1, "a state is not that of the token before"
                assert tokens_of(row)[:-1][-KNOWN:] == tokens_of(before)[-KNOWN:], "a state is of another text"
            logits = blend(tokens_of(rows[-1])).copy()
            logits[unknown] = -np.inf
            return logits

        def check_place(cached: Sequence[int], rows: Sequence[HeadRow]) -> None:
            root = rows[0][1]
            assert root[0] == len(cached), "the root is not read with the latest state"
            assert [int(each) for each in root[1:] if each >= 0] == list(cached)[-KNOWN:]

        def say_of_cache(cached: Sequence[int], rows: Sequence[HeadRow]) -> Float64Array:
            check_place(cached, rows)
            return say(rows)

        if self._kind == "blocks":
            return self._make_block_head(scene, rng, vocabulary, say)
        if self._kind == "target cache":
            head = CacheHead(
                self.latest,
                say_of_cache,
                lambda cached, rows: own_state(rows),
                max_rows=64 if scene.calm else rng.choice((64, 5, 2, 1)),
            )
            cache_drafter = CacheHeadDrafter(head, target=self.latest.vocabulary)  # type: ignore[arg-type]
            cache_drafter.pool = CountingPool(head, max_idle=0, max_saved_bytes=0)  # type: ignore[arg-type]
            return cache_drafter
        engine = ScriptedEngine(
            say,
            vocabulary,
            state_of=own_state,
            state_width=1 + KNOWN,
            reads_states=True,
            context_length=4096 if scene.calm else rng.choice((40, 7, 3, 2)),
            max_rows=64 if scene.calm else rng.choice((64, 5, 2, 1)),
            max_sequences=4 if scene.calm else rng.choice((4, 1)),
            cells=None if scene.calm else rng.choice((None, 60, 25)),
        )
        drafter = HeadDrafter(engine, target=self.latest.vocabulary)
        drafter.pool = CountingPool(engine, max_idle=0, max_saved_bytes=0)
        return drafter

    def _make_block_head(
        self,
        scene: Scene,
        rng: random.Random,
        vocabulary: ScriptedVocabulary,
        say: Callable[[Sequence[HeadRow]], Float64Array],
    ) -> BlockHeadDrafter:
        """Return a head whose tokens depend on the drafts before them, or on what it would have said itself."""
        assert self.latest is not None
        depends, size = rng.choice((True, False)), rng.choice((1, 3, 8))

        def say_in_block(rows: Sequence[HeadRow], root: int, drafted: Sequence[int]) -> Float64Array:
            for before, row in itertools.pairwise(rows):
                assert row[1][0] == before[1][0] + 1, "a state is not that of the token after"
                assert tokens_of_state(row[1])[-KNOWN:] == [*tokens_of_state(before[1]), row[0]][-KNOWN:]
            assert all(tokens_of_state(state)[-1] == token_id for token_id, state in rows), "of another token"
            latest = [*tokens_of_state(rows[-1][1]), root]
            length = int(rows[-1][1][0])
            for place in range(len(drafted) + 1):
                state = np.array([length + place, *([-1] * KNOWN + latest[:-1])[-KNOWN:]], np.float32)
                logits = say([(latest[-1], state)])
                if place < len(drafted):
                    latest.append(drafted[place] if depends else int(np.argmax(logits)))
            return logits

        head = BlockHead(
            say_in_block,
            vocabulary,
            size=size,
            state_width=1 + KNOWN,
            context_length=4096 if scene.calm else size + 1 + rng.choice((40, 7, 3, 2)),
            max_rows=64 if scene.calm else size + rng.choice((64, 5, 2, 1)),
            max_sequences=4 if scene.calm else rng.choice((4, 1)),
            cells=None if scene.calm else rng.choice((None, 60, 25)),
        )
        drafter = BlockHeadDrafter(head, target=self.latest.vocabulary)
        drafter.pool = CountingPool(head, max_idle=0, max_saved_bytes=0)
        return drafter


def play_with_heads(kind: str, tally: Tally) -> None:
    def check(scene: Scene) -> None:
        rng, targets = random.Random(scene.seed), Targets(kind)
        setups = tuple(
            dataclasses.replace(setup, drafters=(*(n for n in setup.drafters if n != "draft"), "draft")[-2:])
            for setup in scene.setups
        )
        scene = dataclasses.replace(scene, vocab_size=min(scene.vocab_size, 250), setups=setups)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateTrack.__init__, "__defaults__", (0, rng.choice((3, 2048))))
            check_scene(scene, tally, draft_model=targets.make_head, make_engine=targets.make)

    play(kind, by_tier(60, quick=24), check)


def test_speculative_is_plain() -> None:
    tally = Tally()
    for kind in ("own cache", "target cache", "blocks"):
        play_with_heads(kind, tally)
    tally.report("lossless, with heads", {PARTIAL: by_tier(600, quick=20), "preempted": 1})
