"""Drafting with a smaller model: one level of all trees per pass.

The drafter owns its engine's sequences. Its cache follows a request lazily: nothing is fed while the policy does not
ask, and the first pass after a pause feeds what was missed. For one request and one round::

    request.token_ids        t0 ... t(n-1)                  the last one is the tree's root
    draft cache, committed   t0 ... t(n-1)                  after catching up
    draft cache, pending           └─ d1 ─ d2               drafted tokens that were fed to draft the next level

The deepest level is proposed but not fed, so after a full acceptance the catch-up is that token and the bonus token.

A request that drafts for the first time starts from what the pool keeps of its text, so that no turn of a chat is read
twice (:mod:`paceline.engines.sequence_pool`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ConstraintError, InputError, NoRoomError, SamplingError
from paceline.core.request import Request
from paceline.core.sampling import largest_probability
from paceline.core.tree import ROOT, DraftTree, Evidence
from paceline.core.verify import Proposal
from paceline.drafters.base import Commit, DraftJob
from paceline.engines.base import COMMITTED_END, Engine, ForwardOutput, Step
from paceline.engines.sequence_pool import SequencePool


@dataclass(slots=True)
class _Follower:
    """How the draft's cache follows one request.

    Attributes:
        sequence: handle at the draft engine; ``None`` until the request first drafts.
        start: index in ``request.token_ids`` of the first cached token (above 0 once the draft's context overflowed).
        cached: committed tokens in the draft's cache.
        tree: tree being grown this round.
        frontier: tree node to extend next.
        fed: drafted tokens in the draft's cache: the chain from below the root to the frontier's parent.
        at_hand: tokens the pool holds of the text of a request that has not drafted; ``None`` if that must be asked.
    """

    sequence: int | None = None
    start: int = 0
    cached: int = 0
    tree: DraftTree | None = None
    frontier: int = ROOT
    fed: list[int] = field(default_factory=list)
    at_hand: int | None = None


class DraftModelDrafter:
    """Proposes what a smaller model would say that shares most token ids with the target.

    It grows a chain of its best proposal at every position; with siblings, the runners-up hang beside the chain.

    Args:
        engine: the draft model; closed with the drafter.
        target_vocab_size: the target's number of token ids; the draft's ids beyond are never proposed.
        unshared_ids: ids of the draft that are no token, or another one, to the target; never proposed either.
        end_ids: tokens after which the target says nothing; by default those of the draft.
        context_length: tokens of history the draft sees at most; by default all its engine can hold.
        pool: gives out the engine's sequences; by default one that keeps nothing, so that several drafters may share an
            engine.

    Attributes:
        engine: the draft model.
        pool: as given, or made.
        end_ids: as given.

    Raises:
        CapabilityError: the draft model cannot take back tokens that it was fed over several passes.
        InputError: the context is too short, or longer than the engine's.
    """

    name = "draft"

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
        if engine.capabilities.max_rollback is not None:
            raise CapabilityError(
                f"{engine.description} can take back {engine.capabilities.max_rollback} tokens of one pass only, and "
                "drafting feeds one token a pass: choose a draft model without recurrent layers, or --drafters suffix"
            )
        capacity = engine.capabilities.context_length
        context_length = capacity if context_length is None else context_length
        if not 2 <= context_length <= capacity:
            most = f"at most the {capacity} that it was loaded for" if capacity >= 2 else "load it for more"
            raise InputError(f"a draft context of {context_length} tokens (-cd): give at least 2, and {most}")
        vocabulary = engine.vocabulary
        self.engine = engine
        self.pool = pool or SequencePool(engine, max_idle=0, max_saved_bytes=0)
        self.end_ids = vocabulary.end_ids if end_ids is None else frozenset(end_ids)
        self._width, self._masked = _proposable(min(target_vocab_size, vocabulary.size), unshared_ids)
        self._lacks_ids = target_vocab_size > vocabulary.size
        self._vocab_size = vocabulary.size
        # What a draft lacks is mostly a token of chat templates. It parts turns, as an end of text parts texts.
        self._stand_in = min(vocabulary.end_ids, default=0)
        self._context_length = context_length
        self._followers: dict[int, _Follower] = {}

    def begin(self, request: Request) -> None:
        """Remember the request; nothing is fed before the policy asks for drafts."""
        self._followers[request.id] = _Follower()

    def unread(self, request: Request) -> int:
        """Return the length of what was said since the model last read, at most its context."""
        follower = self._followers[request.id]
        cached = follower.cached
        if follower.sequence is None:
            if follower.at_hand is None:
                follower.at_hand = self.pool.match_length(
                    request.token_ids, most=self._most_cached(request), namespace=request.cache.namespace
                )
            cached = follower.at_hand
        return min(len(request.token_ids) - follower.start - cached, self._context_length)

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Add one level to every tree, in one pass of the draft (more only to catch up)."""
        followers = [self._followers[job.request.id] for job in jobs]
        for job, follower in zip(jobs, followers, strict=True):
            if follower.tree is not job.tree:
                self._start_round(follower, job)
        open_jobs = [
            (job, follower)
            for job, follower in zip(jobs, followers, strict=True)
            if follower.sequence is not None
            and job.tree.depths[follower.frontier] < job.budget.max_depth
            and self._fits(job, follower)
        ]
        # A level of more trees than one pass has rows: the first ones draft.
        del open_jobs[self.engine.capabilities.max_rows :]
        grown = set()
        if open_jobs:
            try:
                output, rows = self._feed(open_jobs)
            except NoRoomError:
                # The draft's cache is full of other requests: this round drafts without the model.
                return [False] * len(jobs)
            for (job, follower), row in zip(open_jobs, rows, strict=True):
                if self._propose(job, follower, output, row):
                    grown.add(job.request.id)
        return [
            job.request.id in grown and job.tree.depths[follower.frontier] < job.budget.max_depth
            for job, follower in zip(jobs, followers, strict=True)
        ]

    def observe(self, request: Request, commit: Commit) -> None:
        """Keep the accepted tokens that are in the draft's cache, drop the other drafts."""
        follower = self._followers[request.id]
        if follower.tree is None:
            return
        # The last emitted token stays out even if it was fed: the next round feeds it to get its row.
        kept = 0
        for fed_token, token_id in zip(follower.fed, commit.token_ids[:-1], strict=False):
            if fed_token != token_id:
                break
            kept += 1
        self._end_round(follower, kept)

    def end(self, request: Request) -> None:
        """Give the request's sequence back to the pool."""
        follower = self._followers[request.id]
        if follower.sequence is None:
            # An interrupt may have come between the handle's birth and its reaching the follower.
            self.pool.discard_of(request.token_ids)
        else:
            self.pool.release(follower.sequence)
            self._look_again()
        del self._followers[request.id]

    def close(self) -> None:
        """Close the draft engine."""
        self._followers.clear()
        self.pool.drop_all()
        self.engine.close()

    def _start_round(self, follower: _Follower, job: DraftJob) -> None:
        if follower.tree is not None:
            # The last round was never decided (its pass failed, or had no row left for this request): its drafts are
            # void, and the root, which has been fed, is fed again for its row.
            self._end_round(follower, 0)
            if follower.sequence is not None and follower.start + follower.cached == len(job.request.token_ids):
                follower.cached -= 1
                self.pool.trim(follower.sequence, follower.cached)
        if follower.sequence is None:
            if len([f for f in self._followers.values() if f.sequence is not None]) >= (
                self.engine.capabilities.max_sequences
            ):
                return
            request = job.request
            follower.sequence = self.pool.open(
                request.token_ids, most=self._most_cached(request), namespace=request.cache.namespace
            ).sequence
            follower.cached = self.engine.length(follower.sequence)
            self._look_again()
        follower.tree = job.tree
        follower.frontier = ROOT

    def _most_cached(self, request: Request) -> int:
        """Return how much of a text the cache may hold beforehand: the root is read for its row.

        Of a text that is longer than the draft's context, the end is read and the beginning is of no use. A request
        that is to read its prompt anew does so here too.
        """
        length = len(request.token_ids)
        return length - 1 if request.cache.cache_prompt and length <= self._context_length else 0

    def _look_again(self) -> None:
        """Forget what the pool held: it has changed."""
        for follower in self._followers.values():
            follower.at_hand = None

    def _end_round(self, follower: _Follower, kept: int) -> None:
        if follower.fed and follower.sequence is not None:
            self.engine.commit(follower.sequence, range(kept))
            follower.cached += kept
        follower.fed.clear()
        follower.tree = None

    def _fits(self, job: DraftJob, follower: _Follower) -> bool:
        """Make room in the draft's own context, if need be by forgetting the oldest half of it."""
        length = len(job.request.token_ids) - follower.start
        depth = job.tree.depths[follower.frontier]
        if length + depth <= self._context_length:
            return True
        if depth > 0:
            return False
        # Which history a draft sees changes what it proposes, never what is emitted.
        assert follower.sequence is not None
        self.pool.hold(follower.sequence, ())
        follower.start = len(job.request.token_ids) - self._context_length // 2
        follower.cached = 0
        self.pool.trim(follower.sequence, 0)
        return True

    def _feed(self, open_jobs: Sequence[tuple[DraftJob, _Follower]]) -> tuple[ForwardOutput, list[int]]:
        """Feed every frontier node, and before it whatever the cache lacks.

        Returns:
            The output of the last pass and, for each job, its step in that pass.
        """
        capabilities = self.engine.capabilities
        while True:
            room = capabilities.max_rows
            steps: list[Step] = []
            waiting = False
            for index, (job, follower) in enumerate(open_jobs):
                assert follower.sequence is not None
                left = len(open_jobs) - index - 1
                if follower.frontier == ROOT:
                    missing = self._readable(job.request.token_ids[follower.start + follower.cached :])
                    # Keep a row for each job that follows, so that all frontiers can meet in the last pass; the
                    # last token of a job is held back until they do.
                    chunk = missing[: room - left]
                    waiting = waiting or len(chunk) < len(missing)
                    steps.append(
                        Step(
                            follower.sequence,
                            chunk,
                            range(COMMITTED_END, COMMITTED_END + len(chunk)),
                            (len(chunk) - 1,),
                        )
                    )
                    room -= len(chunk)
                else:
                    # The fed chain is nodes 0, 1, ... of the pending tree, so the last of them is the parent.
                    parent = len(follower.fed) - 1
                    token_id = job.tree.token_ids[follower.frontier]
                    steps.append(Step(follower.sequence, (token_id,), (parent,), (0,)))
                    room -= 1
            if waiting:
                self._catch_up(open_jobs)
                continue
            output = self.engine.forward(steps)
            for (job, follower), step in zip(open_jobs, steps, strict=True):
                if follower.frontier == ROOT:
                    assert follower.sequence is not None
                    self.engine.commit(follower.sequence, range(len(step.token_ids)))
                    follower.cached += len(step.token_ids)
                else:
                    follower.fed.append(job.tree.token_ids[follower.frontier])
            return output, list(range(len(steps)))

    def _catch_up(self, open_jobs: Sequence[tuple[DraftJob, _Follower]]) -> None:
        """Feed one pass of missing tokens, all but the last of each request, and commit them."""
        room = self.engine.capabilities.max_rows
        steps = []
        fed = []
        for job, follower in open_jobs:
            assert follower.sequence is not None
            missing = self._readable(job.request.token_ids[follower.start + follower.cached : -1])
            chunk = missing[:room]
            if follower.frontier == ROOT and chunk:
                room -= len(chunk)
                parents = range(COMMITTED_END, COMMITTED_END + len(chunk))
                steps.append(Step(follower.sequence, chunk, parents, ()))
                fed.append((follower, len(chunk)))
        self.engine.forward(steps)
        for follower, count in fed:
            assert follower.sequence is not None
            self.engine.commit(follower.sequence, range(count))
            follower.cached += count

    def _readable(self, token_ids: list[int]) -> list[int]:
        """Put an id of the draft's own in the place of those that it has no embedding for."""
        if not self._lacks_ids:
            return token_ids
        size, stand_in = self._vocab_size, self._stand_in
        return [token_id if token_id < size else stand_in for token_id in token_ids]

    def _propose(self, job: DraftJob, follower: _Follower, output: ForwardOutput, row: int) -> bool:
        """Add the proposals of one row below the frontier; return whether the chain can go on."""
        proposals, probability = self._read(job, follower.frontier, output, row)
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
        follower.frontier = nodes[0]
        # Nothing follows the end of an answer.
        return proposals[0].token_id not in self.end_ids

    def _read(
        self, job: DraftJob, frontier: int, output: ForwardOutput, row: int
    ) -> tuple[list[Proposal], float | None]:
        """Return what a row proposes below the frontier, best first, and its largest probability if asked for.

        There are no proposals where that probability is below the budget's, or where nothing may be proposed. A token
        that is forced has all of it.
        """
        request, tree, budget = job.request, job.tree, job.budget
        sampler = request.verifier.sampler
        drafted = tree.path_tokens(frontier) if sampler.reads_history else []
        history = [*request.token_ids, *drafted] if sampler.reads_history else ()
        forced = sampler.forced(history)
        logits = self._proposable_logits(output.logits(row, 0))
        if forced is not None and (forced >= len(logits) or logits[forced] == -np.inf):
            # The draft knows no such token.
            return [], None
        params = request.params
        probability: float | None = None
        if budget.probability or budget.min_probability > 0.0:
            probability = 1.0
            if forced is None:
                try:
                    allowed = sampler.constrained(logits, history)
                except ConstraintError:
                    return [], None
                probability = largest_probability(allowed if params.greedy else allowed / params.temperature)
            if probability < budget.min_probability:
                return [], probability
        position = len(request.token_ids) + tree.depths[frontier]
        try:
            proposals = request.verifier.propose(logits, position, history, budget.siblings, margins=budget.margin)
        except (SamplingError, ConstraintError):
            # All that the draft may propose here is forbidden; the target has more to choose from.
            proposals = []
        return proposals, probability

    def _proposable_logits(self, logits: FloatArray) -> FloatArray:
        """Cut a row ``[vocab]`` of the draft to what it may propose; other entries before the cut become ``-inf``."""
        logits = logits[: self._width]
        if not len(self._masked):
            return logits
        logits = logits.copy()  # rows are borrowed
        logits[self._masked] = -np.inf
        return logits


def _proposable(size: int, unshared_ids: Iterable[int]) -> tuple[int, npt.NDArray[np.int64]]:
    """Return where to cut rows of ``size`` logits, and which entries before the cut may not be proposed.

    Most vocabularies differ in padding, which lies at the end: a cut costs nothing, a masked row is a copy.
    """
    unshared = {token_id for token_id in unshared_ids if token_id < size}
    while size - 1 in unshared:
        size -= 1
        unshared.remove(size)
    return size, np.array(sorted(unshared), dtype=np.int64)
