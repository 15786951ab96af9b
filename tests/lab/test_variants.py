from __future__ import annotations

import dataclasses

import pytest

from paceline.core.errors import InputError
from paceline.lab.replaying.recorder import record
from paceline.lab.replaying.recording import Recording
from paceline.lab.sessions import Session
from paceline.lab.variants import (
    PLAIN,
    VARIANT_NAMES,
    Variant,
    VariantReplay,
    check_variant_names,
    pick_fastest,
    policy_variants,
    replay_all,
    static_variants,
)
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import POLICY_NAMES
from tests.lab.scripted_pairs import LEVEL_S, PASS_S, engines, profile


@pytest.fixture(scope="module")
def recording() -> Recording:
    with Session(engines(), ["draft"], NO_SPECULATION) as session:
        return record(session, [1, 2, 3], depth=8, temperature=0.0, max_tokens=33)


def of_length(length: int) -> Variant:
    return Variant(f"draft-max {length}", "static", ("draft",), "fixed", FixedPolicy(length))


def test_replays_take_what_passes_cost(recording: Recording) -> None:
    """Perfect drafts of three: eight rounds of a pass and three levels for 32 tokens."""
    (replayed,) = replay_all([recording], [of_length(3)], profile())
    assert replayed.per_second == pytest.approx(32 / (8 * (PASS_S + 3 * LEVEL_S)))
    assert replayed.ratio == pytest.approx(32 * PASS_S / (8 * (PASS_S + 3 * LEVEL_S)))
    assert replayed.accept_share == 1.0


def test_sampling_takes_its_time_with_and_without_drafts(recording: Recording) -> None:
    costs = dataclasses.replace(profile(), sampling_row_s=0.5)
    sampled = dataclasses.replace(recording, temperature=0.8)
    (replayed,) = replay_all([sampled], [of_length(3)], costs)
    assert replayed.ratio == pytest.approx(32 * (PASS_S + 0.5) / (8 * (PASS_S + 3 * LEVEL_S) + 32 * 0.5))
    (greedy,) = replay_all([recording], [of_length(3)], costs)
    assert greedy.ratio > replayed.ratio


def test_of_settings_that_did_the_same_only_one_runs() -> None:
    def replayed(name: str, ratio: float, share: float | None) -> VariantReplay:
        return VariantReplay(dataclasses.replace(of_length(1), name=name), ratio, ratio, share)

    outcomes = [replayed("a", 1.1, 0.5), replayed("b", 1.3, 0.4), replayed("c", 1.3, 0.4), replayed("d", 1.3, 0.5)]
    assert [each.variant.name for each in pick_fastest(outcomes, 3)] == ["b", "d", "a"]


def test_names_come_from_the_registry_of_policies() -> None:
    assert VARIANT_NAMES[0] == "static"
    assert set(VARIANT_NAMES[1:]) == set(POLICY_NAMES) - {"fixed"}
    check_variant_names(VARIANT_NAMES)
    for names, words in ((["plain"], "always runs"), (["x"], "unknown variant 'x'"), ([], "no variant")):
        with pytest.raises(InputError, match=words):
            check_variant_names(names)


def test_policies_are_tried_with_each_set_of_drafters_and_auto_with_all() -> None:
    names = ("suffix", "draft")
    assert [each.drafters for each in policy_variants("heuristic", names)] == [("suffix",), ("draft",), names]
    assert [(each.kind, each.drafters) for each in policy_variants("auto", names)] == [("auto", names)]
    assert all(each.kind == "static" for each in static_variants(names))


def test_every_variant_builds_a_policy_of_its_own() -> None:
    costs = profile()
    assert PLAIN.build(costs) == NO_SPECULATION
    for name in VARIANT_NAMES[1:]:
        (*_, variant) = policy_variants(name, ("suffix", "draft"))
        assert variant.build(costs) is not variant.build(costs)


def test_ratios_are_medians_over_laps(recording: Recording) -> None:
    """A text that is drafted perfectly, twice, and one that never is."""
    (trace,) = recording.traces
    silent = dataclasses.replace(recording, traces=(dataclasses.replace(trace, chains=((),) * len(trace.chains)),))
    perfect = 32 * PASS_S / (8 * (PASS_S + 3 * LEVEL_S))
    (by_prompt,) = replay_all([recording, silent, recording], [of_length(3)], profile())
    assert by_prompt.ratio == pytest.approx(perfect)
    (by_lap,) = replay_all([recording, silent] * 2, [of_length(3)], profile(), lap_tasks=2)
    slow_s = 32 * PASS_S + 31 * LEVEL_S
    assert by_lap.ratio == pytest.approx(64 * PASS_S / (8 * (PASS_S + 3 * LEVEL_S) + slow_s))
