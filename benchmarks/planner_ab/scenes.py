"""Scenes: how texts are met. A process's first answer, a session, a machine that changes, several requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from benchmarks.planner_ab.charging import NO_TIME, Charged, MidwayDrift, OwnTimes
from benchmarks.planner_ab.corpus import Priced
from paceline.core.clock import VirtualClock
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import replay
from paceline.planning.auto.learned import Learned
from paceline.planning.base import Policy
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import NO_SPECULATION

ASKING_S: Final = 20e-6
"""Of a drafter without a model, for a request: what suffix and lookup take."""

Build: TypeAlias = Callable[[CostProfile, Learned | None], Policy]
"""Returns a new policy, from what passes cost and what an earlier process learned."""

Starts: TypeAlias = Literal["text", "lap", "half"]
"""What a process lives through: a single text, a lap or a half of the corpus."""


@dataclass(frozen=True, slots=True)
class Scene:
    """How texts are met.

    Attributes:
        name: in tables.
        lives: what a policy lives through.
        knows: whether it starts with what another has learned in a session of other texts.
        drifts: whether the machine changes in the middle of answers.
        requests: answered at once; all of a group begin together.
    """

    name: str
    lives: Starts
    knows: bool = False
    drifts: bool = False
    requests: int = 1


SCENES: Final[Sequence[Scene]] = (
    Scene("first answer", "text"),
    Scene("first answer, prior", "text", knows=True),
    Scene("session", "lap"),
    Scene("drift", "lap", drifts=True),
    Scene("2 requests", "half", requests=2),
    Scene("4 requests", "half", requests=4),
    Scene("8 requests", "half", requests=8),
    Scene("16 requests", "half", requests=16),
)


def plain(scene: Scene, laps: Sequence[Sequence[Recording]], priced: Priced) -> list[float]:
    """Return the seconds of each text, lap after lap, decoded plainly."""
    return seconds(scene, laps, priced, lambda costs, learned: NO_SPECULATION, NO_TIME, drafters=())


def seconds(
    scene: Scene,
    laps: Sequence[Sequence[Recording]],
    priced: Priced,
    build: Build,
    own_times: OwnTimes,
    *,
    drafters: Sequence[str] | None = None,
) -> list[float]:
    """Return the seconds that each text takes under a policy, lap after lap, from its first token to its last."""
    run = _Runner(scene, priced, build, own_times, drafters)
    texts = [recording for lap in laps for recording in lap]
    if scene.lives == "half":
        return run.in_groups(texts)
    found: list[float] = []
    for index, lap in enumerate(laps):
        prior = run.learned_in(laps[index - 1]) if scene.knows else None
        lives = [[recording] for recording in lap] if scene.lives == "text" else [lap]
        for life in lives:
            found += run.session(life, prior)
    return found


class _Runner:
    """Replays by a scene's rules."""

    def __init__(
        self, scene: Scene, priced: Priced, build: Build, own_times: OwnTimes, drafters: Sequence[str] | None
    ) -> None:
        self._scene = scene
        self._costs = priced.costs
        self._factor = priced.own_factor
        self._build = build
        self._own_times = own_times
        self._drafters = drafters

    def session(self, recordings: Sequence[Recording], prior: Learned | None) -> list[float]:
        """Return the seconds of texts that follow each other in one process."""
        return self._replay(recordings, self._build(self._costs, prior), VirtualClock(), 1)

    def learned_in(self, recordings: Sequence[Recording]) -> Learned | None:
        """Return what a process keeps of texts that follow each other."""
        policy = self._build(self._costs, None)
        self._replay(recordings, policy, VirtualClock(), 1)
        learned = policy.learned()
        return learned if isinstance(learned, Learned) else None

    def in_groups(self, recordings: Sequence[Recording]) -> list[float]:
        """Return the seconds of texts that come in groups, one group after the other, in one process."""
        policy, clock, count = self._build(self._costs, None), VirtualClock(), self._scene.requests
        found: list[float] = []
        for start in range(0, len(recordings), count):
            # The last group is filled with texts of the first, which have been counted already.
            group = [recordings[(start + index) % len(recordings)] for index in range(count)]
            found += self._replay(group, policy, clock, count)
        return found[: len(recordings)]

    def _replay(
        self, recordings: Sequence[Recording], policy: Policy, clock: VirtualClock, concurrent: int
    ) -> list[float]:
        drift = MidwayDrift(recordings) if self._scene.drifts else None
        outcome = replay(
            recordings,
            Charged(policy, clock, self._own_times, self._factor, drift),
            self._costs,
            drafters=self._drafters,
            concurrent=concurrent,
            drift=drift,
            free_s=ASKING_S,
            clock=clock,
        )
        return [
            # A row is sampled for every token, whatever was drafted.
            request.decode_s + self._costs.sampling_s(len(recording.token_ids) - 1 if recording.temperature > 0 else 0)
            for recording, request in zip(recordings, outcome.requests, strict=True)
        ]
