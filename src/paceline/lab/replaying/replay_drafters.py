"""Drafters that read traces: what stands for the real ones in a replay."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.clock import VirtualClock
from paceline.core.request import Request
from paceline.core.tree import ROOT
from paceline.core.verify import Proposal
from paceline.drafters.base import Commit, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.base import ForwardOutput
from paceline.lab.replaying.models import ReplayEngine
from paceline.lab.replaying.recording import Chain, DrafterTrace, read_evidence


class ReplayModelDrafter(DraftModelDrafter):
    """The draft-model drafter, its passes charged by the engine and its proposals from traces.

    Args:
        engine: charges for passes.
        traces: one for each request, in the order they begin.
    """

    def __init__(self, engine: ReplayEngine, traces: Sequence[DrafterTrace], target_vocab_size: int) -> None:
        super().__init__(engine, target_vocab_size=target_vocab_size)
        self.name = traces[0].name
        self._traces = _Traces(traces)

    def begin(self, request: Request) -> None:
        super().begin(request)
        self._traces.begin(request)

    def end(self, request: Request) -> None:
        super().end(request)
        self._traces.end(request)

    def _read(
        self, job: DraftJob, frontier: int, output: ForwardOutput, row: int
    ) -> tuple[list[Proposal], float | None]:
        chain, depth = self._traces.chain(job.request), job.tree.depths[frontier]
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
        traces: one for each request, in the order they begin.
        clock: moved by ``request_s``.
        request_s: seconds of asking it for one request.
    """

    def __init__(self, traces: Sequence[DrafterTrace], clock: VirtualClock, request_s: float) -> None:
        self.name = traces[0].name
        self.end_ids = traces[0].end_ids
        levels = (level for trace in traces for chain in trace.chains for level in chain)
        self.says_margins = any(level.margins[0] is not None for level in levels)
        self._traces = _Traces(traces)
        self._clock = clock
        self._request_s = request_s

    def begin(self, request: Request) -> None:
        self._traces.begin(request)

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Propose what was recorded; a second call has nothing to add."""
        for job in jobs:
            self._clock.advance(self._request_s)
            budget, node = job.budget, ROOT
            for level in self._traces.chain(job.request)[: budget.max_depth]:
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
        self._traces.end(request)

    def close(self) -> None:
        """Nothing is held."""


class _Traces:
    """Which trace is whose."""

    def __init__(self, traces: Sequence[DrafterTrace]) -> None:
        self._traces = traces
        self._begun = 0
        self._by_request: dict[int, DrafterTrace] = {}

    def begin(self, request: Request) -> None:
        self._by_request[request.id] = self._traces[self._begun]
        self._begun += 1

    def chain(self, request: Request) -> Chain:
        return self._by_request[request.id].chains[request.num_output - 1]

    def end(self, request: Request) -> None:
        del self._by_request[request.id]
