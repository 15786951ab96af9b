"""What a policy has learned of its drafters, kept for the next one: it starts there, and trusts nothing spoiled."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from benchmarks.cost_tables import PASS_MS

from paceline.core.errors import InputError
from paceline.lab.replaying.recording import Recording
from paceline.lab.replaying.replay import replay
from paceline.planning.auto.learned import Learned
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.policies.fixed import NO_SPECULATION
from tests.planning.helpers import Skill, synthetic, table
from tests.tiers import some_long

CURVE = table(PASS_MS["Q8_0"], draft_ms=1.0)


def texts(right: float, seeds: range, num_tokens: int = 256) -> list[Recording]:
    skills = {"draft": Skill(right), "suffix": Skill(right / 2, is_model=False)}
    return [synthetic(seed, skills, num_tokens=num_tokens, num_prompt=100, depth=8, siblings=2) for seed in seeds]


def learned_of(recordings: list[Recording]) -> Learned:
    policy = AutoPolicy(CURVE)
    replay(recordings, policy, CURVE)
    return kept_of(policy)


def kept_of(policy: AutoPolicy) -> Learned:
    learned = policy.learned()
    assert learned is not None
    return learned


def through_text(learned: Learned) -> Learned:
    return Learned.from_json(json.loads(json.dumps(learned.to_json())))


def test_a_policy_that_asked_nobody_has_nothing_to_keep() -> None:
    assert AutoPolicy(CURVE).learned() is None
    assert AutoPolicy(CURVE, learned=learned_of(texts(0.7, range(1)))).learned() is None


def test_what_was_learned_survives_being_written_down() -> None:
    learned = learned_of(texts(0.7, range(4)))
    assert set(learned.drafters) == {"draft", "suffix"}
    assert through_text(learned).to_json() == learned.to_json()
    assert learned.to_json() != learned_of(texts(0.7, range(1))).to_json()


def test_another_policy_believes_what_this_one_did() -> None:
    learned = learned_of(texts(0.7, range(4)))
    following = AutoPolicy(CURVE, learned=through_text(learned))
    assert following.report().remembered == []
    replay(texts(0.7, range(4, 5)), following, CURVE)
    assert following.report().remembered == ["draft", "suffix"]


def test_what_was_learned_stays_as_it_was_when_another_policy_goes_on_from_it() -> None:
    learned = learned_of(texts(0.7, range(4)))
    before = learned.to_json()
    following = AutoPolicy(CURVE, learned=learned)
    replay(texts(0.2, range(4, 6)), following, CURVE)
    assert learned.to_json() == before
    assert kept_of(following).to_json() != before


def seconds(recording: Recording, learned: Learned | None) -> float:
    return replay([recording], AutoPolicy(CURVE, learned=learned), CURVE).decode_s


def test_a_draft_that_is_known_not_to_pay_takes_less_of_a_first_answer() -> None:
    learned = learned_of(texts(0.1, range(6)))
    firsts = texts(0.1, range(20, 28), num_tokens=128)
    plain_s = sum(replay([text], NO_SPECULATION, CURVE).decode_s for text in firsts)
    lost_s = sum(seconds(text, learned) for text in firsts) - plain_s
    assert lost_s <= 0.5 * (sum(seconds(text, None) for text in firsts) - plain_s)
    assert lost_s <= 0.01 * plain_s


def test_a_draft_that_is_known_to_pay_is_used_sooner() -> None:
    learned = learned_of(texts(0.95, range(6)))
    firsts = texts(0.95, range(20, 28), num_tokens=128)
    assert sum(seconds(text, learned) for text in firsts) < sum(seconds(text, None) for text in firsts)


@pytest.mark.parametrize(("before", "now"), some_long([(0.05, 0.95), (0.95, 0.05)], quick=[(0.95, 0.05)]))
def test_what_was_learned_of_other_texts_does_not_stand_in_the_way(before: float, now: float) -> None:
    learned = learned_of(texts(before, range(6)))
    firsts = texts(now, range(20, 26), num_tokens=512)
    fresh_s = sum(seconds(text, None) for text in firsts)
    plain_s = sum(replay([text], NO_SPECULATION, CURVE).decode_s for text in firsts)
    assert sum(seconds(text, learned) for text in firsts) <= 1.02 * min(fresh_s, plain_s)


def test_drafters_that_were_not_met_are_passed_on() -> None:
    learned = learned_of(texts(0.7, range(4)))
    following = AutoPolicy(CURVE, learned=learned)
    replay(texts(0.7, range(4, 6)), following, CURVE, drafters=["suffix"])
    assert following.report().remembered == ["suffix"]
    passed_on = kept_of(following)
    assert passed_on.drafters["draft"].to_json() == learned.drafters["draft"].to_json()
    assert passed_on.drafters["suffix"].to_json() != learned.drafters["suffix"].to_json()


def test_another_drafter_of_the_same_name_starts_anew() -> None:
    learned = learned_of(texts(0.7, range(4)))
    (draft,) = (synthetic(9, {"draft": Skill(0.5, is_model=False)}, num_tokens=64, num_prompt=10),)
    following = AutoPolicy(CURVE, learned=learned)
    replay([draft], following, CURVE)
    assert following.report().remembered == []
    assert not kept_of(following).drafters["draft"].is_model


def test_a_drafter_that_says_margins_without_passes_of_its_own_is_remembered_as_one() -> None:
    def block(seed: int, *, says_margins: bool) -> list[Recording]:
        skills = {"draft": Skill(0.8, is_model=False, says_margins=says_margins)}
        return [synthetic(seed, skills, num_tokens=128, num_prompt=20)]

    learned = through_text(learned_of(block(1, says_margins=True)))
    assert (learned.drafters["draft"].is_model, learned.drafters["draft"].says_margins) == (False, True)
    for says_margins in (True, False):
        following = AutoPolicy(CURVE, learned=learned)
        replay(block(2, says_margins=says_margins), following, CURVE)
        assert following.report().remembered == (["draft"] if says_margins else [])


@cache
def some_learned() -> str:
    return json.dumps(learned_of(texts(0.7, range(2))).to_json())


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda data: change(data["drafters"]["draft"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.clear(),
        lambda data: data.update(format="paceline-cost-profile"),
        lambda data: data.update(version=0),
        lambda data: data.update(drafters=[1, 2]),
        lambda data: data["drafters"].update(draft=None),
        changed(lambda draft: draft.pop("outlook")),
        changed(lambda draft: draft.update(is_model="yes")),
        changed(lambda draft: draft.update(paid=None)),
        changed(lambda draft: draft.update(ask_s=-1.0)),
        changed(lambda draft: draft.update(ask_s=10**400)),
        changed(lambda draft: draft.update(read_token_s=float("nan"))),
        changed(lambda draft: draft.update(siblings=None)),
        changed(lambda draft: draft["first"].pop()),
        changed(lambda draft: draft["first"].append([0.0, 0.1])),
        changed(lambda draft: draft["first"].__setitem__(0, [float("inf"), 0.1])),
        changed(lambda draft: draft["first"].__setitem__(0, [0.0, 0.0])),
        changed(lambda draft: draft["first"].__setitem__(0, [0.0, 99.0])),
        changed(lambda draft: draft["first"].__setitem__(0, ["0", 0.1])),
        changed(lambda draft: draft["first"].__setitem__(0, [10**400, 0.1])),
        changed(lambda draft: draft["outlook"].pop()),
        changed(lambda draft: draft["outlook"].__setitem__(0, [2.0, 1.0])),
        changed(lambda draft: draft["outlook"].__setitem__(0, [1.0, 1e9])),
        changed(lambda draft: draft.update(gains={"other": {}})),
        changed(lambda draft: draft["gains"]["alone"].update(rounds=10**9)),
        changed(lambda draft: draft["gains"]["alone"].update(rounds=0.5)),
        changed(lambda draft: draft["gains"]["alone"].update(mean=float("nan"))),
        changed(lambda draft: draft["gains"]["alone"].update(mean=10**400)),
        changed(lambda draft: draft["gains"]["alone"].update(variance=-1.0)),
    ],
)
def test_what_makes_no_sense_is_refused(spoil: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(some_learned())
    Learned.from_json(data)
    spoil(data)
    with pytest.raises(InputError, match="learned"):
        Learned.from_json(data)
