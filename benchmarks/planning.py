"""What planning takes: the planner's own time a round, by what became of the drafts, in replays of the embedded pair.

Nothing else runs between two rounds here, so caches are warm; beside the passes of a large model on a CPU it takes two
to three times as long. ``PYTHONPATH=src python -m benchmarks planning`` gives the same where nothing is compiled.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks.cost_tables import measured_profile
from paceline.api import load
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.machine import is_compiled
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import RoundRecord
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.replaying.recording import RECORDED_DEPTH, record
from paceline.planning.replaying.replay import replay

TEXTS = 2
PROMPT_CHARACTERS = 1500
ANSWER_TOKENS = 200
REPEATS = 5
COSTS, DRAFT_MS = "Q4_0", 0.6

VERIFIED, DROPPED, SILENT, PLAIN = "verified", "dropped", "nothing proposed", "nobody asked"


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


class Stopwatch:
    """A planner whose time is taken, learning from a round included.

    Attributes:
        times_us: microseconds of every round, by what became of its drafts.
    """

    def __init__(self, auto: AutoPolicy) -> None:
        self._auto = auto
        self.check, self.begin, self.end = auto.check, auto.begin, auto.end
        self._kind = PLAIN
        self._spent_s = 0.0
        self.times_us: dict[str, list[float]] = defaultdict(list)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Take the time of a round's beginning."""
        started_s = time.perf_counter()
        budgets = self._auto.budgets(requests)
        self._spent_s = time.perf_counter() - started_s
        self._kind = PLAIN
        return budgets

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Take the time of a decision."""
        started_s = time.perf_counter()
        chosen = self._auto.choose(drafter, jobs)
        self._spent_s += time.perf_counter() - started_s
        if chosen:
            self._kind = SILENT
        return chosen

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Take the time of the last decision, and see what is verified."""
        is_drafted = any(tree.num_drafted for tree in trees)
        started_s = time.perf_counter()
        self._auto.select(requests, trees)
        self._spent_s += time.perf_counter() - started_s
        if is_drafted:
            self._kind = VERIFIED if any(tree.num_drafted for tree in trees) else DROPPED

    def observe(self, record: RoundRecord) -> None:
        """Take the time of learning, and enter the round."""
        started_s = time.perf_counter()
        self._auto.observe(record)
        self._spent_s += time.perf_counter() - started_s
        if record.requests:
            self.times_us[self._kind].append(1e6 * self._spent_s)
        self._spent_s = 0.0
