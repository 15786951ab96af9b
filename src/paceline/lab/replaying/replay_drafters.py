"""Drafters that read traces: what stands for the real ones in a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.clock import VirtualClock
from paceline.core.request import Request
from paceline.core.tree import ROOT
from paceline.core.verify import Proposal
from paceline.drafters.base import Commit, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import ForwardOutput
from paceline.engines.sequence_pool import SequencePool
from paceline.lab.replaying.models import ReplayEngine
from paceline.lab.replaying.recording import Chain, DrafterTrace, read_evidence


class ReplayModelDrafter(DraftModelDrafter):
    """The draft-model drafter, its passes charged by the engine and its proposals from traces.

    Args:
        engine: charges for passes.
        traces: of all texts.
        by_request: which of them is a request's, by its id.
        pool: gives out the engine's sequences, as a real one's.
    """

    def __init__(
        self,
        engine: ReplayEngine,
        traces: Sequence[DrafterTrace],
        by_request: Mapping[int, DrafterTrace],
        target_vocab_size: int,
        *,
        pool: SequencePool | None = None,
    ) -> None:
        super().__init__(engine, target_vocab_size=target_vocab_size, pool=pool)
        self.name = traces[0].name
        self._by_request = by_request

    def _read(
        self, job: DraftJob, frontier: int, output: ForwardOutput, row: int
    ) -> tuple[list[Proposal], float | None]:
        chain, depth = _chain(self._by_request, job.request), job.tree.depths[frontier]
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
    """A drafter that proposes a trace's whole chain at once: without a model, or with one that needs no pass a level.

    Args:
        traces: of all texts.
        by_request: which of them is a request's, by its id.
        clock: moved by ``request_s``.
        request_s: seconds of asking it for one request.
    """

    def __init__(
        self,
        traces: Sequence[DrafterTrace],
        by_request: Mapping[int, DrafterTrace],
        clock: VirtualClock,
        request_s: float,
    ) -> None:
        self.name = traces[0].name
        self.end_ids = traces[0].end_ids
        levels = (level for trace in traces for chain in trace.chains for level in chain)
        self.says_margins = any(level.margins[0] is not None for level in levels)
        self._by_request = by_request
        self._clock = clock
        self._request_s = request_s

    def begin(self, request: Request) -> None:
        """Nothing is read."""

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Propose what was recorded; a second call has nothing to add."""
        for job in jobs:
            self._clock.advance(self._request_s)
            budget, node = job.budget, ROOT
            for level in _chain(self._by_request, job.request)[: budget.max_depth]:
                if level.probability is not None and level.probability < budget.min_probability:
                    break
                nodes = [
                    job.tree.add(node, token_id, self.name, read_evidence(level, index))
                    for index, token_id in enumerate(level.token_ids[: budget.siblings])
                ]
                node = nodes[0]
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """Nothing to do: traces are read by position."""

    def end(self, request: Request) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing is held."""


def _chain(by_request: Mapping[int, DrafterTrace], request: Request) -> Chain:
    return by_request[request.id].chains[request.num_output - 1]
