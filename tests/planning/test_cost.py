"""The cost profile as data: read between measurements, written and read back, and following a machine that changes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.engines.base import Step
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.planning.costs.profile import CostProfile, DriftTracker, PassCost, WidthCost

# Milliseconds of the 1B shape in Q4_0 on two cores (design notes): dearer at 3 rows than at 4, at 6 than at 8.
Q4_0 = {1: 16.0, 2: 26.0, 3: 37.0, 4: 24.0, 6: 46.0, 8: 44.0, 12: 63.0}


def exact(rows: int, ms: float) -> WidthCost:
    return WidthCost.of(rows, [ms / 1e3])


def staircase(**slopes: Any) -> PassCost:
    return PassCost(tuple(exact(rows, ms) for rows, ms in Q4_0.items()), **slopes)


def profile() -> CostProfile:
    return CostProfile(
        target=staircase(context=32, token_s=1e-6, token_row_s=2e-7, long_context=1056),
        draft=PassCost((exact(1, 2.0), WidthCost.of(2, [0.003, 0.004, 0.0025]))),
        request_s=5e-4,
        sampling_row_s=3e-5,
        num_passes=40,
        took_s=1.25,
    )


def test_cliffs_both_ways_are_kept() -> None:
    cost = CostProfile(staircase())
    assert {rows: cost.round_s(rows) * 1e3 for rows in Q4_0} == pytest.approx(Q4_0)
    assert cost.round_s(4) < cost.round_s(2) < cost.round_s(3)


def test_a_width_in_between_costs_as_much_as_the_dearer_neighbour() -> None:
    cost = staircase()
    for rows, ms in {5: 46.0, 7: 46.0, 9: 63.0, 11: 63.0}.items():
        assert not cost.is_measured(rows)
        assert cost.seconds(rows) * 1e3 == pytest.approx(ms)
    assert [rows for rows in range(1, 20) if cost.is_measured(rows)] == list(Q4_0)


def test_beyond_the_widest_every_row_costs_the_widest_pass_s_average() -> None:
    cost = staircase()
    assert cost.widest == 12
    assert cost.seconds(13) * 1e3 == pytest.approx(63.0 * 13 / 12)
    assert cost.seconds(120) * 1e3 == pytest.approx(630.0)


def test_context_adds_to_every_pass_and_to_every_row() -> None:
    cost = profile()
    assert cost.round_s(4, context=32) == pytest.approx(0.024)
    assert cost.round_s(4, context=1032) == pytest.approx(0.024 + 1000 * (1e-6 + 4 * 2e-7))
    assert cost.round_s(4, context=0) == pytest.approx(0.024 - 32 * (1e-6 + 4 * 2e-7))


def test_shorter_contexts_never_come_out_free() -> None:
    steep = PassCost((exact(1, 10.0),), context=1000, token_s=1e-4, long_context=2000)
    assert steep.seconds(1, context=0) == pytest.approx(0.005)


def test_requests_and_sampling_add_to_a_round() -> None:
    cost = profile()
    assert cost.round_s(4, 32, requests=3) == pytest.approx(0.024 + 2 * 5e-4)
    assert cost.sampling_s(3) == pytest.approx(9e-5)
    assert CostProfile(staircase()).round_s(4, requests=3) == pytest.approx(0.024)


def test_medians_and_quartiles() -> None:
    width = WidthCost.of(3, [5.0, 1.0, 2.0, 100.0, 3.0])
    assert (width.rows, width.samples, width.low_s, width.median_s, width.high_s) == (3, 5, 2.0, 3.0, 5.0)
    two = WidthCost.of(1, [1.0, 2.0])
    assert (two.low_s, two.median_s, two.high_s) == (1.25, 1.5, 1.75)
    assert WidthCost.of(1, [0.0]).median_s > 0


def test_rounding_keeps_quartiles_in_order() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        times = list(0.1 + 1e-17 * rng.integers(0, 3, size=rng.integers(1, 8)))
        assert WidthCost.of(1, times).samples == len(times)


def test_a_profile_without_a_draft_model_says_so() -> None:
    with pytest.raises(ValueError, match="without a draft model"):
        CostProfile(staircase()).draft_s()


@pytest.mark.parametrize("rows", [0, -1])
def test_passes_have_rows(rows: int) -> None:
    with pytest.raises(ValueError, match="the least is 1"):
        profile().round_s(rows)


def test_nonsense_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match="ascending from 1"):
        PassCost((exact(2, 1.0),))
    with pytest.raises(ValueError, match="ascending from 1"):
        PassCost((exact(1, 1.0), exact(3, 1.0), exact(2, 1.0)))
    with pytest.raises(ValueError, match="not longer"):
        PassCost((exact(1, 1.0),), context=100, long_context=100)
    with pytest.raises(ValueError, match=">= 0"):
        PassCost((exact(1, 1.0),), token_s=-1e-9)
    with pytest.raises(ValueError, match="quartiles"):
        WidthCost(1, 1, median_s=1.0, low_s=2.0, high_s=3.0)


def test_json_gives_back_an_equal_profile() -> None:
    for cost in (profile(), CostProfile(staircase())):
        assert CostProfile.from_json(cost.to_json()) == cost
        assert CostProfile.from_json(json.loads(json.dumps(cost.to_json()))) == cost


def changed(path: str, value: object) -> object:
    data: Any = profile().to_json()
    *way, last = path.split(".")
    place = data
    for name in way:
        place = place[int(name) if name.isdigit() else name]
    if value is KeyError:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return json.loads(json.dumps(data))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "not a cost profile"),
        ({"format": "something"}, "not a cost profile"),
        (changed("version", 0), "version 0"),
        (changed("version", "1"), "version 1"),
        (changed("target", None), "damaged"),
        (changed("target", KeyError), "damaged"),
        (changed("draft", KeyError), "damaged"),
        (changed("target.widths", {}), "damaged"),
        (changed("target.widths", []), "damaged"),
        (changed("target.widths.1", 7), "damaged"),
        (changed("target.widths.1.rows", 3), "damaged"),
        (changed("target.widths.1.rows", 2.5), "damaged"),
        (changed("target.widths.6.rows", 10**12), "damaged"),
        (changed("target.widths.1.samples", 0), "damaged"),
        (changed("target.widths.1.median_s", "fast"), "damaged"),
        (changed("target.widths.1.median_s", True), "damaged"),
        (changed("target.widths.1.median_s", -1), "damaged"),
        (changed("target.widths.1.median_s", math.nan), "damaged"),
        (changed("target.widths.1.median_s", math.inf), "damaged"),
        (changed("target.widths.1.median_s", 10**400), "damaged"),
        (changed("target.token_s", math.nan), "damaged"),
        (changed("target.context", -1), "damaged"),
        (changed("target.long_context", 3), "damaged"),
        (changed("request_s", -1.0), "damaged"),
        (changed("sampling_row_s", math.inf), "damaged"),
    ],
)
def test_what_is_no_sound_profile_is_one_clear_error(data: object, why: str) -> None:
    with pytest.raises(InputError, match=why) as raised:
        CostProfile.from_json(data)
    assert "\n" not in str(raised.value)
    assert "paceline profile" in str(raised.value)


def test_drift_follows_a_machine_that_becomes_twice_as_slow() -> None:
    """Rounds in virtual time, of changing widths, whose cost doubles midway."""
    slow_from_s = 5.0
    cost = CostProfile(staircase())

    def curve(rows: int, context: int) -> float:
        return cost.round_s(rows) * (2.0 if engine.clock.now_s() >= slow_from_s else 1.0)

    engine = ScriptedEngine(random_model(8, seed=1), ScriptedVocabulary.of_size(8), cost=curve)
    sequence = engine.open()
    tracker = DriftTracker()
    rng = np.random.default_rng(3)
    since = 0
    for _ in range(400):
        rows = int(rng.integers(1, 13))
        started_s = engine.clock.now_s()
        slow = started_s >= slow_from_s
        engine.forward([Step(sequence, [0] * rows, range(-1, rows - 1), ())])
        engine.commit(sequence, [0])
        tracker.observe(cost.round_s(rows), engine.clock.now_s() - started_s)
        since += slow
        if not slow:
            assert tracker.factor == pytest.approx(1.0)
        elif since >= 5:
            assert tracker.factor == pytest.approx(2.0)
    assert since > 50


def test_one_outlier_changes_nothing() -> None:
    tracker = DriftTracker()
    for outlier in (1000.0, 1e-6):
        tracker.observe(0.02, 0.02 * outlier)
        assert tracker.factor == 1.0
        for _ in range(9):
            tracker.observe(0.02, 0.02)
            assert tracker.factor == 1.0


def test_outliers_up_to_half_a_window_stay_within_what_the_others_say() -> None:
    rng = np.random.default_rng(0)
    tracker = DriftTracker(window=9)
    for index in range(300):
        ratio = 50.0 if index % 9 in (0, 3, 4, 8) else float(rng.uniform(1.4, 1.6))
        tracker.observe(1.0, ratio)
        if index >= 9:
            assert 1.4 <= tracker.factor <= 1.6


def test_on_another_machine_one_round_is_enough_and_those_after_it_correct_it() -> None:
    tracker = DriftTracker(window=5)
    tracker.restart(1.0, 3.0)
    assert tracker.factor == 3.0
    tracker.observe(1.0, 2.0)
    # What disturbs a round makes it longer.
    assert tracker.factor == 2.0
    tracker.observe(1.0, 2.2)
    assert tracker.factor == 2.2


def test_a_clock_too_coarse_says_nothing_and_nonsense_is_refused() -> None:
    tracker = DriftTracker(window=3)
    for _ in range(5):
        tracker.observe(1.0, 0.0)
    assert tracker.factor == 1.0
    for predicted_s, actual_s in ((0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)):
        with pytest.raises(ValueError, match="predicted"):
            tracker.observe(predicted_s, actual_s)
    with pytest.raises(ValueError, match="odd"):
        DriftTracker(window=4)
