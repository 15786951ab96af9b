"""Requests that bring a policy of their own, beside those of the policy that the model was loaded with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, SpeculationParams, StopRules
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, blended_model, random_model, table_model
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import Policy, RoundRecord
from paceline.planning.policies.accept_ratio import AcceptRatioPolicy
from paceline.planning.policies.by_request import RoutingPolicy
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.policies.heuristic import HeuristicPolicy
from paceline.planning.policies.profile_ev import ProfileEvPolicy
from paceline.planning.registry import check_asked
from paceline.planning.report import PlannerReport
from paceline.runtime.loop import DecodingLoop
from tests.helpers import ForcedDrafter, drain
from tests.planning.helpers import Curve, smooth

GREEDY = SamplingParams(0.0)
COUNTING = table_model(np.roll(np.eye(10), 1, axis=1))
OWN = SpeculationParams(policy="fixed")


@dataclass(frozen=True)
class Listening(FixedPolicy):
    """Keeps what it is asked and told."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    selected: list[int] = field(default_factory=list)
    records: list[RoundRecord] = field(default_factory=list)

    def choose(self, drafter: Drafter, jobs: Sequence[Any]) -> list[Any]:
        self.asked.extend((drafter.name, job.request.id) for job in jobs)
        return super().choose(drafter, jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        self.selected.extend(request.id for request in requests)
        super().select(requests, trees)

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)


def counting(name: str, *, right: bool = True, first: int = 1) -> ForcedDrafter:
    """Return a drafter of eight tokens, all of them right or all wrong."""
    step = first if right else first + 3
    return ForcedDrafter(lambda request: [[(request.token_ids[-1] + step * k) % 10 for k in range(1, 9)]], name)


def counted(
    drafters: Sequence[Drafter], loaded: Policy, *asked: SpeculationParams, num_tokens: int = 13, trees: bool = True
) -> list[Request]:
    """Return requests that count, each with options of its own, decoded together."""
    engine = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10), trees=trees, cost=lambda rows, context: 10.0)
    loop = DecodingLoop(engine, drafters, loaded, clock=engine.clock)
    requests = [loop.add([0], GREEDY, StopRules(num_tokens), speculation) for speculation in asked]
    drain(loop)
    for request in requests:
        assert request.output_ids == [(k + 1) % 10 for k in range(num_tokens)]
    return requests


def deepest(request: Request) -> int:
    return max(request.stats.tested_by_depth, default=-1) + 1


@pytest.mark.parametrize(
    "loaded", [FixedPolicy(2), AcceptRatioPolicy(start=2), AutoPolicy(smooth(0.001, 1.0)), NO_SPECULATION]
)
def test_a_length_of_its_own_is_drafted_whatever_the_loaded_policy_says(loaded: Policy) -> None:
    asked = [SpeculationParams(), OWN, replace(OWN, draft_max=8), replace(OWN, speculate=False)]
    other, own, longer, plain = counted([counting("draft")], loaded, *asked)
    # Of thirteen tokens the first comes with the prompt, and a round emits one more than it drafts.
    assert (deepest(own), own.stats.rounds) == (5, 2)
    assert (deepest(longer), longer.stats.rounds) == (8, 2)
    assert plain.stats.num_drafted == 0
    if isinstance(loaded, AutoPolicy):
        assert other.stats.num_drafted <= 1, "a row costs as much as a round"
    else:
        alone = counted([counting("draft")], loaded, SpeculationParams())[0]
        assert other.stats.tested_by_depth == alone.stats.tested_by_depth


def test_the_loaded_policy_may_be_asked_for_by_its_name() -> None:
    loaded = FixedPolicy(2)
    named, own = counted([counting("draft")], AcceptRatioPolicy(2), SpeculationParams(policy="accept-ratio"), OWN)
    unnamed = counted([counting("draft")], AcceptRatioPolicy(2), SpeculationParams())[0]
    assert named.stats.drafted_by_source == unnamed.stats.drafted_by_source
    assert deepest(own) == 5
    assert deepest(counted([counting("draft")], loaded, OWN)[0]) == 5, "with the lengths of the request"


def test_limits_are_of_the_request() -> None:
    wrong, right = counting("suffix", right=False), counting("draft")
    none, short = counted(
        [right], FixedPolicy(2), replace(OWN, draft_max=8, draft_min=8), replace(OWN, draft_max=3, draft_min=2)
    )
    assert none.stats.num_drafted == 8, "there is room for it once"
    assert (deepest(short), short.stats.num_drafted) == (3, 9)
    (unsure,) = counted([wrong], FixedPolicy(2), replace(OWN, p_min=1.0))
    assert unsure.stats.num_drafted > 0, "a drafter that says nothing of chances is taken at its word"


def test_the_draft_model_drafts_alone_unless_others_are_named() -> None:
    drafters = [counting("suffix", right=False), counting("draft"), counting("lookup", first=2)]
    own, some, both = counted(
        drafters,
        FixedPolicy(2),
        OWN,
        replace(OWN, drafters=("suffix", "lookup")),
        replace(OWN, drafters=("draft", "lookup")),
    )
    assert own.stats.drafted_by_source.keys() == {"draft"}
    assert some.stats.drafted_by_source.keys() == {"suffix"}, "the first that proposes anything"
    assert both.stats.drafted_by_source.keys() == {"draft"}
    silent = ForcedDrafter(lambda request: [], "suffix")
    (own,) = counted([silent, counting("lookup")], FixedPolicy(2), OWN)
    assert own.stats.drafted_by_source.keys() == {"lookup"}


def test_drafts_of_its_own_length_have_no_branches() -> None:
    loaded = Listening(2)
    drafters = [counting("suffix", right=False), counting("lookup")]
    other, own = counted(drafters, loaded, SpeculationParams(), OWN)
    widest = max(len(tree) for record in loaded.records for tree in record.trees)
    assert widest == 1 + 2 + 2, "two chains of the loaded policy"
    assert other.stats.drafted_by_source.keys() == {"suffix", "lookup"}
    assert own.stats.drafted_by_source == {"suffix": own.stats.num_drafted}
    assert deepest(own) == 1


def test_the_loaded_policy_is_asked_and_told_of_its_own() -> None:
    loaded = Listening(2)
    other, own = counted([counting("draft")], loaded, SpeculationParams(), OWN)
    assert {request_id for _, request_id in loaded.asked} == {other.id}
    assert set(loaded.selected) == {other.id}
    shared = [record for record in loaded.records if own in record.requests]
    drafted_beside = [record for record in shared if record.prefill_rows]
    assert drafted_beside
    for record in drafted_beside:
        for request, tree, path in zip(record.requests, record.trees, record.paths, strict=True):
            assert tree.num_drafted == len(path) == (0 if request is own else 2)
        assert record.draft_seconds == {}
        assert (record.round_s, record.draft_s) == (10.0, 0.0), "without what drafting took"
    alone = [record for record in loaded.records if record.requests == [other]]
    assert [record.prefill_rows for record in alone] == [0] * len(alone)
    assert alone


def test_what_drafting_took_is_not_the_loaded_policys() -> None:
    loaded = Listening(2)
    target = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10), cost=lambda rows, context: 10.0)
    draft = ScriptedEngine(COUNTING, ScriptedVocabulary.of_size(10), cost=lambda rows, context: 1.0, clock=target.clock)
    loop = DecodingLoop(target, [DraftModelDrafter(draft, target_vocab_size=10)], loaded, clock=target.clock)
    own = loop.add([0], GREEDY, StopRules(3), OWN)
    for _ in range(2):
        loop.step()
    assert own.stats.num_drafted == 1
    (record,) = [record for record in loaded.records if record.requests]
    assert (record.draft_s, record.verify_s, record.round_s) == (0.0, 10.0, 10.0)
    # A draft that was too short is not verified, and took its time all the same.
    short = ForcedDrafter(lambda request: [[1]], "draft")
    (unverified,) = counted([short], loaded, replace(OWN, draft_min=5))
    assert unverified.stats.num_drafted == 0
    assert [record.prefill_rows > 0 for record in loaded.records if unverified in record.requests].count(True) > 1


CURVE = Curve(lambda rows: 1.0 + 0.03 * (rows - 1), lambda rows: 0.1 + 0.01 * (rows - 1))


def planned(
    *asked: tuple[SpeculationParams, int], distance: float = 0.15, draft_s: float = 1.0
) -> tuple[AutoPolicy, list[Request]]:
    """Decode requests of so many tokens under the planner, by passes that take what was measured.

    Args:
        asked: what each request asks of speculation, and its tokens.
        distance: of the draft from the target.
        draft_s: what a pass of the draft takes, over what was measured.
    """
    vocabulary, model = ScriptedVocabulary.of_size(30), random_model(30, seed=1, order=2)
    target = ScriptedEngine(model, vocabulary, cost=lambda rows, context: CURVE.target(rows))
    draft = ScriptedEngine(
        blended_model(model, random_model(30, seed=2, order=2), distance),
        vocabulary,
        clock=target.clock,
        cost=lambda rows, context: draft_s * CURVE.draft(rows),
    )
    policy = AutoPolicy(CURVE)
    loop = DecodingLoop(target, [DraftModelDrafter(draft, target_vocab_size=30)], policy, clock=target.clock)
    requests = [
        loop.add([number, 3], SamplingParams(0.8, seed=number), StopRules(count, ignore_end=True), speculation)
        for number, (speculation, count) in enumerate(asked)
    ]
    drain(loop)
    return policy, requests


def booked(report: PlannerReport) -> float:
    """Return what rounds took that are in the ledger."""
    return report.plain_s + report.debt_s


@pytest.mark.parametrize("distance", [0.15, 3.0])
def test_the_planner_learns_no_costs_and_no_debt_of_rounds_with_drafts_of_others(distance: float) -> None:
    """Drafts take ten times what was measured, which would tell of another draft model."""
    policy, (own, _) = planned((OWN, 200), (SpeculationParams(), 40), distance=distance, draft_s=10.0)
    report = policy.report()
    assert own.stats.num_drafted > 100
    assert report.drift == pytest.approx(1.0)
    assert policy._shared.costs.draft_s() == CURVE.draft_s(), "no pass of the draft was its own"
    # The first rounds are those of prompts and of plain decoding; in all others something was drafted.
    assert booked(report) < 3.0
    assert report.reliability["draft"].trials > 0, "of what the planner asked for"


def test_the_planner_would_learn_what_it_must_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoutingPolicy, "_without_own", lambda self, record: record)
    policy, _ = planned((OWN, 200), (SpeculationParams(), 40), draft_s=10.0)
    report = policy.report()
    assert booked(report) > 20.0
    assert report.debt_s > 3.0


def test_the_planner_goes_on_drafting_beside_others() -> None:
    """It learns what its own drafts are worth from rounds that it shares."""
    policy, (own, other) = planned((OWN, 300), (SpeculationParams(), 100))
    assert (own.stats.num_accepted > 100, other.stats.num_accepted > 40) == (True, True)
    assert policy.report().reliability["draft"].trials > 40
    _, (plain, alone) = planned((SpeculationParams(speculate=False), 300), (SpeculationParams(), 100))
    assert plain.stats.num_drafted == 0
    assert other.output_ids == alone.output_ids
    assert own.output_ids == plain.output_ids


def test_nothing_is_learned_where_none_is_the_planners() -> None:
    policy, (own,) = planned((OWN, 100), draft_s=10.0)
    report = policy.report()
    assert own.stats.num_drafted > 100
    assert (report.ledger, report.reliability, report.plain_s, report.drift) == ([], {}, 0.0, 1.0)


def test_the_planner_may_be_asked_for_by_its_name() -> None:
    policy, (request,) = planned((SpeculationParams(), 100))
    named, (again,) = planned((SpeculationParams(policy="auto"), 100))
    assert again.stats.num_drafted == request.stats.num_drafted > 0
    assert named.report().ledger == policy.report().ledger


Make = Callable[[], Policy]


@pytest.mark.parametrize(
    ("asked", "loaded", "words"),
    [
        ("auto", FixedPolicy, "policy 'auto' is not available on a model loaded with policy 'fixed', without "
         "costs to plan by: leave policy out, give 'fixed', or load the model with policy 'auto' .--policy auto."),
        ("profile-ev", lambda: AutoPolicy(CURVE), "loaded with policy 'auto': leave policy out, give 'fixed', or load"),
        ("heuristic", lambda: ProfileEvPolicy(CURVE), "loaded with policy 'profile-ev': leave"),
        ("heuristic", lambda: AroundNothing(), "loaded with policy 'AroundNothing': leave"),
    ],
)  # fmt: skip
def test_a_policy_that_the_model_was_not_loaded_with(asked: Any, loaded: Make, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_asked(SpeculationParams(policy=asked), loaded(), ["draft"])


class AroundNothing(RoutingPolicy):
    """A policy of somebody else's."""

    def __init__(self) -> None:
        super().__init__(NO_SPECULATION, [])


@pytest.mark.parametrize(
    ("asked", "drafters", "words"),
    [
        ({}, [], "policy 'fixed' has nothing to draft with, as the model was loaded without drafters: leave policy"),
        ({"draft_max": 129}, ["draft"], "draft-max 129 is out of range: give a value from 0 to 128"),
        ({"draft_min": 6}, ["draft"], "draft-min 6 is out of range: give 0 to draft-max, 5"),
    ],
)
def test_lengths_that_fixed_does_not_take(asked: dict[str, Any], drafters: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_asked(replace(OWN, **asked), FixedPolicy(), drafters)


def test_what_every_model_offers() -> None:
    for loaded in (FixedPolicy(), AutoPolicy(CURVE), HeuristicPolicy(), AroundNothing()):
        check_asked(SpeculationParams(), loaded, [])
        check_asked(OWN, loaded, ["draft"])
    check_asked(SpeculationParams(policy="auto"), AutoPolicy(CURVE), ["draft"])
