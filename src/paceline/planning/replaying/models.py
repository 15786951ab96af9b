"""What stands for the models in a replay: a target that says the recorded text, and drafters that read tapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.clock import VirtualClock
from paceline.core.errors import CapabilityError
from paceline.core.request import Request
from paceline.core.tree import ROOT
from paceline.core.verify import Proposal
from paceline.drafters.base import Commit, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import EngineCapabilities, ForwardOutput, Step
from paceline.engines.pending import PendingTree
from paceline.engines.scripted import ScriptedVocabulary
from paceline.planning.replaying.recording import Chain, DrafterTape, Recording, evidence_of

_NO_LIMIT = 1 << 30

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
