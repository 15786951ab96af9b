"""What the planner knows: what passes cost, what each drafter is worth, and how each request is doing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import Drafter
from paceline.drafters.grammar import NAME as GRAMMAR
from paceline.planning.auto.counterfactual import CounterfactualCredit
from paceline.planning.auto.floored_costs import FlooredCosts
from paceline.planning.auto.gains import Gains
from paceline.planning.auto.learned import DrafterState, Learned
from paceline.planning.auto.ledger import Ledger
from paceline.planning.auto.online_costs import OnlineCosts
from paceline.planning.auto.probes import ProbeBudget, ReentryTest
from paceline.planning.auto.round_plan import RequestPlan, RoundPlan
from paceline.planning.auto.survival import AcceptanceForecast, GrownTree, SurvivalModel
from paceline.planning.base import RoundCosts, RoundRecord, with_floor

_HISTORY: Final = 4096

_LONG_PREFILL: Final = 0.02
"""Share of an answer's time from which on it says something of other prompts whether a model's reading paid: what a
short prompt takes comes back soon."""

_DECISIONS: Final = 20
"""Latest rounds over which it is averaged what planning one takes."""


@dataclass(slots=True)
class RequestState:
    """One request's own.

    Attributes:
        forecasts: by drafter; they start from the drafter's over all requests.
        gains: by drafter; they start from the drafter's, too.
        probes: what it has set aside for probes.
        rounds: begun.
        asked: by drafter, tokens of the text when it was asked last; the first time it reads the prompt.
        held: by model, tokens of the text that it had at hand when its asking was last weighed.
        invested: of models that read what they had missed because that was to pay, the share of the answer it took.
        runs: by text lookup, tokens that it has been right in a row.
        counterfactual: drafts that could not be afforded.
        reentry_tests: by model, whether it may be asked all the same, because it was right of late.
    """

    ledger: Ledger
    forecasts: dict[str, AcceptanceForecast] = field(default_factory=dict)
    gains: dict[str, Gains] = field(default_factory=dict)
    probes: ProbeBudget = field(default_factory=ProbeBudget)
    reentry_tests: dict[str, ReentryTest] = field(default_factory=dict)
    rounds: int = 0
    asked: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    invested: dict[str, float] = field(default_factory=dict)
    runs: dict[str, int] = field(default_factory=dict)
    counterfactual: CounterfactualCredit = field(default_factory=CounterfactualCredit)

    def start_with(self, name: str, drafter: DrafterState) -> None:
        self.forecasts[name] = AcceptanceForecast(memory=40.0, shared=drafter.forecast)
        self.probes.saved_s[name] = 0.0
        self.gains[name] = drafter.gains.copy()
        if drafter.is_model:
            self.reentry_tests[name] = ReentryTest()


class PlannerState:
    """What the planner knows.

    Args:
        costs: what passes take, as measured beforehand.
        learned: of drafters that may be met; it is copied.

    Attributes:
        costs: corrected by the rounds as they go by.
        survival: how far drafts are accepted.
        drafters: by name, those that were met.
        requests: by id.
        ledger: of all requests together.
        deciding_s: seconds that planning a round with drafts takes, and learning from it.
        remembered: drafters met of which something had been learned.
    """

    def __init__(self, costs: RoundCosts, learned: Learned | None = None) -> None:
        floored = with_floor(costs)
        self.costs = OnlineCosts(costs) if floored is None else FlooredCosts(floored)
        # Of drafters that were not met here, which are no reason to plan anything.
        remembered = Learned.from_json(learned.to_json()).drafters if learned is not None else {}
        self._priors = dict(remembered)
        self.remembered: list[str] = []
        self.survival = SurvivalModel()
        self.drafters: dict[str, DrafterState] = {}
        self.requests: dict[int, RequestState] = {}
        self.ledger = Ledger(0.0, history=_HISTORY)
        self.deciding_s = 0.0
        self._decisions = 0

    def begin(self, request: Request, ledger: Ledger) -> None:
        """Take note of a new request; it starts with what is known of all."""
        state = self.requests[request.id] = RequestState(ledger)
        for name, drafter in self.drafters.items():
            state.start_with(name, drafter)
        self.survival.begin(request.id)

    def end(self, request: Request) -> None:
        state = self.requests.pop(request.id)
        for name, share in state.invested.items():
            if share > _LONG_PREFILL:
                self.drafters[name].paid = state.ledger.debt_s <= 0
        self.survival.end(request.id)

    def meet(self, drafter: Drafter, request: Request) -> DrafterState:
        """Return what is known of a drafter, which may be new; any request that it has begun tells whether it reads."""
        met = self.drafters.get(drafter.name)
        if met is None:
            is_model = drafter.unread(request) is not None
            says_margins = bool(getattr(drafter, "says_margins", is_model))
            met = self._priors.pop(drafter.name, None)
            if met is not None and (met.is_model, met.says_margins) == (is_model, says_margins):
                self.remembered.append(drafter.name)
            else:
                met = DrafterState.new(drafter.name, is_model=is_model, says_margins=says_margins)
            self.drafters[drafter.name] = met
            self.survival.know(drafter.name, met.chances)
            for state in self.requests.values():
                state.start_with(drafter.name, met)
        return met

    def learned(self) -> Learned:
        """Return what is known of drafters, those included that were not met here."""
        return Learned({**self._priors, **self.drafters})

    def score(self, plan: RequestPlan, tree: DraftTree) -> GrownTree:
        """Return the survivals of a tree, made anew if it has grown."""
        is_pruned = plan.num_prunings != tree.num_prunings
        if plan.tree is None or is_pruned or plan.num_proposals != tree.num_proposals:
            # Whoever takes something back while a tree grows may propose as much in its place.
            plan.tree = self.survival.score(plan.request.id, tree, None if is_pruned else plan.tree)
            plan.num_proposals, plan.num_prunings = tree.num_proposals, tree.num_prunings
        return plan.tree

    def credit(self, planned: RoundPlan, value: float) -> None:
        """Remember what asking each drafter was worth, the last one first."""
        for name in reversed(list(planned.value_before)):
            asked = planned.asked.get(name, ())
            if asked:
                spent_s = planned.predicted_draft_s.get(name, 0.0)
                gain = (value - planned.value_before[name]) / len(asked) - planned.pace * spent_s / len(asked)
                for request_id in asked:
                    has_co_proposal = planned.plans[request_id].has_co_proposal[name]
                    self.requests[request_id].gains[name].where(has_co_proposal).add(gain)
                    self.drafters[name].gains.where(has_co_proposal).add(gain)
            value = planned.value_before[name]

    def learn(self, planned: RoundPlan, record: RoundRecord) -> None:
        """Compare what was drafted with what was said, and what drafting took with what it should have taken."""
        for request, tree in zip(record.requests, record.trees, strict=True):
            plan = planned.plans.get(request.id)
            if plan is None or plan.tree is None:
                continue
            emitted = request.token_ids[request.num_prompt + plan.num_output :]
            state = self.requests[request.id]
            for verdict in self.survival.learn(request.id, plan.tree, emitted):
                state.forecasts[verdict.source].add(verdict.before, verdict.right)
                if not self.drafters[verdict.source].says_margins and verdict.source != GRAMMAR:
                    run = state.runs.get(verdict.source, 0)
                    state.runs[verdict.source] = run + 1 if verdict.right else 0
                if verdict.depth == 1 and verdict.source in state.reentry_tests:
                    state.reentry_tests[verdict.source].add(verdict.chance, verdict.right)
            if state.reentry_tests:
                verified = {candidate.source for node in range(len(tree)) for candidate in tree.candidates(node)}
                for name in verified & state.reentry_tests.keys():
                    state.reentry_tests[name].confirm()
        for name, spent_s in record.draft_seconds.items():
            asked = len(planned.asked.get(name, ()))
            if not asked:
                continue
            drafter = self.drafters[name]
            if drafter.is_model:
                self.costs.observe_draft(planned.predicted_draft_s.get(name, 0.0), spent_s)
            elif name not in planned.prefill_tokens:
                drafter.ask_s += 0.1 * (spent_s / asked - drafter.ask_s)
            else:
                # Reading a prompt comes once for every request: the next time it takes much less.
                drafter.read_token_s += 0.5 * (spent_s / planned.prefill_tokens[name] - drafter.read_token_s)

    def observe_deciding(self, own_s: float) -> None:
        self._decisions = min(self._decisions + 1, _DECISIONS)
        self.deciding_s += (max(own_s, 0.0) - self.deciding_s) / self._decisions
