"""The most that an answer can lose, as the documentation has it: computed from the planner's constants, and tried."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from benchmarks.cost_tables import PASS_MS

from paceline.lab.replaying.replay import replay
from paceline.planning.auto.policy import START_ROUNDS, START_SHARE, AutoPolicy
from paceline.planning.policies.fixed import FixedPolicy
from tests.docs.scripts import DOCS, script
from tests.planning.helpers import Skill, synthetic, table

TOKENS = 300


def bound_rounds() -> float:
    parts: list[tuple[str, float]] = script("compute_results").bound(TOKENS)
    return sum(rounds for _, rounds in parts)


@pytest.mark.parametrize("page", ["promise.md", "index.md"])
def test_the_one_number_is_what_the_rules_come_to(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert f"{100 * bound_rounds() / TOKENS:.1f} %" in text


def test_credit_is_counted_as_often_as_an_answer_could_earn_it() -> None:
    credited = script("compute_results").credited_rounds
    # Two rounds won allow four more, four allow two, eight allow one.
    assert [credited(tokens) for tokens in (1, 2, 5, 6, 13, 14)] == [0, 4, 4, 6, 6, 7]
    assert 7.9 < credited(300) < 8


def test_the_parts_are_named_in_words_as_in_figures() -> None:
    text = (DOCS / "promise.md").read_text(encoding="utf-8")
    begin, share, *_ = script("compute_results").bound(TOKENS)
    assert f"{begin[1] + share[1]:.1f} rounds, or {100 * (begin[1] + share[1]) / TOKENS:.1f} %" in text
    # Where 3 % of the most tokens is less than the four rounds.
    assert f"*may* have {math.ceil(START_ROUNDS / START_SHARE)} tokens or more" in re.sub(r"\s+", " ", text)


SKILLS: dict[str, float | Callable[[int], float]] = {
    "never right": 0.0,
    "right by turns": lambda position: 0.95 if position // 20 % 2 else 0.0,
    "right at last": lambda position: 0.9 if position > 250 else 0.0,
}


@pytest.mark.parametrize("taught", [False, True], ids=["cold start", "after a good text"])
@pytest.mark.parametrize("skill", SKILLS)
def test_no_answer_loses_more(skill: str, taught: bool) -> None:
    """A slow draft model and a long prompt, which cost most; what is lost is far below the bound, and above nothing."""
    costs = table(PASS_MS["Q8_0"], 8.0)
    recording = synthetic(0, {"draft": Skill(SKILLS[skill])}, num_tokens=TOKENS, num_prompt=2000)
    policy = AutoPolicy(costs)
    if taught:
        replay([synthetic(99, {"draft": Skill(0.9)}, num_tokens=200)], policy, costs)
    plain_s = replay([recording], FixedPolicy(0), costs).decode_s
    lost_s = replay([recording], policy, costs).decode_s - plain_s
    assert lost_s * (TOKENS - 1) / plain_s <= bound_rounds()
