"""A stopwatch changes nothing of what its policy decides, and enters every round once."""

from __future__ import annotations

from benchmarks.stopwatch import DROPPED, PLAIN, SILENT, VERIFIED, Stopwatch

from paceline.lab.replaying.replay import replay
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.policies.fixed import FixedPolicy
from tests.planning.helpers import Skill, smooth, synthetic

COSTS = smooth(0.01, 0.001)


def test_rounds_are_entered_by_what_became_of_their_drafts() -> None:
    recordings = [synthetic(seed, {"draft": Skill(0.6, silent=0.3)}, num_tokens=60) for seed in range(3)]
    for policy in (lambda: FixedPolicy(4), lambda: AutoPolicy(COSTS)):
        stopwatch = Stopwatch(policy())
        result = replay(recordings, stopwatch, COSTS)
        assert result == replay(recordings, policy(), COSTS)
        assert sum(map(len, stopwatch.times_us.values())) == result.rounds
        assert set(stopwatch.times_us) <= {VERIFIED, DROPPED, SILENT, PLAIN}
        assert min(min(times) for times in stopwatch.times_us.values()) > 0
        assert 1e-6 * sum(map(sum, stopwatch.times_us.values())) < stopwatch.spent_s


def test_fixed_drafts_are_verified_unless_there_are_none() -> None:
    stopwatch = Stopwatch(FixedPolicy(4))
    replay([synthetic(1, {"draft": Skill(0.6, silent=0.3)}, num_tokens=60)], stopwatch, COSTS)
    assert stopwatch.times_us[VERIFIED]
    assert stopwatch.times_us[SILENT]
    assert DROPPED not in stopwatch.times_us
