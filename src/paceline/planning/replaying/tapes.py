"""Drafters that read tapes: what stands for the real ones in a replay."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.clock import VirtualClock
from paceline.core.request import Request
from paceline.core.tree import ROOT
from paceline.core.verify import Proposal
from paceline.drafters.base import Commit, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import ForwardOutput
from paceline.planning.replaying.models import ReplayEngine
from paceline.planning.replaying.recording import Chain, DrafterTape, evidence_of


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
        self.end_ids = tapes[0].end_ids
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
