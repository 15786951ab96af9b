"""Drafting with a smaller model that shares most token ids with the target: one level of all trees per pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import numpy.typing as npt

from paceline.core.arrays import FloatArray
from paceline.core.request import Request
from paceline.core.tree import Evidence
from paceline.core.verify import Proposal
from paceline.drafters.base import Commit, DraftJob
from paceline.drafters.following import Follower, FollowerT, FollowingDrafter, Rows
from paceline.drafters.rows import read_row
from paceline.engines.base import Engine, ForwardOutput
from paceline.engines.sequence_pool import SequencePool


class ModelDrafter(FollowingDrafter[FollowerT]):
    """Proposes what a model would say that shares most token ids with the target.

    It grows a chain of its best proposal at every position; with siblings, the runners-up hang beside the chain.

    Args:
        engine: the draft model; closed with the drafter.
        target_vocab_size: the target's number of token ids; the draft's ids beyond are never proposed.
        unshared_ids: ids of the draft that are no token, or another one, to the target; never proposed either.
        end_ids: tokens after which the target says nothing; by default those of the draft.
        context_length: tokens of history the draft sees at most; by default all its engine can hold.
        pool: gives out the engine's sequences; by default one that keeps nothing, so that several drafters may share an
            engine.

    Raises:
        CapabilityError: the draft model cannot take back tokens that it was fed over several passes.
        InputError: the context is too short, or longer than the engine's.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        target_vocab_size: int,
        unshared_ids: Iterable[int] = (),
        end_ids: Collection[int] | None = None,
        context_length: int | None = None,
        pool: SequencePool | None = None,
    ) -> None:
        vocabulary = engine.vocabulary
        super().__init__(
            engine,
            end_ids=vocabulary.end_ids if end_ids is None else end_ids,
            context_length=context_length,
            pool=pool,
        )
        self._width, self._masked = _proposable(min(target_vocab_size, vocabulary.size), unshared_ids)
        self._lacks_ids = target_vocab_size > vocabulary.size
        self._vocab_size = vocabulary.size
        # What a draft lacks is mostly a token of chat templates. It parts turns, as an end of text parts texts.
        self._stand_in = min(vocabulary.end_ids, default=0)

    def _readable(self, token_ids: list[int]) -> list[int]:
        """Put an id of the draft's own in the place of those that it has no embedding for."""
        if not self._lacks_ids:
            return token_ids
        size, stand_in = self._vocab_size, self._stand_in
        return [token_id if token_id < size else stand_in for token_id in token_ids]

    def _propose(self, job: DraftJob, follower: FollowerT, rows: Rows) -> bool:
        proposals, probability = self._read(job, follower.frontier, rows.output, rows.step)
        if not proposals:
            return False
        nodes = [
            job.tree.add(
                follower.frontier,
                proposal.token_id,
                self.name,
                Evidence(probability, margin=proposal.margin),
                proposal.draft_probs,
            )
            for proposal in proposals
        ]
        follower.frontier, follower.drafted = nodes[0], proposals[0].token_id
        # Nothing follows the end of an answer.
        return proposals[0].token_id not in self.end_ids

    def _read(
        self, job: DraftJob, frontier: int, output: ForwardOutput, row: int
    ) -> tuple[list[Proposal], float | None]:
        return read_row(job, frontier, self._proposable_logits(output.logits(row, 0)))

    def _proposable_logits(self, logits: FloatArray) -> FloatArray:
        """Cut a row ``[vocab]`` of the draft to what it may propose; other entries before the cut become ``-inf``."""
        logits = logits[: self._width]
        if not len(self._masked):
            return logits
        logits = logits.copy()  # rows are borrowed
        logits[self._masked] = -np.inf
        return logits


class DraftModelDrafter(ModelDrafter[Follower]):
    """Proposes what a smaller model would say that shares most token ids with the target."""

    def _follow(self, request: Request) -> Follower:
        return Follower(request.token_ids)

    def _num_kept(self, follower: Follower, commit: Commit) -> int:
        # The last emitted token stays out even if it was fed: the next round feeds it to get its row.
        kept = 0
        for fed_token, token_id in zip(follower.fed, commit.token_ids[:-1], strict=False):
            if fed_token != token_id:
                break
            kept += 1
        return kept


def _proposable(size: int, unshared_ids: Iterable[int]) -> tuple[int, npt.NDArray[np.int64]]:
    """Return where to cut rows of ``size`` logits, and which entries before the cut may not be proposed.

    Most vocabularies differ in padding, which lies at the end: a cut costs nothing, a masked row is a copy.
    """
    unshared = {token_id for token_id in unshared_ids if token_id < size}
    while size - 1 in unshared:
        size -= 1
        unshared.remove(size)
    return size, np.array(sorted(unshared), dtype=np.int64)
