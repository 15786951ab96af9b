"""Many replicas in virtual time: each is the real decoding loop, with the real planner, over recorded drafts.

::

    arrivals ──> Gateway ──affinity or least loaded──> Replica: DecodingLoop ── ReplayEngine ── a clock of its own
                                                          │          │
                                                queue, batches,   planner, learned from the recordings
                                                prefix cache

A replica is let run until the next request comes, so the gateway knows how many requests each has at that moment. One
that comes during a round waits for its end, as it does live. What is not there: the network, the gateway's own time,
texts turned into tokens and back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.clock import VirtualClock
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Request
from paceline.engines.sequence_pool import SequencePool
from paceline.lab.capacity.traffic import Arrival
from paceline.lab.doctor.prediction import LiveCosts
from paceline.lab.replaying.models import ReplayEngine, TextVerifier
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import ReplayedTexts, blank_vocabulary, replay
from paceline.lab.variants import AUTO
from paceline.planning.auto.learned import Learned
from paceline.planning.base import Policy
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.planning.registry import build_policy
from paceline.runtime.loop import DecodingLoop

_GREEDY: Final = SamplingParams(temperature=0.0)
"""Nothing is drawn in a replay: texts and proposals are there."""
_BALANCE_RATIO: Final = 1.5
"""Times as many requests as the least loaded replica that one must have, too, to be passed over: smg's default."""
_FULL: Final = 0.97
"""Share of the time for which replicas are busy above which they do not keep up."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What one replica is.

    Attributes:
        costs: what its passes take.
        recordings: with the drafters of all; they teach the planner before the first request.
        slots: requests that it answers at once.
        max_rows: most rows of a pass.
        token_bytes: host memory of a token of a finished request.
        kept_bytes: host memory for finished requests.
    """

    costs: LiveCosts
    recordings: Sequence[Recording]
    slots: int = 4
    max_rows: int = 512
    token_bytes: int = 0
    kept_bytes: int = 512 << 20

    def drafters(self, *, speculative: bool) -> tuple[str, ...]:
        return tuple(trace.name for trace in self.recordings[0].traces) if speculative else ()

    def learn(self) -> Learned | None:
        """Return what the planner has learned once it has answered every recorded prompt."""
        policy = build_policy(AUTO, costs=self.costs.profile)
        replay(self.recordings, policy, self.costs)
        learned = policy.learned()
        return learned if isinstance(learned, Learned) else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a number of replicas made of a load.

    Attributes:
        ttft_s: seconds from each request to its first token.
        tpot_s: seconds a token after the first, of each answer that has more than one.
        gaps_s: seconds between tokens of an answer that did not come at once; with speculation several come at once.
        answer_tokens: that all answers have.
        prompt_tokens: that all prompts have.
        read_tokens: of all prompts, those that a replica read; it had the others in its cache.
        wall_s: seconds until the last token.
        sent_to: replica that each request went to, from 0 on.
        busy: share of the time until the last request came for which a replica worked, on average.
    """

    replicas: int
    ttft_s: Sequence[float]
    tpot_s: Sequence[float]
    gaps_s: Sequence[float]
    answer_tokens: int
    prompt_tokens: int
    read_tokens: int
    wall_s: float
    busy: float
    sent_to: Sequence[int] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers a second, of each replica."""
        return self.answer_tokens / self.wall_s / self.replicas

    @property
    def keeps_up(self) -> bool:
        """Whether the replicas are as fast as requests come; else the queue grows with the load's length."""
        return self.busy < _FULL


def percentiles(values: Sequence[float]) -> Mapping[str, float] | None:
    """Return p50 and p99; ``None`` of nothing."""
    if not values:
        return None
    p50, p99 = np.quantile(values, (0.5, 0.99)).tolist()
    return {"p50": p50, "p99": p99}


def simulate(
    arrivals: Sequence[Arrival],
    settings: ReplicaSettings,
    replicas: int,
    *,
    speculative: bool,
    affinity: bool,
    balance: int,
    learned: Learned | None = None,
    seed: int = 1,
    advance: Callable[[float], None] = lambda share: None,
) -> Outcome:
    """Let so many replicas answer a load.

    Args:
        speculative: whether they draft, by policy ``auto``; else they decode plainly.
        affinity: whether a request goes where its prompt's beginning was read; else to the least loaded replica.
        balance: requests that a replica may have more than the least loaded one before affinity gives way.
        learned: what the planner of each starts with.
        seed: of the gateway's choice among equals.
        advance: told the share of the requests that have come; it may raise to end all.
    """
    several = [Replica(settings, speculative=speculative, learned=learned) for _ in range(replicas)]
    gateway = Gateway(several, affinity=affinity, balance=balance, seed=seed)
    sent = []
    for number, arrival in enumerate(arrivals):
        sent.append(gateway.send(arrival))
        advance((number + 1) / len(arrivals))
    last_s = arrivals[-1].at_s
    busy_s = sum(replica.busy_s - max(replica.now_s - last_s, 0.0) for replica in several)
    for replica in several:
        replica.finish()
    requests = [request for _, request in sent]
    ttft_s, tpot_s, gaps_s = [], [], []
    for arrival, request in zip(arrivals, requests, strict=True):
        assert request.num_output == len(arrival.recording.token_ids)
        came_s = request.stats.arrivals_s
        ttft_s.append(came_s[0] - arrival.at_s)
        if len(came_s) > 1:
            tpot_s.append((came_s[-1] - came_s[0]) / (len(came_s) - 1))
        gaps_s += [gap_s for gap_s in np.diff(came_s).tolist() if gap_s > 0]
    return Outcome(
        replicas,
        ttft_s,
        tpot_s,
        gaps_s,
        answer_tokens=sum(request.num_output for request in requests),
        prompt_tokens=sum(request.num_prompt for request in requests),
        read_tokens=sum(request.num_prompt - request.stats.cached_tokens for request in requests),
        wall_s=max(request.stats.arrivals_s[-1] for request in requests),
        busy=busy_s / last_s / replicas,
        sent_to=[index for index, _ in sent],
    )


class Replica:
    """One server: its queue, its cache of prefixes, its planner.

    Attributes:
        busy_s: seconds that it worked.
    """

    def __init__(self, settings: ReplicaSettings, *, speculative: bool, learned: Learned | None) -> None:
        costs, first = settings.costs, settings.recordings[0]
        self.busy_s = 0.0
        self._clock = clock = VirtualClock()
        self._sampling_s = costs.sampling_s
        engine = ReplayEngine(
            costs.round_s,
            clock,
            blank_vocabulary(first.vocab_size, first.end_ids),
            max_sequences=settings.slots,
            max_rows=settings.max_rows,
            token_bytes=settings.token_bytes,
        )
        names = settings.drafters(speculative=speculative)
        policy: Policy = NO_SPECULATION
        if speculative:
            policy = build_policy(AUTO, costs=costs.profile, learned=learned)
        self._texts = ReplayedTexts(settings.recordings, names)
        self._loop = DecodingLoop(
            engine,
            self._texts.drafters(costs, clock, lambda now_s: 1.0, keeps=True),
            policy,
            pool=SequencePool(engine, max_saved_bytes=settings.kept_bytes),
            clock=clock,
            costs=costs.profile,
        )
        # The loop would forget a request that is over.
        self._open: list[Request] = []

    @property
    def now_s(self) -> float:
        return self._clock.now_s()

    def count(self, at_s: float) -> int:
        """Return how many requests it has at a moment, up to which it was let run."""
        self._open = [each for each in self._open if not each.finish_reason or each.stats.arrivals_s[-1] > at_s]
        return len(self._open)

    def run_until(self, at_s: float) -> None:
        """Make all rounds that begin before a moment."""
        while self._loop.active and self.now_s < at_s:
            self._make_round()

    def take(self, arrival: Arrival) -> Request:
        """Take a request, which comes when it is as late as :meth:`run_until` was told last, and return it."""
        self._clock.advance(max(arrival.at_s - self.now_s, 0.0))
        recording = arrival.recording
        request = self._loop.add(
            arrival.prompt_ids,
            SamplingParams(recording.temperature, top_k=0, top_p=1.0, min_p=0.0),
            StopRules(recording.max_tokens, ignore_end=True),
            # No deeper than was recorded.
            SpeculationParams(draft_max=recording.depth),
            verifier=_TimedVerifier(arrival, self._clock, self._sampling_s),
        )
        self._texts.give(request, recording)
        self._open.append(request)
        return request

    def finish(self) -> None:
        """Answer all that it has."""
        while self._loop.active:
            self._make_round()

    def _make_round(self) -> None:
        before_s = self.now_s
        self._loop.step()
        self.busy_s += self.now_s - before_s


class _TimedVerifier(TextVerifier):
    """Judges by the text, in the time that it takes to sample a row."""

    def __init__(self, arrival: Arrival, clock: VirtualClock, sampling_s: float) -> None:
        super().__init__(_GREEDY, len(arrival.prompt_ids), arrival.recording.token_ids)
        self._clock = clock
        self._sampling_s = sampling_s

    def _choose(self, row: FloatArray, position: int, history: Sequence[int]) -> int:
        self._clock.advance(self._sampling_s)
        return super()._choose(row, position, history)


@dataclass(slots=True)
class Gateway:
    """Gives every request to a replica.

    With affinity it does as smg's ``cache_aware`` does: a request goes to a replica that was sent its beginning before,
    the least loaded of these. Where the busiest replica has more than ``balance`` requests more than the least loaded
    one, and half as many again, it goes to the least loaded of all. So does one whose beginning is new, and without
    affinity all do. Equals are drawn.
    """

    replicas: Sequence[Replica]
    affinity: bool
    balance: int
    seed: int
    _sent: dict[int, set[int]] = field(default_factory=dict)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def send(self, arrival: Arrival) -> tuple[int, Request]:
        """Let all replicas run until a request comes, and give it to one of them; return which, and the request."""
        for replica in self.replicas:
            replica.run_until(arrival.at_s)
        counts = [replica.count(arrival.at_s) for replica in self.replicas]
        most, least = max(counts), min(counts)
        have = self._sent.setdefault(arrival.prefix, set())
        among = list(range(len(counts)))
        is_imbalanced = most - least > self.balance and most > _BALANCE_RATIO * least
        if self.affinity and have and not is_imbalanced:
            among = sorted(have)
        fewest = min(counts[index] for index in among)
        chosen = self._random.choice([index for index in among if counts[index] == fewest])
        have.add(chosen)
        return chosen, self.replicas[chosen].take(arrival)
