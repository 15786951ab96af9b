"""What is predicted is what a live session does, on engines whose costs are known."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline.engines.options import ModelOptions
from paceline.lab.agreement import DRAFT, measure_agreement, measure_survival
from paceline.lab.answers import Answers
from paceline.lab.comparison import Stopped
from paceline.lab.doctor.prediction import (
    ALL_DRAFTERS,
    LiveCosts,
    calibrate_costs,
)
from paceline.lab.intervals import ALL, Interval
from paceline.lab.sessions import Session
from paceline.planning.policies.fixed import FixedPolicy
from paceline.planning.registry import build_policy
from tests.lab.doctor.scenes import KINDS, TOKENS, partly, predicted, recordings_of, tasks, written_by
from tests.lab.scripted_pairs import LEVEL_S, PASS_S, counting_model, engines, profile


@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_a_live_session_takes_what_was_predicted(right: int) -> None:
    prediction, found = predicted(right)
    for speed, drafters, policy in (
        (prediction.auto, ALL_DRAFTERS, build_policy("auto", costs=profile())),
        (
            prediction.static,
            (DRAFT,),
            FixedPolicy(prediction.static.draft_max or 0, p_min=prediction.static.p_min or 0),
        ),
    ):
        with Session(found, drafters, policy) as session:
            answers = [session.answer(task, 0.0, lambda: False) for task in tasks()]
        seconds = sum(answer.seconds for answer in answers)
        tokens = sum(len(answer.token_ids) - 1 for answer in answers)
        assert speed.tokens_per_s.value == pytest.approx(tokens / seconds, rel=0.01)
        assert prediction.plain.tokens_per_s.value == pytest.approx(1 / PASS_S)


def test_a_draft_that_is_always_right_pays() -> None:
    prediction, _ = predicted(4)
    assert prediction.pays is True
    assert prediction.auto.gain.value > 2.5
    assert dict(prediction.lengths)[8] == pytest.approx(9 / (1 + 8 * LEVEL_S), rel=0.05)
    assert prediction.closed_form == pytest.approx(17 / (1 + 16 * LEVEL_S))
    assert prediction.draft_cost == LEVEL_S
    assert prediction.break_even == 1.0, "as each level saves a pass"
    assert set(prediction.gain_by_kind) == set(KINDS)
    assert prediction.tokens == 4 * (TOKENS - 1)


def test_a_draft_that_is_never_right_does_not_pay() -> None:
    prediction, _ = predicted(0)
    assert prediction.pays is False
    assert prediction.static.draft_max == 1
    assert all(gain < 1 for _, gain in prediction.lengths)
    assert prediction.break_even is None
    assert prediction.auto.gain.value > 0.8, "auto gives it up"


def test_a_draft_in_between_has_a_price_at_which_it_pays() -> None:
    """Passes of any width take as long, so a draft pays up to the share of its tokens that are right."""
    prediction, _ = predicted(2)
    assert prediction.break_even is not None
    assert 0.3 < prediction.break_even < 0.7


def test_calibration_finds_what_passes_take_now() -> None:
    for pass_s, factor in ((1.0, 1.0), (1.2, 1.2), (0.9, 0.9), (9.0, 1.5)):
        found = engines(draft=partly(3), pass_s=[pass_s])
        written = written_by(found)
        recordings = recordings_of(3)
        costs = calibrate_costs(found, profile(), written, recordings, 0.0, lambda: False)
        assert costs.pass_factor == pytest.approx(factor)
        # In virtual time nothing takes any but the passes.
        assert (costs.level_s, costs.round_own_s, costs.sampling_s) == pytest.approx((0.0, 0.0, 0.0), abs=1e-9)


def test_calibration_counts_the_answers_that_were_written_just_now() -> None:
    found = engines(draft=partly(3), pass_s=[1.3])
    written = written_by(found)
    assert [each.passes_s for each in written] == pytest.approx([1.3 * (TOKENS - 1)] * 4)
    recordings = recordings_of(3)
    kept = [dataclasses.replace(each, passes_s=None) for each in written]
    slower = [dataclasses.replace(each, passes_s=1.4 * (TOKENS - 1)) for each in written]
    factors = [
        calibrate_costs(found, profile(), answers, recordings, 0.0, lambda: False).pass_factor
        for answers in (kept, slower)
    ]
    assert factors[0] == pytest.approx(1.3)
    assert 1.35 < factors[1] < 1.4, "many passes of the answers, and some of the short ones"


def test_calibration_finds_what_levels_take_more() -> None:
    found = engines(draft=partly(3), level_s=LEVEL_S + 0.1)
    written = written_by(found)
    recordings = recordings_of(3)
    costs = calibrate_costs(found, profile(), written, recordings, 0.0, lambda: False)
    assert costs.level_s == pytest.approx(0.1)
    assert costs.draft_s() == pytest.approx(LEVEL_S + 0.1)


def test_live_costs_are_the_profile_s_with_what_the_loop_adds() -> None:
    costs = LiveCosts(profile(), pass_factor=2.0, level_s=0.5, round_own_s=0.1, drafting_own_s=0.2)
    assert costs.round_s(1) == pytest.approx(2.1)
    assert costs.round_s(2) == pytest.approx(2.2)
    assert costs.draft_s(1) == pytest.approx(LEVEL_S + 0.5)
    assert costs.is_measured(1)


@pytest.mark.parametrize(
    ("value", "low", "high", "pays"),
    [
        (1.4, 1.2, 1.6, True),
        (1.1, 0.9, 1.3, None),
        (1.01, 0.9, 1.2, False),
        (1.01, 1.005, 1.02, True),
        (0.8, 0.7, 0.9, False),
        (1.5, None, None, True),
        (0.9, None, None, False),
    ],
)
@pytest.mark.parametrize("static", [0.9, 1.4])
def test_what_pays_is_beyond_its_interval(
    value: float, low: float | None, high: float | None, pays: bool | None, static: float
) -> None:
    prediction, _ = predicted(4)
    plain = prediction.plain.tokens_per_s.value
    fixed = dataclasses.replace(
        prediction.static, tokens_per_s=Interval(static * plain, None, None), gain=Interval(static, None, None)
    )
    without = dataclasses.replace(prediction, over_none=Interval(value, low, high), static=fixed, tokens=64)
    # "Does not pay" is not said beside a fixed length that gains.
    assert without.pays is (None if pays is False and static > 1 else pays)
    assert without.verdict == {True: "pays", False: "does not pay", None: "too close to call"}[without.pays]
    few = dataclasses.replace(without, tokens=63)
    assert (few.pays, few.verdict) == (None, "too few tokens to tell")


def test_agreement_is_that_of_both_models() -> None:
    found = engines(draft=partly(3))
    written = written_by(found)
    assert found.draft is not None
    agreement = measure_agreement(found.draft, written, target_vocab_size=256, unshared_ids=(), temperature=0.0)
    # Position by position: right after three of four tokens.
    before = [[each.task.prompt_ids[-1], *each.token_ids[:-1]] for each in written]
    right = sum(token_id % 4 < 3 for of_text in before for token_id in of_text)
    for ratios in (agreement.coupled, agreement.overlap, agreement.same_top):
        assert ratios[ALL].value == pytest.approx(right / sum(map(len, before)))
    assert set(agreement.coupled) == {*KINDS, ALL}


def test_ids_that_are_not_shared_are_never_said() -> None:
    found = engines(draft=counting_model())
    written = written_by(found)
    assert found.draft is not None
    said = {token_id for each in written for token_id in each.token_ids}
    agreement = measure_agreement(
        found.draft, written, target_vocab_size=256, unshared_ids=sorted(said), temperature=0.0
    )
    assert agreement.same_top[ALL].value == 0.0


def test_places_are_what_tokens_are_drawn_from() -> None:
    written = written_by(engines())
    for each in written:
        assert len(each.places) == len(each.token_ids) == TOKENS
        assert [int(ids[probs.argmax()]) for ids, probs in each.places] == list(each.token_ids)
        assert all(np.isclose(probs.sum(), 1.0) for _, probs in each.places)
        cut = each.cut(9)
        assert (len(cut.token_ids), len(cut.places), cut.finish_reason) == (9, 9, "length")


def test_survival_is_counted_along_the_answer() -> None:
    recordings = recordings_of(3)
    survival = measure_survival(recordings, KINDS)
    (trace,) = (trace for trace in recordings[0].traces if trace.name == DRAFT)
    first = [
        chain[0].token_ids[0] == recordings[0].token_ids[position + 1]
        for position, chain in enumerate(trace.chains)
        if position + 1 < len(recordings[0].token_ids)
    ]
    of_code = measure_survival(recordings[:1], KINDS[:1])["code"][0]
    assert of_code.survival == pytest.approx(sum(first) / len(first))
    shares = [depth.survival for depth in survival[ALL] if depth.survival is not None]
    assert shares == sorted(shares, reverse=True)


def test_an_interrupt_ends_it() -> None:
    found = engines()
    answers = Answers(ModelOptions("absent.gguf"), 0.0, keep=False)
    with pytest.raises(Stopped):
        answers.write(found, tasks(), 4, stopped=lambda: True, in_time=lambda: True, report=lambda count: None)
