"""Costs that follow the machine, told by rounds of known length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.params import SamplingParams, StopRules
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, table_model
from paceline.planning.auto.online_costs import OnlineCosts
from paceline.planning.auto.policy import AutoPolicy
from paceline.runtime.loop import DecodingLoop
from tests.helpers import drain
from tests.planning.helpers import Curve, smooth, table

CHUNK = 512


def read_prompt(costs: OnlineCosts, seconds: Sequence[float]) -> None:
    for index, pass_s in enumerate(seconds):
        costs.observe_prompt(CHUNK, index * CHUNK, pass_s)


def test_reading_a_prompt_tells_what_a_context_adds() -> None:
    measured = smooth(0.05, 0.002)
    # Attention of every row over 1,000 tokens takes 3 ms.
    costs = OnlineCosts(measured)
    read_prompt(costs, [measured.round_s(CHUNK) + CHUNK * context * 3e-6 for context in range(0, 4 * CHUNK, CHUNK)])
    for rows in (1, 4):
        assert costs.round_s(rows, 2000) == pytest.approx(measured.round_s(rows) + rows * 0.006)
    # Plain rounds that are as slow as that are no machine that became slower.
    for _ in range(9):
        costs.observe_round(1, 2000, 1, measured.round_s(1) + 0.006)
    assert costs.drift == pytest.approx(1.0)


def test_a_short_prompt_tells_nothing_of_it() -> None:
    costs = OnlineCosts(smooth(0.05, 0.002))
    costs.observe_prompt(CHUNK, 0, 1.0)
    costs.observe_prompt(100, CHUNK, 0.9)
    costs.observe_prompt(CHUNK, 0, 3.0)
    assert costs.round_s(4, 4000) == costs.round_s(4)


def test_the_last_token_of_a_prompt_that_was_in_the_cache_tells_nothing_of_it() -> None:
    costs = OnlineCosts(smooth(0.05, 0.002))
    for context, pass_s in ((0, 1.0), (10, 1.0), (500, 1.2), (900, 1.4)):
        costs.observe_prompt(1, context, pass_s)
    assert costs.round_s(8, 4000) == costs.round_s(8)


def test_prompts_do_not_overrule_what_was_measured() -> None:
    measured = Curve(lambda rows: 0.05 + 0.002 * rows, token_s=1e-6)
    costs = OnlineCosts(measured)
    read_prompt(costs, [1.0, 2.0, 3.0, 4.0])
    assert costs.round_s(4, 2000) == measured.round_s(4, 2000)


def test_passes_that_become_faster_promise_nothing() -> None:
    costs = OnlineCosts(smooth(0.05, 0.002))
    read_prompt(costs, [2.0, 1.9, 1.8, 1.7])
    assert costs.round_s(4, 4000) == costs.round_s(4)


def test_the_first_pass_of_a_process_says_nothing() -> None:
    costs = OnlineCosts(smooth(0.05, 0.002))
    read_prompt(costs, [60.0, 1.0, 1.0 + CHUNK * CHUNK * 1e-6, 1.0 + 2 * CHUNK * CHUNK * 1e-6])
    assert costs.round_s(1, 1000) == pytest.approx(costs.round_s(1) + 1e-3)


def test_the_loop_tells_the_planner_of_its_prompts() -> None:
    model = table_model(np.full((10, 10), 0.1))
    vocabulary = ScriptedVocabulary([b"a"] * 10, ())
    engine = ScriptedEngine(model, vocabulary, max_rows=4, cost=lambda rows, context: 1.0 + rows * (1 + context) / 10)
    policy = AutoPolicy(smooth(1.0, 0.1))
    loop = DecodingLoop(engine, [], policy, clock=engine.clock)
    loop.add([0] * 12, SamplingParams(0.0), StopRules(9))
    drain(loop)
    # A round after so much context takes more than twice as long, as three chunks of prompt had foretold.
    assert policy.report().drift == pytest.approx(1.0, abs=0.05)


def play(costs: OnlineCosts, machine: Curve, widths: Sequence[int]) -> None:
    for rows in widths:
        costs.observe_round(rows, 0, 1, machine.round_s(rows))


def times(measured: Curve, factor: float) -> Curve:
    return Curve(lambda rows: factor * measured.round_s(rows))


def doubts(costs: OnlineCosts) -> bool:
    # Asked of the property itself, mypy would take the first answer for all.
    return costs.is_doubtful


def test_what_rows_add_need_not_get_slower_with_plain_rounds() -> None:
    # Reading the weights takes 40 ms longer, computing with them what it took.
    measured, now = smooth(0.060, 0.005), smooth(0.100, 0.005)
    costs = OnlineCosts(measured)
    play(costs, now, [1] * 5)
    assert costs.round_s(16) == pytest.approx(costs.drift * measured.round_s(16))
    play(costs, now, [4, 8, 4, 8])
    # These were never made.
    for rows in (2, 6, 12, 16):
        assert costs.round_s(rows) == pytest.approx(now.round_s(rows), rel=0.05)


def test_a_width_that_was_not_measured_tells_of_itself_alone() -> None:
    # Of a staircase its wide steps were measured, and what 9 rows took was a guess.
    measured, now = table({1: 65, 4: 90, 8: 135, 16: 232}), table({1: 65, 4: 90, 8: 135, 9: 190, 16: 232})
    costs = OnlineCosts(measured)
    play(costs, now, [1, 9, 9, 9, 9, 9, 9])
    assert costs.round_s(9) == pytest.approx(0.190, rel=0.05)
    for rows in (4, 8, 16):
        assert costs.round_s(rows) == measured.round_s(rows)


def test_a_machine_that_slows_down_in_wide_rounds_does_not_make_them_dear_for_good() -> None:
    measured = smooth(0.060, 0.005)
    now = times(measured, 2)
    costs = OnlineCosts(measured)
    play(costs, now, [4, 8] * 8)
    assert costs.round_s(16) > now.round_s(16)
    play(costs, now, [1] * 5)
    assert costs.round_s(16) == pytest.approx(now.round_s(16), rel=0.01)


@pytest.mark.parametrize(("before", "after"), [(2.5, 1.0), (1.0, 2.5)])
def test_a_machine_that_changes_in_wide_rounds_is_noticed_and_one_plain_round_says_so(
    before: float, after: float
) -> None:
    measured = smooth(0.020, 0.010)
    costs = OnlineCosts(measured)
    play(costs, times(measured, before), [1] * 5 + [4] * 8)
    assert not doubts(costs)
    play(costs, times(measured, before), [1])
    play(costs, times(measured, after), [4, 4])
    assert not doubts(costs)
    play(costs, times(measured, after), [4])
    assert doubts(costs)
    assert costs.round_s(1) == pytest.approx(before * measured.round_s(1))
    play(costs, times(measured, after), [1])
    assert not doubts(costs)
    for rows in (1, 2, 4, 8):
        assert costs.round_s(rows) == pytest.approx(after * measured.round_s(rows))


def test_a_change_of_width_is_as_much_slower_as_the_machine() -> None:
    measured = replace(smooth(0.020, 0.010), change_s=0.02)
    costs = OnlineCosts(measured)
    play(costs, measured, [1] * 5)
    # The first two of a width say nothing.
    play(costs, times(measured, 2.5), [4] * 4)
    assert not doubts(costs)
    play(costs, times(measured, 2.5), [4])
    assert doubts(costs)
    costs.observe_round(1, 0, 1, 2.5 * (measured.round_s(1) + 0.02))
    assert costs.drift == pytest.approx(2.5)


def test_a_machine_that_stays_as_it_is_is_doubted_ever_less() -> None:
    rng = np.random.default_rng(0)
    measured = smooth(0.020, 0.010)
    costs = OnlineCosts(measured)
    play(costs, measured, [1])
    doubted = 0
    for _ in range(1000):
        play(costs, times(measured, float(np.exp(rng.normal(0.0, 0.2)))), [4])
        if doubts(costs):
            doubted += 1
            play(costs, measured, [1])
    # Of noise like that, more than every tenth round would be reason for one.
    assert 10 < doubted < 40
    # Nor is it forgotten that it may change.
    play(costs, times(measured, 2.5), [4] * 60)
    assert doubts(costs)


def test_rounds_of_other_widths_and_numbers_of_requests_raise_no_doubts() -> None:
    # What 9 rows take was a guess.
    measured, now = table({1: 65, 4: 90, 8: 135, 16: 232}), table({1: 65, 4: 90, 8: 135, 9: 190, 16: 232})
    costs = OnlineCosts(measured)
    play(costs, now, [1, 9, 9, 9])
    assert not doubts(costs)
    # So is what four requests take when there were plain rounds of one alone.
    for _ in range(3):
        costs.observe_round(8, 0, 4, 2 * measured.round_s(8, 0, 4))
    assert not doubts(costs)


def test_wide_rounds_that_were_measured_wrong_are_doubted_once() -> None:
    measured, now = table({1: 65, 4: 90, 8: 135}), table({1: 65, 4: 120, 8: 135})
    costs = OnlineCosts(measured)
    play(costs, now, [1, 4, 4, 4])
    assert doubts(costs)
    play(costs, now, [1])
    assert costs.round_s(1) == measured.round_s(1)
    assert costs.round_s(4) == pytest.approx(0.120, rel=0.1)
    play(costs, now, [4] * 9)
    assert not doubts(costs)


def test_a_plain_round_that_was_disturbed_is_no_other_machine() -> None:
    measured = smooth(0.020, 0.010)
    costs = OnlineCosts(measured)
    play(costs, measured, [1] * 5)
    # Wide rounds are cheaper than they were, and the plain one takes longer.
    play(costs, times(measured, 0.7), [4] * 3)
    assert doubts(costs)
    play(costs, times(measured, 1.5), [1])
    assert costs.drift == pytest.approx(1.0)


def test_a_prompt_between_them_leaves_no_doubt() -> None:
    measured = smooth(0.020, 0.010)
    costs = OnlineCosts(measured)
    play(costs, measured, [1] * 5)
    play(costs, times(measured, 2.0), [4] * 3)
    assert doubts(costs)
    costs.interrupt()
    assert not doubts(costs)


def test_rows_that_add_next_to_nothing_say_nothing_of_others() -> None:
    measured = table({1: 72, 2: 72.1, 8: 142})
    costs = OnlineCosts(measured)
    # Whatever else it was that took 5 ms.
    play(costs, Curve(lambda rows: 0.0771), [2] * 20)
    assert costs.round_s(8) == pytest.approx(measured.round_s(8), rel=0.01)


def test_what_a_change_of_width_costs_is_no_slower_machine() -> None:
    measured = replace(smooth(0.05, 0.002), change_s=0.02)
    costs = OnlineCosts(measured)
    for rows in (1, 4, 1, 1, 4, 4, 2, 1):
        changed = costs.change_s(rows, 1)
        costs.observe_round(rows, 100, 1, measured.round_s(rows, 100) + changed)
    assert costs.drift == pytest.approx(1.0)
    for rows in (1, 2, 3, 4):
        assert costs.round_s(rows, 100) == pytest.approx(measured.round_s(rows, 100))


def test_a_change_of_width_is_part_of_the_price_of_every_width_but_the_latest() -> None:
    measured = replace(smooth(0.05, 0.002), change_s=0.02)
    costs = OnlineCosts(measured)
    costs.observe_round(4, 100, 1, measured.round_s(4, 100) + 0.02)
    for rows, next_s in enumerate(costs.next_rounds_s(range(1, 6), 100, 1), start=1):
        if rows == 4:
            assert next_s == pytest.approx(measured.round_s(4, 100))
        else:
            assert measured.round_s(rows, 100) < next_s <= measured.round_s(rows, 100) + 0.02
    assert costs.change_s(4, 2) == costs.change_s(3, 1) == pytest.approx(0.02)
    # Whatever came before it, a prompt's pass was another.
    costs.observe_prompt(CHUNK, 0, 1.0)
    assert costs.change_s(4, 1) == pytest.approx(0.02)
