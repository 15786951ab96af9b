"""The one loop: every round drafts, verifies in one pass of the target, and commits, for all active requests at once.

A single request is the case of one; a server is the same loop with more. The loop owns each request's tokens and is
the only one that asks the target to commit. Between rounds::

    request.token_ids   t0 t1 ... t(n-2) t(n-1)
    target's cache      t0 t1 ... t(n-2)          the last token is fed by the next round, as the tree's root

Requests whose prompt is not in the cache yet take part in the same passes with chunks of it.

A round is made whole or not at all. What one that an error or an interrupt cut short did to its requests is taken back
before anything else is done, so that every request stands where it stood between rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import CapabilityError, ContextLengthError, InputError, NoRoomError, PacelineError
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import SOURCE_TARGET, Emission, FinishReason, Request
from paceline.core.tree import ROOT, DraftTree
from paceline.core.verify import Verifier, Walk, make_verifier
from paceline.drafters.base import Commit, DraftBudget, Drafter, DraftJob, TargetRows
from paceline.engines.base import COMMITTED_END, Engine, ForwardOutput, Step
from paceline.planning.base import Observer, Policy, RoundRecord
from paceline.runtime.turns import Tie, Turns
from paceline.runtime.writing import take_back, write


@dataclass(slots=True)
class _Turn:
    """One request's part in one pass."""

    request: Request
    step: Step
    tree: DraftTree
    num_rows: int
    emits: bool
    was_decoding: bool


@dataclass(slots=True)
class _Drafts:
    """What was drafted for one round.

    Attributes:
        trees: one for each decoding request.
        draft_seconds: seconds each drafter took.
    """

    trees: list[DraftTree]
    draft_seconds: dict[str, float] = field(default_factory=dict)


DEFAULT_SPECULATION: Final = SpeculationParams()


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A sequence that holds the beginning of a prompt, at most all but its last token.

    Attributes:
        sequence: handle at the target engine.
        seconds: what reading it took the target.
    """

    sequence: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Before:
    """Where a request stood before a round.

    Attributes:
        request: the request.
        num_tokens: of prompt and answer.
        cached: how many of them the target's cache held.
    """

    request: Request
    num_tokens: int
    cached: int

    @classmethod
    def of(cls, request: Request) -> _Before:
        """Note where a request stands."""
        return cls(request, len(request.token_ids), request.cached)


class DecodingLoop:
    """Decodes any number of requests on one target engine.

    Several threads may use it, and take turns; so may finalizers, whose requests end between rounds.

    Args:
        engine: the target. The loop opens and closes sequences on it but does not close it.
        drafters: asked in this order; the first to propose a token owns it. Not closed by the loop.
        policy: decides what is drafted and verified.
        clock: where times come from.
        observers: told of every round, after the policy.
        turns: at the engine; loops that share an engine share them.
        request_ids: numbers for its requests, by default from 0 on; loops that share drafters need different ones.
    """

    def __init__(
        self,
        engine: Engine,
        drafters: Sequence[Drafter],
        policy: Policy,
        *,
        clock: Clock | None = None,
        observers: Sequence[Observer] = (),
        turns: Turns | None = None,
        request_ids: Iterator[int] | None = None,
    ) -> None:
        self._engine = engine
        self._drafters = list(drafters)
        self._policy = policy
        self._clock = clock or WallClock()
        self._observers: list[Observer] = [policy, *observers]
        self._turns = turns or Turns()
        self._requests: dict[int, Request] = {}
        # The requests of the round that is being made; between rounds, of one that was cut short.
        self._open_round: list[_Before] = []
        # To those who want the answers, by request.
        self._ties: dict[int, Tie] = {}
        # Drafts that had no room in the last pass and have to be judged in the next, by request.
        self._unjudged: dict[int, DraftTree] = {}
        # Seconds after the latest round in which the policy learned from it.
        self._learning_s = 0.0
        # Finished requests the policy was not told of yet: it hears of their last round first.
        self._ended: list[Request] = []
        self._ids = request_ids or itertools.count()
        self._capabilities = engine.capabilities
        self._vocabulary = engine.vocabulary
        self._end_ids = engine.vocabulary.end_ids

    @property
    def active(self) -> Sequence[Request]:
        """Requests that are not finished."""
        return list(self._requests.values())

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        speculation: SpeculationParams = DEFAULT_SPECULATION,
        *,
        verifier: Verifier | None = None,
        read: ReadPrompt | None = None,
        owner: object = None,
    ) -> Request:
        """Admit a request; the next :meth:`step` takes it along.

        Args:
            prompt_ids: at least one token.
            params: how it is sampled.
            rules: when it ends.
            speculation: how it is sped up.
            verifier: judges its drafts, in place of the one that ``speculation`` names.
            read: where its prompt was read before; the loop closes that sequence with the request.
            owner: once this is collected, nobody wants the answer any more, and the request is cancelled.

        Raises:
            InputError: the prompt is empty, has unknown tokens, or the policy cannot be lossless for it.
            ContextLengthError: the prompt leaves no room in the context for a token of answer.
            CapabilityError: the engine has no sequence left.
            BusyError: a round is being made by this thread.
        """
        context_length = self._capabilities.context_length
        if not prompt_ids:
            raise InputError("the prompt is empty: give at least one token to continue")
        if len(prompt_ids) >= context_length:
            raise ContextLengthError.of_prompt(len(prompt_ids), context_length)
        vocab_size = self._vocabulary.size
        for token_id in prompt_ids:
            if not 0 <= token_id < vocab_size:
                raise InputError(f"token id {token_id} is not in the vocabulary of {vocab_size}")
        for token_id in params.logit_bias:
            if token_id >= vocab_size:
                raise InputError(f"logit bias for token id {token_id}, which is not in the vocabulary of {vocab_size}")
        if list(params.logit_bias.values()).count(-math.inf) >= vocab_size:
            raise InputError("logit biases of -inf ban every token: lift one")
        request = Request(
            next(self._ids),
            prompt_ids,
            params,
            rules,
            speculation,
            verifier or make_verifier(speculation.verify, params),
        )
        self._policy.check(request)
        admit = functools.partial(self._admit, request, read, owner)
        try:
            self._turns.run("a request", admit)
        except CapabilityError:
            # Owners that were dropped as parts of reference cycles hold their places until they are collected.
            gc.collect()
            self._turns.run("a request", admit)
        return request

    def _admit(self, request: Request, read: ReadPrompt | None, owner: object) -> None:
        self._mend()
        if read is None:
            request.sequence = self._engine.open()
        else:
            request.sequence = read.sequence
            request.cached = request.stats.prompt_tokens = self._engine.length(read.sequence)
            request.stats.prompt_s = read.seconds
        try:
            for drafter in self._drafters:
                drafter.begin(request)
            self._policy.begin(request)
            if owner is not None:
                self._ties[request.id] = self._turns.tie(owner, functools.partial(self._end, request))
            self._requests[request.id] = request
        except BaseException:
            self._engine.close_sequence(request.sequence)
            for leave in (*(drafter.end for drafter in self._drafters), self._policy.end):
                with contextlib.suppress(Exception):  # not all of them know the request
                    leave(request)
            raise

    def cancel(self, request: Request) -> Emission | None:
        """End a request now and return what text was still withheld; ``None`` if it is over already.

        In the middle of a round of this thread the request ends after the round, and nothing is returned.
        """
        if request.finish_reason is not None:
            return None
        first_token, first_segment = request.num_output, len(request.segments)
        self._turns.run_or_note(functools.partial(self._end, request))
        return _emission(request, first_token, first_segment) if request.id not in self._requests else None

    def _end(self, request: Request) -> None:
        """Cancel a request unless it is over."""
        self._mend()
        if request.id in self._requests:
            self._open_round = [_Before.of(request)]
            self._finish(request, "cancelled", request.num_output, len(request.segments))
            self._open_round = []
            self._tell_ended()

    def step(self) -> list[Emission]:
        """Run one round: every active request gains tokens, or has more of its prompt read.

        Returns:
            What was emitted, for each request that emitted or ended.

        Raises:
            EngineError: a pass failed.
            BusyError: a round is being made by this thread.
        """
        return self._turns.run("a round", self._step)

    def _step(self) -> list[Emission]:
        self._mend()
        self._open_round = [_Before.of(request) for request in self._requests.values()]
        started_s = self._clock.now_s()
        decoding = [request for request in self._requests.values() if request.decoding]
        drafts = self._draft(decoding)
        trees = drafts.trees
        drafted_s = self._clock.now_s()

        turns = self._schedule(decoding, trees)
        if not turns:
            self._open_round = []
            return []
        try:
            output = self._engine.forward([turn.step for turn in turns])
        except NoRoomError:
            # A row for each decoding request may fit still; prompts wait until they have made room.
            turns = self._schedule(decoding, trees, sparing=True)
            try:
                output = self._engine.forward([turn.step for turn in turns])
            except NoRoomError:
                # Ending a request makes room only if it holds cells; the youngest has lost the least.
                holders = [request for request in self._requests.values() if request.cached > 0]
                victim = (holders or [turns[-1].request])[-1]
                emission = self._finish(victim, "no_room", victim.num_output, len(victim.segments))
                self._open_round = []
                self._tell_ended()
                return [emission]
        prefill_context = sum(turn.request.cached for turn in turns if not turn.was_decoding)
        output.wait()
        verified_s = self._clock.now_s()

        walks = [self._walk(turn, output, index) for index, turn in enumerate(turns)]
        sampled_s = self._clock.now_s()

        settled = [
            self._settle(turn, walk, TargetRows(output, index))
            for index, (turn, walk) in enumerate(zip(turns, walks, strict=True))
        ]
        # Every request stands between rounds again, whatever becomes of the accounts that follow.
        self._open_round = []

        ended_s = self._clock.now_s()
        learning_s = self._learning_s
        draft_s, verify_s = drafted_s - started_s + learning_s, verified_s - drafted_s
        round_s = ended_s - started_s + learning_s
        for turn in turns:
            stats = turn.request.stats
            if turn.was_decoding:
                stats.rounds += 1
                stats.decode_s += round_s
                stats.phases.add(draft_s, verify_s, sampled_s - verified_s, round_s)
            else:
                stats.prompt_s += round_s
        emissions = [emission for emission in settled if emission is not None]
        for emission in emissions:
            emission.request.stats.arrivals_s.extend([ended_s] * len(emission.token_ids))
        decoded = [
            (turn, walk, emission)
            for turn, walk, emission in zip(turns, walks, settled, strict=True)
            if turn.was_decoding and walk is not None and emission is not None
        ]
        record = RoundRecord(
            requests=[turn.request for turn, _, _ in decoded],
            trees=[turn.tree for turn, _, _ in decoded],
            paths=[walk.path for _, walk, _ in decoded],
            emitted=[len(emission.token_ids) for _, _, emission in decoded],
            prefill_rows=sum(len(turn.step.token_ids) for turn in turns if not turn.was_decoding),
            prefill_context=prefill_context,
            draft_s=draft_s,
            learning_s=learning_s,
            draft_seconds=drafts.draft_seconds,
            verify_s=verify_s,
            round_s=round_s,
        )
        for observer in self._observers:
            observer.observe(record)
        self._tell_ended()
        # Nobody waits for what the last request taught.
        self._learning_s = self._clock.now_s() - ended_s if self._requests else 0.0
        return emissions

    def _draft(self, requests: Sequence[Request]) -> _Drafts:
        """Grow one tree for each decoding request."""
        trees = [self._unjudged.get(request.id) or DraftTree(request.token_ids[-1]) for request in requests]
        drafts = _Drafts(trees)
        if not requests or not self._drafters:
            return drafts
        budgets = self._policy.budgets(requests)
        if not any(budgets):
            return drafts
        jobs = []
        for request, tree, budget in zip(requests, trees, budgets, strict=True):
            if budget is not None and not tree.num_drafted:
                limited = self._limit(request, budget)
                if limited.max_depth > 0:
                    jobs.append(DraftJob(request, tree, limited))
        for drafter in self._drafters:
            growing = jobs if self._capabilities.trees else [job for job in jobs if job.tree.num_drafted == 0]
            while growing and (growing := self._policy.choose(drafter, growing)):
                name = drafter.name
                started_s = self._clock.now_s()
                more = drafter.grow(growing)
                spent_s = self._clock.now_s() - started_s
                drafts.draft_seconds[name] = drafts.draft_seconds.get(name, 0.0) + spent_s
                growing = [job for job, can_grow in zip(growing, more, strict=True) if can_grow]
        if jobs:
            self._policy.select(requests, trees)
        return drafts

    def _limit(self, request: Request, budget: DraftBudget) -> DraftBudget:
        """Cut a budget to what the engine can take and the request can still use."""
        # The round adds one token of the target's own, so a draft of all that is left would be one too long.
        depth = min(
            budget.max_depth,
            request.num_left - 1,
            self._capabilities.context_length - len(request.token_ids) - 1,
            self._capabilities.max_outputs // max(1, len(self._requests)) - 1,
        )
        if self._capabilities.max_rollback is not None:
            depth = min(depth, self._capabilities.max_rollback)
        siblings = budget.siblings if self._capabilities.trees else 1
        if depth == budget.max_depth and siblings == budget.siblings:
            return budget
        return dataclasses.replace(budget, max_depth=max(depth, 0), siblings=siblings)

    def _schedule(
        self, decoding: Sequence[Request], trees: Sequence[DraftTree], *, sparing: bool = False
    ) -> list[_Turn]:
        """Cut one pass: the trees of decoding requests first, then as much prompt as still fits.

        Args:
            decoding: requests that emit in this pass.
            trees: their trees; their last nodes stay out where room is short.
            sparing: take one row for each of them and no prompt, unless nothing else is left to do.
        """
        room = self._capabilities.max_rows
        output_room = self._capabilities.max_outputs
        turns = []
        for index, (request, tree) in enumerate(zip(decoding, trees, strict=True)):
            if output_room == 0:
                break
            # A wide tree must not starve the requests after it, so a row is kept for each of them.
            share = 1 if sparing else max(1, output_room - (len(decoding) - index - 1))
            # Parents come before their children, so the first nodes are a tree of their own.
            num_rows = min(len(tree), share)
            if num_rows < len(tree) and not request.verifier.judges_every_draw:
                tree.keep(range(num_rows))
            room -= num_rows
            output_room -= num_rows
            step = Step(request.sequence, tree.token_ids[:num_rows], tree.parents[:num_rows], range(num_rows))
            turns.append(_Turn(request, step, tree, num_rows, True, True))
        for request in self._requests.values():
            if room == 0 or output_room == 0 or (sparing and decoding):
                break
            if request.decoding:
                continue
            chunk = request.token_ids[request.cached : request.cached + room]
            room -= len(chunk)
            last = request.cached + len(chunk) == len(request.token_ids)
            output_room -= last
            step = Step(
                request.sequence,
                chunk,
                range(COMMITTED_END, COMMITTED_END + len(chunk)),
                [len(chunk) - 1] if last else [],
            )
            turns.append(_Turn(request, step, DraftTree(chunk[-1]), 1, last, False))
        return turns

    def _walk(self, turn: _Turn, output: ForwardOutput, index: int) -> Walk | None:
        if not turn.emits:
            return None
        request = turn.request
        rows = TargetRows(output, index)
        try:
            return request.verifier.walk(turn.tree, turn.num_rows, rows.logits, request.token_ids)
        except Exception as error:
            # It ends this request, not the others in the pass.
            request.error = error
            return None

    def _settle(self, turn: _Turn, walk: Walk | None, rows: TargetRows) -> Emission | None:
        """Book what a pass decided for one request, and commit it."""
        request, stats = turn.request, turn.request.stats
        if not turn.was_decoding:
            stats.prompt_tokens += len(turn.step.token_ids)
        first_token, first_segment = request.num_output, len(request.segments)
        if request.error is not None:
            return self._finish(request, "error", first_token, first_segment)
        if walk is None:
            request.cached += len(turn.step.token_ids)
            self._engine.commit(request.sequence, range(len(turn.step.token_ids)))
            return None
        tree = turn.tree
        reason: FinishReason | None = None
        for depth, token_id in enumerate(walk.token_ids):
            request.token_ids.append(token_id)
            request.sources.append(tree.sources[walk.path[depth]] if depth < len(walk.path) else SOURCE_TARGET)
            reason = self._judge_end(request, token_id)
            if reason is not None:
                break
        self._count(turn, walk, request.sources[first_token:])
        if reason is not None:
            return self._finish(request, reason, first_token, first_segment)
        self._unjudged.pop(request.id, None)
        if walk.unread is not None:
            self._unjudged[request.id] = tree.below(walk.unread)
        if turn.was_decoding:
            request.cached += 1 + len(walk.path)
            self._engine.commit(request.sequence, [ROOT, *walk.path])
        else:
            request.cached += len(turn.step.token_ids)
            self._engine.commit(request.sequence, range(len(turn.step.token_ids)))
        if turn.was_decoding:
            commit = Commit(tree, walk.path, walk.token_ids, rows)
            for drafter in self._drafters:
                drafter.observe(request, commit)
        return _emission(request, first_token, first_segment)

    def _mend(self) -> None:
        """Take back what a round that was cut short did, for every request of it.

        All of it can be done again where another interrupt cuts it short.
        """
        while self._open_round:
            self._take_back(self._open_round[-1])
            self._open_round.pop()

    def _take_back(self, before: _Before) -> None:
        request = before.request
        self._unjudged.pop(request.id, None)
        try:
            self._engine.trim(request.sequence, min(before.cached, self._engine.length(request.sequence)))
        except PacelineError:
            # A recurrent state that cannot be stepped back, or a sequence that was torn or closed: all is read again.
            with contextlib.suppress(PacelineError):
                self._engine.close_sequence(request.sequence)
            request.sequence = self._engine.open()
        request.cached = self._engine.length(request.sequence)
        take_back(request, before.num_tokens, self._vocabulary)
        for drafter in self._drafters:
            # Of what a drafter noted in that round nothing is certain, not even that it knows the request still.
            with contextlib.suppress(Exception):
                drafter.end(request)
            drafter.begin(request)
        self._requests[request.id] = request
        self._ended = [ended for ended in self._ended if ended is not request]

    def _tell_ended(self) -> None:
        """Tell the policy which requests are over, after their last round."""
        while self._ended:
            request = self._ended[-1]
            # Until here a round that is taken back may have had to go on with it.
            self._ties.pop(request.id, None)
            try:
                self._policy.end(request)
            except Exception:
                self._ended.pop()  # told once, as badly as it took that; an interrupt has it told again
                raise
            self._ended.pop()

    def _judge_end(self, request: Request, token_id: int) -> FinishReason | None:
        """Add the text of the token just emitted and return why the request ends with it, if it does."""
        if token_id in self._end_ids and not request.rules.ignore_end:
            return "end"
        write(request, token_id, request.sources[-1], self._vocabulary)
        if request.text.stopped:
            return "stop"
        if request.num_output >= request.rules.max_tokens:
            return "length"
        if len(request.token_ids) >= self._capabilities.context_length:
            return "context"
        return None

    def _count(self, turn: _Turn, walk: Walk, sources: Sequence[str]) -> None:
        """Count a round that emitted one token from each of ``sources``."""
        stats, num_drafted, num_emitted = turn.request.stats, turn.num_rows - 1, len(sources)
        stats.predicted_tokens += num_emitted
        if not turn.was_decoding or not num_drafted:
            return
        accepted = min(len(walk.path), num_emitted)
        stats.num_drafted += num_drafted
        stats.num_accepted += accepted
        # A walk that ends for the request's sake judged only what it accepted.
        turned_down = num_emitted == len(walk.token_ids) and not walk.reached_leaf
        stats.num_judged += accepted + turned_down
        stats.drafted_by_source.update(turn.tree.sources[1 : turn.num_rows])
        stats.accepted_by_source.update(sources[:accepted])
        for depth in range(accepted):
            stats.tested_by_depth[depth] += 1
            stats.accepted_by_depth[depth] += 1
        if turned_down:
            stats.tested_by_depth[accepted] += 1

    def _finish(self, request: Request, reason: FinishReason, first_token: int, first_segment: int) -> Emission:
        """End a request; its last emission starts at the given token and segment of the answer."""
        self._unjudged.pop(request.id, None)
        request.segments += request.text.flush()
        for drafter in self._drafters:
            drafter.end(request)
        self._engine.close_sequence(request.sequence)
        self._ended.append(request)
        request.finish_reason = reason
        del self._requests[request.id]
        return _emission(request, first_token, first_segment)


def _emission(request: Request, first_token: int, first_segment: int) -> Emission:
    return Emission(
        request,
        token_ids=request.output_ids[first_token:],
        sources=request.sources[first_token:],
        segments=request.segments[first_segment:],
        finish_reason=request.finish_reason,
    )
