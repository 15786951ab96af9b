"""The scenes of ``test_lossless`` on GGUF models with a recurrent state: no pass reads a state that is another's.

Every call goes to the real engine and to a scripted one, whose function is the real model read from the beginning, one
text at a time. Rows of the two may differ by rounding and nothing more. The loop gets the scripted rows, so that an
answer that is rounded otherwise is not taken for a wrong one.
"""

from __future__ import annotations

from tests.proofs import Tally
from tests.runtime.scenes import PARTIAL, Scene, check_scene, play
from tests.runtime.twins import Twins
from tests.tiers import by_tier


def test_speculative_is_plain_on_a_recurrent_model(twins: Twins) -> None:
    tally = Tally()

    def check(scene: Scene) -> None:
        check_scene(twins.shaped(scene), tally, make_model=twins.make_model, make_engine=twins.make)

    play("recurrent", by_tier(100, quick=16), check)
    tally["rows as read from the beginning"] = twins.num_rows
    tally["passes of unequal steps"] = twins.num_unequal
    least = {PARTIAL: by_tier(200, quick=30), "passes of unequal steps": by_tier(1000, quick=150)}
    tally.report("lossless, recurrent", least)
