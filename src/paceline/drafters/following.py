"""Following requests with a model's cache: what every drafter with a model shares.

The drafter owns its engine's sequences. Its cache follows a request lazily: nothing is fed while the policy does not
ask, and the first pass after a pause feeds what was missed. For one request and one round::

    follower.text            t0 ... t(n-1)                  what the model reads of the request
    draft cache, committed   t0 ... t(n-1)                  after catching up
    draft cache, pending           └─ d1 ─ d2               drafted tokens that were fed to draft the next level

The latest drafted token is proposed but not fed, so after a full acceptance the catch-up is that token and the bonus
token.

A request that drafts for the first time starts from what the pool keeps of its text, so that no turn of a chat is read
twice (:mod:`paceline.engines.sequence_pool`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, InputError, NoRoomError
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import Commit, DraftJob
from paceline.engines.base import COMMITTED_END, Engine, ForwardOutput, Step
from paceline.engines.sequence_pool import SequencePool


@dataclass(slots=True)
class Follower:
    """How the draft's cache follows one request.

    Attributes:
        text: tokens that the model reads of the request, all of them. It is the same list for as long as the follower
            lives.
        sequence: handle at the draft engine; ``None`` until the request first drafts.
        start: index in ``text`` of the first cached token (above 0 once the draft's context overflowed).
        cached: committed tokens in the draft's cache.
        tree: tree being grown this round.
        frontier: tree node to extend next.
        drafted: the latest drafted token, which is fed next; ``None`` where the text is still to be read to its end.
        fed: drafted tokens in the draft's cache, all before ``drafted``.
        at_hand: tokens the pool holds of the text of a request that has not drafted; ``None`` if that must be asked.
    """

    text: list[int]
    sequence: int | None = None
    start: int = 0
    cached: int = 0
    tree: DraftTree | None = None
    frontier: int = ROOT
    drafted: int | None = None
    fed: list[int] = field(default_factory=list)
    at_hand: int | None = None

    @property
    def num_pending(self) -> int:
        """Number of drafted tokens, those that were fed and the one that is fed next."""
        return len(self.fed) + (self.drafted is not None)


@dataclass(frozen=True, slots=True)
class Rows:
    """The draft's rows of one request in one pass, ``count`` of them, borrowed until the next pass."""

    output: ForwardOutput
    step: int
    count: int

    @property
    def last(self) -> FloatArray:
        """Logits ``[draft vocab]`` of what follows the latest token."""
        return self.output.logits(self.step, self.count - 1)

    @property
    def before_last(self) -> FloatArray | None:
        """Logits ``[draft vocab]`` of what follows the token before that; ``None`` where they were not asked for."""
        return self.output.logits(self.step, self.count - 2) if self.count > 1 else None


FollowerT = TypeVar("FollowerT", bound=Follower)


class FollowingDrafter(ABC, Generic[FollowerT]):
    """A drafter whose model follows each request with a cache, one level of all trees per pass.

    Args:
        engine: the draft model; closed with the drafter.
        end_ids: of the target: tokens after which it says nothing.
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
    says_margins = True
    """Whether proposals have margins for evidence, by which they are judged; see the guide to drafters."""
    _num_fresh = 1
    """Tokens at a text's end that are always read anew, for their rows."""

    def __init__(
        self,
        engine: Engine,
        *,
        end_ids: Collection[int],
        context_length: int | None = None,
        pool: SequencePool | None = None,
    ) -> None:
        if engine.capabilities.max_rollback is not None:
            raise CapabilityError(
                f"{engine.description} can take back {engine.capabilities.max_rollback} tokens of one pass only, and "
                "drafting feeds one token a pass: choose a draft model without recurrent layers, or "
                "`drafters=['suffix']`"
            )
        capacity = engine.capabilities.context_length
        context_length = capacity if context_length is None else context_length
        if not 2 <= context_length <= capacity:
            most = f"at most the {capacity} that it was loaded for" if capacity >= 2 else "load it for more"
            raise InputError(
                f"a draft context of {context_length} tokens (`DraftOptions.context_length`): give at "
                f"least 2, and {most}"
            )
        self.engine = engine
        self.pool = pool or SequencePool(engine, max_idle=0, max_saved_bytes=0)
        self.end_ids = frozenset(end_ids)
        self._context_length = context_length
        self._followers: dict[int, FollowerT] = {}

    # --- what each of them does in its own way ------------------------------------------------------------------------

    @abstractmethod
    def _follow(self, request: Request) -> FollowerT:
        """Return a follower for a new request."""

    @abstractmethod
    def _propose(self, job: DraftJob, follower: FollowerT, rows: Rows) -> bool:
        """Add the proposals of the latest row below the frontier; return whether the chain can go on.

        Sets ``frontier`` and ``drafted``, which is fed next.
        """

    @abstractmethod
    def _num_kept(self, follower: FollowerT, commit: Commit) -> int:
        """Return how many of the fed drafts became text in a round, and are worth keeping in the cache."""

    def _catch_up_text(self, follower: FollowerT, request: Request) -> bool:
        """Bring ``follower.text`` up to the request's; return whether a draft can start from its end."""
        return True

    def _readable(self, token_ids: list[int]) -> list[int]:
        """Return tokens of the text as the model is fed them."""
        return token_ids

    def _first_readable(self, follower: FollowerT) -> int:
        """Return the first token of the text that the model can begin to read at."""
        return 0

    def _states(self, follower: FollowerT, start: int, stop: int) -> FloatArray | None:
        """Return the states ``[stop - start, width]`` that a head reads these tokens of the text with."""
        return None

    def _outputs(self, num_tokens: int, num_jobs: int) -> tuple[int, ...]:
        """Return the rows wanted of a text's last ``num_tokens`` tokens, the last among them."""
        return (num_tokens - 1,)

    # --- the drafter's contract ---------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        self._followers[request.id] = self._follow(request)

    def unread(self, request: Request) -> int | None:
        """Return the length of what was said since the model last read, at most its context."""
        follower = self._followers[request.id]
        self._catch_up_text(follower, request)
        cached = follower.cached
        if follower.sequence is None:
            if follower.at_hand is None:
                follower.at_hand = self.pool.match_length(
                    follower.text, most=self._most_cached(follower, request), namespace=request.cache.namespace
                )
            cached = follower.at_hand
        return min(len(follower.text) - follower.start - cached, self._context_length)

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Add one level to every tree, in one pass of the draft (more only to catch up)."""
        followers = [self._followers[job.request.id] for job in jobs]
        for job, follower in zip(jobs, followers, strict=True):
            if follower.tree is not job.tree:
                self._start_round(follower, job)
        open_jobs = [
            (job, follower)
            for job, follower in zip(jobs, followers, strict=True)
            if follower.tree is job.tree
            and job.tree.depths[follower.frontier] < job.budget.max_depth
            and self._fits(follower)
        ]
        # A level of more trees than one pass has rows: the first ones draft.
        del open_jobs[self.engine.capabilities.max_rows :]
        grown = set()
        if open_jobs:
            try:
                all_rows = self._feed(open_jobs)
            except NoRoomError:
                # The draft's cache is full of other requests: this round drafts without the model.
                return [False] * len(jobs)
            for (job, follower), rows in zip(open_jobs, all_rows, strict=True):
                if self._propose(job, follower, rows):
                    grown.add(job.request.id)
        return [
            job.request.id in grown and job.tree.depths[follower.frontier] < job.budget.max_depth
            for job, follower in zip(jobs, followers, strict=True)
        ]

    def observe(self, request: Request, commit: Commit) -> None:
        follower = self._followers[request.id]
        if follower.tree is not None:
            self._end_round(follower, self._num_kept(follower, commit))

    def end(self, request: Request) -> None:
        follower = self._followers[request.id]
        if follower.sequence is None:
            # An interrupt may have come after the handle was made and before the follower had it.
            self.pool.discard_owned(follower.text)
        else:
            self.pool.release(follower.sequence)
            self._look_again()
        del self._followers[request.id]

    def close(self) -> None:
        self._followers.clear()
        self.pool.drop_all()
        self.engine.close()

    # --- following ----------------------------------------------------------------------------------------------------

    def _start_round(self, follower: FollowerT, job: DraftJob) -> None:
        if follower.tree is not None:
            # The last round was never decided (its pass failed, or had no row left for this request): its drafts are
            # void, and the root is fed again for its row.
            self._end_round(follower, 0)
            if follower.sequence is not None and follower.start + follower.cached == len(follower.text):
                follower.cached -= 1
                self.pool.trim(follower.sequence, follower.cached)
        if not self._catch_up_text(follower, job.request):
            return
        if follower.sequence is None:
            if len([f for f in self._followers.values() if f.sequence is not None]) >= (
                self.engine.capabilities.max_sequences
            ):
                return
            request = job.request
            follower.sequence = self.pool.open(
                follower.text, most=self._most_cached(follower, request), namespace=request.cache.namespace
            ).sequence
            follower.cached = self.engine.length(follower.sequence)
            self._look_again()
        follower.tree = job.tree
        follower.frontier = ROOT
        follower.drafted = None

    def _most_cached(self, follower: FollowerT, request: Request) -> int:
        """Return how much of a text the cache may hold beforehand: the end is read for its rows.

        Of a text that is longer than the draft's context, the end is read and the beginning is of no use. A request
        that is to read its prompt anew does so here too.
        """
        length = len(follower.text)
        is_of_use = request.cache.cache_prompt and length <= self._context_length
        return max(length - self._num_fresh, 0) if is_of_use else 0

    def _look_again(self) -> None:
        """Forget what the pool held, which has changed."""
        for follower in self._followers.values():
            follower.at_hand = None

    def _end_round(self, follower: FollowerT, kept: int) -> None:
        if follower.fed and follower.sequence is not None:
            self.engine.commit(follower.sequence, range(kept))
            follower.cached += kept
        follower.fed.clear()
        follower.tree = None

    def _fits(self, follower: FollowerT) -> bool:
        """Make room in the draft's own context, if need be by forgetting the oldest half of it."""
        length = len(follower.text) - follower.start
        if length + follower.num_pending <= self._context_length:
            return True
        if follower.num_pending > 0:
            return False
        # Which history a draft sees changes what it proposes, never what is emitted.
        assert follower.sequence is not None
        self.pool.hold(follower.sequence, ())
        follower.start = max(len(follower.text) - self._context_length // 2, self._first_readable(follower))
        follower.cached = 0
        self.pool.trim(follower.sequence, 0)
        return True

    def _feed(self, open_jobs: Sequence[tuple[DraftJob, FollowerT]]) -> list[Rows]:
        """Feed the latest drafted token of every job, or before any was drafted what the cache lacks of the text."""
        capabilities = self.engine.capabilities
        while True:
            room = capabilities.max_rows
            steps: list[Step] = []
            waiting = False
            for index, (_, follower) in enumerate(open_jobs):
                assert follower.sequence is not None
                left = len(open_jobs) - index - 1
                if follower.drafted is None:
                    first = follower.start + follower.cached
                    missing = self._readable(follower.text[first:])
                    # Keep a row for each job that follows, so that all frontiers can meet in the last pass; the
                    # last token of a job is held back until they do.
                    chunk = missing[: room - left]
                    waiting = waiting or len(chunk) < len(missing)
                    steps.append(
                        Step(
                            follower.sequence,
                            chunk,
                            range(COMMITTED_END, COMMITTED_END + len(chunk)),
                            self._outputs(len(chunk), len(open_jobs)),
                            self._states(follower, first, first + len(chunk)),
                        )
                    )
                    room -= len(chunk)
                else:
                    # The fed chain is nodes 0, 1, ... of the pending tree, so the last of them is the parent.
                    parent = len(follower.fed) - 1
                    steps.append(Step(follower.sequence, (follower.drafted,), (parent,), (0,)))
                    room -= 1
            if waiting:
                self._read_on(open_jobs)
                continue
            output = self.engine.forward(steps)
            for (_, follower), step in zip(open_jobs, steps, strict=True):
                if follower.drafted is None:
                    assert follower.sequence is not None
                    self.engine.commit(follower.sequence, range(len(step.token_ids)))
                    follower.cached += len(step.token_ids)
                else:
                    follower.fed.append(follower.drafted)
            return [Rows(output, index, len(step.outputs)) for index, step in enumerate(steps)]

    def _read_on(self, open_jobs: Sequence[tuple[DraftJob, FollowerT]]) -> None:
        """Feed one pass of missing tokens, all but the last of each request, and commit them."""
        room = self.engine.capabilities.max_rows
        steps = []
        fed = []
        for _, follower in open_jobs:
            assert follower.sequence is not None
            first = follower.start + follower.cached
            missing = self._readable(follower.text[first:-1])
            chunk = missing[:room]
            if follower.drafted is None and chunk:
                room -= len(chunk)
                parents = range(COMMITTED_END, COMMITTED_END + len(chunk))
                states = self._states(follower, first, first + len(chunk))
                steps.append(Step(follower.sequence, chunk, parents, (), states))
                fed.append((follower, len(chunk)))
        self.engine.forward(steps)
        for follower, count in fed:
            assert follower.sequence is not None
            self.engine.commit(follower.sequence, range(count))
            follower.cached += count
