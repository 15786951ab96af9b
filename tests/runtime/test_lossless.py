"""Coupled speculative decoding is plain decoding, token for token, whatever is drafted, verified, refused or cancelled.

Everything runs on the scripted engine, which is exact, so the smallest difference is a fault of the algorithm. Each
example is a scene of one to four requests in one loop; each of them is compared with the same request decoded plainly
and alone.
"""

from __future__ import annotations

from tests.proofs import Tally
from tests.runtime.scenes import BOUNDED, EVERY_END, PARTIAL, check_scene, play
from tests.tiers import by_tier


def test_speculative_is_plain() -> None:
    tally = Tally()
    play("plain", by_tier(800, quick=230), lambda scene: check_scene(scene, tally))
    tally.report(
        "lossless",
        {
            **EVERY_END,
            PARTIAL: by_tier(5000, quick=500),
            BOUNDED: tally[PARTIAL] // 10 + 1,
            "preempted": by_tier(1000, quick=100),
            "accepted by a policy of its own": by_tier(400, quick=50),
            "accepted a part of a prediction": by_tier(400, quick=50),
            "in passes of its own": tally["equal to plain decoding"] // 12 + 1,
            "plain beside others": 1,
            "refused passes": 1,
            "reused tokens": 1,
            "cut short": 1,
        },
    )
