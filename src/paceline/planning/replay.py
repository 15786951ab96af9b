"""Replay: a recording's rounds under any policy, through the real decoding loop, in virtual time.

::

    Recording ──tapes──> replay drafters ─┐
        │                                 ├── DecodingLoop <── the policy under test
        └──text──> ReplayEngine ──────────┘        │
                       │                           v
    RoundCosts ──> virtual clock            ReplayResult

Nothing of the loop is written a second time: budgets, levels, siblings, pruning, verification and bookkeeping are what
they are live. Only the models are replaced: the target's rows say the recorded token, the draft model's passes say the
recorded proposals, and both move the clock by what such a pass costs. The draft model's cache is followed by the real
drafter, so catching up after a pause is charged as it is live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np

from paceline.core.clock import VirtualClock
from paceline.core.errors import CapabilityError, InputError
from paceline.core.loop import DecodingLoop
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.core.verify import CoupledVerifier, Proposal
from paceline.drafters.base import Commit, Drafter, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import EngineCapabilities, FloatArray, ForwardOutput, Step
from paceline.engines.pending import PendingTree
from paceline.engines.scripted import ScriptedVocabulary
from paceline.planning.base import Policy, RoundCosts
from paceline.planning.recording import Chain, DrafterTape, Recording, evidence_of

_NO_LIMIT = 1 << 30
_GREEDY = SamplingParams(temperature=0.0)

Drift: TypeAlias = Callable[[float], float]
"""Factor on every pass, from the virtual time at which it starts; for machines that become slower or faster."""


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """What a policy made of one recording.

    Attributes:
        name: of the recording.
        num_tokens: tokens of the answer.
        rounds: decoding rounds; the first token comes with the prompt.
        num_drafted: draft tokens verified.
        num_accepted: draft tokens kept.
        start_s: virtual time at which its prompt was read.
        decode_s: virtual seconds of its rounds.
        arrivals_s: virtual time at which each token came.
    """

    name: str
    num_tokens: int
    rounds: int
    num_drafted: int
    num_accepted: int
    start_s: float
    decode_s: float
    arrivals_s: Sequence[float]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of decoding; ``None`` if there were no rounds."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0 else None

    @property
    def accept_share(self) -> float | None:
        """Accepted / drafted; ``None`` if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a policy made of several recordings.

    Attributes:
        requests: in the order of the recordings.
        decode_s: virtual seconds of rounds in which anything was decoded; requests that shared a round share it.
    """

    requests: tuple[ReplayedRequest, ...]
    decode_s: float

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all requests per second of decoding; ``None`` if there were no rounds."""
        tokens = sum(request.num_tokens - 1 for request in self.requests)
        return tokens / self.decode_s if self.decode_s > 0 else None

    @property
    def rounds(self) -> int:
        """Decoding rounds, each request's own."""
        return sum(request.rounds for request in self.requests)

    @property
    def accept_share(self) -> float | None:
        """Accepted / drafted; ``None`` if nothing was drafted."""
        drafted = sum(request.num_drafted for request in self.requests)
        return sum(request.num_accepted for request in self.requests) / drafted if drafted else None

    def shares_of(self, oracle_seconds: Sequence[float]) -> tuple[list[float], float]:
        """Return the oracle's time over the policy's, for each request and for all; 1 is the best there is.

        Args:
            oracle_seconds: for each recording, from :func:`~paceline.planning.oracle.oracle_s`.
        """
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
    own_s: float = 0.0,
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
        own_s: seconds that deciding about a round with drafts takes, for which a policy may have to make up.

    Raises:
        InputError: the recordings do not go together, or lack a drafter that is asked for.
    """
    check_recordings(recordings)
    if concurrent < 1:
        raise InputError(f"replay of {concurrent} requests at once: give 1 or more")
    first = recordings[0]
    names = [tape.name for tape in first.tapes] if drafters is None else list(drafters)
    clock = VirtualClock()
    factor = drift or (lambda now_s: 1.0)
    engine = ReplayEngine(
        lambda rows, context, requests: costs.round_s(rows, context, requests) * factor(clock.now_s()),
        clock,
        ScriptedVocabulary([b""] * first.vocab_size, first.end_ids),
        recordings,
        max_depth=first.depth,
    )
    built: list[Drafter] = []
    for name in names:
        tapes = [tape_named(recording, name) for recording in recordings]
        if tapes[0].is_model:
            draft_engine = ReplayEngine(
                lambda rows, context, requests: costs.draft_s(rows, context) * factor(clock.now_s()),
                clock,
                ScriptedVocabulary([b""] * first.vocab_size, tapes[0].end_ids),
            )
            built.append(ReplayModelDrafter(draft_engine, tapes, first.vocab_size))
        else:
            built.append(ReplayFreeDrafter(tapes, clock, free_s))
    loop = DecodingLoop(engine, built, cast(Policy, _Slow(policy, clock, own_s)), clock=clock)
    requests: list[Request] = []
    starts_s: list[float] = []
    decode_s = 0.0
    while len(requests) < len(recordings) or loop.active:
        while len(requests) < len(recordings) and len(loop.active) < concurrent:
            requests.append(_add(loop, recordings[len(requests)]))
            starts_s.append(clock.now_s())
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
                start_s,
                request.stats.decode_s,
                tuple(request.stats.arrivals_s),
            )
            for recording, request, start_s in zip(recordings, requests, starts_s, strict=True)
        ),
        decode_s,
    )


def check_recordings(recordings: Sequence[Recording]) -> None:
    """Raise unless recordings can share one loop.

    Raises:
        InputError: there are none, or they are of different vocabularies or depths.
    """
    if not recordings:
        raise InputError("there are no recordings to replay: make some with python -m benchmarks record")
    if len({(r.vocab_size, r.end_ids, r.depth, tuple(t.name for t in r.tapes)) for r in recordings}) > 1:
        raise InputError("the recordings are of different models, drafters or depths: replay each kind by itself")


def tape_named(recording: Recording, name: str) -> DrafterTape:
    """Return a drafter's tape.

    Raises:
        InputError: that drafter was not recorded.
    """
    for tape in recording.tapes:
        if tape.name == name:
            return tape
    raise InputError(f"drafter {name!r} was not recorded: there are {', '.join(t.name for t in recording.tapes) or 0}")


def _add(loop: DecodingLoop, recording: Recording) -> Request:
    params = SamplingParams(recording.temperature, top_k=0, top_p=1.0, min_p=0.0)
    rules = StopRules(recording.max_tokens, ignore_end=recording.ignore_end)
    # Which tokens the prompt had matters to nobody here, only how many.
    request = loop.add([0] * recording.num_prompt, params, rules)
    # Policies see the temperature of the recording; the rows say its tokens without any noise.
    request.verifier = CoupledVerifier(_GREEDY)
    return request


class _Slow:
    """A policy that takes virtual time to decide.

    Args:
        policy: that decides.
        clock: moved by ``own_s``.
        own_s: seconds of a round with drafts.
    """

    def __init__(self, policy: Policy, clock: VirtualClock, own_s: float) -> None:
        self._policy = policy
        self._clock = clock
        self._own_s = own_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Take the time, and decide."""
        self._clock.advance(self._own_s)
        self._policy.select(requests, trees)


PassCost: TypeAlias = Callable[[int, int, int], float]
"""Seconds of a pass, from its rows, the tokens in the cache before it, and the sequences that take part."""


@dataclass(slots=True)
class _Sequence:
    recording: Recording | None
    committed: int
    pending: PendingTree


class _Row:
    """Rows that have one token as their largest logit, as views of one array."""

    def __init__(self, vocab_size: int) -> None:
        self._size = vocab_size
        self._values = np.zeros(2 * vocab_size - 1, dtype=np.float32)
        self._values[vocab_size - 1] = 1.0
        self._values.setflags(write=False)

    def saying(self, token_id: int) -> FloatArray:
        start = self._size - 1 - token_id
        return self._values[start : start + self._size]


class ReplayOutput:
    """Rows that say what the recording says next, whatever was drafted before them."""

    def __init__(self, row: _Row, next_tokens: list[list[int]]) -> None:
        self._row = row
        self._next_tokens = next_tokens

    def wait(self) -> None:
        """Virtual passes are over at once."""

    def logits(self, step: int, output: int) -> FloatArray:
        """Return a row whose largest logit is the recorded token's."""
        return self._row.saying(self._next_tokens[step][output])

    def hidden_states(self, step: int, output: int) -> FloatArray:
        """There are none in recordings."""
        raise CapabilityError("recordings hold no hidden states")


class ReplayEngine:
    """Says recorded texts, at a price.

    The row after position ``i`` says the recorded token at ``i + 1``. Below a draft that the text does not follow that
    is not what the model would have said, but no walk ever comes there.

    Args:
        cost: seconds of a pass.
        clock: moved by ``cost``.
        vocabulary: of the recordings.
        recordings: said by the sequences in the order they are opened. Without, as for a draft model, rows are not
            to be read.
        max_depth: deepest tree of a round; ``None`` for no limit.
    """

    description = "replayed model"

    def __init__(
        self,
        cost: PassCost,
        clock: VirtualClock,
        vocabulary: ScriptedVocabulary,
        recordings: Sequence[Recording] = (),
        *,
        max_depth: int | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.capabilities = EngineCapabilities(
            context_length=_NO_LIMIT,
            max_rows=_NO_LIMIT,
            max_outputs=_NO_LIMIT,
            max_sequences=_NO_LIMIT,
            trees=True,
            # The loop drafts no deeper than can be taken back, which is how it hears what was recorded.
            max_rollback=max_depth,
            hidden_states=False,
            logit_tolerance=0.0,
        )
        self._cost = cost
        self._clock = clock
        self._row = _Row(vocabulary.size)
        self._recordings = list(recordings)
        self._sequences: dict[int, _Sequence] = {}
        self._opened = 0
        self._used = 0

    def open(self) -> int:
        """Start the sequence of the next recording."""
        handle = self._opened
        self._opened += 1
        recording = self._recordings[handle] if self._recordings else None
        self._sequences[handle] = _Sequence(recording, 0, PendingTree())
        return handle

    def forward(self, steps: Sequence[Step]) -> ReplayOutput:
        """Append the steps' rows and move the clock by the cost of the pass."""
        rows = 0
        next_tokens = []
        for step in steps:
            state = self._sequences[step.sequence]
            before = len(state.pending)
            state.pending.append(step.parents)
            rows += len(step.token_ids)
            next_tokens.append(self._next_tokens(state, before, step.outputs))
        self._clock.advance(self._cost(rows, self._used, len(steps)))
        self._used += rows
        return ReplayOutput(self._row, next_tokens)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        """Keep one path of the pending tree."""
        state = self._sequences[sequence]
        state.pending.check_path(path)
        self._used -= len(state.pending) - len(path)
        state.committed += len(path)
        state.pending.clear()

    def length(self, sequence: int) -> int:
        """Return the number of committed tokens."""
        return self._sequences[sequence].committed

    def fork(self, sequence: int) -> int:
        """Refuse: a recording is of a whole request."""
        raise CapabilityError("a replayed sequence cannot be forked: replay its prompt")

    def trim(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` committed tokens."""
        state = self._sequences[sequence]
        self._used -= state.committed - length + len(state.pending)
        state.committed = length
        state.pending.clear()

    def close_sequence(self, sequence: int) -> None:
        """Forget a sequence."""
        state = self._sequences.pop(sequence)
        self._used -= state.committed + len(state.pending)

    def close(self) -> None:
        """Forget all sequences."""
        self._sequences.clear()
        self._used = 0

    def _next_tokens(self, state: _Sequence, before: int, outputs: Sequence[int]) -> list[int]:
        recording, depths = state.recording, state.pending.depths
        if recording is None:
            return []
        text = recording.token_ids
        start = state.committed - recording.num_prompt
        # Past the text's end nothing is emitted any more, so anything may be said.
        return [text[min(start + depths[before + row], len(text) - 1)] for row in outputs]


class ReplayModelDrafter(DraftModelDrafter):
    """The draft-model drafter, its passes charged by the engine and its proposals from tapes.

    Args:
        engine: charges for passes.
        tapes: one for each request, in the order they begin.
        target_vocab_size: the target's number of token ids.
    """

    def __init__(self, engine: ReplayEngine, tapes: Sequence[DrafterTape], target_vocab_size: int) -> None:
        super().__init__(engine, target_vocab_size=target_vocab_size)
        self.name = tapes[0].name
        self._tapes = _Tapes(tapes)

    def begin(self, request: Request) -> None:
        """Take the next tape."""
        super().begin(request)
        self._tapes.begin(request)

    def end(self, request: Request) -> None:
        """Put the tape away."""
        super().end(request)
        self._tapes.end(request)

    def _read(
        self, job: DraftJob, frontier: int, output: ForwardOutput, row: int
    ) -> tuple[list[Proposal], float | None]:
        chain, depth = self._tapes.chain(job.request), job.tree.depths[frontier]
        if depth >= len(chain):
            return [], None
        level = chain[depth]
        wanted = job.budget.probability or job.budget.min_probability > 0.0
        if wanted and level.probability is not None and level.probability < job.budget.min_probability:
            return [], level.probability
        proposals = [
            Proposal(token_id, None, margin) for token_id, margin in zip(level.token_ids, level.margins, strict=True)
        ]
        return proposals[: job.budget.siblings], level.probability if wanted else None


class ReplayFreeDrafter:
    """A drafter without a model: proposes a tape's whole chain at once.

    Args:
        tapes: one for each request, in the order they begin.
        clock: moved by ``request_s``.
        request_s: seconds of asking it for one request.
    """

    def __init__(self, tapes: Sequence[DrafterTape], clock: VirtualClock, request_s: float) -> None:
        self.name = tapes[0].name
        self._tapes = _Tapes(tapes)
        self._clock = clock
        self._request_s = request_s

    def begin(self, request: Request) -> None:
        """Take the next tape."""
        self._tapes.begin(request)

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Propose what was recorded; a second call has nothing to add."""
        for job in jobs:
            self._clock.advance(self._request_s)
            budget, node = job.budget, ROOT
            for level in self._tapes.chain(job.request)[: budget.max_depth]:
                if level.probability is not None and level.probability < budget.min_probability:
                    break
                nodes = [
                    job.tree.add(node, token_id, self.name, evidence_of(level, index))
                    for index, token_id in enumerate(level.token_ids[: budget.siblings])
                ]
                node = nodes[0]
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """Nothing to do: tapes are read by position."""

    def end(self, request: Request) -> None:
        """Put the tape away."""
        self._tapes.end(request)

    def close(self) -> None:
        """Nothing is held."""


class _Tapes:
    """Which tape is whose."""

    def __init__(self, tapes: Sequence[DrafterTape]) -> None:
        self._tapes = tapes
        self._begun = 0
        self._by_request: dict[int, DrafterTape] = {}

    def begin(self, request: Request) -> None:
        self._by_request[request.id] = self._tapes[self._begun]
        self._begun += 1

    def chain(self, request: Request) -> Chain:
        return self._by_request[request.id].chains[request.num_output - 1]

    def end(self, request: Request) -> None:
        del self._by_request[request.id]
