"""The planner: decides round by round what is worth drafting and verifying, so that nobody has to set a draft length.

A round of ``R`` rows that is expected to emit ``E`` tokens is worth ``E - pace * seconds(R)``, where the pace is the
tokens a second of the long run (Dinkelbach's method for the largest ratio of tokens to time). Everything is decided by
that one figure, for all requests of a round together::

    free drafters            asked first: they propose all they have, with evidence
    model drafters           another level while some number of further levels is worth its passes and its rows,
                             the chances of tokens not drafted yet taken as they were on average
    rows                     all proposals in order of their survival, cut where the staircase says: the best cut of
                             all, not the first that gets worse

Where that says no, nothing is drafted, and what is drafted now and then all the same is compared with what the target
says next without being verified: looking costs a pass of the draft, not a wide pass of the target. What may be lost on
the way to knowing is bounded by a ledger.

Under rejection sampling what is verified must not depend on what was drawn, so there the length of a draft is decided
beforehand, by past rounds alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.planning.base import RoundCosts, RoundRecord
from paceline.planning.calibration import Reliability
from paceline.planning.fixed import MAX_DRAFT, MAX_SIBLINGS
from paceline.planning.gains import GAIN_MEMORY, Comeback, Gain, Gains
from paceline.planning.ledger import ALLOWED_SHARE_OF_ONE, Ledger, LedgerEntry
from paceline.planning.online_costs import OnlineCosts
from paceline.planning.paper import PaperRound, PaperTrading
from paceline.planning.rest import Rest
from paceline.planning.round_plan import Cut, Front, Proposal, RequestPlan, RoundPlan, front_of, others
from paceline.planning.survival import GrownTree, Outlook, SurvivalModel

START_ROUNDS = 4.0
"""Plain rounds that a request may lose before it has won any, and"""
START_SHARE = 0.06
"""share of the longest answer that it may have, if that is less."""

RISKED_SHARE = 0.7
"""Of what may be lost, in one round."""

LOOKING_SHARE = 0.005
"""Of plain time that is spent on drafts which nothing speaks for, to see whether that is still so."""

PAPER_ROUNDS = 2.0
"""Plain rounds that drafts have to win on paper before more may be lost than was allowed, and"""
PAPER_GRANTS = 1
"""times that this is done for a request."""

INVESTED_SHARE = 0.03
"""Of the time a prompt took the target that a draft model may take to catch up with it."""

HOPED_SHARE, TRIED_SHARE = 0.04, 0.01
"""Of what is left of an answer, that it may take where nothing is known of it yet: if drafts as they mostly are would
be worth it here, and if they would not."""

FIRST_PLAIN_ROUNDS = 2
"""Plain rounds at the start;"""
PLAIN_EVERY = 64
"""rounds after which another is made, as speculation is compared with what they take, and"""
FIRST_PLAIN_EVERY, KNOWN_AFTER = 16, 5
"""rounds until there were so many: the machine may not be as it was when passes were measured."""

_PACE_MEMORY = 64.0
_TRIALS = 3
_FIRST_ROUNDS = 8
_WIDEST = 64
_OF_NOTE = 0.3
_CAUGHT_UP = 8
_HISTORY = 4096


@dataclass(slots=True)
class _Source:
    """What is known of one drafter, over all requests.

    Attributes:
        is_model: whether asking costs passes.
        outlook: how likely its next proposals are to be right.
        ask_s: seconds that asking it for one request takes; of a model, beyond its passes nothing is counted.
        last_asked: requests it was asked for when it was last considered.
        gains: of all requests.
    """

    is_model: bool
    outlook: Outlook
    ask_s: float = 0.0
    last_asked: int = 0
    gains: Gains = field(default_factory=Gains)


@dataclass(slots=True)
class _State:
    """One request's own.

    Attributes:
        outlooks: by drafter; they start from the drafter's over all requests.
        gains: by drafter.
        ledger: its own.
        looking_s: by drafter, seconds that may be spent on asking it although nothing speaks for it.
        rounds: begun.
        tried: models that were asked.
        paper: drafts that could not be afforded.
        comebacks: by model, whether it may be asked all the same, because it was right of late.
    """

    ledger: Ledger
    outlooks: dict[str, Outlook] = field(default_factory=dict)
    gains: dict[str, Gains] = field(default_factory=dict)
    looking_s: dict[str, float] = field(default_factory=dict)
    comebacks: dict[str, Comeback] = field(default_factory=dict)
    rounds: int = 0
    tried: set[str] = field(default_factory=set)
    paper: PaperTrading = field(default_factory=PaperTrading)


@dataclass(frozen=True, slots=True)
class PlannerReport:
    """What the planner has learned.

    Attributes:
        reliability: by drafter, predicted against actual acceptance.
        ledger: debt after every round, over all requests; the latest rounds only.
        debt_s: seconds lost so far against plain decoding; negative is a gain.
        plain_s: seconds that plain decoding would have taken.
        pace: tokens a second of plain decoding over those of late.
        drift: how many times as long plain rounds take as when they were measured.
    """

    reliability: Mapping[str, Reliability]
    ledger: Sequence[LedgerEntry]
    debt_s: float
    plain_s: float
    pace: float
    drift: float


class AutoPolicy:
    """Plans by measured costs and calibrated acceptance.

    Args:
        costs: what passes take, such as a :class:`~paceline.planning.cost.CostProfile`.
        draft_max: deepest draft.
        siblings: proposals a draft model makes for a position.
        branches: most branches of all trees of a round together; what the engine was loaded for.
    """

    def __init__(self, costs: RoundCosts, *, draft_max: int = 16, siblings: int = 2, branches: int = 8) -> None:
        if not 1 <= draft_max <= MAX_DRAFT:
            raise InputError(f"drafts of up to {draft_max} tokens: give 1 to {MAX_DRAFT}")
        if not 1 <= siblings <= MAX_SIBLINGS:
            raise InputError(f"{siblings} draft siblings are out of range: give 1 (a chain) to {MAX_SIBLINGS}")
        if branches < 0:
            raise InputError(f"{branches} branches: give 0 (chains only) or more")
        self.draft_max = draft_max
        self.siblings = siblings if branches else 1
        self.branches = branches
        self._costs = OnlineCosts(costs)
        self._survival = SurvivalModel()
        self._sources: dict[str, _Source] = {}
        self._states: dict[int, _State] = {}
        self._ledger: Ledger | None = None
        # Plain and actual seconds of late, of all requests.
        self._late_plain_s = self._late_actual_s = 0.0
        self._round: RoundPlan | None = None
        self._rest: Rest | None = None
        self._resting: _State | None = None
        self._rounds = 0
        self._since_plain = 0
        self._plain_rounds = 0
        self._overhead_s = 0.0
        # By how much the cheapest round with drafts was longer than a plain one when it was last looked up.
        self._cheapest_s = 0.0

    def check(self, request: Request) -> None:
        """Lossless everywhere: under rejection nothing is decided by what was drawn."""

    def begin(self, request: Request) -> None:
        """Start with what is known of all requests."""
        self._wake()
        start_rounds = min(START_ROUNDS, START_SHARE * request.rules.max_tokens)
        start_s = start_rounds * self._costs.round_s(1, len(request.token_ids))
        state = _State(Ledger(start_s, share=ALLOWED_SHARE_OF_ONE))
        for name, source in self._sources.items():
            self._greet(state, name, source)
        self._states[request.id] = state
        self._survival.begin(request.id)

    def end(self, request: Request) -> None:
        """Forget the request; what it taught about all requests stays."""
        self._wake()
        del self._states[request.id]
        self._survival.end(request.id)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        """Open the round: every request may draft, unless it is a round of plain decoding for all."""
        count = len(requests)
        if self._rest is not None:
            if count == 1 and self._states[requests[0].id] is self._resting:
                return [None]
            self._wake()
        self._rounds += 1
        context = sum(len(request.token_ids) - 1 for request in requests)
        plain_s = self._costs.round_s(count, context, count)
        if self._ledger is None:
            self._ledger = Ledger(START_ROUNDS * plain_s, history=_HISTORY)
        self._round = None
        self._since_plain += 1
        longest = PLAIN_EVERY if self._plain_rounds >= KNOWN_AFTER else FIRST_PLAIN_EVERY
        if self._rounds <= FIRST_PLAIN_ROUNDS or self._since_plain > longest:
            return [None] * count
        headroom_s = self._ledger.headroom_s
        if count == 1:
            headroom_s = min(headroom_s, self._states[requests[0].id].ledger.headroom_s)
        # All of it at once would be one gamble where several smaller ones tell more.
        headroom_s *= RISKED_SHARE
        pace = count / plain_s * self._speedup
        states = [self._states[request.id] for request in requests]
        for state in states:
            state.rounds += 1
            for name in state.looking_s:
                earned_s = LOOKING_SHARE * plain_s / count / len(state.looking_s)
                state.looking_s[name] = min(state.looking_s[name] + earned_s, plain_s)
        wanted = [
            _is_blind(request) or self._worth_asking_any(state, pace, blocked=headroom_s < self._cheapest_s)
            for request, state in zip(requests, states, strict=True)
        ]
        if not any(wanted):
            if count == 1:
                self._lie_down(states[0], plain_s)
            return [None] * count
        planned = RoundPlan(self._costs, {}, count, pace, context, plain_s, headroom_s, self.draft_max, self.branches)
        widest = min(self.draft_max * count, _WIDEST)
        self._cheapest_s = min(planned.seconds(rows) for rows in range(1, widest + 1)) - plain_s
        if planned.seconds(widest) - plain_s > headroom_s:
            # The best round may be out of reach: then a second is worth what it brings within reach.
            planned.pace = count / plain_s
            within = (rows for rows in range(widest, 0, -1) if planned.seconds(rows) - plain_s <= headroom_s)
            most_rows = next(within, 0)
            planned.blocked = not most_rows
            # Where nothing is within reach, what is looked at is followed as far as it goes, on paper.
            planned.most_rows = most_rows or math.inf
        budgets: list[DraftBudget | None] = []
        for request, state, is_wanted in zip(requests, states, wanted, strict=True):
            blind = _is_blind(request)
            depth = self._blind_depth(state, planned) if blind else self.draft_max
            if depth == 0 or not is_wanted:
                budgets.append(None)
                continue
            planned.plans[request.id] = RequestPlan(request, blind, request.num_output)
            budgets.append(DraftBudget(depth, 1 if blind else self.siblings, margin=not blind))
        if planned.plans:
            self._round = planned
        return budgets

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Choose the trees for which a further level of this drafter is worth its time."""
        planned = self._round
        assert planned is not None
        name = drafter.name
        if name not in planned.asked:
            chosen = self._first_choice(planned, drafter, jobs)
            planned.asked[name] = [job.request.id for job in chosen]
            return chosen
        if not self._sources[name].is_model:
            # Whether it has more to propose is for it to say: that takes no pass.
            return list(jobs)
        return self._go_on(planned, name, jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Keep the proposals that are worth their rows."""
        planned = self._round
        assert planned is not None
        owners = {}
        for request, tree in zip(requests, trees, strict=True):
            plan = planned.plans.get(request.id)
            if plan is not None and tree.num_drafted:
                self._look(plan, tree)
                owners[request.id] = tree
        # What drafts are worth does not depend on whether they can be afforded now.
        ranked = planned.ranked()
        wanted, affordable = planned.cut(ranked), planned.cut(ranked, planned.headroom_s)
        self._credit(planned, wanted.value)
        if wanted.kept and not affordable.kept and planned.requests == 1:
            self._trade_on_paper(planned, wanted.kept)
        kept: dict[int, list[int]] = {request_id: [] for request_id in owners}
        for _, request_id, node in affordable.kept:
            kept[request_id].append(node)
        for request_id, tree in owners.items():
            if not planned.plans[request_id].blind and len(kept[request_id]) < tree.num_drafted:
                tree.keep(kept[request_id])

    def observe(self, record: RoundRecord) -> None:
        """Learn what was accepted and what it cost, and enter it in the ledgers."""
        planned, self._round = self._round, None
        count = len(record.requests)
        if not count:
            return
        if self._rest is not None:
            self._rest.add(record)
            if self._rest.over:
                # One of them says what passes take now as well as all would; a mean would take in what disturbed any.
                verify_s = record.round_s - record.draft_s
                self._costs.observe_round(1, len(record.requests[0].token_ids) - 1, 1, verify_s)
                self._wake()
            return
        rows = sum(len(tree) for tree in record.trees)
        context = sum(len(request.token_ids) - 1 for request in record.requests)
        emitted = [len(path) + 1 for path in record.paths]
        if rows == count:
            self._since_plain = 0
            self._plain_rounds += 1
        if planned is not None:
            self._learn(planned, record)
        if record.prefill_rows:
            # Prompts shared the pass: its time says nothing about drafts.
            return
        # A plain round is what plain decoding takes, whatever was measured before; deciding came on top.
        verify_s = record.round_s - record.draft_s
        plain_s = verify_s if rows == count else self._costs.round_s(count, context, count)
        self._costs.observe_round(rows, context, count, verify_s)
        tokens = sum(emitted)
        self._book(tokens, record.round_s, tokens / count * plain_s)
        for request, own in zip(record.requests, emitted, strict=True):
            state = self._states[request.id]
            state.ledger.book(own, record.round_s / count, own / count * plain_s)
            if state.paper.idle:
                continue
            state.paper.follow(request.token_ids[-own:], plain_s)
            if state.paper.grants < PAPER_GRANTS and state.paper.grant(PAPER_ROUNDS * plain_s):
                state.ledger.grant(START_ROUNDS * plain_s)
                if self._ledger is not None:
                    self._ledger.grant(START_ROUNDS * plain_s)

    def report(self) -> PlannerReport:
        """Return what was learned so far."""
        ledger = self._ledger or Ledger(0.0)
        return PlannerReport(
            {name: calibration.reliability for name, calibration in self._survival.calibrations.items()},
            list(ledger.history),
            ledger.debt_s,
            ledger.plain_s,
            self._speedup,
            self._costs.drift,
        )

    @property
    def _speedup(self) -> float:
        """Pace of late over that of plain decoding; at least 1."""
        if self._late_actual_s <= 0:
            return 1.0
        return max(self._late_plain_s / self._late_actual_s, 1.0)

    def _source(self, drafter: Drafter, request: Request) -> _Source:
        source = self._sources.get(drafter.name)
        if source is None:
            is_model = drafter.unread(request) is not None
            source = self._sources[drafter.name] = _Source(is_model, Outlook(memory=400.0))
            self._survival.know(drafter.name, is_model=is_model)
            for state in self._states.values():
                self._greet(state, drafter.name, source)
        return source

    @staticmethod
    def _greet(state: _State, name: str, source: _Source) -> None:
        state.outlooks[name] = Outlook(memory=40.0, shared=source.outlook)
        state.looking_s[name] = 0.0
        state.gains[name] = source.gains.copy()
        if source.is_model:
            state.comebacks[name] = Comeback()

    def _worth_asking_any(self, state: _State, pace: float, *, blocked: bool) -> bool:
        """Return whether some drafter is worth asking, or worth a look: the quick way to plain decoding."""
        if self._speaks_for_asking(state, pace, blocked=blocked):
            return True
        for name, source in self._sources.items():
            if state.looking_s[name] >= source.ask_s + self._overhead_s:
                # The round is planned for the sake of this look, so planning it is part of what the look costs.
                state.looking_s[name] -= self._overhead_s
                return True
        return False

    def _speaks_for_asking(self, state: _State, pace: float, *, blocked: bool) -> bool:
        """Return whether by what is known some drafter is worth asking."""
        if any(comeback.looks_left for comeback in state.comebacks.values()):
            return True
        if blocked:
            # Asking costs time too, and there is none to lose.
            return False
        if not self._sources or state.rounds <= _FIRST_ROUNDS:
            return True
        return any(
            max(state.gains[name].alone.hoped, state.gains[name].beside.hoped)
            > pace * (self._overhead_s + (0.0 if source.is_model else source.ask_s))
            for name, source in self._sources.items()
        )

    def _lie_down(self, state: _State, plain_s: float) -> None:
        """Decide for as many rounds as nothing will be worth a decision: until enough was saved for a look."""
        if not state.paper.idle:
            return
        missing_s = min(
            (source.ask_s + self._overhead_s - state.looking_s[name] for name, source in self._sources.items()),
            default=math.inf,
        )
        rest = Rest.until(missing_s, LOOKING_SHARE * plain_s / max(len(state.looking_s), 1))
        if rest is not None:
            self._rest, self._resting = rest, state

    def _wake(self) -> None:
        """End the rest, if there is one: book its rounds, and what they saved for looks."""
        rest, state, self._rest, self._resting = self._rest, self._resting, None, None
        if rest is None or state is None or not rest.rounds:
            return
        self._since_plain = 0
        self._book(rest.tokens, rest.actual_s, rest.plain_s, rest.rounds)
        state.ledger.book(rest.tokens, rest.actual_s, rest.plain_s)
        # The first was counted when it was decided about.
        further = rest.rounds - 1
        self._rounds += further
        state.rounds += further
        for name in state.looking_s:
            state.looking_s[name] += LOOKING_SHARE * rest.plain_s * further / rest.rounds / len(state.looking_s)

    def _book(self, tokens: int, actual_s: float, plain_s: float, rounds: int = 1) -> None:
        """Enter rounds in the ledger of all requests, and in the pace of late."""
        keep = (1.0 - 1.0 / _PACE_MEMORY) ** rounds
        self._late_plain_s = self._late_plain_s * keep + plain_s
        self._late_actual_s = self._late_actual_s * keep + actual_s
        if self._ledger is not None:
            self._ledger.book(tokens, actual_s, plain_s)

    def _blind_depth(self, state: _State, planned: RoundPlan) -> int:
        """Return the length of chain that is worth most, by what was accepted on average."""
        models = [name for name, source in self._sources.items() if source.is_model]
        if not models:
            names = list(self._sources)
            if not names:
                return 1
        else:
            names = models
        outlooks = [state.outlooks[name].ahead(None, self.draft_max) for name in names]
        level_s = self._costs.draft_s(1, planned.context) if models else 0.0
        best, best_depth, gained, survival = 0.0, 0, 0.0, 1.0
        for depth in range(1, self.draft_max + 1):
            survival *= max(chances[depth - 1] for chances in outlooks)
            gained += survival
            extra_s = planned.seconds(depth) - planned.plain_s + depth * level_s
            if extra_s > planned.headroom_s:
                continue
            value = gained - planned.pace * extra_s
            if value > best:
                best, best_depth = value, depth
        if not best_depth:
            name = names[0]
            look_s = planned.seconds(1) - planned.plain_s + level_s
            if state.looking_s[name] >= look_s:
                state.looking_s[name] -= look_s
                return 1
        return best_depth

    def _first_choice(self, planned: RoundPlan, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Choose the trees that this drafter is asked for at all."""
        source = self._source(drafter, jobs[0].request)
        name = drafter.name
        for job in jobs:
            plan = planned.plans[job.request.id]
            plan.beside[name] = max(self._look(plan, job.tree).survivals[1:], default=0.0) > _OF_NOTE
        standing = planned.cut(planned.ranked())
        planned.value_before[name] = standing.value
        if not source.is_model:
            return [job for job in jobs if self._ask_free(planned, planned.plans[job.request.id], name, source)]
        # A draft is tried on a few requests, and then on twice as many, before all of them have it read their prompts.
        most = max(1, len(jobs) // 16, 2 * source.last_asked)
        chosen: list[DraftJob] = []
        for job in jobs:
            plan = planned.plans[job.request.id]
            if len(chosen) == most and not plan.blind:
                continue
            unread = drafter.unread(job.request) or 0
            catch_up_s = 0.0
            if unread > _CAUGHT_UP:
                catch_up_s = self._costs.draft_s(unread, len(job.request.token_ids)) - self._costs.draft_s(
                    1, planned.context
                )
            if plan.blind or self._ask_model(planned, plan, name, catch_up_s, standing):
                chosen.append(job)
                self._states[job.request.id].tried.add(name)
                predicted = planned.predicted_draft_s
                predicted[name] = predicted.get(name, 0.0) + catch_up_s
        source.last_asked = len(chosen)
        if chosen:
            planned.predicted_draft_s[name] += self._costs.draft_s(len(chosen), planned.context)
        return chosen

    def _ask_free(self, planned: RoundPlan, plan: RequestPlan, name: str, source: _Source) -> bool:
        state = self._states[plan.request.id]
        gain = self._gain(state.gains[name], plan, name)
        if plan.blind or (not planned.blocked and (gain.rounds == 0 or gain.hoped > planned.pace * source.ask_s)):
            return True
        return self._may_look(state, name, source.ask_s)

    def _may_look(self, state: _State, name: str, cost_s: float) -> bool:
        """Take what a look costs from what there is for looking, if there is enough."""
        if state.looking_s[name] < cost_s:
            return False
        state.looking_s[name] -= cost_s
        return True

    @staticmethod
    def _gain(gains: Gains, plan: RequestPlan, name: str) -> Gain:
        return gains.beside if plan.beside[name] else gains.alone

    def _ask_model(self, planned: RoundPlan, plan: RequestPlan, name: str, catch_up_s: float, standing: Cut) -> bool:
        """Return whether a model is worth asking for one request, or worth a look."""
        state, request = self._states[plan.request.id], plan.request
        level_s = self._costs.draft_s(1, planned.context)
        gain = self._gain(state.gains[name], plan, name)
        if gain.rounds < _TRIALS:
            gain = self._gain(self._sources[name].gains, plan, name)
        # What asking brought counts for more than what was expected of it; a few tries are worth a level each.
        expected = gain.hoped if gain.rounds >= _TRIALS else level_s * planned.pace
        is_affordable = not planned.blocked and level_s <= planned.headroom_s
        if is_affordable and catch_up_s == 0 and expected > 0:
            return True
        front = Front(None, 1.0, state.outlooks[name].ahead(None, self.draft_max), others(plan, ROOT))
        ahead = max(
            planned.value_ahead([front], standing.gained, len(standing.kept), 1),
            planned.value_ahead([front.alone()], 0.0, 0, 1),
        )
        expected = max(expected, ahead - standing.value)
        left = request.rules.max_tokens - request.num_output
        left_s = left * planned.plain_s / planned.requests
        if is_affordable and expected > 0:
            if catch_up_s == 0:
                return True
            # An investment: it has to come back over what is left of the answer, and may cost so much at most.
            limit_s = INVESTED_SHARE * request.stats.prompt_s + max(planned.headroom_s, 0.0)
            if gain.rounds < _TRIALS:
                limit_s = min(limit_s, HOPED_SHARE * left_s)
            if catch_up_s <= limit_s and 0.25 * expected * left > planned.pace * catch_up_s:
                state.ledger.grant(catch_up_s)
                if self._ledger is not None:
                    self._ledger.grant(catch_up_s)
                return True
            return False
        plan.looks.add(name)
        comeback = state.comebacks[name]
        if comeback.looks_left and level_s + catch_up_s <= planned.plain_s / 8:
            comeback.looks_left -= 1
            return True
        if name not in state.tried:
            # Nothing can be known of a draft that has not read the prompt: reading it is paid by what the prompt cost.
            known = self._sources[name].gains.alone
            share = LOOKING_SHARE if known.rounds == GAIN_MEMORY and known.hoped <= 0 else INVESTED_SHARE
            if catch_up_s <= min(share * request.stats.prompt_s, TRIED_SHARE * left_s):
                return True
        return self._may_look(state, name, level_s + catch_up_s)

    def _go_on(self, planned: RoundPlan, name: str, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Choose the trees to which a model should add a level beyond the first."""
        fronts: list[tuple[float, DraftJob, int]] = []
        blind: list[DraftJob] = []
        for job in jobs:
            plan = planned.plans[job.request.id]
            if plan.blind:
                blind.append(job)
                continue
            state = self._states[job.request.id]
            if name in plan.looks:
                # A look may go deep where it finds something, and then the next ones have to wait.
                if state.looking_s[name] < -planned.plain_s / 4:
                    continue
                state.looking_s[name] -= self._costs.draft_s(1, planned.context)
            tree = self._look(plan, job.tree)
            node = front_of(job.tree, name)
            fronts.append((tree.survivals[node], job, node))
        standing = planned.cut(planned.ranked())
        rows, gained, value = len(standing.kept), standing.gained, standing.value
        # A front can only be extended if what leads to it is verified: beside what is worth it by itself, or instead.
        kept = {(request_id, node) for _, request_id, node in standing.kept}
        own_rows, own_gained = 0, 0.0
        outlook = []
        for survival, job, node in fronts:
            plan = planned.plans[job.request.id]
            tree = self._look(plan, job.tree)
            ahead = self._states[job.request.id].outlooks[name].ahead(tree.chance(node), self.draft_max)
            outlook.append(Front(job, survival, ahead, others(plan, node)))
            while node != ROOT:
                own_rows += 1
                own_gained += tree.survivals[node]
                if (job.request.id, node) not in kept:
                    rows += 1
                    gained += tree.survivals[node]
                node = tree.parents[node]
        outlook.sort(key=lambda front: -front.survival)
        alone = [front.alone() for front in outlook]
        best, best_count = value, 0
        step = max(1, len(outlook) // 8)
        for number in range(len(outlook), 0, -step):
            level_rows = len(blind) + number
            ahead_of = max(
                planned.value_ahead(outlook[:number], gained, rows, level_rows),
                planned.value_ahead(alone[:number], own_gained, own_rows, level_rows),
            )
            if ahead_of > best:
                best, best_count = ahead_of, number
        chosen = [front.job for front in outlook[:best_count] if front.job is not None] + blind
        if chosen:
            planned.predicted_draft_s[name] += self._costs.draft_s(len(chosen), planned.context)
            wanted = {job.request.id for job in chosen}
            chosen = [job for job in jobs if job.request.id in wanted]
        return chosen

    def _look(self, plan: RequestPlan, tree: DraftTree) -> GrownTree:
        """Return the survivals of a tree, made anew if it has grown."""
        if plan.tree is None or plan.num_proposals != tree.num_proposals:
            plan.tree = self._survival.grown(plan.request.id, tree, plan.tree)
            plan.num_proposals = tree.num_proposals
        return plan.tree

    def _trade_on_paper(self, planned: RoundPlan, ranked: Sequence[Proposal]) -> None:
        """Follow what would have been verified if it could have been afforded."""
        (plan,) = planned.plans.values()
        paper = self._states[plan.request.id].paper
        if plan.tree is not None and paper.idle:
            extra_s = planned.seconds(len(ranked)) - planned.plain_s + planned.draft_s
            paper.open(PaperRound(plan.tree, [node for _, _, node in ranked], extra_s))

    def _credit(self, planned: RoundPlan, value: float) -> None:
        """Remember what asking each drafter was worth, the last one first."""
        for name in reversed(list(planned.value_before)):
            asked = planned.asked.get(name, ())
            if asked:
                spent_s = planned.predicted_draft_s.get(name, 0.0)
                gain = (value - planned.value_before[name]) / len(asked) - planned.pace * spent_s / len(asked)
                for request_id in asked:
                    plan = planned.plans[request_id]
                    self._gain(self._states[request_id].gains[name], plan, name).add(gain)
                    self._gain(self._sources[name].gains, plan, name).add(gain)
            value = planned.value_before[name]

    def _learn(self, planned: RoundPlan, record: RoundRecord) -> None:
        """Compare what was drafted with what was said."""
        for request, tree in zip(record.requests, record.trees, strict=True):
            plan = planned.plans.get(request.id)
            if plan is None or plan.tree is None:
                continue
            emitted = request.token_ids[request.num_prompt + plan.num_output :]
            state = self._states[request.id]
            for verdict in self._survival.learn(request.id, plan.tree, emitted):
                state.outlooks[verdict.source].add(verdict.before, verdict.right)
                if verdict.depth == 1 and verdict.source in state.comebacks:
                    state.comebacks[verdict.source].add(verdict.chance, verdict.right)
            if tree.num_drafted:
                for comeback in state.comebacks.values():
                    comeback.confirm()
        for name, spent_s in record.draft_seconds.items():
            asked = len(planned.asked.get(name, ()))
            if not asked:
                continue
            source = self._sources[name]
            if source.is_model:
                self._costs.observe_draft(planned.predicted_draft_s.get(name, 0.0), spent_s)
                spent_s = self._costs.draft_s(1, planned.context) * asked
            source.ask_s += 0.1 * (spent_s / asked - source.ask_s)
        own_s = record.draft_s - sum(record.draft_seconds.values())
        self._overhead_s += 0.05 * (max(own_s, 0.0) - self._overhead_s)


def _is_blind(request: Request) -> bool:
    """Return whether nothing may depend on what is drawn for a request."""
    return request.verifier.name == "rejection" and not request.params.greedy
