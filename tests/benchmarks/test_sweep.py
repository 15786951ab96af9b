"""``auto`` beside every static setting and policy, by replay."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from benchmarks.__main__ import app
from benchmarks.cost_tables import measured_profile
from benchmarks.sweep import sweep_costs
from typer.testing import CliRunner

from paceline.lab.replaying.recording import Recording, save_recordings
from paceline.lab.replaying.replay import replay
from paceline.lab.variants import PLAIN, policy_variants, replay_all, static_variants
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.policies.fixed import NO_SPECULATION
from tests.planning.helpers import Skill, synthetic

PROFILE = measured_profile("Q4_0", 1.0)


def recordings(right: float, kind: str, count: int) -> list[Recording]:
    made = [synthetic(seed, {"draft": Skill(right)}, num_tokens=40) for seed in range(count)]
    return [dataclasses.replace(each, name=f"{kind} {seed}") for seed, each in enumerate(made)]


def test_a_workload_by_itself_is_what_the_bench_would_replay() -> None:
    group = recordings(0.9, "good", 3)
    found = sweep_costs({"good": group}, PROFILE)
    assert list(found) == ["good"]
    plain, *statics, auto = replay_all(
        group, [PLAIN, *static_variants(["draft"]), *policy_variants("auto", ["draft"])], PROFILE
    )
    best = max(statics, key=lambda each: each.per_second)
    assert found["good"].static == best.variant.name
    assert found["good"].static_ratio == pytest.approx(best.per_second / plain.per_second)
    assert found["good"].auto == pytest.approx(auto.per_second / plain.per_second)
    assert found["good"].tuned_ratio == found["good"].static_ratio
    assert found["good"].of_static == pytest.approx(auto.per_second / best.per_second)
    assert found["good"].lowest <= found["good"].auto
    assert set(found["good"].policies) == {"accept-ratio", "profile-ev", "heuristic"}


def test_mixed_goes_through_all_in_turn_and_through_the_shorter_ones_again() -> None:
    groups = {"good": recordings(0.95, "good", 3), "bad": recordings(0.0, "bad", 1)}
    found = sweep_costs(groups, PROFILE)["mixed"]
    assert found.texts == 6
    session = [each for good in groups["good"] for each in (good, *groups["bad"])]
    plain_s = replay(session, NO_SPECULATION, PROFILE).decode_s
    statics = {
        variant.name: plain_s / replay(session, variant.build(PROFILE), PROFILE).decode_s
        for variant in static_variants(["draft"])
    }
    assert statics[found.static] == pytest.approx(found.static_ratio)
    assert max(statics.values()) == pytest.approx(found.static_ratio)
    tuned_s = sum(
        min(replay(part, variant.build(PROFILE), PROFILE).decode_s for variant in static_variants(["draft"]))
        for part in (groups["good"], groups["bad"] * 3)
    )
    assert found.tuned_ratio == pytest.approx(plain_s / tuned_s)
    assert found.tuned_ratio > found.static_ratio
    assert found.auto == pytest.approx(plain_s / replay(session, AutoPolicy(PROFILE), PROFILE).decode_s)


def test_the_command(tmp_path: Path) -> None:
    path, json_file = tmp_path / "some.npz", tmp_path / "sweep.json"
    save_recordings(path, [*recordings(0.9, "good", 1), *recordings(0.1, "bad", 1)])
    arguments = ["sweep", "--recordings", str(path), "--costs", "F16,Q8_0", "--json", str(json_file)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "best static of plain" in result.output
    figures = json.loads(json_file.read_text())["sweep"]
    assert {costs: list(found) for costs, found in figures.items()} == {
        "F16": ["good", "bad", "mixed"],
        "Q8_0": ["good", "bad", "mixed"],
    }
    assert figures["F16"]["good"]["auto"] > figures["F16"]["bad"]["auto"]
