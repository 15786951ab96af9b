"""Chances of acceptance, learned from verdicts whose true chances are known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from paceline.core.tree import Evidence
from paceline.planning.auto.calibration import (
    Calibration,
    CoProposals,
    GrammarFeatures,
    MarginFeatures,
    MatchFeatures,
    probability,
)

REQUEST = 0


def chance(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))


def taught(
    calibration: Calibration,
    truth: Callable[[Evidence, int], float],
    evidence: Callable[[random.Random], Evidence],
    verdicts: int,
    seed: int = 0,
    request: int = REQUEST,
) -> Calibration:
    """Draft chains of up to 4 until there were so many verdicts; a chain ends at its first rejection."""
    rng = random.Random(seed)
    while verdicts > 0:
        for depth in range(1, 5):
            seen = evidence(rng)
            accepted = rng.random() < truth(seen, depth)
            calibration.observe(request, seen, depth, accepted)
            verdicts -= 1
            if not accepted:
                break
    return calibration


def margins(rng: random.Random) -> Evidence:
    return Evidence(margin=math.exp(rng.gauss(0.0, 1.5)))


def matches(rng: random.Random) -> Evidence:
    return Evidence(match_length=rng.choice([1, 2, 3, 5, 9, 20, 60]), count=rng.choice([1, 1, 2, 3, 6]))


def by_margin(seen: Evidence, depth: int) -> float:
    assert seen.margin is not None
    return chance(0.4 + 1.3 * math.log(seen.margin) - 0.15 * depth)


def by_match(seen: Evidence, depth: int) -> float:
    assert seen.match_length is not None
    return 0.35 if seen.match_length < 4 else 0.7 if seen.match_length < 16 else 0.95


def test_chances_of_a_draft_model_are_learned() -> None:
    errors = []
    for seed in range(6):
        calibration = taught(Calibration(MarginFeatures()), by_margin, margins, 3000, seed)
        assert calibration.reliability.trials >= 3000
        assert calibration.reliability.error < 0.03
        for margin in (0.2, 0.5, 1.0, 2.0, 5.0):
            for depth in (1, 2, 3):
                seen = Evidence(margin=margin)
                errors.append(abs(calibration.chance(REQUEST, seen, depth) - by_margin(seen, depth)))
    # It forgets on purpose, so single estimates stray by about their own uncertainty.
    assert sum(errors) / len(errors) < 0.08
    assert max(errors) < 0.25


def test_a_draft_model_that_is_sure_is_believed_more_until_shown_otherwise() -> None:
    calibration = Calibration(MarginFeatures())
    unsure, even, sure = (Evidence(probability, margin=1.0) for probability in (0.2, 0.5, 0.9))
    chances = [calibration.chance(REQUEST, seen, 1) for seen in (unsure, even, sure)]
    assert chances == sorted(chances)
    assert calibration.belief(REQUEST, Evidence(margin=1.0), 1) == calibration.belief(REQUEST, even, 1)
    truth = {0.2: 0.8, 0.9: 0.2}
    either = [unsure, sure]
    taught(calibration, lambda seen, depth: truth[seen.probability or 0.0], lambda rng: rng.choice(either), 2000)
    assert calibration.chance(REQUEST, unsure, 1) == pytest.approx(0.8, abs=0.1)
    assert calibration.chance(REQUEST, sure, 1) == pytest.approx(0.2, abs=0.1)
    # What no softmax gives, or only rounding does, is as good as the ends of what it may.
    assert all(0.0 < calibration.chance(REQUEST, Evidence(end, margin=1.0), 1) < 1.0 for end in (0.0, 1.0))


def test_chances_of_a_lookup_are_learned_though_they_are_steps() -> None:
    calibration = taught(Calibration(MatchFeatures()), by_match, matches, 4000)
    for length in (2, 5, 9, 20, 60):
        seen = Evidence(match_length=length, count=1)
        assert calibration.chance(REQUEST, seen, 1) == pytest.approx(by_match(seen, 1), abs=0.12)


def test_a_lookup_whose_match_went_on_otherwise_as_often_is_believed_less() -> None:
    calibration = Calibration(MatchFeatures())
    # By Laplace's rule: seen once and nothing else; once, as one other was; three times, as one other was.
    alone, even, most = (Evidence(probability, 4, count) for probability, count in ((1 / 2, 1), (1 / 3, 1), (3 / 5, 3)))
    unknown = Evidence(None, 4, 1)
    chances = [calibration.chance(REQUEST, seen, 1) for seen in (even, most, alone)]
    assert chances == sorted(chances)
    assert calibration.belief(REQUEST, unknown, 1) == calibration.belief(REQUEST, alone, 1)
    # And how much less is learned.
    truth = {1 / 2: 0.8, 1 / 3: 0.2, 3 / 5: 0.6}
    taught(calibration, lambda seen, depth: truth[seen.probability or 0.0], lambda rng: rng.choice([alone, even]), 2000)
    assert calibration.chance(REQUEST, even, 1) == pytest.approx(0.2, abs=0.1)
    assert calibration.chance(REQUEST, alone, 1) == pytest.approx(0.8, abs=0.1)


def test_a_match_where_a_copy_broke_off_is_believed_more_until_shown_otherwise() -> None:
    calibration = Calibration(MatchFeatures())
    elsewhere, resumed = (Evidence(1 / 2, 2, 1, resumed=resumed) for resumed in (False, True))
    assert calibration.chance(REQUEST, resumed, 1) > calibration.chance(REQUEST, elsewhere, 1)
    truth = {False: 0.8, True: 0.2}
    taught(calibration, lambda seen, depth: truth[seen.resumed], lambda rng: rng.choice([elsewhere, resumed]), 2000)
    assert calibration.chance(REQUEST, resumed, 1) == pytest.approx(0.2, abs=0.1)
    assert calibration.chance(REQUEST, elsewhere, 1) == pytest.approx(0.8, abs=0.1)


def test_what_a_grammar_forces_is_believed_more_than_habits_until_shown_otherwise() -> None:
    calibration = Calibration(GrammarFeatures())
    forced = Evidence(match_length=4)
    rare, usual, anywhere = Evidence(0.2, 1, 1), Evidence(0.8, 1, 8), Evidence(0.8, 0, 8)
    chances = [calibration.chance(REQUEST, seen, 1) for seen in (rare, anywhere, usual, forced)]
    assert chances == sorted(chances)
    assert len(set(chances)) == 4
    truth = {forced: 0.3, rare: 0.1, usual: 0.95, anywhere: 0.6}
    taught(calibration, lambda seen, depth: truth[seen], lambda rng: rng.choice(list(truth)), 3000)
    for seen, right in truth.items():
        assert calibration.chance(REQUEST, seen, 1) == pytest.approx(right, abs=0.2)


def test_what_company_means_is_learned_for_each_kind() -> None:
    calibration, seen, rng = Calibration(MatchFeatures()), Evidence(match_length=4, count=1), random.Random(0)
    for _ in range(2000):
        co_proposals = CoProposals(lookups=rng.random() < 0.5, models=rng.random() < 0.5)
        calibration.observe(REQUEST, seen, 1, rng.random() < (0.9 if co_proposals.models else 0.1), co_proposals)
    for lookups in (True, False):
        for models, right in ((True, 0.9), (False, 0.1)):
            chance = calibration.chance(REQUEST, seen, 1, CoProposals(lookups, models))
            assert chance == pytest.approx(right, abs=0.15)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.1), (0.1, 0.9)])
def test_a_change_is_followed_within_fifty_verdicts(before: float, after: float) -> None:
    for features, seen in ((MarginFeatures(), margins), (MatchFeatures(), matches)):
        calibration = taught(Calibration(features), lambda *_: before, seen, 1000)
        rng = random.Random(1)
        probe = [seen(rng) for _ in range(50)]
        taught(calibration, lambda *_: after, seen, 50, seed=2)
        mean = sum(calibration.chance(REQUEST, one, 1) for one in probe) / len(probe)
        assert abs(mean - after) < 0.25


def test_uncertainty_shrinks_with_verdicts_and_a_new_request_starts_less_certain() -> None:
    calibration = Calibration(MarginFeatures())
    seen = Evidence(margin=1.0)
    calibration.begin(REQUEST)
    at_first = calibration.belief(REQUEST, seen, 1)[1]
    taught(calibration, by_margin, margins, 500)
    later = calibration.belief(REQUEST, seen, 1)
    calibration.begin(1)
    fresh = calibration.belief(1, seen, 1)
    assert later[1] < 0.3 * at_first
    assert fresh[1] > 2 * later[1]
    # It starts from what the other request taught, without what was that request's own.
    assert probability(fresh) == pytest.approx(by_margin(seen, 1), abs=0.2)


def test_requests_that_differ_are_told_apart() -> None:
    calibration = Calibration(MarginFeatures())
    for number in range(30):
        for request, true in ((0, 0.9), (1, 0.2)):
            if number == 0:
                calibration.begin(request)
            taught(calibration, lambda *_, true=true: true, margins, 10, seed=100 * request + number, request=request)
    seen = Evidence(margin=1.0)
    assert calibration.chance(0, seen, 1) > calibration.chance(1, seen, 1) + 0.4


def test_a_request_that_ended_is_forgotten() -> None:
    calibration = Calibration(MarginFeatures())
    calibration.begin(REQUEST)
    with_offset = calibration.belief(REQUEST, Evidence(margin=1.0), 1)[1]
    calibration.end(REQUEST)
    calibration.end(REQUEST)
    assert calibration.belief(REQUEST, Evidence(margin=1.0), 1)[1] < with_offset


def test_uncertainty_draws_the_chance_towards_one_half() -> None:
    assert 0.5 < probability((0.7, 2.0)) < probability((0.7, 0.3)) < probability((0.7, 0.0))
    assert probability((0.7, 0.0)) == pytest.approx(chance(0.7))


def test_certain_and_hopeless_drafts_stay_finite() -> None:
    for accepted in (True, False):
        calibration = taught(Calibration(MarginFeatures()), lambda *_, a=accepted: float(a), margins, 3000)
        likely = calibration.chance(REQUEST, Evidence(margin=1.0), 1)
        assert 0.0 < likely < 1.0
        assert (likely > 0.95) is accepted
        assert (likely < 0.05) is not accepted
