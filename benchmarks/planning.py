"""What planning takes: the planner's own time a round, by what became of the drafts, in replays of the embedded pair.

Nothing else runs between two rounds here, so caches are warm; beside the passes of a large model on a CPU it takes two
to three times as long. ``PYTHONPATH=src python -m benchmarks planning`` gives the same where nothing is compiled.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from benchmarks.cost_tables import measured_profile
from benchmarks.stopwatch import Stopwatch
from paceline.api import load
from paceline.lab.replaying.recorder import record
from paceline.lab.replaying.recording import RECORDED_DEPTH
from paceline.lab.replaying.replay import replay
from paceline.machine import is_compiled
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.policies.fixed import FixedPolicy

TEXTS = 2
PROMPT_CHARACTERS = 1500
ANSWER_TOKENS = 200
REPEATS = 5
COSTS, DRAFT_MS = "Q4_0", 0.6


def measure() -> dict[str, Any]:
    """Return the rounds of each kind, and microseconds each takes to decide about and to learn from."""
    with load(policy=FixedPolicy(RECORDED_DEPTH)) as model:
        recordings = [
            record(
                model,
                text[:PROMPT_CHARACTERS],
                name=f"{kind} {seed}",
                max_tokens=ANSWER_TOKENS,
                temperature=0.8,
                seed=seed,
            )
            for kind in HELDOUT_KINDS
            for seed, text in enumerate(heldout(kind)[:TEXTS])
        ]
    costs = measured_profile(COSTS, DRAFT_MS)
    times_us: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPEATS):
        stopwatch = Stopwatch(AutoPolicy(costs))
        replay(recordings, stopwatch, costs)
        for kind, spent_us in stopwatch.times_us.items():
            times_us[kind] += spent_us
    figures: dict[str, Any] = {
        kind: {"rounds": len(spent_us) // REPEATS, "us": statistics.median(spent_us)}
        for kind, spent_us in times_us.items()
    }
    print(
        f"planning, {'compiled' if is_compiled() else 'interpreted'}, median us a round by what became of its drafts: "
        + ", ".join(f"{kind} {row['us']:.0f} ({row['rounds']} rounds)" for kind, row in figures.items())
    )
    return {"compiled": is_compiled(), "rounds": figures}
