"""Drafting with a head: a layer or two that read the target's own states, such as a model's MTP layer.

A head reads tokens in pairs with the state that the target left one token before, and says the token after::

    target's tokens     t0  t1  t2  ...  t(n-2)  t(n-1)           t(n-1) is the root, which the target has not read
    target's states     h0  h1  h2  ...  h(n-2)
    pairs it reads      (t1, h0)  (t2, h1)  ...  (t(n-1), h(n-2))  ->  d1
    drafts on           (d1, its own state)  ->  d2                (d2, its own state)  ->  d3

What it made of drafts is dropped after each round, and accepted tokens are read again with their true states: so what
it proposes depends on the text alone, whatever was drafted before.

A head that reads the target's cache has none of its own, and nothing to catch up with. All it reads of a text is its
end, and its drafts it reads at the same place::

    target's cache              t0  t1  t2  ...  t(n-2)
    all read at place n - 1     (t(n-1), h(n-2))  ->  d1     (d1, its own state)  ->  d2     (d2, its own state)  ->  d3

A head of blocks reads states of the text alone, and says all tokens of a block in one pass::

    states it reads             h0  h1  h2  ...  h(n-2)
    block                       t(n-1), masks  ->  d1  d2  d3  ...

Source: https://arxiv.org/abs/2404.19737 (several tokens at once), https://arxiv.org/abs/2412.19437, section 2.2 (MTP),
https://arxiv.org/abs/2602.06036 (DFlash), https://arxiv.org/abs/2607.05147 (DSpark).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, NoRoomError
from paceline.core.request import Request, StateSource
from paceline.core.tree import ROOT, Evidence
from paceline.core.vocabulary import Vocabulary
from paceline.drafters.base import Commit, DraftJob
from paceline.drafters.draft_model import ModelDrafter
from paceline.drafters.following import Follower, Rows
from paceline.drafters.rows import read_row
from paceline.engines.base import COMMITTED_END, Block, BlockHead, Engine, Step


@dataclass(slots=True, kw_only=True)
class _HeadFollower(Follower):
    """How a head follows one request, whose own list its ``text`` is: it never reads the first of it."""

    request: Request
    target: StateSource


class HeadDrafter(ModelDrafter[_HeadFollower]):
    """Proposes what a head of the target would say, in a chain.

    Args:
        engine: the head; closed with the drafter.
        target: the vocabulary of the target, whose states it reads.
        context_length: tokens of history that it sees at most; by default all its engine can hold.

    Raises:
        InputError: the context is too short, or longer than the engine's.
    """

    _shift = 1
    """How many tokens before a token the state is that the head reads it with."""

    def __init__(self, engine: Engine, *, target: Vocabulary, context_length: int | None = None) -> None:
        super().__init__(engine, target_vocab_size=target.size, end_ids=target.end_ids, context_length=context_length)

    def _follow(self, request: Request) -> _HeadFollower:
        if request.target is None:
            raise CapabilityError("a head reads states of the target, and this request has none")
        return _HeadFollower(text=request.token_ids, start=self._shift, request=request, target=request.target)

    def _catch_up_text(self, follower: _HeadFollower, request: Request) -> bool:
        """Begin anew where states between what was read and the text's end are gone."""
        if request.sequence < 0:
            return False
        first = self._first_readable(follower)
        if first >= len(follower.text) - 1 + self._shift:
            # The target's cache was restored without states: its next pass gives some.
            return False
        if follower.start + follower.cached < first:
            if follower.sequence is not None:
                self.pool.trim(follower.sequence, 0)
            follower.start, follower.cached = first, 0
        return True

    def _first_readable(self, follower: _HeadFollower) -> int:
        return follower.target.first_state(follower.request.sequence) + self._shift

    def _states(self, follower: _HeadFollower, start: int, stop: int) -> FloatArray:
        return follower.target.states(follower.request.sequence, start - self._shift, stop - self._shift)

    def _most_cached(self, follower: _HeadFollower, request: Request) -> int:
        return 0

    def _num_kept(self, follower: _HeadFollower, commit: Commit) -> int:
        return 0


class CacheHeadDrafter(HeadDrafter):
    """Proposes what a head would say that reads the target's cache, in a chain; such as an assistant of Gemma 4.

    Its sequences are those of the target (:func:`~paceline.engines.base.lender`), so it opens and keeps none.
    """

    def unread(self, request: Request) -> int:
        return 0

    def end(self, request: Request) -> None:
        self._end_round(self._followers.pop(request.id), 0)

    def _catch_up_text(self, follower: _HeadFollower, request: Request) -> bool:
        return request.sequence >= 0 and self._first_readable(follower) < len(follower.text)

    def _start_round(self, follower: _HeadFollower, job: DraftJob) -> None:
        self._end_round(follower, 0)  # where the last one was never decided
        if self._catch_up_text(follower, job.request):
            follower.sequence = job.request.sequence
            follower.tree, follower.frontier, follower.drafted = job.tree, ROOT, None

    def _end_round(self, follower: _HeadFollower, kept: int) -> None:
        if follower.sequence is not None:
            self.engine.commit(follower.sequence, ())
        follower.sequence = follower.tree = None
        follower.fed.clear()

    def _fits(self, follower: _HeadFollower) -> bool:
        return True

    def _feed(self, open_jobs: Sequence[tuple[DraftJob, _HeadFollower]]) -> list[Rows]:
        steps = []
        for _, follower in open_jobs:
            assert follower.sequence is not None
            token_id, states = follower.drafted, None
            if token_id is None:
                end = len(follower.text)
                token_id, states = follower.text[-1], self._states(follower, end - 1, end)
            # What was fed is the chain of nodes 0, 1, ... here: the root, and drafts below.
            steps.append(Step(follower.sequence, (token_id,), (len(follower.fed) - 1,), (0,), states))
        output = self.engine.forward(steps)
        for (_, follower), step in zip(open_jobs, steps, strict=True):
            follower.fed.append(step.token_ids[0])
        return [Rows(output, index, 1) for index in range(len(steps))]


class BlockHeadDrafter(HeadDrafter):
    """Proposes what a head says that drafts a block in one pass, in a chain; such as DFlash.

    Asking costs a pass whatever is made of it, so it has no :meth:`unread`: a policy learns what asking takes, and cuts
    what it is told.

    Every block is as long as the head was trained for, and other lengths would say other tokens: so what is proposed
    depends on the text alone here too.
    """

    _shift = 0

    def __init__(self, engine: BlockHead, *, target: Vocabulary, context_length: int | None = None) -> None:
        if context_length is None:
            # A block lies behind the text.
            context_length = engine.capabilities.context_length - engine.block_rows
        super().__init__(engine, target=target, context_length=context_length)
        self._head = engine

    def unread(self, request: Request) -> None:
        return None

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Add all that a block has to every tree."""
        open_jobs = []
        for job in jobs:
            follower = self._followers[job.request.id]
            self._start_round(follower, job)
            if follower.tree is job.tree and self._fits(follower) and follower.start < len(follower.text) - 1:
                open_jobs.append((job, follower))
        most = max(self.engine.capabilities.max_rows // self._head.block_rows, 1)
        try:
            self._read_states([follower for _, follower in open_jobs])
            for first in range(0, len(open_jobs), most):
                self._propose_blocks(open_jobs[first : first + most])
        except NoRoomError:
            pass  # the head's cache is full of other requests: those that are left draft without it
        return [False] * len(jobs)

    def _read_states(self, followers: Sequence[_HeadFollower]) -> None:
        """Have the head read the states of texts, but of their last tokens, which have none."""
        while True:
            room = self.engine.capabilities.max_rows
            steps, read = [], []
            for follower in followers:
                assert follower.sequence is not None
                first = follower.start + follower.cached
                count = min(len(follower.text) - 1 - first, room)
                if count > 0:
                    room -= count
                    states = self._states(follower, first, first + count)
                    parents = range(COMMITTED_END, COMMITTED_END + count)
                    steps.append(Step(follower.sequence, follower.text[first : first + count], parents, (), states))
                    read.append((follower, count))
            if not steps:
                return
            self.engine.forward(steps)
            for follower, count in read:
                assert follower.sequence is not None
                self.engine.commit(follower.sequence, range(count))
                follower.cached += count

    def _propose_blocks(self, jobs: Sequence[tuple[DraftJob, _HeadFollower]]) -> None:
        roots = [(follower.sequence, follower.text[-1]) for _, follower in jobs if follower.sequence is not None]
        for (job, follower), block in zip(jobs, self._head.draft_blocks(roots), strict=True):
            self._propose_block(job, follower, block)

    def _propose_block(self, job: DraftJob, follower: _HeadFollower, block: Block) -> None:
        # A chain: policies weigh no siblings of what is proposed all at once.
        budget = dataclasses.replace(job.budget, siblings=1)
        drafted: list[int] = []
        while len(drafted) < min(budget.max_depth, self._head.block_size):
            probability = block.confidence(drafted)
            if probability is not None and probability < budget.min_probability:
                return
            row = self._proposable_logits(block.logits(drafted))
            own = budget if probability is None else dataclasses.replace(budget, min_probability=0.0, probability=False)
            proposals, largest = read_row(DraftJob(job.request, job.tree, own), follower.frontier, row)
            if not proposals:
                return
            (proposal,) = proposals
            evidence = Evidence(largest if probability is None else probability, margin=proposal.margin)
            follower.frontier = job.tree.add(
                follower.frontier, proposal.token_id, self.name, evidence, proposal.draft_probs
            )
            drafted.append(proposal.token_id)
            if proposal.token_id in self.end_ids:
                return
