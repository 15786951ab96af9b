"""Replay: a recording's rounds under any policy, through the real decoding loop, in virtual time.

::

    Recording ──traces──> replay drafters ─┐
        │                                 ├── DecodingLoop <── the policy under test
        └──text──> TextVerifier ──────────┘        │
                                                   v
    RoundCosts ──> ReplayEngine ──> virtual clock, ReplayResult

Nothing of the loop is written a second time: budgets, levels, siblings, pruning and bookkeeping are what they are live.
Only the models are replaced: drafts are verified by the recorded text, the draft model's passes say the recorded
proposals, and the passes of both move the clock by what they cost. The draft model's cache is followed by the real
drafter, so catching up after a pause is charged as it is live.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline.core.clock import VirtualClock
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.drafters.base import Drafter
from paceline.engines.scripted import ScriptedVocabulary
from paceline.engines.sequence_pool import SequencePool
from paceline.lab.replaying.models import ReplayEngine, TextVerifier
from paceline.lab.replaying.recording import DrafterTrace, Recording
from paceline.lab.replaying.replay_drafters import ReplayFreeDrafter, ReplayModelDrafter
from paceline.planning.base import Policy, RoundCosts
from paceline.runtime.loop import DecodingLoop

_GREEDY = SamplingParams(temperature=0.0)

Drift: TypeAlias = Callable[[float], float]
"""Factor on every pass, from the virtual time at which it starts; for machines that become slower or faster."""


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """What a policy made of one recording.

    Attributes:
        rounds: decoding rounds; the first token comes with the prompt.
        decode_s: virtual seconds of its rounds.
        arrivals_s: virtual time at which each token came.
    """

    name: str
    num_tokens: int
    rounds: int
    num_drafted: int
    num_accepted: int
    decode_s: float
    arrivals_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a policy made of several recordings.

    Attributes:
        requests: in the order of the recordings.
        decode_s: virtual seconds of rounds in which anything was decoded; requests that shared a round share it.
        total_s: virtual seconds until all was done, prompts included. Where requests follow each other and share rounds
            this alone compares policies: in whose rounds a prompt is read hangs on who ends when.
    """

    requests: tuple[ReplayedRequest, ...]
    decode_s: float
    total_s: float

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all requests per second of decoding; ``None`` if there were no rounds."""
        tokens = sum(request.num_tokens - 1 for request in self.requests)
        return tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def rounds(self) -> int:
        return sum(request.rounds for request in self.requests)

    @property
    def accept_share(self) -> float | None:
        drafted = sum(request.num_drafted for request in self.requests)
        return sum(request.num_accepted for request in self.requests) / drafted if drafted else None

    def oracle_shares(self, oracle_seconds: Sequence[float]) -> tuple[list[float], float]:
        """Return the oracle's time over the policy's, for each request and for all; 1 is the best there is."""
        shares = [
            oracle / request.decode_s if request.decode_s > 0 else 1.0
            for oracle, request in zip(oracle_seconds, self.requests, strict=True)
        ]
        return shares, sum(oracle_seconds) / self.decode_s if self.decode_s > 0 else 1.0


def replay(
    recordings: Sequence[Recording],
    policy: Policy,
    costs: RoundCosts,
    *,
    drafters: Sequence[str] | None = None,
    concurrent: int = 1,
    drift: Drift | None = None,
    free_s: float = 0.0,
    clock: VirtualClock | None = None,
) -> ReplayResult:
    """Run recordings, one after the other or several at once, under one policy and one virtual clock.

    A policy cannot draft deeper, or with more siblings, than was recorded.

    Args:
        recordings: made with the same drafters.
        policy: keeps what it learns from one recording to the next, as it would live.
        costs: what passes take. The draft model's, for the tokens fed to it, however many.
        drafters: names of those to take part, in the order they are asked; by default all that were recorded.
        concurrent: most requests at once.
        drift: factor on ``costs`` as virtual time goes by.
        free_s: seconds of asking a drafter without a model, for each request.
        clock: for a policy that takes time to decide, and moves it; by default a new one.

    Raises:
        InputError: the recordings do not go together, or lack a drafter that is asked for.
    """
    check_recordings(recordings)
    if concurrent < 1:
        raise InputError(f"replay of {concurrent} requests at once: give 1 or more")
    first = recordings[0]
    names = [trace.name for trace in first.traces] if drafters is None else list(drafters)
    clock = clock or VirtualClock()
    started_s = clock.now_s()
    factor = drift or (lambda now_s: 1.0)
    engine = ReplayEngine(
        _Rounds(costs, factor, clock).seconds,
        clock,
        blank_vocabulary(first.vocab_size, first.end_ids),
        max_depth=first.depth,
    )
    texts = ReplayedTexts(recordings, names)
    built = texts.drafters(costs, clock, factor, free_s)
    loop = DecodingLoop(engine, built, policy, clock=clock, prompt_rounds=math.inf)
    requests: list[Request] = []
    decode_s = 0.0
    while len(requests) < len(recordings) or loop.active:
        while len(requests) < len(recordings) and len(loop.active) < concurrent:
            recording = recordings[len(requests)]
            requests.append(_add(loop, recording))
            texts.give(requests[-1], recording)
        decoding = any(request.decoding for request in loop.active)
        before_s = clock.now_s()
        loop.step()
        if decoding:
            decode_s += clock.now_s() - before_s
    return ReplayResult(
        tuple(
            ReplayedRequest(
                recording.name,
                request.num_output,
                request.stats.rounds,
                request.stats.num_drafted,
                request.stats.num_accepted,
                request.stats.decode_s,
                tuple(request.stats.arrivals_s),
            )
            for recording, request in zip(recordings, requests, strict=True)
        ),
        decode_s,
        clock.now_s() - started_s,
    )


@functools.lru_cache(maxsize=4)
def blank_vocabulary(size: int, end_ids: frozenset[int]) -> ScriptedVocabulary:
    """Return tokens without text: nobody reads a replay's."""
    return ScriptedVocabulary([b""] * size, end_ids)


class ReplayedTexts:
    """Which recording each request of a loop is to follow, for the drafters of that loop.

    Args:
        recordings: all that a request may follow, made with the same drafters.
        names: of the drafters, in the order they are asked.
    """

    def __init__(self, recordings: Sequence[Recording], names: Sequence[str]) -> None:
        self._first = recordings[0]
        self._traces = {name: [trace_named(recording, name) for recording in recordings] for name in names}
        self._by_request: dict[str, dict[int, DrafterTrace]] = {name: {} for name in names}

    def give(self, request: Request, recording: Recording) -> None:
        """Let a request, which no round was made of yet, follow a recording."""
        for name, by_request in self._by_request.items():
            by_request[request.id] = trace_named(recording, name)

    def drafters(
        self,
        costs: RoundCosts,
        clock: VirtualClock,
        factor: Drift,
        free_s: float = 0.0,
        *,
        keeps: bool = False,
    ) -> list[Drafter]:
        """Return the drafters.

        Args:
            costs: of the draft model's passes.
            clock: moved by what they take.
            factor: on ``costs``.
            free_s: seconds of asking a drafter without a model, for each request.
            keeps: whether the draft model's cache keeps what it read of requests that are over.
        """
        built: list[Drafter] = []
        for name, traces in self._traces.items():
            by_request = self._by_request[name]
            if traces[0].is_model:
                engine = ReplayEngine(
                    lambda rows, context, requests: costs.draft_s(rows, context) * factor(clock.now_s()),
                    clock,
                    blank_vocabulary(self._first.vocab_size, traces[0].end_ids),
                )
                pool = SequencePool(engine) if keeps else None
                built.append(ReplayModelDrafter(engine, traces, by_request, self._first.vocab_size, pool=pool))
            else:
                built.append(ReplayFreeDrafter(traces, by_request, clock, free_s))
        return built


class _Rounds:
    """What passes of the target take one after the other."""

    def __init__(self, costs: RoundCosts, factor: Drift, clock: VirtualClock) -> None:
        self._costs = costs
        self._factor = factor
        self._clock = clock
        self._previous: tuple[int, int] | None = None

    def seconds(self, rows: int, context: int, requests: int) -> float:
        """Return the seconds of the next pass."""
        change_s = 0.0 if self._previous == (rows, requests) else self._costs.change_s
        self._previous = rows, requests
        return (self._costs.round_s(rows, context, requests) + change_s) * self._factor(self._clock.now_s())


def check_recordings(recordings: Sequence[Recording]) -> None:
    """Raise unless recordings can share one loop."""
    if not recordings:
        raise InputError("there are no recordings to replay: make some with python -m benchmarks record")
    if len({(r.vocab_size, r.end_ids, r.depth, tuple(t.name for t in r.traces)) for r in recordings}) > 1:
        raise InputError("the recordings are of different models, drafters or depths: replay each kind by itself")


def trace_named(recording: Recording, name: str) -> DrafterTrace:
    for trace in recording.traces:
        if trace.name == name:
            return trace
    raise InputError(f"drafter {name!r} was not recorded: there are {', '.join(t.name for t in recording.traces) or 0}")


def _add(loop: DecodingLoop, recording: Recording) -> Request:
    params = SamplingParams(recording.temperature, top_k=0, top_p=1.0, min_p=0.0)
    rules = StopRules(recording.max_tokens, ignore_end=recording.ignore_end)
    # Which tokens the prompt had matters to nobody here, only how many.
    # Policies see the temperature of the recording; traces hold proposals that were drawn already.
    verifier = TextVerifier(_GREEDY, recording.num_prompt, recording.token_ids)
    return loop.add([0] * recording.num_prompt, params, rules, verifier=verifier)
