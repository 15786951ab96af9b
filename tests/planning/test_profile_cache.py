"""Profiles kept on disk: measured once, and again where they do not hold any more."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from paceline.engines.options import ModelOptions
from paceline.planning.costs.meter import ProfilingBudget
from paceline.planning.costs.profile_cache import find_or_measure
from tests.planning.helpers import engine_of

pytestmark = pytest.mark.usefixtures("folder")


def test_a_model_is_measured_once(options: ModelOptions) -> None:
    engine = engine_of(2.0)
    first = find_or_measure(engine, options, clock=engine.clock)
    passed_s = engine.clock.now_s()
    second = find_or_measure(engine, options, clock=engine.clock)
    assert (first.measured, second.measured) == (True, False)
    # But for a few passes, which say that it still holds.
    assert engine.clock.now_s() - passed_s < 0.15
    assert first.profile == second.profile
    assert first.path == second.path
    assert first.path is not None
    assert first.path.is_file()


def test_a_machine_that_changed_a_little_can_be_measured_again(options: ModelOptions) -> None:
    engine, slower = engine_of(5.0), engine_of(6.0)
    find_or_measure(engine, options, clock=engine.clock)
    assert not find_or_measure(slower, options, clock=slower.clock).measured
    again = find_or_measure(slower, options, clock=slower.clock, force=True)
    assert again.measured
    assert again.profile.round_s(1) == pytest.approx(0.007)
    assert find_or_measure(engine, options, clock=engine.clock).profile.round_s(1) == pytest.approx(0.007)


@pytest.mark.parametrize("ms", [1.0, 9.0])
def test_a_profile_of_a_machine_that_changed_much_is_replaced(options: ModelOptions, ms: float) -> None:
    engine, changed = engine_of(4.0), engine_of(ms)
    find_or_measure(engine, options, clock=engine.clock)
    again = find_or_measure(changed, options, clock=changed.clock)
    assert again.measured
    assert again.profile.round_s(1) == pytest.approx((ms + 1) / 1e3)
    assert not find_or_measure(changed, options, clock=changed.clock).measured


def test_a_profile_whose_wide_passes_changed_is_replaced(options: ModelOptions) -> None:
    engine = engine_of(10.0)
    find_or_measure(engine, options, clock=engine.clock)
    engine._cost = lambda rows, context: 0.011
    assert find_or_measure(engine, options, clock=engine.clock).measured


def test_passes_that_something_disturbed_are_no_reason_to_measure_again(options: ModelOptions) -> None:
    engine = engine_of(10.0)
    find_or_measure(engine, options, clock=engine.clock)
    undisturbed, passes = engine._cost, itertools.count()
    engine._cost = lambda rows, context: undisturbed(rows, context) * (5.0 if next(passes) < 5 else 1.0)
    assert not find_or_measure(engine, options, clock=engine.clock).measured


def test_a_check_of_slow_passes_is_short(options: ModelOptions) -> None:
    engine = engine_of(800.0)
    find_or_measure(engine, options, clock=engine.clock)
    before_s = engine.clock.now_s()
    assert not find_or_measure(engine, options, clock=engine.clock).measured
    # The first reads the model from the disk, and then one of each width.
    assert engine.clock.now_s() - before_s <= 3 * 0.81


@pytest.mark.parametrize("keep_partial", [True, False])
def test_what_a_short_budget_measured_is_kept_only_where_it_may_be(options: ModelOptions, keep_partial: bool) -> None:
    engine = engine_of(500.0, max_rows=16)
    short = find_or_measure(
        engine, options, clock=engine.clock, budget=ProfilingBudget(0.5, None), keep_partial=keep_partial
    )
    assert not short.profile.target.is_measured(16)
    assert (short.path is not None) is keep_partial
    assert find_or_measure(engine, options, clock=engine.clock).measured is not keep_partial


def test_a_short_budget_that_was_enough_is_kept(options: ModelOptions) -> None:
    engine = engine_of(1.0, max_rows=16)
    short = find_or_measure(engine, options, clock=engine.clock, budget=ProfilingBudget(5.0, None), keep_partial=False)
    assert short.profile.target.is_measured(16)
    assert not find_or_measure(engine, options, clock=engine.clock).measured


def test_widths_that_are_not_kept_are_measured(options: ModelOptions) -> None:
    engine = engine_of(max_rows=100)
    find_or_measure(engine, options, clock=engine.clock, widths=(1, 2, 4))
    assert not find_or_measure(engine, options, clock=engine.clock, widths=(4, 101)).measured
    again = find_or_measure(engine, options, clock=engine.clock, widths=(4, 19))
    assert again.measured
    # They come beside all that planning goes by.
    assert all(again.profile.target.is_measured(rows) for rows in (1, 2, 4, 8, 16, 19))


def test_what_a_context_adds_is_measured_for_those_who_need_it(options: ModelOptions) -> None:
    # A row takes 15 ms at best, so that two seconds are not enough for a context that is long enough to tell.
    engine = engine_of(500.0, max_rows=32)
    first = find_or_measure(engine, options, clock=engine.clock)
    assert first.profile.target.long_context is None
    assert not find_or_measure(engine, options, clock=engine.clock).measured
    patient = ProfilingBudget(60.0, None)
    again = find_or_measure(engine, options, clock=engine.clock, budget=patient, long_context=True)
    assert again.measured
    assert again.profile.target.long_context is not None
    assert not find_or_measure(engine, options, clock=engine.clock, long_context=True).measured


def test_a_context_too_short_to_tell_is_not_measured_again_and_again(options: ModelOptions) -> None:
    engine = engine_of(max_rows=32, context_length=200)
    assert find_or_measure(engine, options, clock=engine.clock, long_context=True).profile.target.long_context is None
    assert not find_or_measure(engine, options, clock=engine.clock, long_context=True).measured


def test_a_cache_that_cannot_be_written_keeps_nothing_but_works(tmp_path: Path, options: ModelOptions) -> None:
    (tmp_path / "cache").write_text("in the way")
    engine = engine_of()
    kept = find_or_measure(engine, options, clock=engine.clock)
    assert (kept.measured, kept.path) == (True, None)


def test_a_model_whose_file_is_gone_is_measured_and_not_kept(options: ModelOptions, folder: Path) -> None:
    Path(options.path).unlink()
    engine = engine_of()
    kept = find_or_measure(engine, options, clock=engine.clock)
    assert (kept.measured, kept.path) == (True, None)
    assert kept.profile.round_s(1) == pytest.approx(0.002)
    assert not folder.exists()
