"""What a request's statistics say of waiting, of drafters, of the gain and of rounds without drafts, by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Request
from paceline.core.stats import OFF_REASONS, OffReason, PlainTimes, RequestStats
from paceline.core.tree import DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, table_model
from paceline.planning.base import Policy, PolicyBase, RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import ForcedDrafter, drain

GREEDY = SamplingParams(0.0)
COUNTING = table_model(np.roll(np.eye(10), 1, axis=1))
"""Greedily counts up: 0 is followed by 1, ..., 9 by 0."""

PLAINLY = SpeculationParams(speculate=False)
OF_OTHER = SpeculationParams(drafters=("other",))


def pass_s(rows: int, context: int) -> float:
    """A pass takes 10 s, and 1 s a row."""
    return 10.0 + rows


def counting_engine(
    *,
    cost: Callable[[int, int], float] = pass_s,
    context_length: int = 1 << 10,
    max_outputs: int | None = None,
    max_sequences: int = 4,
    cells: int | None = None,
) -> ScriptedEngine:
    return ScriptedEngine(
        COUNTING,
        ScriptedVocabulary([str(digit).encode() for digit in range(10)]),
        cost=cost,
        context_length=context_length,
        max_outputs=max_outputs,
        max_sequences=max_sequences,
        cells=cells,
    )


def right(count: int) -> Callable[[Request], list[list[int]]]:
    """Return what drafts the next ``count`` tokens."""
    return lambda request: [[(request.token_ids[-1] + ahead) % 10 for ahead in range(1, count + 1)]]


def nothing(request: Request) -> list[list[int]]:
    return []


class SlowDrafter(ForcedDrafter):
    """Takes half a second whenever it is asked."""

    def __init__(self, paths: Callable[[Request], Sequence[Sequence[int]]], name: str, clock: VirtualClock) -> None:
        super().__init__(paths, name)
        self._clock = clock

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        self._clock.advance(0.5)
        return super().grow(jobs)


class Knowing(FixedPolicy):
    """Knows what a plain round takes: 11 s, give or take."""

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        return PlainTimes(11.0, 10.0, 13.0)


class Wavering(PolicyBase):
    """Drafts in rounds that were named beforehand, and takes a second to decide."""

    def __init__(self, clock: VirtualClock, drafts: Sequence[bool]) -> None:
        self._clock = clock
        self._drafts = list(drafts)

    def check(self, request: Request) -> None:
        """Anything goes."""

    def begin(self, request: Request) -> None:
        """Nothing is kept."""

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        self._clock.advance(1.0)
        return [DraftBudget(3) if self._drafts.pop(0) else None] * len(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        return list(jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Verify everything."""

    def observe(self, record: RoundRecord) -> None:
        """Learn nothing."""

    def end(self, request: Request) -> None:
        """Nothing is kept."""


def loop_of(
    engine: ScriptedEngine,
    drafters: Sequence[Drafter] = (),
    policy: Policy = NO_SPECULATION,
    *,
    prompt_rounds: float = 2.0,
    growth: int = 16,
) -> DecodingLoop:
    return DecodingLoop(engine, drafters, policy, clock=engine.clock, prompt_rounds=prompt_rounds, growth=growth)


class TestWaiting:
    def test_until_the_first_start(self) -> None:
        engine = counting_engine(max_sequences=1)
        engine.clock.advance(100.0)
        loop = loop_of(engine)
        first, second = loop.add([0], GREEDY, StopRules(3)), loop.add([5], GREEDY, StopRules(1))
        loop.step()
        third = loop.add([5], GREEDY, StopRules(1))
        assert (first.stats.added_s, second.stats.added_s, third.stats.added_s) == (100.0, 100.0, 111.0)
        assert (first.stats.queue_s, second.stats.queue_s, third.stats.queue_s) == (0.0, None, None)
        drain(loop)
        # The first took three passes of 11 s, the second one.
        assert (first.stats.queue_s, second.stats.queue_s, third.stats.queue_s) == (0.0, 33.0, 33.0)
        assert second.stats.arrivals_s[0] - second.stats.added_s == 44.0

    def test_of_one_that_never_starts_until_its_end(self) -> None:
        engine = counting_engine(max_sequences=1)
        loop = loop_of(engine)
        loop.add([0], GREEDY, StopRules(3))
        waiting = loop.add([5], GREEDY, StopRules(3))
        loop.step()
        loop.cancel(waiting)
        loop.step()
        assert waiting.stats.queue_s == 11.0
        assert (waiting.stats.gain, waiting.stats.off_reason) == (None, None)

    def test_what_lost_its_place_is_not_counted_as_waiting_again_and_takes_plain_decoding_as_long(self) -> None:
        engine = counting_engine(cells=44)
        loop = loop_of(engine, growth=0)
        requests = [loop.add([start] * 20, GREEDY, StopRules(10)) for start in (0, 5)]
        drain(loop)
        assert requests[1].stats.preemptions > 0
        assert [request.stats.queue_s for request in requests] == [0.0, 0.0]
        assert [request.stats.gain for request in requests] == [1.0, 1.0]


def test_every_sharer_is_charged_all_that_each_drafter_took() -> None:
    engine = counting_engine()
    drafters = [SlowDrafter(nothing, "first", engine.clock), SlowDrafter(right(2), "second", engine.clock)]
    loop = loop_of(engine, drafters, FixedPolicy(2))
    one = loop.add([0], GREEDY, StopRules(4))
    some = loop.add([3], GREEDY, StopRules(7), SpeculationParams(drafters=("second",)))
    plain = loop.add([6], GREEDY, StopRules(2), PLAINLY)
    drain(loop)
    # Each round but the first asks; the request that may only have the second drafter has one round alone.
    assert (one.stats.rounds, some.stats.rounds, plain.stats.rounds) == (1, 2, 1)
    assert one.stats.draft_s_by_source == {"first": 0.5, "second": 0.5}
    assert some.stats.draft_s_by_source == {"first": 0.5, "second": 1.0}
    assert plain.stats.draft_s_by_source == {"first": 0.5, "second": 0.5}
    assert some.stats.phases.draft_s == 1.5


class TestGain:
    def after_one_round(self, policy: Policy, paths: Callable[[Request], Sequence[Sequence[int]]]) -> RequestStats:
        engine = counting_engine()
        loop = loop_of(engine, [ForcedDrafter(paths)], policy)
        request = loop.add([0, 1, 2], GREEDY, StopRules(50))
        loop.step()
        assert request.stats.gain is None, "nothing was decoded yet"
        loop.step()
        return request.stats

    def test_of_drafts_accepted_whole(self) -> None:
        stats = self.after_one_round(Knowing(3), right(3))
        # Four tokens in a pass of four rows.
        assert (stats.decode_s, stats.plain) == (14.0, PlainTimes(44.0, 40.0, 52.0))
        assert (stats.gain, stats.gain_low, stats.gain_high) == (44 / 14, 40 / 14, 52 / 14)

    def test_of_drafts_turned_down_it_is_a_loss(self) -> None:
        stats = self.after_one_round(Knowing(3), lambda request: [[9, 9, 9]])
        assert (stats.gain, stats.gain_low, stats.gain_high) == (11 / 14, 10 / 14, 13 / 14)

    def test_is_unknown_where_the_policy_knows_no_costs(self) -> None:
        stats = self.after_one_round(FixedPolicy(3), right(3))
        assert (stats.plain, stats.gain, stats.gain_low, stats.gain_high) == (None, None, None, None)

    def test_stays_unknown_though_later_rounds_are_plain(self) -> None:
        engine = counting_engine()
        loop = loop_of(engine, [ForcedDrafter(right(3))], Wavering(engine.clock, [False, True, False]))
        request = loop.add([0], GREEDY, StopRules(7))
        gains = []
        while loop.active:
            loop.step()
            gains.append(request.stats.gain)
        # Before any round; a plain one of 11 s, which it took a second to decide on; then one with drafts.
        assert gains == [None, 11 / 12, None, None]

    def test_of_plain_decoding_is_one(self) -> None:
        loop = loop_of(counting_engine())
        requests = [loop.add([start], GREEDY, StopRules(5)) for start in (0, 3)]
        drain(loop)
        assert [request.stats.gain for request in requests] == [1.0, 1.0]

    def test_of_one_token_is_none(self) -> None:
        loop = loop_of(counting_engine())
        request = loop.add([0], GREEDY, StopRules(1))
        drain(loop)
        assert (request.stats.gain, request.stats.off_reason) == (None, None)

    def test_beside_drafts_of_others_plain_decoding_is_slower_than_alone(self) -> None:
        engine = counting_engine()
        loop = loop_of(engine, [ForcedDrafter(right(3))], Knowing(3))
        loop.add([0], GREEDY, StopRules(9))
        plain = loop.add([5], GREEDY, StopRules(3), PLAINLY)
        drain(loop)
        assert (plain.stats.decode_s, plain.stats.gain) == (30.0, 22 / 30)

    @pytest.mark.parametrize("policy", [NO_SPECULATION, FixedPolicy(3), Knowing(3)])
    def test_rounds_that_read_prompts_without_drafts_are_what_plain_decoding_takes(self, policy: Policy) -> None:
        loop = loop_of(counting_engine(), [ForcedDrafter(right(3))], policy)
        request = loop.add([0], GREEDY, StopRules(50))
        loop.step()
        loop.add([0] * 40, GREEDY, StopRules(1))
        while len(loop.active) == 2:
            loop.step()
        assert request.stats.rounds > 2
        assert request.stats.gain == request.stats.gain_low == request.stats.gain_high == 1.0

    @pytest.mark.parametrize("policy", [Knowing(3), FixedPolicy(3)], ids=["costs", "no costs"])
    def test_of_a_round_that_drafts_and_reads_a_prompt(self, policy: Policy) -> None:
        loop = loop_of(counting_engine(), [ForcedDrafter(right(3))], policy, prompt_rounds=math.inf)
        request = loop.add([0], GREEDY, StopRules(50))
        loop.step()
        loop.add([0] * 6, GREEDY, StopRules(1))
        loop.step()
        # Of ten rows in 20 s seven would have been there without drafts; three more tokens take plain rounds.
        assert request.stats.decode_s == 20.0
        known = PlainTimes(14.0 + 3 * 11.0, 10.0 + 3 * 10.0, 20.0 + 3 * 13.0)
        assert request.stats.plain == (known if isinstance(policy, Knowing) else None)


class TestWhyNothingWasDrafted:
    def off_rounds(
        self,
        drafters: Sequence[Drafter],
        policy: Policy,
        speculation: SpeculationParams = SpeculationParams(),  # noqa: B008
        *,
        max_tokens: int = 5,
        context_length: int = 1 << 10,
        max_outputs: int | None = None,
    ) -> Counter[OffReason]:
        engine = counting_engine(context_length=context_length, max_outputs=max_outputs)
        loop = loop_of(engine, drafters, policy)
        request = loop.add([0], GREEDY, StopRules(max_tokens), speculation)
        drain(loop)
        stats = request.stats
        assert stats.num_drafted == 0
        assert stats.off_rounds.total() == stats.rounds
        return stats.off_rounds

    @pytest.mark.parametrize(
        ("drafters", "policy", "options", "reasons"),
        [
            ({"one": right(3)}, FixedPolicy(3), {"speculation": PLAINLY}, {"asked": 4}),
            ({"one": right(3)}, NO_SPECULATION, {}, {"asked": 4}),
            ({}, NO_SPECULATION, {}, {"asked": 4}),
            ({}, FixedPolicy(3), {}, {"no_drafters": 4}),
            ({"one": right(3)}, FixedPolicy(3), {"speculation": OF_OTHER}, {"no_drafters": 4}),
            # Nothing matched until there was nothing left to draft.
            ({"one": nothing, "other": nothing}, FixedPolicy(3), {}, {"no_match": 3, "short": 1}),
            (
                {"one": right(3), "other": nothing},
                FixedPolicy(3),
                {"speculation": OF_OTHER},
                {"no_match": 3, "short": 1},
            ),
            ({"one": right(3)}, FixedPolicy(3), {"context_length": 3}, {"short": 1}),
            ({"one": right(2)}, FixedPolicy(3, draft_min=3), {}, {"draft_min": 3, "short": 1}),
            # A pass has no row for drafts.
            ({"one": right(3)}, FixedPolicy(3), {"max_outputs": 1}, {"no_room": 3, "short": 1}),
        ],
    )
    def test_each_round_has_its_reason(
        self,
        drafters: dict[str, Callable[[Request], list[list[int]]]],
        policy: Policy,
        options: dict[str, Any],
        reasons: dict[OffReason, int],
    ) -> None:
        drafting = [ForcedDrafter(paths, name) for name, paths in drafters.items()]
        assert self.off_rounds(drafting, policy, **options) == Counter(reasons)

    def test_a_policy_held_that_no_draft_would_pay(self) -> None:
        engine = counting_engine()
        loop = loop_of(engine, [ForcedDrafter(right(3))], Wavering(engine.clock, [False] * 4))
        request = loop.add([0], GREEDY, StopRules(5))
        drain(loop)
        assert request.stats.off_rounds == Counter(no_gain=4)

    def test_some_drafters_had_nothing_and_others_were_not_asked(self) -> None:
        class Picky(FixedPolicy):
            def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
                return list(jobs) if drafter.name == "one" else []

            def off_reason(self, request: Request) -> OffReason:
                return "no_gain"

        drafters = [ForcedDrafter(nothing, "one"), ForcedDrafter(right(3), "other")]
        assert self.off_rounds(drafters, Picky(3)) == Counter(no_gain=3, short=1)

    def test_the_cache_had_no_room_for_drafts(self) -> None:
        # Its drafts do not fit, one row does: with the prompt and two tokens the cache is full.
        loop = loop_of(counting_engine(cells=5), [ForcedDrafter(right(3))], FixedPolicy(3))
        request = loop.add([0, 1, 2], GREEDY, StopRules(50))
        drain(loop)
        assert request.finish_reason == "no_room"
        assert request.stats.off_rounds == Counter(no_room=2)
        assert request.stats.off_reason == "no_room"

    def test_prompts_were_read_beside_it(self) -> None:
        loop = loop_of(counting_engine(), [ForcedDrafter(right(3))], FixedPolicy(3))
        requests = [
            loop.add([0], GREEDY, StopRules(50), speculation)
            for speculation in (SpeculationParams(), PLAINLY, SpeculationParams(drafters=("other",)))
        ]
        loop.step()
        loop.add([0] * 40, GREEDY, StopRules(1))
        while len(loop.active) == 4:
            loop.step()
        reasons = [request.stats.off_reason for request in requests]
        assert reasons == ["prompts", "asked", "no_drafters"]
        loop.step()
        assert requests[0].stats.off_rounds["prompts"] == requests[0].stats.rounds - 1
        assert requests[0].stats.off_reason is None, "something was drafted"

    def test_the_reason_is_that_of_most_rounds(self) -> None:
        rounds: Counter[OffReason] = Counter({"measuring": 1, "no_match": 3, "prompts": 3})
        assert RequestStats(off_rounds=rounds).off_reason == "no_match"
        assert RequestStats(num_drafted=1, off_rounds=rounds).off_reason is None
        assert RequestStats().off_reason is None


def test_every_reason_is_said_in_words() -> None:
    assert tuple(OFF_REASONS) == get_args(OffReason)
