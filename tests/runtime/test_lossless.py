"""Coupled speculative decoding is plain decoding, token for token, whatever is drafted, verified, refused or cancelled.

Everything runs on the scripted engine, which is exact, so the smallest difference is a fault of the algorithm. Each
example is a scene of one to four requests in one loop; each of them is compared with the same request decoded plainly
and alone.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.conftest import SUMMARY_LINES
from tests.runtime.scenes import Scene, Tally, check_scene, scenes
from tests.tiers import by_tier

NUM_SCENES = by_tier(800, quick=230)
MIN_PARTIAL_CASES = by_tier(5000, quick=500)
MIN_PREEMPTIONS = by_tier(1000, quick=100)
MIN_OWN_POLICIES = by_tier(400, quick=50)
MIN_PREDICTED = by_tier(400, quick=50)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@settings(max_examples=NUM_SCENES)
@given(scene=scenes())
def test_speculative_is_plain(scene: Scene, tally: Tally) -> None:
    check_scene(scene, tally)


def test_enough_cases_ended_in_partial_rejection(tally: Tally, request: pytest.FixtureRequest) -> None:
    """A proof by examples needs enough examples of the hard case.

    A case is a request that ended by itself, equal to plain decoding, after at least one round in which a draft was
    accepted and the walk then left the tree where more was drafted.
    """
    if not tally.finished:
        pytest.skip("the property test did not run")
    line = (
        f"lossless: {tally.finished} requests equal to plain decoding, {tally.partial} of them with partial rejection, "
        f"{tally.bounded} of these on targets that take back rows of one pass alone, ended by {dict(tally.reasons)}; "
        f"cut short {dict(tally.cut_short)}; {tally.num_refused_passes} passes refused, {tally.preemptions} requests "
        f"preempted, {tally.plain} plain beside others, {tally.own_policy} that accepted drafts by a policy of their "
        f"own, {tally.predicted} that accepted a part of their prediction, {tally.apart} in passes of their own; "
        f"drafts did not read {tally.reused_tokens} tokens again"
    )
    request.config.stash[SUMMARY_LINES].append(line)
    assert tally.partial >= MIN_PARTIAL_CASES, line
    assert tally.num_refused_passes > 0
    assert tally.reused_tokens > 0
    assert tally.preemptions >= MIN_PREEMPTIONS
    assert tally.plain > 0
    assert tally.own_policy >= MIN_OWN_POLICIES
    assert tally.predicted >= MIN_PREDICTED
    assert tally.bounded > tally.partial / 10
    assert tally.apart > tally.finished / 12
    assert set(tally.cut_short) == {"cancelled"}
    assert {"stop", "end", "length", "context"} <= set(tally.reasons)
