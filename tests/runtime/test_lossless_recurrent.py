"""The scenes of ``test_lossless`` on GGUF models with a recurrent state: no pass reads a state that is another's.

Every call goes to the real engine and to a scripted one, whose function is the real model read from the beginning, one
text at a time. Rows of the two may differ by rounding and nothing more. The loop gets the scripted rows, so that an
answer that is rounded otherwise is not taken for a wrong one.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from tests.conftest import SUMMARY_LINES
from tests.engines.tiny_models import VOCABULARY_SIZE
from tests.runtime.scenes import Scene, Tally, check_scene, scenes
from tests.runtime.twins import Twins
from tests.tiers import by_tier

NUM_SCENES = by_tier(100, quick=16)


@settings(max_examples=NUM_SCENES)
@given(scene=scenes())
def check(twins: Twins, tally: Tally, scene: Scene) -> None:
    setups = tuple(dataclasses.replace(setup, trees=False) for setup in scene.setups)
    check_scene(
        dataclasses.replace(scene, vocab_size=VOCABULARY_SIZE, setups=setups),
        tally,
        make_model=lambda scene, rng: twins.model,
        make_engine=twins.make,
    )


def test_speculative_is_plain_on_a_recurrent_model(twins: Twins, request: pytest.FixtureRequest) -> None:
    tally = Tally()
    check(twins, tally)
    line = (
        f"lossless, recurrent: {tally.finished} requests equal to plain decoding, {tally.partial} with partial "
        f"rejection, {tally.preemptions} preempted; {twins.num_rows} rows as read from the beginning, "
        f"{twins.num_unequal} passes of unequal steps"
    )
    request.config.stash[SUMMARY_LINES].append(line)
    assert tally.partial >= by_tier(200, quick=30), line
    assert twins.num_unequal >= by_tier(1000, quick=150), line
