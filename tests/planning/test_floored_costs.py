"""Passes that wait for something else than their rows: measured, followed and planned for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline.core.params import SamplingParams, StopRules
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, table_model
from paceline.planning.auto.floored_costs import FlooredCosts
from paceline.planning.auto.online_costs import OnlineCosts
from paceline.planning.auto.policy import DEEPEST, AutoPolicy
from paceline.planning.base import RoundRecord, with_floor
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.costs.profiling import measure_profile
from paceline.planning.policies.fixed import MAX_DRAFT
from paceline.planning.registry import build_policy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import drain
from tests.planning.helpers import WaitingEngine

FLOOR_S = 2.0
SIZE = 20


def computing(rows: int) -> float:
    return 0.1 + 0.02 * rows


def profile(floor_s: float = FLOOR_S) -> CostProfile:
    widths = tuple(WidthCost.of(rows, [computing(rows)]) for rows in (1, 2, 4, 8, 16, 32, 64))
    return CostProfile(PassCost(widths), PassCost((WidthCost.of(1, [0.02]),)), floor_s=floor_s)


def following() -> np.ndarray:
    """Return logits that make each of ten tokens follow the one before, by far."""
    return np.where(np.roll(np.eye(SIZE), 1, axis=1) > 0, 9.0, 0.0)


def waiting_engine(floor_s: float = FLOOR_S) -> WaitingEngine:
    return WaitingEngine(
        table_model(following()), floor_s, computing, vocabulary=ScriptedVocabulary.of_size(SIZE), max_rows=256
    )


def test_a_round_takes_what_it_waits_for_or_what_its_rows_do() -> None:
    costs = profile()
    assert costs.round_s(1) == costs.round_s(64) == FLOOR_S
    assert costs.round_s(128) == pytest.approx(2 * computing(64))
    assert costs.without_floor().round_s(8) == computing(8)
    assert CostProfile.from_json(costs.to_json()) == costs
    older = costs.to_json()
    del older["floor_s"]
    assert CostProfile.from_json(older).floor_s == 0.0
    assert with_floor(costs) is costs
    assert with_floor(costs.without_floor()) is None
    with pytest.raises(ValueError, match="floor_s is -1"):
        dataclasses.replace(costs, floor_s=-1.0)


def test_a_disk_that_becomes_slower_says_nothing_of_the_rows() -> None:
    costs = FlooredCosts(profile())
    for _ in range(9):
        # Wide rounds tell it as well as plain ones.
        costs.observe_round(16, 100, 1, 3.0, 3.0 - computing(16))
    assert costs.tells_plain
    assert costs.round_s(1) == costs.round_s(16) == pytest.approx(3.0)
    assert costs.round_s(160) == pytest.approx(2.5 * computing(64))
    assert costs.drift == pytest.approx(1.5)
    low, high = costs.plain_bounds
    assert low <= 1.0 <= high
    assert high - low < 0.2


def test_a_processor_that_becomes_slower_says_nothing_of_the_disk() -> None:
    costs = FlooredCosts(profile())
    for _ in range(40):
        for rows in (1, 16, 32):
            costs.observe_round(rows, 100, 1, FLOOR_S, FLOOR_S - 2 * computing(rows))
    assert costs.round_s(1) == pytest.approx(FLOOR_S)
    assert costs.round_s(64) == pytest.approx(2 * computing(64), rel=0.05)
    assert not costs.is_doubtful


def test_a_disk_that_nobody_waits_for_any_more_is_noticed() -> None:
    costs = FlooredCosts(profile())
    for _ in range(20):
        costs.observe_round(1, 100, 1, computing(1))
    assert not costs.tells_plain
    assert costs.round_s(1) == pytest.approx(computing(1))


def test_a_lock_on_the_way_is_no_wait() -> None:
    costs = FlooredCosts(profile(0.25))
    for _ in range(9):
        # What its rows take is longer than what it waits for; it took a lock, which is never quite free.
        costs.observe_round(16, 100, 1, computing(16), 2e-5)
    assert costs.round_s(1) == pytest.approx(0.25)


def test_costs_that_know_of_no_floor_have_none() -> None:
    measured = OnlineCosts(profile(0.0))
    assert not measured.tells_plain
    assert isinstance(AutoPolicy(profile())._shared.costs, FlooredCosts)
    assert type(AutoPolicy(profile(0.0))._shared.costs) is OnlineCosts


def test_drafts_are_as_deep_as_rows_cost_nothing() -> None:
    depths = []
    for floor_s in (0.0, 0.3, 1.0, 60.0):
        policy = build_policy("auto", costs=profile(floor_s))
        assert isinstance(policy, AutoPolicy)
        depths.append(policy.draft_max)
    # A second is what 45 rows take, and what lies between two measured widths counts as the wider.
    assert depths == [DEEPEST, DEEPEST, 31, MAX_DRAFT]


def test_a_profile_is_measured_without_the_waits() -> None:
    engine = waiting_engine()
    measured = measure_profile(engine, clock=engine.clock)
    assert measured.floor_s == FLOOR_S
    assert measured.target.is_measured(64)
    for rows in (1, 8, 64):
        assert measured.target.seconds(rows) == pytest.approx(computing(rows))
    assert measured.took_s <= 10.0
    # Afterwards they wait again.
    assert not any(waited for waited, _ in engine.passes)
    assert not engine.is_dry


def test_a_kept_profile_is_checked_without_waits_and_has_the_wait_of_now(options: ModelOptions, folder: object) -> None:
    engine = waiting_engine()
    find_or_measure(engine, options, clock=engine.clock)
    engine.floor_s = 3 * FLOOR_S
    kept = find_or_measure(engine, options, clock=engine.clock)
    assert not kept.measured
    assert kept.profile.floor_s == 3 * FLOOR_S
    assert not any(waited for waited, _ in engine.passes)
    engine.compute_s = lambda rows: 3 * computing(rows)
    assert find_or_measure(engine, options, clock=engine.clock).measured


class Records:
    """Keeps what observers hear."""

    def __init__(self) -> None:
        self.heard: list[RoundRecord] = []

    def observe(self, record: RoundRecord) -> None:
        self.heard.append(record)


def test_a_good_draft_of_slow_passes_is_followed_far_at_once() -> None:
    engine = waiting_engine(60.0)
    draft = ScriptedEngine(
        table_model(following()),
        ScriptedVocabulary.of_size(SIZE),
        cost=lambda rows, context: 0.05 * rows,
        clock=engine.clock,
    )
    costs = measure_profile(engine, draft, clock=engine.clock)
    policy, records = build_policy("auto", costs=costs), Records()
    engine.passes.clear()
    loop = DecodingLoop(
        engine, [DraftModelDrafter(draft, target_vocab_size=SIZE)], policy, clock=engine.clock, observers=[records]
    )
    # Reading the prompt takes the draft 25 s, which is less than half of one of these rounds.
    loop.add([index % SIZE for index in range(500)], SamplingParams(0.0), StopRules(400))
    drain(loop)
    rounds = records.heard
    assert sum(rounds[0].emitted) == 0 or rounds[0].prefill_rows > 0
    decoding = [record for record in rounds if not record.prefill_rows]
    # None was made plainly to see what those take, and few were short because nothing was known yet.
    assert all(len(record.trees[0]) > 1 for record in decoding)
    assert len(decoding) <= 10
    assert all(
        record.waited_s == pytest.approx(record.verify_s - computing(len(record.trees[0]))) for record in decoding
    )
    assert policy.report() is not None


def test_a_useless_draft_of_slow_passes_loses_next_to_nothing() -> None:
    engine = waiting_engine(10.0)
    draft = ScriptedEngine(
        table_model(np.roll(following(), 3, axis=1)),
        ScriptedVocabulary.of_size(SIZE),
        cost=lambda rows, context: 0.05 * rows,
        clock=engine.clock,
    )
    costs = measure_profile(engine, draft, clock=engine.clock)
    policy = build_policy("auto", costs=costs)
    loop = DecodingLoop(engine, [DraftModelDrafter(draft, target_vocab_size=SIZE)], policy, clock=engine.clock)
    request = loop.add([1, 2, 3], SamplingParams(0.0), StopRules(100))
    drain(loop)
    assert request.stats.decode_s <= 1.03 * 10.0 * 99
