"""Sides of a comparison: a revision and a policy, with what its decisions take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planner_ab.charging import OwnTimes
from benchmarks.planner_ab.corpus import CORPORA
from benchmarks.planner_ab.environments import Environment, Job, environment, run_all
from benchmarks.planner_ab.own_time import SLICES
from benchmarks.reporting import progress_bar
from paceline.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Side:
    environment: Environment
    policy: str
    own_times: Mapping[str, OwnTimes]
    cells: Sequence[tuple[str, str]]
    scenes: Sequence[str]

    @property
    def replaying(self) -> Job:
        return {"policy": self.policy, "own_times": self.own_times}

    def steps(self, job: Job) -> int:
        """Return how many results a job has."""
        cells = sum(profile in job["profiles"] for profile, _ in self.cells)
        return cells * len(job["halves"]) * len(self.scenes)


def side_of(revision: str | None, policy: str) -> Side:
    """Install a revision, and measure what a policy of it takes to decide, each unless it was done before."""
    with progress_bar() as bar:
        bar.add_task(f"{revision or 'working tree'}: compiling the planner, unless it was before", total=None)
        made = environment(revision)
    ((found,),) = run_all([(made, {"task": "list"})], lambda result: None)
    if not found["compiled"]:
        raise InputError(f"{made.name} was built without compiling the planner: remove {made.package} and try again")
    own_times = made.own_times(policy)
    if own_times is None:
        models = len({corpus.models for corpus in CORPORA})
        with progress_bar() as bar:
            task = bar.add_task(f"{made.name}: what deciding takes", total=models * SLICES)
            (measured,) = run_all([(made, {"task": "own time", "policy": policy})], lambda result: bar.advance(task))
        own_times = measured[-1]
        made.keep_own_times(policy, own_times)
    return Side(made, policy, own_times, [(profile, corpus) for profile, corpus in found["cells"]], found["scenes"])


def chosen_profiles(sides: Sequence[Side], chosen: Sequence[str] | None) -> list[str]:
    """Return the profiles that all sides have, or those chosen of them."""
    each = [dict.fromkeys(profile for profile, _ in side.cells) for side in sides]
    common = [profile for profile in each[-1] if all(profile in one for one in each)]
    for name in chosen or ():
        if name not in common:
            raise InputError(f"--costs {name!r}: choose from those that every side has, {', '.join(common)}")
    return common if chosen is None else list(chosen)
