"""Sixteen requests of mixed settings in one loop say what each says alone: beginnings shared, places lost, and all.

Each scene draws a model, drafters, a policy, a pool of sequences and a cache that is mostly too small. Its requests
begin alike in groups, join at random rounds, ask for different things, and some are cancelled; then the loop goes on,
warm, with a second turn: each prompt with its answer and some more tokens. Every answer has to be that of plain
decoding by itself, token for token.
"""

from __future__ import annotations

import pytest

from tests.conftest import SUMMARY_LINES
from tests.runtime.shared_scenes import Tally, play
from tests.tiers import by_tier

NUM_PARTS = 10
SCENES_OF_A_PART = by_tier(200, quick=8)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_requests_that_share_a_loop_say_what_each_says_alone(part: int, tally: Tally) -> None:
    for seed in range(part * SCENES_OF_A_PART, (part + 1) * SCENES_OF_A_PART):
        try:
            play(seed, tally)
        except BaseException:
            print(f"scene {seed}")
            raise
    assert tally.equal > 10 * SCENES_OF_A_PART


def test_enough_scenes_were_hard(tally: Tally, request: pytest.FixtureRequest) -> None:
    if tally.scenes < NUM_PARTS * SCENES_OF_A_PART:
        pytest.skip("not all scenes were played")
    line = (
        f"sharing: {tally.equal} requests of {tally.scenes} scenes equal to plain decoding, {tally.preemptions} "
        f"preempted, {tally.cached_tokens} tokens not read again, {tally.cancelled} cancelled; {dict(tally.reasons)}"
    )
    request.config.stash[SUMMARY_LINES].append(line)
    assert tally.preemptions >= tally.scenes, line
    assert tally.cached_tokens >= 20 * tally.scenes, line
    assert {"length", "end", "stop", "cancelled"} <= set(tally.reasons), line
