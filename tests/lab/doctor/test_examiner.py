"""What an examination leaves out where there is little time, by what its steps will take."""

from __future__ import annotations

import itertools

import pytest

from paceline.lab.doctor.examiner import Plan, StepSeconds, choose_plan
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost


def steps(pass_s: float, *, draft_s: float = 0.005) -> StepSeconds:
    widths = tuple(WidthCost.of(rows, [pass_s * (0.9 + 0.1 * rows)]) for rows in (1, 8, 64))
    profile = CostProfile(PassCost(widths), PassCost((WidthCost.of(1, [draft_s]),)))
    return StepSeconds(profile, 50_000, 8)


def needed_s(plan: Plan, steps: StepSeconds, missing: int) -> float:
    answers_s = missing * steps.answer_s(plan.tokens) + plan.texts * steps.text_s(plan.tokens, plan.depth)
    return answers_s + (steps.calibration_s if plan.calibrates else 0.0)


def test_there_is_time_for_what_is_planned_unless_one_short_answer_is_too_much() -> None:
    for pass_s, left_s in itertools.product((0.01, 0.1, 0.3, 0.7, 1.0, 2.0), (10.0, 30.0, 60.0, 300.0)):
        found = choose_plan(steps(pass_s), left_s, lambda texts, tokens: texts)
        if (found.texts, found.tokens) != (1, 16):
            assert needed_s(found, steps(pass_s), found.texts) < left_s


def test_answers_come_before_calibrating_and_calibrating_before_the_length_of_answers() -> None:
    plans = [choose_plan(steps(1.0), left_s, lambda texts, tokens: texts) for left_s in range(10, 600)]
    assert plans[0] == Plan(1, 16, 4, calibrates=False)
    sizes = [(plan.texts * plan.tokens, plan.calibrates) for plan in plans]
    assert sizes == sorted(sizes)
    assert {plan.calibrates for plan in plans if plan.texts >= 4} == {True, False}
    assert not any(plan.calibrates for plan in plans if plan.texts < 4)


@pytest.mark.parametrize("left_s", [20.0, 60.0])
def test_answers_that_are_kept_take_no_time(left_s: float) -> None:
    written, kept = (
        choose_plan(steps(1.0), left_s, missing) for missing in (lambda texts, _: texts, lambda texts, _: 0)
    )
    assert written.texts < 4 <= kept.texts
