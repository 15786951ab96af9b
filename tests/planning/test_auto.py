"""The planner in virtual time: what it may lose, what it must gain, and how fast it follows."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.arrays import Float64Array
from paceline.core.clock import VirtualClock
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Request
from paceline.core.tree import ROOT, DraftTree
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines.scripted import (
    LogitFunction,
    ScriptedEngine,
    ScriptedVocabulary,
    blended_model,
    random_model,
    table_model,
)
from paceline.engines.sequence_pool import SequencePool
from paceline.lab.replaying.oracle import oracle_s
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import ReplayResult, replay
from paceline.planning.auto.drafter_selector import DrafterSelector
from paceline.planning.auto.ledger import Ledger
from paceline.planning.auto.planner_state import PlannerState
from paceline.planning.auto.policy import (
    CERTAIN_AFTER,
    FIRST_PLAIN_EVERY,
    FIRST_PLAIN_ROUNDS,
    PLAIN_EVERY,
    START_ROUNDS,
    AutoPolicy,
)
from paceline.planning.auto.round_plan import RequestPlan, RoundPlan
from paceline.planning.base import Policy, RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import PLAIN_PARAMS, drain, request_of
from tests.planning.curves import CURVES, QUICK_CURVES, line, texts
from tests.planning.helpers import AroundAuto, Curve, Skill, smooth, synthetic
from tests.runtime.enumeration import DRAFT_3, TARGET_3, draft_of, markov_text, text_distribution, total_variation
from tests.tiers import by_tier, some_long

MOSTLY_LONG = some_long(CURVES, quick=QUICK_CURVES)


def with_evidence(recording: Recording, **evidence: Any) -> Recording:
    """Return a recording whose proposals all have that evidence instead of their own."""
    traces = [
        replace(trace, chains=tuple(tuple(replace(level, **evidence) for level in chain) for chain in trace.chains))
        for trace in recording.traces
    ]
    return replace(recording, traces=tuple(traces))


@functools.cache
def changing(before: float, after: float) -> Callable[[int], float]:
    """Return how often a draft is right that changes at the 300th token."""
    return lambda position: before if position < 300 else after


class Deliberate(AroundAuto):
    """Takes virtual time for what it decides about a round with drafts."""

    def __init__(self, auto: AutoPolicy, clock: VirtualClock, own_s: float) -> None:
        super().__init__(auto)
        self._clock = clock
        self._own_s = own_s

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        self._clock.advance(self._own_s)
        super().select(requests, trees)


def deliberate(recordings: Sequence[Recording], curve: Curve, own_s: float) -> ReplayResult:
    """Replay under a planner that takes ``own_s`` seconds a round with drafts; asking for a copy takes 20 us."""
    clock = VirtualClock()
    return replay(recordings, Deliberate(AutoPolicy(curve), clock, own_s), curve, free_s=2e-5, clock=clock)


def plain_s(recordings: list[Recording], curve: Curve, **options: object) -> float:
    return replay(recordings, NO_SPECULATION, curve, **options).decode_s  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CURVES)
def test_a_useless_draft_costs_at_most_a_hundredth(name: str) -> None:
    recordings = texts(right=0.02)
    curve = CURVES[name]
    assert replay(recordings, AutoPolicy(curve), curve).decode_s <= 1.01 * plain_s(recordings, curve)


@pytest.mark.parametrize("name", MOSTLY_LONG)
def test_a_block_is_used_as_far_as_it_pays(name: str) -> None:
    """What asking for it takes, three tenths of a pass, is learned: useless, it costs little, and good, it is used."""
    curve = CURVES[name]
    free_s = 0.3 * curve.round_s(1)

    def ask(right: float, policy: Policy) -> float:
        skills = {"draft": Skill(right, is_model=False)}
        blocks = [synthetic(seed, skills, num_tokens=512, num_prompt=100, depth=15) for seed in range(2)]
        return replay(blocks, policy, curve, free_s=free_s).decode_s

    assert ask(0.02, AutoPolicy(curve)) <= 1.012 * ask(0.02, NO_SPECULATION)
    assert ask(0.8, AutoPolicy(curve)) <= min(ask(0.8, FixedPolicy(depth)) for depth in (1, 4, 7, 15))


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_useless_draft_on_a_machine_that_drifts(factor: float) -> None:
    recordings, curve = texts(right=0.02), CURVES["Q4_0"]

    def drift(now_s: float) -> float:
        return 1.0 if now_s < 5.0 else factor

    assert replay(recordings, AutoPolicy(curve), curve, drift=drift).decode_s <= 1.01 * plain_s(
        recordings, curve, drift=drift
    )


def test_a_machine_that_recovers_while_drafts_pay_does_not_make_plain_decoding_look_slow() -> None:
    """Passes take two and a half times as long until drafts have been verified for a while; then drafts turn bad."""
    curve = line(0.012, 0.010)
    recordings = texts(lambda position: 0.95 if position < 150 else 0.5, num_tokens=400, count=8)
    seconds, after_s = 0.0, 0.0
    for recording in recordings:
        recovers_s = replay([recording], AutoPolicy(curve), curve).requests[0].arrivals_s[100] * 2.5

        def drift(now_s: float, recovers_s: float = recovers_s) -> float:
            return 2.5 if now_s < recovers_s else 1.0

        arrivals_s = replay([recording], AutoPolicy(curve), curve, drift=drift).requests[0].arrivals_s
        assert arrivals_s[150] > recovers_s
        seconds += arrivals_s[-1] - arrivals_s[170]
        after_s += (len(arrivals_s) - 171) * curve.round_s(1)
    assert seconds <= 1.02 * after_s


# The oracle leaves out what changes of width cost.
@pytest.mark.parametrize(
    "name", some_long([name for name, curve in CURVES.items() if not curve.change_s], quick=["Q4_0", "line"])
)
def test_a_perfect_draft_reaches_what_an_oracle_does(name: str) -> None:
    recordings, curve = texts(right=1.0, num_tokens=400), CURVES[name]
    oracle = sum(oracle_s(recording, curve) for recording in recordings)
    assert oracle >= 0.95 * replay(recordings, AutoPolicy(curve), curve).decode_s


@pytest.mark.parametrize("name", some_long(["Q4_0", "F16", "Q8_0", "Q4_K_M"], quick=["Q4_0"]))
def test_the_end_of_an_answer_is_drafted_though_rounds_there_are_worse_than_before(name: str) -> None:
    """However many tokens the rounds before have left over, in sight of the end plain decoding takes longer."""
    curve = CURVES[name]
    for num_tokens in range(120, 137):
        last = replay(texts(right=1.0, num_tokens=num_tokens), AutoPolicy(curve), curve).requests[-1]
        assert last.arrivals_s[-1] - last.arrivals_s[-16] <= 0.4 * 15 * curve.round_s(1)


@pytest.mark.parametrize("name", MOSTLY_LONG)
@pytest.mark.parametrize("right", [0.3, 0.6, 0.8, 0.9])
def test_no_answer_is_slower_than_plain_by_more_than_was_allowed(name: str, right: float) -> None:
    recordings, curve = texts(right, count=8), CURVES[name]
    result = replay(recordings, AutoPolicy(curve), curve)
    for recording, request in zip(recordings, result.requests, strict=True):
        assert request.decode_s <= plain_s([recording], curve) / 0.97


@pytest.mark.parametrize(
    ("name", "right"),
    # With graphs, two rounds that fail use up what may be lost, and best is 1.12 of plain at 0.6: not found in time.
    some_long(
        [(name, right) for name in CURVES for right in (0.6, 0.8, 0.9) if (name, right) != ("graphs", 0.6)],
        quick=[("Q4_0", 0.6), ("Q4_0", 0.9), ("graphs", 0.8)],
    ),
)
def test_it_is_as_good_as_the_best_length_set_by_hand(name: str, right: float) -> None:
    recordings, curve = texts(right, count=8), CURVES[name]
    best = min(replay(recordings, FixedPolicy(length), curve).decode_s for length in (0, 1, 2, 3, 4, 6, 8, 12, 16))
    assert best >= 0.95 * replay(recordings, AutoPolicy(curve), curve).decode_s


@pytest.mark.parametrize("name", some_long(["F16", "Q4_0", "Q8_0", "line"], quick=["Q4_0"]))
@pytest.mark.parametrize(("before", "after"), [(0.95, 0.05), (0.05, 0.95)])
def test_a_draft_that_changes_is_followed_within_50_tokens(name: str, before: float, after: float) -> None:
    """From 50 tokens after the change, the rest goes about as fast as where the draft was like that all along."""
    curve = CURVES[name]

    def seconds_of_the_end(right: float | Callable[[int], float]) -> float:
        seconds = 0.0
        for recording in texts(right, num_tokens=600, count=12):
            (request,) = replay([recording], AutoPolicy(curve), curve).requests
            seconds += request.arrivals_s[-1] - request.arrivals_s[350]
        return seconds

    assert seconds_of_the_end(changing(before, after)) <= 1.1 * seconds_of_the_end(after)


def test_no_draft_is_given_up_for_good() -> None:
    """What little a draft still promises must not keep it from being probed."""
    curve = CURVES["line"]
    for recording in texts(lambda position: 0.02 if position < 300 else 0.95, num_tokens=600, count=12):
        (request,) = replay([recording], AutoPolicy(curve), curve).requests
        assert request.arrivals_s[-1] - request.arrivals_s[350] <= 0.5 * 249 * curve.round_s(1)


def test_what_early_losses_used_up_is_allowed_again_where_drafts_win_on_paper() -> None:
    """Each text by itself: a lookup that was mostly wrong must not keep the model's drafts from ever being tried."""
    curve = line(0.015, 0.001)
    late = Skill(lambda position: 0.05 if position < 300 else 0.95)
    skills = {"suffix": Skill(0.5, silent=0.97, is_model=False), "draft": late}
    for seed in range(by_tier(48, quick=12)):
        recording = synthetic(seed, skills, num_tokens=700, num_prompt=100, depth=16)
        (request,) = deliberate([recording], curve, 1.5e-4).requests
        assert request.arrivals_s[-1] - request.arrivals_s[400] <= 0.5 * 299 * curve.round_s(1)


def test_a_draft_model_is_asked_how_sure_it_is() -> None:
    """Where margins say nothing, that alone tells which drafts are worth it."""
    curve = CURVES["F16"]

    def seconds(**evidence: object) -> float:
        recordings = [with_evidence(recording, margins=(1.0,), **evidence) for recording in texts(0.6)]
        return replay(recordings, AutoPolicy(curve), curve).decode_s

    assert seconds() <= 0.9 * seconds(probability=None)


@pytest.mark.parametrize("name", QUICK_CURVES)
def test_what_a_model_says_in_one_pass_is_cut_by_its_margins(name: str) -> None:
    curve = CURVES[name]

    def block(right: float, *, says_margins: bool) -> list[Recording]:
        skills = {"draft": Skill(right, is_model=False, says_margins=says_margins)}
        return [synthetic(seed, skills, num_tokens=512, num_prompt=100, depth=16) for seed in range(2)]

    def seconds(recordings: list[Recording]) -> float:
        return replay(recordings, AutoPolicy(curve), curve, free_s=0.3 * curve.round_s(1)).decode_s

    assert seconds(block(0.8, says_margins=True)) <= 0.97 * seconds(block(0.8, says_margins=False))
    useless = block(0.02, says_margins=True)
    assert seconds(useless) <= 1.02 * plain_s(useless, curve)


@pytest.mark.parametrize("name", MOSTLY_LONG)
@pytest.mark.parametrize("right", some_long([0.02, 0.5, 0.8, 0.98], quick=[0.02, 0.8]))
def test_many_requests_at_once_are_never_slower_than_plain(name: str, right: float) -> None:
    recordings = texts(right, num_tokens=128, count=64)
    curve = CURVES[name]
    auto = replay(recordings, AutoPolicy(curve), curve, concurrent=64).decode_s
    assert auto <= 1.01 * plain_s(recordings, curve, concurrent=64)


def test_a_copy_that_lasts_is_drafted_deeper_and_a_model_never() -> None:
    curve = CURVES["graphs"]
    skills = {"suffix": Skill(0.99, is_model=False)}
    copy = synthetic(1, skills, num_tokens=256, num_prompt=100, depth=63)
    usual = replay([copy], AutoPolicy(curve), curve).requests[0]
    deeper = replay([copy], AutoPolicy(curve, copy_max=63), curve).requests[0]
    assert deeper.rounds < 0.7 * usual.rounds
    assert deeper.decode_s < 0.9 * usual.decode_s
    # One that breaks off now and then is not copied deeper before it has lasted.
    broken = synthetic(
        1,
        {"suffix": Skill(lambda token: float(token % 6 > 0), is_model=False)},
        num_tokens=256,
        num_prompt=100,
        depth=63,
    )
    assert replay([broken], AutoPolicy(curve, copy_max=63), curve) == replay([broken], AutoPolicy(curve), curve)
    deepest: dict[str, int] = {}

    class Watching(AroundAuto):
        def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
            (tree,) = trees
            for node in range(ROOT, len(tree)):
                for candidate in tree.candidates(node):
                    deepest[candidate.source] = max(deepest.get(candidate.source, 0), tree.depths[candidate.node])
            super().select(requests, trees)

    until_100 = Skill(0.99, silent=lambda token: float(token >= 100), is_model=False)
    both = synthetic(1, {"suffix": until_100, "draft": Skill(1.0)}, num_tokens=256, num_prompt=100, depth=63)
    free = Curve(lambda rows: 1.0)
    replay([both], Watching(AutoPolicy(free, copy_max=63)), free)
    assert deepest == {"suffix": 63, "draft": 16}


def test_nobody_is_asked_where_no_draft_could_pay() -> None:
    """With so many requests that every row costs what it can bring, a right probe leads nowhere."""
    recordings, curve = texts(0.8, num_tokens=128, count=64), CURVES["F16"]
    asked = []

    class Watching(AroundAuto):
        def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
            budgets = super().budgets(requests)
            asked.append(sum(budget is not None for budget in budgets))
            return budgets

    assert replay(recordings, Watching(AutoPolicy(curve)), curve, concurrent=64).decode_s == plain_s(
        recordings, curve, concurrent=64
    )
    assert asked
    assert not any(asked)


def test_a_lookup_that_finds_nothing_at_first_is_asked_again_though_deciding_takes_time() -> None:
    skills = {"suffix": Skill(0.97, silent=lambda done: done < 30, is_model=False), "draft": Skill(0.5)}
    recordings = [synthetic(seed, skills, num_tokens=256, num_prompt=100, depth=16) for seed in range(4)]
    curve = CURVES["Q4_0"]

    def seconds(own_s: float) -> float:
        return deliberate(recordings, curve, own_s).decode_s

    assert seconds(5e-4) <= 1.05 * seconds(0.0)
    assert seconds(5e-4) <= 0.6 * replay(recordings, AutoPolicy(curve), curve, drafters=["draft"]).decode_s


def test_a_draft_that_turns_good_is_noticed_though_catching_up_and_deciding_take_time() -> None:
    """Two drafters share what is set aside for probes, so that between two of them the draft falls behind."""
    curve = line(0.015, 0.001)

    def seconds_of_the_end(right: float | Callable[[int], float]) -> float:
        skills = {"suffix": Skill(0.5, silent=0.97, is_model=False), "draft": Skill(right)}
        recordings = [synthetic(seed, skills, num_tokens=700, num_prompt=100, depth=16) for seed in range(12)]
        seconds = 0.0
        for recording in recordings:
            (request,) = deliberate([recording], curve, 1.5e-4).requests
            seconds += request.arrivals_s[-1] - request.arrivals_s[400]
        return seconds

    assert seconds_of_the_end(lambda position: 0.05 if position < 300 else 0.95) <= 1.1 * seconds_of_the_end(0.95)


def test_rounds_of_a_millisecond_are_not_planned_for_looks_that_are_too_dear() -> None:
    """A level takes half a plain round, and so does deciding; the draft is right now and then."""
    curve = Curve(lambda rows: 0.0007 + 0.0001 * rows, lambda rows: 0.0004)
    skills = {"suffix": Skill(0.5, silent=0.95, is_model=False), "draft": Skill(0.3)}
    recordings = [synthetic(seed, skills, num_tokens=600, num_prompt=100, depth=16) for seed in range(6)]
    auto = deliberate(recordings, curve, 4e-4).decode_s
    assert auto <= 1.01 * plain_s(recordings, curve)


def test_hearing_every_drafter_takes_little_of_a_short_answer() -> None:
    """Deciding takes three quarters of a plain round, and no draft is worth anything."""
    curve = Curve(lambda rows: 0.0003 + 0.0001 * rows, lambda rows: 0.00033)
    skills = {"suffix": Skill(0.05, silent=0.8, is_model=False), "draft": Skill(0.05)}
    recordings = [synthetic(seed, skills, num_tokens=256, num_prompt=128, depth=16) for seed in range(6)]
    requests = deliberate(recordings, curve, 3e-4).requests
    first_s, *others_s = (request.decode_s for request in requests)
    one_plain_s = plain_s(recordings, curve) / len(recordings)
    assert first_s <= 1.02 * one_plain_s
    assert max(others_s) <= 1.01 * one_plain_s


def test_what_recording_a_plain_pass_takes_is_no_plain_decoding() -> None:
    recordings, curve = texts(0.3), CURVES["graphs"]

    class Recorded(AroundAuto):
        """Lets the second plain round after another pass take longer, as an engine that records it does."""

        plain_rounds = recorded = 0

        def observe(self, record: RoundRecord) -> None:
            is_plain = bool(record.requests) and all(len(tree) == 1 for tree in record.trees)
            self.plain_rounds = self.plain_rounds + 1 if is_plain else 0
            if self.plain_rounds == 2:
                more_s = 4 * record.verify_s
                record = replace(record, verify_s=record.verify_s + more_s, round_s=record.round_s + more_s)
                self.recorded += 1
            super().observe(record)

    policy = Recorded(AutoPolicy(curve))
    replay(recordings, policy, curve)
    assert policy.recorded >= len(recordings)
    # The change of width after each prompt, of which there is one in plain decoding too, is left out.
    settled_s = plain_s(recordings, curve) - len(recordings) * curve.change_s
    assert policy.auto.report().plain_s == pytest.approx(settled_s, rel=1e-6)


def test_plain_rounds_are_made_early_where_they_take_other_than_was_measured() -> None:
    (recording,), curve = texts(1.0, num_tokens=1500, count=1), CURVES["F16"]

    class Watched(AroundAuto):
        widths: list[int]

        def observe(self, record: RoundRecord) -> None:
            self.widths += [len(tree) for tree in record.trees]
            super().observe(record)

    def plain_rounds(factor: float, within: int) -> int:
        policy = Watched(AutoPolicy(curve))
        policy.widths = []
        replay([recording], policy, curve, drift=lambda now_s: factor)
        # Drafts are always right, so these are spent on knowing.
        return policy.widths[:within].count(1)

    assert plain_rounds(1.0, PLAIN_EVERY) == plain_rounds(0.95, PLAIN_EVERY) == FIRST_PLAIN_ROUNDS
    enough = CERTAIN_AFTER * (FIRST_PLAIN_EVERY + 1)
    assert plain_rounds(1.4, enough) == plain_rounds(0.7, enough) == CERTAIN_AFTER


def test_few_requests_at_once_gain_where_one_does() -> None:
    recordings, curve = texts(0.9, num_tokens=128, count=16), CURVES["F16"]
    for concurrent in (1, 2, 4):
        auto = replay(recordings, AutoPolicy(curve), curve, concurrent=concurrent).total_s
        assert auto <= replay(recordings, NO_SPECULATION, curve, concurrent=concurrent).total_s / 1.15


def one_after_the_other(right: float) -> list[Recording]:
    """Return requests of all lengths, as a server gets them: whenever one is done, the next takes its place."""
    rng = random.Random(0)
    return [
        synthetic(
            seed,
            {"draft": Skill(right)},
            num_tokens=rng.randint(24, 256),
            num_prompt=rng.choice((20, 100, 400)),
            depth=16,
        )
        for seed in range(24)
    ]


@pytest.mark.parametrize("name", MOSTLY_LONG)
@pytest.mark.parametrize("right", [0.02, 0.8])
def test_a_server_is_never_slower_than_with_plain_decoding(name: str, right: float) -> None:
    recordings, curve = one_after_the_other(right), CURVES[name]
    auto = replay(recordings, AutoPolicy(curve), curve, concurrent=8).total_s
    assert auto <= 1.01 * replay(recordings, NO_SPECULATION, curve, concurrent=8).total_s


@pytest.mark.parametrize("concurrent", some_long([4, 8, 16], quick=[8]))
def test_what_none_of_several_requests_would_pay_for_alone_is_asked_of_all(concurrent: int) -> None:
    """What a level and a change of width cost is shared: drafts for one or two of eight requests bring nothing."""
    recordings, curve = one_after_the_other(0.95), CURVES["graphs"]

    def seconds(policy: Policy) -> float:
        return replay(recordings, policy, curve, concurrent=concurrent).total_s

    auto = seconds(AutoPolicy(curve))
    assert auto <= seconds(NO_SPECULATION) / 1.3
    assert auto <= min(seconds(FixedPolicy(length)) for length in (1, 2, 3, 4, 7)) / 0.97


@pytest.mark.parametrize(("right", "speedup", "lowest"), [(0.6, 1.3, 1.0), (0.02, 0.98, 0.89)])
def test_a_draft_reads_a_long_prompt_once_if_that_does_not_pay(right: float, speedup: float, lowest: float) -> None:
    # For answers of 3.2 seconds the draft reads for 0.24.
    curve = replace(CURVES["F16"], draft=lambda rows: 0.0006 + 0.00006 * rows)
    skills = {"draft": Skill(right)}
    recordings = [synthetic(seed, skills, num_tokens=64, num_prompt=4032, depth=16) for seed in range(6)]
    auto = replay(recordings, AutoPolicy(curve), curve)
    plain = replay(recordings, NO_SPECULATION, curve)
    ratios = [one.decode_s / other.decode_s for one, other in zip(plain.requests, auto.requests, strict=True)]
    assert plain.decode_s / auto.decode_s >= speedup
    # The first answer may lose what reading took, and what a short answer may lose anyway.
    assert ratios[0] >= lowest
    assert min(ratios[1:]) >= 0.99


@pytest.mark.parametrize(("num_tokens", "reads"), [(64, False), (512, True)])
def test_a_lookup_reads_a_long_prompt_only_where_the_answer_is_long_enough(num_tokens: int, reads: bool) -> None:
    # Reading takes some 8 ms, and these answers 190 and 1,500.
    curve = line(0.0029, 0.0001)
    skills = {"suffix": Skill(0.9, is_model=False)}
    recordings = [synthetic(seed, skills, num_tokens=num_tokens, num_prompt=4032, depth=16) for seed in range(2)]
    first, _ = replay(recordings, AutoPolicy(curve), curve).requests
    assert (first.num_drafted > 0) is reads


def test_nothing_is_asked_of_a_draft_that_costs_as_much_as_the_target() -> None:
    recordings = texts(0.9)
    curve = Curve(lambda rows: 0.001 + 0.0005 * rows, lambda rows: 0.001)
    assert replay(recordings, AutoPolicy(curve), curve).decode_s <= 1.01 * plain_s(recordings, curve)


def test_the_report_says_what_was_predicted_and_what_it_cost() -> None:
    recordings, curve = texts(0.8), CURVES["F16"]
    policy = AutoPolicy(curve)
    result = replay(recordings, policy, curve)
    report = policy.report()
    assert report.reliability["draft"].error < 0.1
    assert report.debt_s == pytest.approx(result.decode_s - plain_s(recordings, curve), rel=0.02)
    assert report.ledger[-1].tokens == sum(request.num_tokens - 1 for request in result.requests)
    assert report.ledger[0].allowance_s == pytest.approx(START_ROUNDS * 0.05, rel=0.05)


class AnewEachTime(AroundAuto):
    """Learns nothing from one request to the next, so that every way the dice can fall meets the same policy."""

    def __init__(self) -> None:
        super().__init__(self._anew())
        self.drafted = 0

    def _anew(self) -> AutoPolicy:
        return AutoPolicy(smooth(0.02, 0.0001, 0.0001))

    def begin(self, request: Request) -> None:
        self.auto = self._anew()
        super().begin(request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        self.auto._rounds += 10  # without the plain rounds that a session starts with
        return super().budgets(requests)

    def observe(self, record: RoundRecord) -> None:
        self.drafted += sum(tree.num_drafted for tree in record.trees)
        super().observe(record)


def test_rejection_keeps_the_distribution() -> None:
    """By enumeration: nothing that is verified may depend on what was drawn."""
    policy = AnewEachTime()
    spoken = text_distribution(table_model(TARGET_3), 3, lambda: [draft_of(DRAFT_3)], policy, num_tokens=3)
    assert policy.drafted > 0
    assert total_variation(spoken, markov_text(TARGET_3, 3)) < 1e-12


MODEL = random_model(12, seed=1)


def seconds_under_rejection(
    curve: Curve,
    policy: Policy,
    draft: LogitFunction,
    *,
    requests: int = 1,
    num_prompt: int = 10,
    num_tokens: int = 200,
) -> float:
    """Decode requests at once with a draft model beside :data:`MODEL`; return virtual seconds."""
    vocabulary = ScriptedVocabulary.of_size(12)
    clock = VirtualClock()
    target = ScriptedEngine(
        MODEL, vocabulary, clock=clock, cost=lambda rows, context: curve.round_s(rows), max_rows=2000
    )
    drafting = ScriptedEngine(
        draft, vocabulary, clock=clock, cost=lambda rows, context: curve.draft_s(rows), max_rows=2000
    )
    loop = DecodingLoop(target, [DraftModelDrafter(drafting, target_vocab_size=12)], policy, clock=clock)
    for seed in range(requests):
        params = replace(PLAIN_PARAMS, seed=seed)
        loop.add([seed % 12] * num_prompt, params, StopRules(num_tokens), SpeculationParams(verify="rejection"))
    drain(loop)
    return clock.now_s()


def test_blind_requests_share_what_a_round_has_room_for() -> None:
    """Four rows more cost nothing, whoever has them; each of sixteen requests must not count on them for itself."""
    curve = Curve(lambda rows: 0.05 * max(rows - 19, 1), lambda rows: 0.0001)
    draft = blended_model(MODEL, random_model(12, seed=2), 0.5)
    scene = {"requests": 16, "num_prompt": 1, "num_tokens": 60}
    plain = seconds_under_rejection(curve, NO_SPECULATION, draft, **scene)
    assert seconds_under_rejection(curve, AutoPolicy(curve), draft, **scene) <= plain


def test_a_blind_draft_reads_a_prompt_only_if_that_comes_back() -> None:
    curve = Curve(lambda rows: 0.04 + 0.01 * rows, lambda rows: 0.005 * rows)
    scene = {"num_prompt": 1000, "num_tokens": 30}
    plain = seconds_under_rejection(curve, NO_SPECULATION, MODEL, **scene)
    # The prompt takes the target ten seconds, the draft would take five, and the answer takes one and a half.
    assert seconds_under_rejection(curve, AutoPolicy(curve), MODEL, **scene) <= plain + 0.1


def test_a_blind_draft_that_is_right_is_used() -> None:
    curve = Curve(lambda rows: 0.049 + 0.001 * rows, lambda rows: 0.001)
    plain = seconds_under_rejection(curve, NO_SPECULATION, MODEL)
    assert seconds_under_rejection(curve, AutoPolicy(curve), MODEL) <= 0.5 * plain


def test_a_blind_draft_that_turns_good_is_used_again() -> None:
    curve = line(0.015, 0.001)
    wrong = random_model(12, seed=2)

    def turning(tokens: Sequence[int]) -> Float64Array:
        return MODEL(tokens) if len(tokens) > 300 else wrong(tokens)

    plain = seconds_under_rejection(curve, NO_SPECULATION, turning, num_tokens=1200)
    assert seconds_under_rejection(curve, AutoPolicy(curve), turning, num_tokens=1200) <= 0.7 * plain


def test_what_one_drafter_brings_several_requests_is_not_credited_to_the_next() -> None:
    """Without branches the second drafter is offered only the trees that the first left empty."""
    vocabulary = ScriptedVocabulary.of_size(12)
    clock, curve = VirtualClock(), Curve(lambda rows: 0.02 + 0.0005 * rows)

    class EverySecond(DraftModelDrafter):
        name = "perfect"

        def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
            grows = [job.request.id % 2 == 0 for job in jobs]
            more = iter(super().grow([job for job, is_own in zip(jobs, grows, strict=True) if is_own]))
            return [is_own and next(more) for is_own in grows]

    def engine(model: LogitFunction, cost: Callable[[int], float]) -> ScriptedEngine:
        return ScriptedEngine(model, vocabulary, clock=clock, cost=lambda rows, context: cost(rows), trees=False)

    perfect = EverySecond(engine(MODEL, curve.draft_s), target_vocab_size=12)
    useless = DraftModelDrafter(engine(random_model(12, seed=5), curve.draft_s), target_vocab_size=12)
    policy = AutoPolicy(curve)
    loop = DecodingLoop(engine(MODEL, curve.round_s), [perfect, useless], policy, clock=clock)
    for number in range(8):
        loop.add([number], replace(PLAIN_PARAMS, temperature=0.0), StopRules(200))
    for _ in range(12):
        loop.step()
    assert len(loop.active) == 8
    learned = policy.learned()
    assert learned is not None
    drafters = learned.drafters
    assert drafters["perfect"].gains.solo.mean > 1.0
    assert drafters["draft"].gains.solo.rounds >= 8
    assert drafters["draft"].gains.solo.mean <= 0.0


def test_trees_have_no_more_branches_than_the_engine_can_hold() -> None:
    model = random_model(12, seed=1)
    vocabulary = ScriptedVocabulary.of_size(12)
    clock = VirtualClock()
    target = ScriptedEngine(model, vocabulary, clock=clock, cost=lambda rows, context: 1.0)
    draft = ScriptedEngine(blended_model(model, random_model(12, seed=2), 0.5), vocabulary, clock=clock)
    most = 0

    class Watching(AroundAuto):
        def observe(self, record: RoundRecord) -> None:
            nonlocal most
            leaves = sum(
                max(len({candidate.node for candidate in tree.candidates(node)}) - 1, 0)
                for tree in record.trees
                for node in range(ROOT, len(tree))
            )
            most = max(most, leaves)
            super().observe(record)

    policy = Watching(AutoPolicy(Curve(lambda rows: 1.0, lambda rows: 0.01), siblings=4, branches=2))
    loop = DecodingLoop(target, [DraftModelDrafter(draft, target_vocab_size=12)], policy, clock=clock)
    loop.add([1, 2], PLAIN_PARAMS, StopRules(200))
    drain(loop)
    assert most == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_max": 0}, "up to 0 tokens"),
        ({"copy_max": 15}, "up to 15 tokens: give 16 to 128"),
        ({"siblings": 0}, "0 draft siblings"),
        ({"branches": -1}, "-1 branches"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        AutoPolicy(CURVES["line"], **settings)


@pytest.mark.parametrize("level_s", [0.05, 0.25, 0.6])
@pytest.mark.parametrize("right", [0.02, 0.7, 1.0])
def test_drafting_that_costs_much_is_bounded_like_verifying(level_s: float, right: float) -> None:
    """Passes take the same time whatever their width, so all that can be lost is lost by drafting."""
    curve = Curve(lambda rows: 1.0, lambda rows: level_s)
    recordings = texts(right)
    auto, plain = replay(recordings, AutoPolicy(curve), curve).decode_s, plain_s(recordings, curve)
    assert auto <= 1.01 * plain
    if right == 1.0:
        assert auto <= plain * min(1.0, 1.3 * (1.0 + 16 * level_s) / 17)


def test_rounds_that_need_no_decision_are_booked_too() -> None:
    recordings, curve = texts(right=0.02), CURVES["Q4_0"]
    policy = AutoPolicy(curve)
    result = replay(recordings, policy, curve)
    report = policy.report()
    emitted = sum(request.num_tokens - 1 for request in result.requests)
    assert report.ledger[-1].tokens == emitted
    assert report.plain_s == pytest.approx(plain_s(recordings, curve), rel=1e-6)
    assert report.plain_s + report.debt_s == pytest.approx(result.decode_s, rel=1e-6)


def test_requests_that_want_plain_decoding_get_it_and_enter_no_ledger() -> None:
    """Their rounds say what plain decoding takes, which requests that speculate beside and after them are judged by."""
    curve = CURVES["F16"]
    clock = VirtualClock()
    target = ScriptedEngine(
        MODEL, ScriptedVocabulary.of_size(12), clock=clock, cost=lambda rows, context: 3.0 * curve.round_s(rows)
    )
    draft = ScriptedEngine(
        MODEL, ScriptedVocabulary.of_size(12), clock=clock, cost=lambda rows, context: curve.draft_s(rows)
    )
    policy = AutoPolicy(curve)
    loop = DecodingLoop(target, [DraftModelDrafter(draft, target_vocab_size=12)], policy, clock=clock)
    params, plainly = replace(PLAIN_PARAMS, temperature=0.0), SpeculationParams(speculate=False)
    plain = loop.add([1, 2], params, StopRules(40), plainly)
    drain(loop)
    assert plain.stats.num_drafted == 0
    report = policy.report()
    assert not report.ledger
    assert report.drift == pytest.approx(3.0, rel=0.1)
    pair = [
        loop.add([number, 3], params, StopRules(100), how) for number, how in ((1, plainly), (2, SpeculationParams()))
    ]
    drain(loop)
    assert pair[0].stats.num_drafted == 0
    assert pair[1].stats.num_accepted > 40


# --- prompts that were read before ------------------------------------------------------------------------------------


def turns(options: Sequence[SpeculationParams], *, keeps: bool, num_prompt: int = 3000) -> list[Request]:
    """Return the turns of a chat with a long prompt, in virtual time, each with options of its own."""
    vocabulary = ScriptedVocabulary.of_size(30)
    model = random_model(30, seed=1, order=2)
    curve = Curve(lambda rows: 1.0 + 0.03 * (rows - 1), lambda rows: 0.1 + 0.001 * (rows - 1))
    target = ScriptedEngine(model, vocabulary, context_length=1 << 14, cost=lambda rows, context: curve.target(rows))
    draft = ScriptedEngine(
        blended_model(model, random_model(30, seed=2, order=2), 0.15),
        vocabulary,
        context_length=1 << 14,
        clock=target.clock,
        cost=lambda rows, context: curve.draft(rows),
    )
    pools = [SequencePool(engine, max_idle=16 if keeps else 0) for engine in (target, draft)]
    drafters: list[Drafter] = [SuffixDrafter(), DraftModelDrafter(draft, target_vocab_size=30, pool=pools[1])]
    loop = DecodingLoop(target, drafters, AutoPolicy(curve), pool=pools[0], clock=target.clock)
    text = [(at * 7 + at // 5) % 29 for at in range(num_prompt)]
    requests = []
    for turn, speculation in enumerate(options):
        params = SamplingParams(0.8, seed=turn)
        request = loop.add(text, params, StopRules(100, ignore_end=True), speculation)
        drain(loop)
        requests.append(request)
        text = [*request.token_ids, 1, 2, 3]
    return requests


def test_a_prompt_that_the_target_had_at_hand_pays_for_a_draft_model_to_read_it_too() -> None:
    """The first turn is plain, so that the draft has read nothing when the second one speculates."""
    options = [SpeculationParams(speculate=False), SpeculationParams(), SpeculationParams()]
    anew, kept = turns(options, keeps=False), turns(options, keeps=True)
    assert [request.stats.cached_tokens > 3000 for request in kept] == [False, True, True]
    for ours, theirs in zip(kept[1:], anew[1:], strict=True):
        assert ours.output_ids == theirs.output_ids
        assert ours.stats.num_drafted > 100
        assert ours.stats.decode_s <= 1.05 * theirs.stats.decode_s < 50


def test_a_look_is_set_aside_for_what_a_draft_model_has_not_at_hand() -> None:
    curve = Curve(lambda rows: 1.0 + 0.03 * (rows - 1), lambda rows: 0.1 + 0.001 * (rows - 1))
    engine = ScriptedEngine(random_model(30, seed=1), ScriptedVocabulary.of_size(30), context_length=1 << 14)
    drafter = DraftModelDrafter(engine, target_vocab_size=30, pool=SequencePool(engine))
    text = [at % 29 for at in range(3000)]
    earlier, request = request_of(text, request_id=1), request_of([*text, *[1] * 201], request_id=2, max_tokens=100)
    for each in (earlier, request):
        drafter.begin(each)
    drafter.grow([DraftJob(earlier, DraftTree(text[-1]), DraftBudget(1))])
    planner = PlannerState(curve)
    selector = DrafterSelector(planner, 16)
    planner.begin(request, Ledger(0.0))
    state = planner.requests[request.id]
    plans = {request.id: RequestPlan(request, draw_independent=False, num_output=0)}
    planned = RoundPlan(planner.costs, plans, 1, 1.0, len(request.token_ids), curve.round_s(1), 0.0, 16, 0)
    planned.limit(16)
    assert selector.select_first(planned, drafter, [DraftJob(request, DraftTree(1), DraftBudget(16))]) == [], (
        "nothing is saved"
    )
    assert selector.missing_s(request, state, token_s=1.0) == pytest.approx(curve.draft_s(201))
