"""Selects the drafters to ask, and their depth: while a level is worth its time, or as a probe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from paceline.core.request import Request
from paceline.core.tree import ROOT
from paceline.drafters.base import Drafter, DraftJob
from paceline.planning.auto.backoff import MAX_BACKOFF_ROUNDS
from paceline.planning.auto.exploration import (
    DOUBTED_CATCH_UP_SHARE,
    FREE_PREFILL_SHARE,
    PROBE_SHARE,
    PROMISING_CATCH_UP_SHARE,
    PROMPT_CATCH_UP_SHARE,
    UNPROMISING_CATCH_UP_SHARE,
    WARM_UP_SHARE,
)
from paceline.planning.auto.gains import GAIN_MEMORY
from paceline.planning.auto.learned import DrafterState
from paceline.planning.auto.planner_state import PlannerState, RequestState
from paceline.planning.auto.round_plan import Cut, Front, RequestPlan, RoundPlan, find_front, others
from paceline.planning.auto.survival import NEGLIGIBLE

_RETURN_BELIEVED: Final = 0.4
"""Of what drafts are expected to bring over what is left of an answer: before that there is an early end, or worse."""

_TRIALS: Final = 3
"""Rounds in which a drafter was asked, before what that brought counts for more than what is expected of it."""

_WARM_UP_ROUNDS: Final = 8
"""Rounds of a request in which every drafter is asked, as far as :data:`WARM_UP_SHARE` allows."""

_OF_NOTE: Final = 0.3
"""Chance of the likeliest token drafted so far from which on another drafter is asked beside a co-proposal."""

_CAUGHT_UP: Final = 8
"""Unread tokens that a model reads along with a level: a pass so narrow takes hardly longer than one of one row."""

_STALE: Final = MAX_BACKOFF_ROUNDS
"""Tokens of a text after which what a drafter brought to it is no longer what it would bring."""


class DrafterSelector:
    """Decides which drafters are asked, and for how many levels."""

    def __init__(self, shared: PlannerState, draft_max: int) -> None:
        self._shared = shared
        self._draft_max = draft_max

    def is_worthwhile(
        self, request: Request, state: RequestState, pace: float, token_s: float, *, blocked: bool
    ) -> bool:
        """Return whether some drafter is worth asking, or a probe that is paid for: the quick way to plain decoding."""
        if self._speaks_for_any(request, state, pace, token_s, blocked=blocked):
            return True
        # A round that is planned for the sake of a probe: then planning it is part of what the probe costs.
        deciding_s = self._shared.deciding_s
        return any(
            state.probes.pay(name, deciding_s, leaving_s=self._probe_s(request, state, name, token_s))
            for name in state.gains
        )

    def _probe_s(self, request: Request, state: RequestState, name: str, token_s: float) -> float:
        """Return what has to be set aside for a probe of a drafter: of a model, for what it has missed too."""
        drafter = self._shared.drafters[name]
        if not drafter.is_model:
            return drafter.ask_s + self._costly_prefill_s(request, state, name, token_s)
        length = len(request.token_ids)
        catch_up_s = self._catch_up_s(length - state.asked.get(name, state.held.get(name, 0)), length)
        if self._may_prefill(request, state, name, catch_up_s, token_s):
            catch_up_s = 0.0
        return self._shared.costs.draft_s(1, length) + catch_up_s

    def _costly_prefill_s(self, request: Request, state: RequestState, name: str, token_s: float) -> float:
        """Return what reading the prompt takes a drafter without a model, where that is more than the answer allows."""
        if name in state.asked:
            return 0.0
        prefill_s = self._shared.drafters[name].read_token_s * len(request.token_ids)
        return prefill_s if prefill_s > FREE_PREFILL_SHARE * request.num_left * token_s else 0.0

    def _may_prefill(self, request: Request, state: RequestState, name: str, catch_up_s: float, token_s: float) -> bool:
        """Return whether what a prompt cost pays for a model to read it, as nothing is known of a draft before that."""
        if name in state.asked:
            return False
        of_all = self._shared.drafters[name].gains.solo
        share = PROBE_SHARE if of_all.rounds == GAIN_MEMORY and of_all.upper_confidence <= 0 else PROMPT_CATCH_UP_SHARE
        return catch_up_s <= min(
            share * self._target_prefill_s(request), UNPROMISING_CATCH_UP_SHARE * request.num_left * token_s
        )

    def _target_prefill_s(self, request: Request) -> float:
        """Return what reading the whole prompt takes the target: what its cache held is priced by the profile."""
        prefill_s, cached = request.stats.prompt_s, request.stats.cached_tokens
        if cached == 0:
            return prefill_s
        # Such rows have contexts from nothing up to their number: on the mean half of that.
        context, round_s = cached // 2, self._shared.costs.round_s
        return prefill_s + max(round_s(cached, context) - round_s(1, context), 0.0)

    def _catch_up_s(self, unread: int, length: int) -> float:
        """Return what reading takes a model beyond a level, at the end of a text of ``length`` tokens."""
        if unread <= _CAUGHT_UP:
            return 0.0
        # Its context grows as it reads: on the mean it is as long as after half of that.
        context = length - unread // 2
        draft_s = self._shared.costs.draft_s
        return max(draft_s(unread, context) - draft_s(1, context), 0.0)

    def _speaks_for_any(
        self, request: Request, state: RequestState, pace: float, token_s: float, *, blocked: bool
    ) -> bool:
        """Return whether by what is known some drafter is worth asking."""
        if any(reentry_test.probes_left for reentry_test in state.reentry_tests.values()):
            return True
        if blocked:
            # DrafterSelector costs time too, and there is none to lose.
            return False
        drafters, deciding_s, length = self._shared.drafters, self._shared.deciding_s, len(request.token_ids)
        is_early = state.rounds <= _WARM_UP_ROUNDS
        if not drafters or (is_early and state.rounds * deciding_s <= WARM_UP_SHARE * request.num_left * token_s):
            return True
        for name, drafter in drafters.items():
            # What a request saw long ago says less than what others that share its rounds have seen since.
            is_stale = length - state.asked.get(name, 0) > _STALE
            gains = drafter.gains if is_stale else state.gains[name]
            asking_s = deciding_s + (0.0 if drafter.is_model else drafter.ask_s)
            if max(gains.solo.upper_confidence, gains.co_proposal.upper_confidence) > pace * asking_s:
                return True
        return False

    def missing_s(self, request: Request, state: RequestState, token_s: float) -> float:
        """Return the seconds that have to be set aside until some drafter can be probed."""
        deciding_s, saved_s = self._shared.deciding_s, state.probes.saved_s
        return min(
            (deciding_s + self._probe_s(request, state, name, token_s) - saved_s[name] for name in state.gains),
            default=math.inf,
        )

    def draw_independent_depths(self, requests: Sequence[Request], planned: RoundPlan) -> list[int]:
        """Return the lengths of chains that are worth most together, by what was accepted on average."""
        if not self._shared.drafters:
            # Nobody was met yet, for which one request is enough.
            return [1] + [0] * (len(requests) - 1)
        token_s = planned.plain_s / planned.requests
        states = [self._shared.requests[request.id] for request in requests]
        names = [
            self._draw_independent_names(request, state, token_s)
            for request, state in zip(requests, states, strict=True)
        ]
        proposals = []
        for index, (request, state) in enumerate(zip(requests, states, strict=True)):
            forecasts = [state.forecasts[name].ahead(None, self._draft_max) for name in names[index]]
            survival = 1.0
            for depth in range(min(self._draft_max, request.num_left - 1)):
                survival *= max(chances[depth] for chances in forecasts)
                if survival < NEGLIGIBLE:
                    break
                proposals.append((-survival, depth, index))
        proposals.sort()
        drafters = self._shared.drafters
        best, best_rows, gained, draft_s = planned.least_value, 0, 0.0, 0.0
        level_rows = [0] * self._draft_max
        for rows, (negative, depth, index) in enumerate(proposals, start=1):
            gained -= negative
            if drafters[names[index][0]].is_model:
                draft_s += self._level_s(planned, level_rows[depth])
                level_rows[depth] += 1
            value = gained - planned.pace * (planned.seconds(rows) - planned.seconds(0) + draft_s)
            if value > best and planned.seconds(rows) - planned.plain_s + draft_s <= planned.headroom_s:
                best, best_rows = value, rows
        depths = [0] * len(requests)
        for _, depth, index in proposals[:best_rows]:
            depths[index] = depth + 1
        rows = best_rows
        for index, (request, state) in enumerate(zip(requests, states, strict=True)):
            if depths[index] == 0 and request.num_left > 1:
                name = names[index][0]
                row_s = max(planned.seconds(rows + 1) - planned.seconds(rows), 0.0)
                if state.probes.pay(name, row_s + self._probe_s(request, state, name, token_s)):
                    planned.paid.add(request.id)
                    depths[index] = 1
                    rows += 1
        return depths

    def _draw_independent_names(self, request: Request, state: RequestState, token_s: float) -> list[str]:
        """Return the drafters of a draw-independent chain: models that have read the prompt, or may."""
        drafters, length = self._shared.drafters, len(request.token_ids)
        models = [name for name, drafter in drafters.items() if drafter.is_model]
        is_early = state.rounds <= _WARM_UP_ROUNDS
        left_s = request.num_left * token_s

        def may_read(name: str) -> bool:
            unread = length - state.held.get(name, 0)
            return is_early and self._catch_up_s(unread, length) <= self._catch_up_share(name) * left_s

        ready = [name for name in models if name in state.asked or may_read(name)]
        return ready or [name for name in drafters if name not in models] or models

    def _catch_up_share(self, name: str) -> float:
        """Return the share of an answer that a model's reading may take where its drafts would be worth it."""
        return PROMISING_CATCH_UP_SHARE if self._shared.drafters[name].paid else DOUBTED_CATCH_UP_SHARE

    def _level_s(self, planned: RoundPlan, rows: int) -> float:
        """Return what one more row than ``rows`` adds to a model's pass; wider may be cheaper, but not for that."""
        level_s = self._shared.costs.draft_s
        more_s = level_s(rows + 1, planned.context) - (level_s(rows, planned.context) if rows else 0.0)
        return max(more_s, 0.0)

    def select_first(self, planned: RoundPlan, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        name, met = drafter.name, self._shared.meet(drafter, jobs[0].request)
        for job in jobs:
            plan = planned.plans[job.request.id]
            plan.draft = job.tree
            plan.has_co_proposal[name] = max(self._shared.score(plan, job.tree).survivals[1:], default=0.0) > _OF_NOTE
        standing = self._standing(planned)
        planned.value_before[name] = standing.value
        growing = [job for job in jobs if self._has_room(planned, job)]
        if met.is_model:
            chosen = self._choose_for_model(planned, drafter, growing, standing)
        else:
            chosen = [job for job in growing if self._asks_free(planned, planned.plans[job.request.id], name, met)]
        for job in chosen:
            asked = self._shared.requests[job.request.id].asked
            if name not in asked:
                planned.prefill_tokens[name] = planned.prefill_tokens.get(name, 0) + len(job.request.token_ids)
            asked[name] = len(job.request.token_ids)
        return chosen

    def _standing(self, planned: RoundPlan) -> Cut:
        """Return the best cut of all that is drafted, of trees too that the next drafter or level is not offered."""
        for plan in planned.plans.values():
            if plan.draft is not None and not plan.draw_independent:
                self._shared.score(plan, plan.draft)
        return planned.standing()

    @staticmethod
    def _has_room(planned: RoundPlan, job: DraftJob) -> bool:
        """Return whether a draw-independent tree may get the branch it may need: nothing of it is cut afterwards."""
        if not planned.plans[job.request.id].draw_independent or not job.tree.num_drafted:
            return True
        planned.draw_independent_branches += 1
        return planned.draw_independent_branches <= planned.branches

    def select_further(self, planned: RoundPlan, name: str, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Choose the trees to which a model should add a level beyond the first."""
        shared = self._shared
        level_s = shared.costs.draft_s(1, planned.context)
        fronts: list[tuple[float, DraftJob, int]] = []
        draw_independent: list[DraftJob] = []
        for job in jobs:
            plan = planned.plans[job.request.id]
            if plan.draw_independent:
                draw_independent.append(job)
                continue
            node = find_front(job.tree, name)
            if job.tree.depths[node] >= self._draft_max:
                # The budget may be deeper for the sake of a copy.
                continue
            if name in plan.probed:
                probes = shared.requests[job.request.id].probes
                if not probes.overdraw(name, level_s, planned.plain_s / 4):
                    continue
            tree = shared.score(plan, job.tree)
            fronts.append((tree.survivals[node], job, node))
        standing = self._standing(planned)
        rows, gained = len(standing.kept), standing.gained
        # A front can only be extended if what leads to it is verified: beside what is worth it by itself, or instead.
        kept = {(request_id, node) for _, request_id, node in standing.kept}
        own_rows, own_gained = 0, 0.0
        forecast = []
        for survival, job, node in fronts:
            plan = planned.plans[job.request.id]
            tree = shared.score(plan, job.tree)
            ahead = shared.requests[job.request.id].forecasts[name].ahead(tree.chance(node), self._draft_max)
            forecast.append(Front(job, survival, ahead, others(plan, node)))
            while node != ROOT:
                own_rows += 1
                own_gained += tree.survivals[node]
                if (job.request.id, node) not in kept:
                    rows += 1
                    gained += tree.survivals[node]
                node = tree.parents[node]
        forecast.sort(key=lambda front: -front.survival)
        best_count = planned.most_worth(
            forecast, standing.value, (gained, rows), (own_gained, own_rows), len(draw_independent)
        )
        chosen = [front.job for front in forecast[:best_count] if front.job is not None] + draw_independent
        if chosen:
            planned.predicted_draft_s[name] += shared.costs.draft_s(len(chosen), planned.context)
            wanted = {job.request.id for job in chosen}
            chosen = [job for job in jobs if job.request.id in wanted]
        return chosen

    def _choose_for_model(
        self, planned: RoundPlan, drafter: Drafter, jobs: Sequence[DraftJob], standing: Cut
    ) -> list[DraftJob]:
        """Choose the trees that share the first pass of a model."""
        name, costs, met = drafter.name, self._shared.costs, self._shared.drafters[drafter.name]
        # A draft is tried on a few requests, and then on twice as many, before all of them have it read their prompts.
        most = max(1, len(jobs) // 16, 2 * met.last_asked)
        chosen: list[DraftJob] = []
        passed_over: list[DraftJob] = []
        prefill_s = 0.0
        for job in jobs:
            request, plan = job.request, planned.plans[job.request.id]
            unread, length = drafter.unread(request) or 0, len(request.token_ids)
            self._shared.requests[request.id].held[name] = length - unread
            catch_up_s = self._catch_up_s(unread, length)
            is_ready = plan.draw_independent and (catch_up_s == 0 or request.id in planned.paid)
            if is_ready or (len(chosen) < most and self._asks_model(planned, plan, name, catch_up_s, standing)):
                chosen.append(job)
                prefill_s += catch_up_s
            elif catch_up_s == 0:
                passed_over.append(job)
        if len(passed_over) > 1:
            chosen += self._worth_together(planned, name, passed_over, len(chosen), standing)
        met.last_asked = len(chosen)
        if chosen:
            planned.predicted_draft_s[name] = prefill_s + costs.draft_s(len(chosen), planned.context)
        return chosen

    def _worth_together(
        self, planned: RoundPlan, name: str, jobs: Sequence[DraftJob], others_asked: int, standing: Cut
    ) -> list[DraftJob]:
        """Return those of the jobs that a model is worth asking for all at once, though not for each by itself.

        They share its passes, what a change of width costs and the next step of the staircase, so that what each of a
        few brought says little of what all would bring.
        """
        if planned.blocked or self._shared.costs.draft_s(len(jobs), planned.context) > planned.headroom_s:
            return []
        fronts = []
        for job in jobs:
            ahead = self._shared.requests[job.request.id].forecasts[name].ahead(None, self._draft_max)
            fronts.append(Front(job, 1.0, ahead, others(planned.plans[job.request.id], ROOT)))
        fronts.sort(key=lambda front: -front.ahead[0])
        # What is worth it only for all has to make up for uneven progress besides.
        value = standing.value + planned.least_value
        count = planned.most_worth(fronts, value, (standing.gained, len(standing.kept)), (0.0, 0), others_asked)
        together = [front.job for front in fronts[:count] if front.job is not None]
        for job in together:
            planned.plans[job.request.id].probed.discard(name)
        return together

    def _asks_free(self, planned: RoundPlan, plan: RequestPlan, name: str, drafter: DrafterState) -> bool:
        """Return whether a drafter without a model is worth asking for one request, or a probe that is paid for."""
        state = self._shared.requests[plan.request.id]
        gain = state.gains[name].where(plan.has_co_proposal[name])
        prefill_s = self._costly_prefill_s(plan.request, state, name, planned.plain_s / planned.requests)
        is_promising = plan.draw_independent or (
            not planned.blocked and (gain.rounds == 0 or gain.upper_confidence > planned.pace * drafter.ask_s)
        )
        if is_promising and not prefill_s:
            return True
        return state.probes.pay(name, drafter.ask_s + prefill_s)

    def _asks_model(self, planned: RoundPlan, plan: RequestPlan, name: str, catch_up_s: float, standing: Cut) -> bool:
        """Return whether a model is worth asking for one request, or a probe; what it takes is granted or paid for."""
        shared, request = self._shared, plan.request
        state = shared.requests[request.id]
        level_s = shared.costs.draft_s(1, planned.context)
        gain = state.gains[name].where(plan.has_co_proposal[name])
        if gain.rounds < _TRIALS:
            gain = shared.drafters[name].gains.where(plan.has_co_proposal[name])
        # What asking brought counts for more than what was expected of it; a few tries are worth a level each.
        expected = gain.upper_confidence if gain.rounds >= _TRIALS else level_s * planned.pace
        is_affordable = not planned.blocked and level_s <= planned.headroom_s
        if is_affordable and catch_up_s == 0 and expected > 0:
            return True
        front = Front(None, 1.0, state.forecasts[name].ahead(None, self._draft_max), others(plan, ROOT))
        ahead = max(
            planned.value_ahead([front], standing.gained, len(standing.kept), 1),
            planned.value_ahead([front.by_itself()], 0.0, 0, 1),
        )
        expected = max(expected, ahead - standing.value)
        left, token_s = request.num_left, planned.plain_s / planned.requests
        if is_affordable and expected > 0:
            if catch_up_s == 0:
                return True
            # An investment: it has to come back over what is left of the answer, and may cost so much at most.
            limit_s = self._catch_up_share(name) * left * token_s
            # Beside what passes wait for rows are free, and reading is all that a draft can lose.
            if not shared.costs.tells_plain:
                limit_s = min(
                    limit_s, PROMPT_CATCH_UP_SHARE * self._target_prefill_s(request) + max(planned.headroom_s, 0.0)
                )
            if catch_up_s <= limit_s and _RETURN_BELIEVED * expected * left > planned.pace * catch_up_s:
                state.invested[name] = catch_up_s / (left * token_s)
                state.ledger.grant(catch_up_s)
                shared.ledger.grant(catch_up_s)
                return True
            # Too little to catch up for, and probes may show more: or what is known of it would stay as it is for good.
        plan.probed.add(name)
        reentry_test = state.reentry_tests[name]
        if reentry_test.probes_left:
            if level_s + catch_up_s <= planned.plain_s / 8:
                reentry_test.probes_left -= 1
                return True
            # Too dear to follow at once: or every round would be planned for probes that are never made.
            reentry_test.probes_left = 0
        if self._may_prefill(request, state, name, catch_up_s, token_s):
            return True
        # What was set aside for before it was decided to probe is enough.
        return state.probes.pay(name, min(level_s + catch_up_s, self._probe_s(request, state, name, token_s)))
