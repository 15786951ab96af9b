"""Who waits, who runs, and what a request holds while it does.

::

    add ──> waiting ──start──> running ──finish──> over
               ^                  │
               └────preempt───────┘        the cache was full, or another's turn came: what the request said stands

Clients share fairly. A place goes to the waiting client with the fewest running requests, among equals to the one whose
latest start, or arrival, is longest ago. Room is taken from the client with the most running requests: where the cache
is full, and where a client with two fewer waits.

Starting a request opens its sequence and tells drafters and policy of it; finishing or preempting closes it. Where a
request starts again, its prompt and its answer so far are read, and it goes on as if nothing had been: its noise
depends on seed and position alone.

A round is made whole or not at all. What one that an error or an interrupt cut short did to its requests is taken back
before anything else is done, so that every request stands where it stood between rounds; one whose cache cannot be
stepped back waits, as if preempted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.core.errors import CapabilityError, PacelineError, QueueFullError
from paceline.core.request import Emission, FinishReason, Request, new_text
from paceline.core.vocabulary import Vocabulary
from paceline.engines.base import Engine
from paceline.engines.sequence_pool import SequencePool
from paceline.planning.base import Policy
from paceline.runtime.drafting import Drafting, Drafts
from paceline.runtime.pass_budget import PassBudget

_log = logging.getLogger(__name__)

_MIN_PLACE_S = 1.0
"""Seconds for which a request has its place before it gives way to another client's, the first time."""


@dataclass(frozen=True, slots=True)
class PrefilledPrompt:
    """A sequence of the target that holds the beginning of a prompt, at most all but its last token.

    ``seconds`` is what reading it took.
    """

    sequence: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Where a request stood before a round, in tokens: of prompt and answer, and in the target's cache."""

    request: Request
    num_tokens: int
    cached: int


class Scheduler:
    """The requests of a loop.

    Args:
        drafting: holds trees of theirs, and knows which drafters are told of requests that start and end.
        max_running: most requests that run at once.
        max_waiting: most requests of one client that wait; ``None`` for any number.
    """

    def __init__(
        self,
        engine: Engine,
        pool: SequencePool,
        budget: PassBudget,
        policy: Policy,
        drafting: Drafting,
        clock: Clock,
        *,
        max_running: int,
        max_waiting: int | None,
    ) -> None:
        # Not handed to the loop's caller yet.
        self._emissions: list[Emission] = []
        self._engine = engine
        self._pool = pool
        self._budget = budget
        self._policy = policy
        self._drafting = drafting
        self._clock = clock
        self._max_running = max_running
        self._max_waiting = max_waiting
        # A prompt that is being read can be shared only if its fork can be trimmed to the shared beginning.
        self._shares_prefill = pool.keeps and engine.capabilities.max_rollback is None
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        # Clock time of each running request's latest start.
        self._started_s: dict[int, float] = {}
        # Number of each client's latest turn, or of its arrival if it had none; of clients with requests alone.
        self._turns: dict[str, int] = {}
        self._num_turns = 0
        # Where passes are not shared: the requests of the round, and the number of each running request's latest round.
        self._shares_passes = engine.capabilities.shares_passes
        self._in_round: list[Request] = []
        self._latest_round: dict[int, int] = {}
        self._num_rounds = 0
        # Prompts that were read before they were asked for, by request, until it starts.
        self._prefilled: dict[int, PrefilledPrompt] = {}
        # Requests that the policy knows.
        self._met: set[int] = set()
        # Finished requests that the policy was not told of yet: it hears of their last round first.
        self._ended: list[Request] = []
        # The requests of the round that is being made; between rounds, of one that was cut short.
        self._open_round: list[_Checkpoint] = []

    @property
    def requests(self) -> list[Request]:
        """Requests that are not over, those that run first; what a round that was cut short ended is not over."""
        requests = [*self._running.values(), *self._waiting]
        return requests + [b.request for b in self._open_round if b.request not in requests]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def in_round(self) -> list[Request]:
        """Requests that take part in the round that is open: all that run, or one where passes are not shared."""
        if self._shares_passes:
            return list(self._running.values())
        return [request for request in self._in_round if request.id in self._running]

    @property
    def decoding(self) -> list[Request]:
        """Requests of the round whose prompt is read: the next pass has a tree of each."""
        return [request for request in self.in_round if request.decoding]

    @property
    def prefilling(self) -> list[Request]:
        """Requests of the round with tokens that the cache does not hold yet, but for the last one."""
        return [request for request in self.in_round if not request.decoding]

    @property
    def outside_round(self) -> list[Request]:
        """Requests that decode and wait for others' passes in this round."""
        if self._shares_passes:
            return []
        return [each for each in self._running.values() if each.decoding and each not in self._in_round]

    def has(self, request: Request) -> bool:
        return request.id in self._running or request in self._waiting

    def add(self, request: Request, prefilled: PrefilledPrompt | None) -> None:
        """Let a request wait for its start, or raise :class:`QueueFullError` where too many of its client wait."""
        client = request.cache.client
        if self._max_waiting is not None:
            waiting = sum(other.cache.client == client for other in self._waiting)
            free = max(self._max_running - len(self._running) - (len(self._waiting) - waiting), 0)
            if waiting >= self._max_waiting + free:
                raise QueueFullError(
                    f"{waiting - free} requests wait and {self._count_running(client) + free} run, which is the most "
                    f"(max_waiting is {self._max_waiting}): try again later, ask for fewer at once, or raise "
                    "max_waiting"
                )
        if prefilled is not None:
            self._prefilled[request.id] = prefilled
        request.stats.added_s = self._clock.now_s()
        self._waiting.append(request)
        if client not in self._turns:
            self._take_turn(client)

    # --- starting -----------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Start requests for as long as there is room: of each client in the order they came, by turns."""
        queues: dict[str, deque[Request]] = {}
        # Where all places are taken, only another client's turn can free one.
        if len(self._running) < self._max_running or len(self._turns) > 1:
            for request in self._waiting:
                queues.setdefault(request.cache.client, deque()).append(request)
        while queues:
            client = min(queues, key=lambda client: self._priority(queues[client][0]))
            request = queues[client].popleft()
            if not queues[client]:
                del queues[client]
            if not self._has_place(request) and not (self._preempt_for(client) and self._has_place(request)):
                break
            if self._awaits_prefix(request):
                continue
            try:
                if not self._start(request):
                    break
            except Exception as error:
                # Ends this request, not the others.
                self._fail(request, error)

    def _has_place(self, request: Request) -> bool:
        running = self._running.values()
        return not running or (len(running) < self._max_running and self._budget.may_start(request, running))

    def _preempt_for(self, client: str) -> bool:
        """Preempt a request of whoever has two places more than a client that waits; returns whether there was one.

        Long answers of one client would else hold all places until they end. What gives way goes on later, and a second
        time only after twice as long, so that little of its time is lost to others that come and go.
        """
        counts = Counter(request.cache.client for request in self._running.values())
        most = max(counts.values())
        if most < counts[client] + 2:
            return False
        now_s = self._clock.now_s()
        for request in reversed(self._running.values()):
            least_s = _MIN_PLACE_S * 2**request.stats.preemptions
            if counts[request.cache.client] == most and now_s - self._started_s[request.id] >= least_s:
                self._open_round = [_checkpoint(request)]
                self.preempt(request)
                self._open_round = []
                return True
        return False

    def _priority(self, first: Request) -> tuple[int, bool, int]:
        """Return what puts a client's first request before those of others: the least goes first."""
        client = first.cache.client
        # Of clients that run as many, one whose first request was preempted comes first.
        return self._count_running(client), first.stats.queue_s is None, self._turns.get(client, 0)

    def _count_running(self, client: str) -> int:
        return sum(request.cache.client == client for request in self._running.values())

    def _take_turn(self, client: str) -> None:
        self._num_turns += 1
        self._turns[client] = self._num_turns

    def _awaits_prefix(self, request: Request) -> bool:
        """Return whether an earlier request reads tokens now that this one can start from once they are read."""
        if not self._shares_prefill or not request.cache.cache_prompt or request.id in self._prefilled:
            return False
        for reader in self._running.values():
            # Only for earlier requests: later ones may keep coming for ever.
            if reader.decoding or reader.id > request.id or reader.cache.namespace != request.cache.namespace:
                continue
            if request.lists_prompt:
                if _lists_same(reader, request):
                    return True
                continue
            end = reader.cached + self._pool.least_reuse
            if end < len(request.token_ids) and reader.token_ids[:end] == request.token_ids[:end]:
                return True
        return False

    def share_listed(self, reader: Request) -> None:
        """Give the log-probabilities of a prompt that was listed to requests that wait and want the same ones.

        Such are further answers to the prompt. They need not list it again, so they may start from what was read.
        """
        for request in self._waiting if self._shares_prefill else ():
            if (
                request.cache.cache_prompt
                and request.cache.namespace == reader.cache.namespace
                and _lists_same(reader, request)
            ):
                request.prompt_logprobs = reader.prompt_logprobs

    def _start(self, request: Request) -> bool:
        """Start a request unless others that run hold all sequences of the engine."""
        try:
            if not self._open(request):
                return False
            for drafter in self._drafting.drafters_of(request):
                drafter.begin(request)
            if request.id not in self._met:
                self._policy.begin(request)
                self._met.add(request.id)
            self._started_s[request.id] = self._clock.now_s()
            self._running[request.id] = request
            self._waiting.remove(request)
            self._end_wait(request)
            self._take_turn(request.cache.client)
        except BaseException:
            self._running.pop(request.id, None)
            self._release(request)
            if request not in self._waiting:
                self._waiting.appendleft(request)
            raise
        return True

    def _open(self, request: Request) -> bool:
        prefilled = self._prefilled.get(request.id)
        if prefilled is not None:
            assert not request.lists_prompt
            self._pool.hold(prefilled.sequence, request.token_ids, namespace=request.cache.namespace)
            request.sequence, request.cached = prefilled.sequence, self._engine.length(prefilled.sequence)
            request.stats.prompt_tokens, request.stats.prompt_s = request.cached, prefilled.seconds
            del self._prefilled[request.id]
            return True
        try:
            opened = self._pool.open(request.token_ids, most=request.most_reused, namespace=request.cache.namespace)
        except CapabilityError:
            if not self._running:
                raise
            return False
        request.sequence, request.cached = opened.sequence, opened.cached
        if request.num_output == 0:
            stats = request.stats
            # What it read itself before it was preempted does not count as found in the cache.
            stats.cached_tokens = max(stats.cached_tokens, opened.cached - stats.prompt_tokens)
        return True

    # --- ending -------------------------------------------------------------------------------------------------------

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request that runs or waits."""
        self._drafting.forget(request)
        request.segments += request.text.flush()
        if request.id in self._running:
            self._tell_drafters(request)
            if reason == "error":
                self._pool.discard(request.sequence)
            else:
                self._pool.release(request.sequence)
            request.sequence = -1
        elif (prefilled := self._prefilled.pop(request.id, None)) is not None:
            self._engine.close_sequence(prefilled.sequence)
        self._ended.append(request)
        self._end_wait(request)
        request.finish_reason = reason
        self._started_s.pop(request.id, None)
        if self._running.pop(request.id, None) is None:
            self._waiting.remove(request)
        client = request.cache.client
        if not self._count_running(client) and all(other.cache.client != client for other in self._waiting):
            self._turns.pop(client, None)

    def _end_wait(self, request: Request) -> None:
        if request.stats.queue_s is None:
            request.stats.queue_s = self._clock.now_s() - request.stats.added_s

    def end(self, request: Request, reason: FinishReason) -> Emission:
        """End a request between tokens, and return its last emission: what text was still withheld."""
        first_segment = len(request.segments)
        self.finish(request, reason)
        return Emission(request, [], [], request.segments[first_segment:], reason)

    def cancel(self, request: Request) -> Emission:
        """End a request that is not over; return all that its reader has not got yet."""
        self._open_round = [_checkpoint(request)]
        last = self.end(request, "cancelled")
        kept = [emission for emission in self._emissions if emission.request is request]
        before = list(itertools.accumulate((len(emission.segments) for emission in kept), initial=0))
        self._open_round, self._emissions = [], [e for e in self._emissions if e.request is not request]
        self.tell_ended()
        return Emission(
            request,
            [token_id for emission in kept for token_id in emission.token_ids],
            [source for emission in kept for source in emission.sources],
            [segment for emission in (*kept, last) for segment in emission.segments],
            "cancelled",
            [start + end for start, emission in zip(before, kept, strict=False) for end in emission.segment_ends],
            tuple(logprob for emission in kept for logprob in emission.logprobs),
        )

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request that could not start."""
        self._open_round = [_checkpoint(request)]
        request.error = error
        self.close_round([self.end(request, "error")])

    def _tell_drafters(self, request: Request) -> None:
        """Have all drafters forget a request, whatever becomes of that in one of them."""
        for drafter in self._drafting.drafters_of(request):
            try:
                drafter.end(request)
            except Exception:
                # The request does not depend on it, and the other drafters have to forget it, too.
                _log.exception("drafter %s failed to forget a request", drafter.name)

    def tell_ended(self) -> None:
        """Tell the policy which requests are over, after their last round."""
        while self._ended:
            request = self._ended[-1]
            if request.id in self._met:
                try:
                    self._policy.end(request)
                except Exception:
                    self._forget_ended(request)  # told once, even in vain; only an interrupt has it told again
                    raise
            self._forget_ended(request)

    def _forget_ended(self, request: Request) -> None:
        self._met.discard(request.id)
        self._ended.pop()

    # --- room ---------------------------------------------------------------------------------------------------------

    def make_room(self, drafts: Drafts) -> Emission | None:
        """Preempt the youngest request of the client with most that hold cells.

        One that alone holds cells goes on: others that were to start have to wait. One that runs alone has all cells
        there are: it ends, and its last emission is returned. Those of ``drafts`` are kept that have to be judged
        later.
        """
        holders = [request for request in self._running.values() if request.cached > 0]
        candidates = holders
        if len(holders) < 2:
            candidates = [request for request in self._running.values() if request not in holders] or holders
        counts = Counter(request.cache.client for request in candidates)
        most = max(counts.values())
        loser = next(request for request in reversed(candidates) if counts[request.cache.client] == most)
        if len(self._running) > 1:
            self.preempt(loser)
            for request, tree in zip(drafts.requests, drafts.trees, strict=True):
                if request is loser and tree.num_drafted and request.verifier.judges_every_draw:
                    self._drafting.keep(request, tree)
            return None
        return self.end(loser, "no_room")

    def preempt(self, request: Request) -> None:
        """Take a running request's place in the cache; it is its client's next to start again."""
        self._waiting.appendleft(request)
        del self._running[request.id]
        request.stats.preemptions += 1
        self._tell_drafters(request)
        # Its cells are copied to host memory where there is room; if not, it is read again.
        self._pool.release(request.sequence)
        request.sequence, request.cached = -1, 0

    def _release(self, request: Request) -> None:
        """Close what a request holds whose start or round was cut short, as far as it holds anything."""
        self._forget(request)
        # By its tokens: an interrupt may have come before it had the handle.
        self._pool.discard_owned(request.token_ids)
        request.sequence, request.cached = -1, 0

    # --- whole rounds -------------------------------------------------------------------------------------------------

    def open_round(self) -> None:
        """Note where all running requests stand, and whose round it is."""
        if not self._shares_passes:
            first = min(self._running.values(), key=lambda request: self._latest_round.get(request.id, 0), default=None)
            self._in_round = [] if first is None else [first]
            self._num_rounds += 1
            self._latest_round = {request_id: self._latest_round.get(request_id, 0) for request_id in self._running} | {
                request.id: self._num_rounds for request in self._in_round
            }
        self._open_round = [_checkpoint(request) for request in self._running.values()]

    def close_round(self, emissions: Sequence[Emission]) -> None:
        """Let stand what was done since the round was opened, and keep what it emitted."""
        # One line without a call, so that no interrupt comes between.
        self._open_round, self._emissions = [], [*self._emissions, *emissions]

    def take_emissions(self) -> list[Emission]:
        emissions, self._emissions = self._emissions, []
        return emissions

    def rollback_round(self) -> None:
        """Take back what a round that was cut short did, for every request of it.

        All of it can be done again where another interrupt cuts it short.
        """
        while self._open_round:
            self._rollback(self._open_round[-1])
            self._open_round.pop()

    def _rollback(self, before: _Checkpoint) -> None:
        request = before.request
        self._drafting.forget(request)
        rollback_text(request, before.num_tokens, self._engine.vocabulary)
        self._ended = [ended for ended in self._ended if ended is not request]
        if request.sequence >= 0 and self._step_back(request, before.cached) and self._begin_again(request):
            self._running[request.id] = request
            if request in self._waiting:
                self._waiting.remove(request)
            return
        # A recurrent state that cannot be stepped back, a sequence that was torn or closed, or a drafter that fails:
        # all is read again.
        self._release(request)
        if request not in self._waiting:
            self._waiting.appendleft(request)
        self._running.pop(request.id, None)

    def _step_back(self, request: Request, cached: int) -> bool:
        try:
            # The round may have given it back already.
            self._pool.hold(request.sequence, request.token_ids, namespace=request.cache.namespace)
            self._pool.trim(request.sequence, min(cached, self._engine.length(request.sequence)))
        except PacelineError:
            return False
        request.cached = self._engine.length(request.sequence)
        return True

    def _begin_again(self, request: Request) -> bool:
        self._forget(request)
        try:
            for drafter in self._drafting.drafters_of(request):
                drafter.begin(request)
        except Exception:
            # The drafter fails again when the request starts: that ends this request, and the others go on.
            return False
        return True

    def _forget(self, request: Request) -> None:
        for drafter in self._drafting.drafters_of(request):
            # After a round that was cut short a drafter may know anything of the request, or nothing.
            with contextlib.suppress(Exception):
                drafter.end(request)


def rollback_text(request: Request, num_tokens: int, vocabulary: Vocabulary) -> None:
    """Go back to where a request stood when it had ``num_tokens`` tokens, and ran; its text is written again."""
    del request.token_ids[num_tokens:]
    del request.sources[request.num_output :]
    del request.logprobs[request.num_output :]
    del request.segment_ends[request.num_output :]
    request.text = new_text(request.rules)
    request.segments = []
    for token_id, source in zip(request.output_ids, request.sources, strict=True):
        request.segments += request.text.push_token(token_id, source, vocabulary)
    request.error = request.finish_reason = None


def _checkpoint(request: Request) -> _Checkpoint:
    return _Checkpoint(request, len(request.token_ids), request.cached)


def _lists_same(reader: Request, request: Request) -> bool:
    """Return whether two requests want the same log-probabilities of one prompt, which ``request`` has not got yet."""
    return (
        request.lists_prompt
        and reader.logprob_params.prompt_logprobs == request.logprob_params.prompt_logprobs
        and reader.num_prompt == request.num_prompt
        and reader.token_ids[: reader.num_prompt] == request.token_ids[: request.num_prompt]
    )
