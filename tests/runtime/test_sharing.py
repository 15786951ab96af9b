"""Sixteen requests of mixed settings in one loop say what each says alone: beginnings shared, places lost, and all.

Each scene draws a model, drafters, a policy, a pool of sequences and a cache that is mostly too small. Its requests
begin alike in groups, join at random rounds, ask for different things, and some are cancelled; then the loop goes on,
warm, with a second turn: each prompt with its answer and some more tokens. Every answer has to be that of plain
decoding by itself, token for token.
"""

from __future__ import annotations

from tests.proofs import Tally
from tests.runtime.shared_scenes import play_seed
from tests.tiers import by_tier

NUM_SCENES = by_tier(2000, quick=80)


def test_requests_that_share_a_loop_say_what_each_says_alone() -> None:
    tally = Tally()
    for seed in range(NUM_SCENES):
        try:
            play_seed(seed, tally)
        except BaseException:
            print(f"scene {seed}")
            raise
    tally.report(
        "sharing",
        {
            "equal to plain decoding": 10 * NUM_SCENES,
            "preempted": NUM_SCENES,
            "tokens not read again": 20 * NUM_SCENES,
            **{f"ended by {reason}": 1 for reason in ("length", "end", "stop", "cancelled")},
        },
    )
