"""The one loop: every round drafts, verifies in one pass of the target, and commits, for all active requests at once.

A single request is the case of one; a server is the same loop with more. Follow ``DecodingLoop._round``, whose lines
are the files of this package::

    scheduler       who waits, who runs; rounds are whole or not at all
    drafting        policy and drafters -> one tree for each request that decodes
    batch_builder   trees and chunks of prompts -> the rows of one pass
    postprocess     the target's rows -> tokens (core/verify), text and stop strings (core/text), commits
    round_stats     statistics, and the record that the policy and other observers hear
    pass_budget     what fits, asked by the first three
    prefill_budget  how many rows of prompts are worth their time, asked by pass_budget

The loop owns each request's tokens and is the only one that asks the target to commit. Between rounds::

    request.token_ids   t0 t1 ... t(n-2) t(n-1)
    target's cache      t0 t1 ... t(n-2)          the last token is fed by the next round, as the tree's root

Requests whose prompt is not in the cache yet take part in the same passes with chunks of it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from typing import Final

from paceline.core.clock import Clock, WallClock
from paceline.core.constraint import Constraint
from paceline.core.errors import BusyError, ConstraintError, InputError, NoRoomError, blame
from paceline.core.logprobs import LogprobParams
from paceline.core.numbers import whole_number
from paceline.core.params import CacheParams, SamplingParams, SpeculationParams, StopRules
from paceline.core.processors import LateTokens
from paceline.core.request import Emission, Request
from paceline.core.sampling import RowSampler
from paceline.core.verify import Verifier, make_verifier
from paceline.drafters.base import Drafter
from paceline.engines.base import Engine, ForwardOutput
from paceline.engines.sequence_pool import SequencePool
from paceline.engines.slow_passes import slow_passes
from paceline.planning.base import Observer, Policy, RoundCosts
from paceline.planning.policies.by_request import RoutingPolicy
from paceline.runtime import round_stats
from paceline.runtime.batch_builder import BatchBuilder, BatchPart
from paceline.runtime.drafting import Drafting, Drafts
from paceline.runtime.pass_budget import PassBudget
from paceline.runtime.postprocess import PartResult, Postprocessor
from paceline.runtime.prefill_budget import PROMPT_ROUNDS, PrefillBudget
from paceline.runtime.round_stats import RoundTimes
from paceline.runtime.scheduler import PrefilledPrompt, Scheduler
from paceline.vocabularies.breakers import BreakerFinder

_DEFAULT_SPECULATION: Final = SpeculationParams()
_DEFAULT_CACHE: Final = CacheParams()
_NO_LOGPROBS: Final = LogprobParams()
_IDS: Final = itertools.count()


class DecodingLoop:
    """Decodes any number of requests on one target engine.

    One thread uses it; :class:`~paceline.runtime.worker.Worker` is for several. A round or an end that a drafter or a
    policy asks for from within a round is refused.

    Args:
        engine: the target. The loop opens and closes sequences on it but does not close it.
        drafters: asked in this order; the first to propose a token owns it. Not closed by the loop.
        policy: decides what is drafted and verified, but for requests that ask for a policy of their own.
        pool: gives out the target's sequences; by default one that keeps none whose request is over.
        clock: where times come from.
        observers: told of every round, after the policy.
        prompt_rounds: plain rounds that a pass may take in which a chunk of a prompt is read beside requests that
            decode, which draft nothing meanwhile; infinity reads prompts as fast as can be, beside drafts.
        costs: what passes take, by which those chunks are cut; ``None`` learns it.
        max_running: most requests that run at once; by default as many as the engine has sequences.
        max_waiting: most requests of one client that wait for their start; ``None`` for any number.
        growth: tokens that every request that runs must be able to say before the cache is full, for one to start.

    Attributes:
        breakers: finds the tokens of DRY's sequence breakers, which takes a while the first time; any thread may.
    """

    def __init__(
        self,
        engine: Engine,
        drafters: Sequence[Drafter],
        policy: Policy,
        *,
        pool: SequencePool | None = None,
        clock: Clock | None = None,
        observers: Sequence[Observer] = (),
        prompt_rounds: float = PROMPT_ROUNDS,
        costs: RoundCosts | None = None,
        max_running: int | None = None,
        max_waiting: int | None = None,
        growth: int = 16,
    ) -> None:
        capabilities = engine.capabilities
        pool = pool or SequencePool(engine, max_idle=0, max_saved_bytes=0)
        prefill = PrefillBudget(prompt_rounds, costs)
        self._budget = PassBudget(capabilities, pool, prefill, growth=growth)
        self._engine = engine
        self.breakers = BreakerFinder(engine.vocabulary)
        self._slow = slow_passes(engine)
        self._policy = policy = RoutingPolicy(policy, drafters)
        self._clock = clock or WallClock()
        self._observers: Sequence[Observer] = (prefill, *observers)
        self._drafting = Drafting(drafters, policy, self._budget, self._clock)
        self._scheduler = Scheduler(
            engine,
            pool,
            self._budget,
            policy,
            self._drafting,
            self._clock,
            max_running=_check_limit("max_running", max_running, 1) or capabilities.max_sequences,
            max_waiting=_check_limit("max_waiting", max_waiting, 0),
        )
        self._batch_builder = BatchBuilder(self._budget)
        self._postprocessor = Postprocessor(engine, self._drafting, self._scheduler)
        self._busy = False
        # Seconds that the policy took to learn from the latest round.
        self._learning_s = 0.0

    @property
    def active(self) -> Sequence[Request]:
        """Requests that are not over, those that run before those that wait."""
        return self._scheduler.requests

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        speculation: SpeculationParams = _DEFAULT_SPECULATION,
        cache: CacheParams = _DEFAULT_CACHE,
        *,
        logprobs: LogprobParams = _NO_LOGPROBS,
        constraint: Constraint | None = None,
        verifier: Verifier | None = None,
        prefilled: PrefilledPrompt | None = None,
    ) -> Request:
        """Take a request, which starts in one of the next rounds, once there is room for it.

        Args:
            prompt_ids: at least one token.
            cache: whose it is, what it may start from, and who may start from what it reads.
            logprobs: which log-probabilities come with its answer.
            constraint: what the answer may say, as it stands at the answer's beginning; ``None`` for anything.
            verifier: judges its drafts, in place of the one that ``speculation`` names; it has the constraint then.
            prefilled: where its prompt was read before; the loop closes that sequence with the request, or refused.

        Raises:
            InputError: the prompt is empty, has unknown tokens, or the policy cannot be lossless for it.
            ContextLengthError: the prompt leaves no room in the context for a token of answer.
            QueueFullError: as many of its client wait as may.
        """
        try:
            self._check(prompt_ids, params, rules, speculation)
            verifier = verifier or self.make_verifier(len(prompt_ids), params, rules, speculation, constraint)
            if rules.ignore_end and verifier.sampler.is_constrained:
                raise ConstraintError(
                    "an answer under a grammar ends where the grammar ends: leave out `ignore_end`, or the grammar",
                    field="ignore_end",
                )
            request = Request(next(_IDS), prompt_ids, params, rules, speculation, verifier, cache, logprobs)
            request.target = self._engine
            self._policy.check(request)
            self._scheduler.add(request, prefilled)
        except BaseException:
            if prefilled is not None:
                self._engine.close_sequence(prefilled.sequence)
            raise
        return request

    def make_verifier(
        self,
        num_prompt: int,
        params: SamplingParams,
        rules: StopRules,
        speculation: SpeculationParams = _DEFAULT_SPECULATION,
        constraint: Constraint | None = None,
    ) -> Verifier:
        """Return what judges the drafts of a request with a prompt of so many tokens, unless another is given."""
        vocabulary, late = self._engine.vocabulary, None
        if rules.min_tokens:
            ends = () if rules.ignore_end else vocabulary.end_ids
            late = LateTokens((*ends, *rules.stop_token_ids), num_prompt + rules.min_tokens)
        ended_by = None if rules.ignore_end else vocabulary
        sampler = RowSampler(params, num_prompt, constraint, self.breakers.find(params), late, ended_by)
        return make_verifier(speculation.verify, sampler)

    def add_observer(self, observer: Observer) -> None:
        self._observers = (*self._observers, observer)

    def cancel(self, request: Request) -> Emission | None:
        """End a request now and return what its reader has not got yet; ``None`` if it is over already.

        Raises:
            BusyError: a round is being made.
        """
        self._refuse_within_a_round("the end of a request")
        self._scheduler.rollback_round()
        return self._scheduler.cancel(request) if self._scheduler.has(request) else None

    def end_reasoning(self, request: Request) -> bool:
        """Have a request close its reasoning: the closing tokens of its budget come next. Return whether it is in one.

        Raises:
            BusyError: a round is being made.
        """
        self._refuse_within_a_round("the end of a reasoning")
        # The text as it stood before a round that was cut short.
        self._scheduler.rollback_round()
        return self._scheduler.has(request) and request.verifier.sampler.end_reasoning(request.token_ids)

    def step(self) -> list[Emission]:
        """Run one round: every running request gains tokens, or has more of its prompt read.

        Returns:
            One emission for each request that emitted or ended.

        Raises:
            EngineError: a pass failed.
            BusyError: a round is being made.
        """
        self._refuse_within_a_round("a round")
        try:
            self._busy = True
            self._round()
        finally:
            self._busy = False
        return self._scheduler.take_emissions()

    def take_emissions(self) -> list[Emission]:
        """Return what a round emitted that stands, though :meth:`step` raised after it, as where an observer failed."""
        return self._scheduler.take_emissions()

    def _round(self) -> None:
        scheduler, postprocessor, clock = self._scheduler, self._postprocessor, self._clock
        scheduler.rollback_round()
        scheduler.admit()
        scheduler.open_round()
        times = RoundTimes(self._learning_s, clock.now_s())
        drafts = self._drafting.grow(scheduler.decoding, len(scheduler.prefilling))
        times.drafted_s = clock.now_s()
        waited_s = self._slow.waited_s if self._slow is not None else 0.0
        parts, output = self._forward(drafts)
        if output is None:
            return
        read_before = sum(part.request.cached for part in parts if not part.decodes)
        output.wait()
        times.verified_s = clock.now_s()
        if self._slow is not None:
            times.waited_s = self._slow.waited_s - waited_s
        walks = postprocessor.verify(parts, output)
        times.sampled_s = clock.now_s()
        results = postprocessor.commit(parts, walks, output)
        scheduler.close_round([each.emission for each in results if each.emission is not None])
        times.ended_s = clock.now_s()
        self._tell(results, drafts, times, read_before)

    def _forward(self, drafts: Drafts) -> tuple[list[BatchPart], ForwardOutput | None]:
        """Make one pass of as much as the cache has room for; no output where nothing is left to do."""
        scheduler, sparing, last = self._scheduler, False, None
        while parts := self._batch_builder.build(drafts, scheduler.prefilling, sparing=sparing):
            with contextlib.suppress(NoRoomError):
                return parts, self._engine.forward([part.step for part in parts])
            if not sparing:
                # A row for each decoding request may fit still; prompts wait until they have made room.
                sparing = True
            elif (last := scheduler.make_room(drafts)) is None:
                drafts = drafts.of(scheduler.decoding)
            else:
                break
        scheduler.close_round([] if last is None else [last])
        scheduler.tell_ended()
        return parts, None

    def _tell(self, results: Sequence[PartResult], drafts: Drafts, times: RoundTimes, read_before: int) -> None:
        """Count the round, and tell the policy and the observers of it."""
        round_stats.count(results, drafts, times)
        round_stats.count_outside(self._scheduler.outside_round, times)
        record = round_stats.make_record(results, drafts, times, read_before)
        self._policy.observe(record)
        round_stats.count_plain(results, record, self._policy.plain_round(record))
        self._scheduler.tell_ended()
        # After the last request nobody waits for the learning.
        self._learning_s = self._clock.now_s() - times.ended_s if self._scheduler.num_running else 0.0
        for observer in self._observers:
            observer.observe(record)

    def _check(
        self, prompt_ids: Sequence[int], params: SamplingParams, rules: StopRules, speculation: SpeculationParams
    ) -> None:
        """Refuse what could never be decoded."""
        vocab_size = self._engine.vocabulary.size
        if not prompt_ids:
            raise InputError("the prompt is empty: give at least one token to continue", field="prompt")
        self._budget.check_prompt(len(prompt_ids))
        budget = params.reasoning_budget
        for field, name, token_ids in (
            ("prompt", "token id {} is", prompt_ids),
            ("logit_bias", "logit bias for token id {}, which is", params.logit_bias),
            (
                "reasoning_budget",
                "token id {} of the reasoning budget is",
                (*budget.start, *budget.end, *budget.forced) if budget is not None else (),
            ),
            ("preserved_ids", "token id {} of preserved_ids is", rules.preserved_ids),
            ("stop_token_ids", "token id {} of stop_token_ids is", rules.stop_token_ids),
            ("allowed_token_ids", "token id {} of allowed_token_ids is", params.allowed_token_ids or ()),
            ("prediction", "token id {} of the prediction is", speculation.prediction),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InputError(f"{name.format(token_id)} not in the vocabulary of {vocab_size}", field=field)
        if list(params.logit_bias.values()).count(-math.inf) >= vocab_size:
            raise InputError("logit biases of -inf ban every token: lift one", field="logit_bias")

    def _refuse_within_a_round(self, what: str) -> None:
        if self._busy:
            raise BusyError(
                f"{what} was requested within a round of the same model, such as by a drafter or a policy: request it "
                "between rounds"
            )


def _check_limit(name: str, value: int | None, least: int) -> int | None:
    """Return a limit that may be left out, or raise :class:`InputError`."""
    if value is None:
        return None
    with blame(name):
        value = whole_number(value, name)
        if value < least:
            raise InputError(f"{name} {value}: the least is {least}, None is no limit of its own")
    return value
