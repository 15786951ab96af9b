"""The planner: decides round by round what is worth drafting and verifying, so that nobody has to set a draft length.

A round of ``R`` rows that is expected to emit ``E`` tokens is worth ``E - pace * seconds(R)``, where the pace is the
tokens a second of the long run (Dinkelbach's method for the largest ratio of tokens to time), and that of plain
decoding where an answer is about to end. Everything is decided by that one figure, for all requests of a round
together::

    free drafters            asked first: they propose all they have, with evidence
    model drafters           another level while some number of further levels is worth its passes and its rows,
                             the chances of tokens not drafted yet taken as they were on average
    rows                     all proposals in order of their survival, cut where the staircase says: the best cut of
                             all, not the first that gets worse

Where that says no, nothing is drafted, and what is drafted now and then all the same is compared with what the target
says next without being verified: a probe costs a pass of the draft, not a wide pass of the target. What may be lost on
the way to knowing is bounded by a ledger.

Under rejection sampling what is verified must not depend on what was drawn, so there the length of a draft is decided
beforehand, by past rounds alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.core.stats import OffReason, PlainTimes
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.engines.options import DEFAULT_BRANCHES
from paceline.planning.auto.backoff import Backoff
from paceline.planning.auto.counterfactual import CounterfactualRound
from paceline.planning.auto.drafter_selector import DrafterSelector
from paceline.planning.auto.learned import Learned
from paceline.planning.auto.ledger import Ledger
from paceline.planning.auto.planner_state import PlannerState, RequestState
from paceline.planning.auto.round_plan import Proposal, RequestPlan, RoundPlan
from paceline.planning.base import RoundCosts, RoundRecord
from paceline.planning.policies.fixed import MAX_DRAFT, MAX_SIBLINGS
from paceline.planning.report import PlannerReport

DEEPEST: Final = 16
"""Deepest draft, unless more rows cost nothing."""

MIN_COPY: Final = 8
"""Tokens that a text lookup has to have been right in a row for its next draft to be deeper."""

START_ROUNDS: Final = 4.0
"""Plain rounds that a request may lose before it has won any."""

START_SHARE: Final = 0.03
"""Share of the longest possible answer that it may lose, where that is less."""

RISKED_SHARE: Final = 0.7
"""Of what may be lost, in one round."""

COUNTERFACTUAL_ROUNDS: Final = 2.0
"""Plain rounds that drafts held back have to win before a request may lose more than was allowed.

First grant: :data:`START_ROUNDS`. Each next grant is half as large and needs twice the shown gain.
"""

FIRST_PLAIN_ROUNDS: Final = 1
"""Plain rounds at the start."""

PLAIN_EVERY: Final = 64
"""Rounds after which another plain one is made, as speculation is compared with what they take; sooner where that is in
doubt."""

FIRST_PLAIN_EVERY: Final = 16
"""Rounds after which it is made where the latest did not take what was measured, until there were enough."""

CERTAIN_AFTER: Final = 5
"""Plain rounds that are enough."""

_PACE_MEMORY: Final = 64.0
_WIDEST: Final = 64


class AutoPolicy:
    """Plans by measured costs and calibrated acceptance.

    Args:
        costs: what passes take, such as a :class:`~paceline.planning.costs.profile.CostProfile`.
        draft_max: deepest draft.
        copy_max: deepest draft of a text lookup that has been right for :data:`MIN_COPY` tokens; ``None`` for
            ``draft_max``.
        siblings: proposals a draft model makes for a position.
        branches: most branches of all trees of a round together; what the engine was loaded for.
        learned: what another such policy has learned of these drafters, with the same target and draft model.
    """

    def __init__(
        self,
        costs: RoundCosts,
        *,
        draft_max: int = DEEPEST,
        copy_max: int | None = None,
        siblings: int = 2,
        branches: int = DEFAULT_BRANCHES,
        learned: Learned | None = None,
    ) -> None:
        if not 1 <= draft_max <= MAX_DRAFT:
            raise InputError(f"drafts of up to {draft_max} tokens: give 1 to {MAX_DRAFT}")
        if copy_max is not None and not draft_max <= copy_max <= MAX_DRAFT:
            raise InputError(f"drafts of copies of up to {copy_max} tokens: give {draft_max} to {MAX_DRAFT}")
        if not 1 <= siblings <= MAX_SIBLINGS:
            raise InputError(f"{siblings} draft siblings are out of range: give 1 (a chain) to {MAX_SIBLINGS}")
        if branches < 0:
            raise InputError(f"{branches} branches: give 0 (chains only) or more")
        self.draft_max = draft_max
        self.copy_max = draft_max if copy_max is None else copy_max
        self.siblings = siblings if branches else 1
        self.branches = branches
        self._shared = PlannerState(costs, learned)
        self._selector = DrafterSelector(self._shared, draft_max)
        # Plain and actual seconds of late, of all requests.
        self._late_plain_s = self._late_actual_s = 0.0
        self._round: RoundPlan | None = None
        self._backoff: Backoff | None = None
        self._backoff_request: Request | None = None
        # Whether there are drafters, so that there is something to keep a ledger of.
        self._is_open = False
        self._rounds = 0
        self._since_plain = 0
        self._plain_rounds = 0
        # What planning the latest round took, until it is known what learning from it did.
        self._decided_s: float | None = None
        # By how much the cheapest round with drafts was longer than a plain one when it was last looked up.
        self._cheapest_s = 0.0
        # What a plain round in place of the latest one takes.
        self._plain: PlainTimes | None = None
        # Why a request drafts nothing in this round, where nothing else is known of it.
        self._off: OffReason = "no_gain"

    def check(self, request: Request) -> None:
        """Lossless everywhere: under rejection nothing is decided by what was drawn."""

    def begin(self, request: Request) -> None:
        self._leave_backoff()
        start_rounds = min(START_ROUNDS, START_SHARE * request.rules.max_tokens)
        start_s = start_rounds * self._shared.costs.round_s(1, len(request.token_ids))
        self._shared.begin(request, Ledger(start_s))

    def end(self, request: Request) -> None:
        self._leave_backoff()
        self._shared.end(request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Open the round: every request may draft, unless it is a round of plain decoding for all."""
        if self._backoff is not None:
            if len(requests) == 1 and requests[0] is self._backoff_request:
                return [None]
            self._leave_backoff()
        if not any(request.speculation.follows_policy for request in requests):
            self._round = None
            return [None] * len(requests)
        count, shared = len(requests), self._shared
        states = [shared.requests[request.id] for request in requests]
        self._rounds += 1
        context = sum(len(request.token_ids) - 1 for request in requests)
        plain_s = shared.costs.round_s(count, context, count)
        if not self._is_open:
            self._is_open = True
            shared.ledger.grant(START_ROUNDS * plain_s)
        self._round = None
        self._since_plain += 1
        is_certain = self._plain_rounds >= CERTAIN_AFTER or shared.costs.as_measured
        longest = PLAIN_EVERY if is_certain else FIRST_PLAIN_EVERY
        is_due = self._rounds <= FIRST_PLAIN_ROUNDS or self._since_plain > longest
        if (is_due and not shared.costs.tells_plain) or shared.costs.is_doubtful:
            self._off = "measuring"
            return [None] * count
        # What all have won by now is no reason to let those of this round lose it.
        own_s = 0.0
        for request, state in zip(requests, states, strict=True):
            # Whoever wants plain decoding lets nobody gamble for it.
            if request.speculation.follows_policy:
                own_s += state.ledger.headroom_s
        headroom_s = min(shared.ledger.headroom_s, own_s)
        # All of it at once would be one gamble where several smaller ones tell more.
        headroom_s *= RISKED_SHARE
        # At the end of an answer, what a second could bring in the long run is no longer to be had.
        is_ending = all(request.num_left <= self.draft_max for request in requests)
        pace = count / plain_s * (1.0 if is_ending else self._speedup)
        for state in states:
            state.rounds += 1
            state.probes.save(plain_s / count, most_s=plain_s)
        blocked = headroom_s < self._cheapest_s
        self._off = self._why_risky(requests, self._cheapest_s) if blocked else "no_gain"
        wanted = [
            request.speculation.follows_policy
            and (
                _is_draw_independent(request)
                or self._selector.is_worthwhile(request, state, pace, plain_s / count, blocked=blocked)
            )
            for request, state in zip(requests, states, strict=True)
        ]
        if not any(wanted):
            if count == 1:
                self._enter_backoff(requests[0], states[0], plain_s)
            return [None] * count
        planned = RoundPlan(shared.costs, {}, count, pace, context, plain_s, headroom_s, self.draft_max, self.branches)
        widest = min(self.draft_max * count, max(_WIDEST, self.draft_max) if shared.costs.tells_plain else _WIDEST)
        self._cheapest_s = min(planned.staircase(widest)[1 : widest + 1]) - plain_s
        if not planned.may_pay(widest):
            self._off = "no_gain"
            return [None] * count
        planned.limit(widest)
        self._off = self._why_risky(requests, self._cheapest_s) if planned.blocked else "no_gain"
        independent_requests = [request for request in requests if _is_draw_independent(request)]
        draw_independent_depths = iter(
            self._selector.draw_independent_depths(independent_requests, planned) if independent_requests else ()
        )
        budgets: list[DraftBudget | None] = []
        # Among more the usual drafts fill the widest pass, and all would wait for one's copy.
        are_few = count * MIN_COPY <= _WIDEST
        for request, state, is_wanted in zip(requests, states, wanted, strict=True):
            draw_independent = _is_draw_independent(request)
            copies = are_few and max(state.runs.values(), default=0) >= MIN_COPY
            deepest = self.copy_max if copies else self.draft_max
            depth = next(draw_independent_depths) if draw_independent else deepest
            if depth == 0 or not is_wanted:
                budgets.append(None)
                continue
            planned.plans[request.id] = RequestPlan(request, draw_independent, request.num_output)
            budgets.append(
                DraftBudget(
                    depth,
                    1 if draw_independent else self.siblings,
                    probability=not draw_independent,
                    margin=not draw_independent,
                )
            )
        if planned.plans:
            self._round = planned
        return budgets

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        planned = self._round
        assert planned is not None
        name = drafter.name
        if name not in planned.asked:
            chosen = self._selector.select_first(planned, drafter, jobs)
            planned.asked[name] = [job.request.id for job in chosen]
            return chosen
        if not self._shared.drafters[name].is_model:
            # Whether it has more to propose is for it to say: that takes no pass.
            return list(jobs)
        return self._selector.select_further(planned, name, jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        planned = self._round
        assert planned is not None
        owners = {}
        for request, tree in zip(requests, trees, strict=True):
            plan = planned.plans.get(request.id)
            if plan is not None and tree.num_drafted:
                self._shared.score(plan, tree)
                owners[request.id] = tree
        # What drafts are worth does not depend on whether they can be afforded now.
        wanted, affordable = planned.standing(), planned.affordable()
        self._shared.credit(planned, wanted.value)
        if wanted.kept and not affordable.kept and planned.requests == 1:
            self._open_counterfactual(planned, wanted.kept)
        if affordable is not wanted:
            cost_s = planned.seconds(len(wanted.kept)) - planned.plain_s + planned.draft_s
            why = self._why_risky(requests, cost_s)
            planned.off = {request_id: why for _, request_id, _ in wanted.kept}
        kept: dict[int, list[int]] = {request_id: [] for request_id in owners}
        for _, request_id, node in affordable.kept:
            kept[request_id].append(node)
        for request_id, tree in owners.items():
            if not planned.plans[request_id].draw_independent and len(kept[request_id]) < tree.num_drafted:
                tree.keep(kept[request_id])

    def observe(self, record: RoundRecord) -> None:
        """Learn what was accepted and what it cost, and enter it in the ledgers."""
        planned, self._round = self._round, None
        count, shared = len(record.requests), self._shared
        self._plain = None
        if self._decided_s is not None:
            shared.observe_deciding(self._decided_s + record.learning_s)
            self._decided_s = None
        verify_s = record.round_s - record.draft_s
        if not count:
            shared.costs.observe_prompt(record.prefill_rows, record.prefill_context, verify_s, record.waited_s)
            return
        if self._backoff is not None:
            self._plain = PlainTimes(verify_s, verify_s, verify_s)
            self._backoff.add(record)
            if self._backoff.over:
                # One of them says what passes take now as well as all would; a mean would take in what disturbed any.
                shared.costs.observe_round(1, len(record.requests[0].token_ids) - 1, 1, verify_s, record.waited_s)
                self._leave_backoff()
            return
        rows = sum(len(tree) for tree in record.trees)
        context = sum(len(request.token_ids) - 1 for request in record.requests)
        if planned is not None:
            shared.learn(planned, record)
            self._decided_s = record.draft_s - record.learning_s - sum(record.draft_seconds.values())
        is_plain, is_shared = rows == count, record.prefill_rows > 0
        # A plain round is what plain decoding takes, whatever was measured before, unless rounds before it made it
        # longer; deciding came on top.
        if is_plain and not is_shared and shared.costs.is_settled(count, count):
            plain_s = verify_s
            self._plain = PlainTimes(plain_s, plain_s, plain_s)
        else:
            plain_s = shared.costs.round_s(count, context, count)
            low, high = shared.costs.plain_bounds
            self._plain = PlainTimes(plain_s, low * plain_s, high * plain_s)
        if not any(request.speculation.follows_policy for request in record.requests):
            # Whoever asked for plain decoding wins nothing and owes nothing; what its rounds take is worth knowing.
            if is_shared:
                shared.costs.interrupt()
            else:
                shared.costs.observe_round(rows, context, count, verify_s, record.waited_s)
            return
        if is_plain:
            self._since_plain = 0
        if is_shared:
            # Where prompts share a pass its time says nothing about drafts.
            shared.costs.interrupt()
        else:
            self._plain_rounds += is_plain
            shared.costs.observe_round(rows, context, count, verify_s, record.waited_s)
            tokens = sum(record.emitted)
            self._book(tokens, record.round_s, tokens / count * plain_s)
            # A request pays for the rows it had: one without drafts would owe what those of others took.
            longer_s, drafted = record.round_s - plain_s, rows - count
            for request, tree, own in zip(record.requests, record.trees, record.emitted, strict=True):
                share = tree.num_drafted / drafted if drafted else 1.0 / count
                own_s = plain_s / count + share * longer_s
                shared.requests[request.id].ledger.book(own, own_s, own / count * plain_s)
        for request, own in zip(record.requests, record.emitted, strict=True):
            self._follow_counterfactual(request, own, plain_s)

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        """Return what the ledgers were booked with, and its bounds."""
        return self._plain

    def off_reason(self, request: Request) -> OffReason:
        """Return what was decided for the request, or for all."""
        planned = self._round
        return self._off if planned is None else planned.off.get(request.id, self._off)

    @property
    def speculates(self) -> bool:
        return True

    @property
    def weighs_drafters(self) -> bool:
        return True

    @property
    def draft_length(self) -> str:
        copies = f", of copies up to {self.copy_max}" if self.copy_max > self.draft_max else ""
        return f"up to {self.draft_max}{copies}, as it pays"

    def most_branches(self, num_drafters: int) -> int | None:
        return None

    def learned(self) -> Learned | None:
        return self._shared.learned() if self._shared.drafters else None

    def report(self) -> PlannerReport:
        shared = self._shared
        return PlannerReport(
            {name: calibration.reliability for name, calibration in shared.survival.calibrations.items()},
            list(shared.ledger.history),
            shared.ledger.debt_s,
            shared.ledger.plain_s,
            shared.costs.drift,
            list(shared.remembered),
        )

    @property
    def _speedup(self) -> float:
        """Pace of late over that of plain decoding; at least 1."""
        if self._late_actual_s <= 0:
            return 1.0
        return max(self._late_plain_s / self._late_actual_s, 1.0)

    def _why_risky(self, requests: Sequence[Request], cost_s: float) -> OffReason:
        """Return why drafts that may lose ``cost_s`` against a plain round are not risked."""
        speculating = [request for request in requests if request.speculation.follows_policy]
        own_s = sum(self._shared.requests[request.id].ledger.allowance_s for request in speculating)
        if RISKED_SHARE * min(self._shared.ledger.allowance_s, own_s) >= cost_s:
            # Without debts they would be.
            return "losing"
        is_short = any(START_SHARE * request.rules.max_tokens < START_ROUNDS for request in speculating)
        return "short" if is_short else "no_gain"

    def _enter_backoff(self, request: Request, state: RequestState, plain_s: float) -> None:
        """Decide for as many rounds as nothing will be worth a decision: until enough was saved for a probe."""
        if not state.counterfactual.idle or not self._shared.costs.is_settled(1, 1):
            # What the rounds of a back-off take is taken for plain decoding's.
            return
        backoff = Backoff.until(self._selector.missing_s(request, state, plain_s), state.probes.set_aside_s(plain_s))
        if backoff is not None:
            self._backoff, self._backoff_request = backoff, request

    def _leave_backoff(self) -> None:
        """End the back-off, if there is one: book its rounds, and what they saved for probes."""
        backoff, request, self._backoff, self._backoff_request = self._backoff, self._backoff_request, None, None
        if backoff is None or request is None or not backoff.rounds:
            return
        state = self._shared.requests[request.id]
        self._since_plain = 0
        self._book(backoff.tokens, backoff.actual_s, backoff.plain_s, backoff.rounds)
        state.ledger.book(backoff.tokens, backoff.actual_s, backoff.plain_s)
        # The first was counted when it was decided about.
        further = backoff.rounds - 1
        self._rounds += further
        state.rounds += further
        state.probes.save(backoff.plain_s * further / backoff.rounds)

    def _book(self, tokens: int, actual_s: float, plain_s: float, rounds: int = 1) -> None:
        """Enter rounds in the ledger of all requests, and in the pace of late."""
        keep = (1.0 - 1.0 / _PACE_MEMORY) ** rounds
        self._late_plain_s = self._late_plain_s * keep + plain_s
        self._late_actual_s = self._late_actual_s * keep + actual_s
        if self._is_open:
            self._shared.ledger.book(tokens, actual_s, plain_s)

    def _open_counterfactual(self, planned: RoundPlan, ranked: Sequence[Proposal]) -> None:
        """Follow what would have been verified if it could have been afforded."""
        (plan,) = planned.plans.values()
        credit = self._shared.requests[plan.request.id].counterfactual
        # A draw-independent request's tree is verified, whatever it is worth.
        if plan.tree is not None and not plan.draw_independent and credit.idle:
            extra_s = planned.seconds(len(ranked)) - planned.plain_s + planned.draft_s
            credit.open(CounterfactualRound(plan.tree, [node for _, _, node in ranked], extra_s))

    def _follow_counterfactual(self, request: Request, emitted: int, plain_s: float) -> None:
        """Compare what was not verified with the tokens emitted; where it would have won enough, allow more."""
        state = self._shared.requests[request.id]
        if state.counterfactual.idle:
            return
        state.counterfactual.follow(request.token_ids[len(request.token_ids) - emitted :], plain_s)
        scale = 2.0**state.counterfactual.grants
        if state.counterfactual.grant(COUNTERFACTUAL_ROUNDS * scale * plain_s):
            state.ledger.grant(START_ROUNDS / scale * plain_s)
            self._shared.ledger.grant(START_ROUNDS / scale * plain_s)


def _is_draw_independent(request: Request) -> bool:
    """Return whether nothing may depend on what is drawn for a request."""
    return request.verifier.name == "rejection" and not request.params.greedy
