"""Recording with the embedded pair, and the comparison of policies by replay, through the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import app
from benchmarks.cost_tables import PASS_MS, measured_profile
from benchmarks.replay import costs_named, figures_of
from typer.testing import CliRunner

from paceline.core.errors import InputError
from paceline.lab.replaying.oracle import oracle_s
from paceline.lab.replaying.recording import Recording, load_recordings, save_recordings
from paceline.lab.replaying.replay import replay
from paceline.lab.variants import PLAIN, policy_variants, replay_all, static_variants
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.policies.fixed import FixedPolicy
from tests.planning.helpers import Skill, synthetic


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def replayed(path: Path, *arguments: object) -> dict[str, Any]:
    json_file = path.with_suffix(".json")
    run("replay", "--recordings", path, "--json", json_file, *arguments)
    figures: dict[str, Any] = json.loads(json_file.read_text())["replay"]
    return figures


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "benchmarks/costs").iterdir()), ids=lambda p: p.stem
)
def test_whole_profiles_are_there_and_all_but_one_have_a_draft(path: Path) -> None:
    profile = costs_named(str(path), 1.0, ())
    if path.stem == "smollm2-q4_1":
        assert profile.draft is None
        return
    assert 0 < profile.draft_s() < profile.round_s(1) <= profile.round_s(64)


@pytest.mark.parametrize("name", PASS_MS)
def test_tables_are_what_was_measured(name: str) -> None:
    profile = measured_profile(name, 1.5)
    for rows, ms in PASS_MS[name].items():
        assert profile.round_s(rows) == pytest.approx(ms / 1e3)
    assert profile.draft_s(1) == profile.draft_s(20) == pytest.approx(1.5e-3)
    assert profile.draft_s(512) == pytest.approx(24e-3)


def recordings(right: float, kind: str, count: int, first_seed: int = 0) -> list[Recording]:
    seeds = range(first_seed, first_seed + count)
    made = [synthetic(seed, {"draft": Skill(right)}, num_tokens=40) for seed in seeds]
    return [replace(each, name=f"{kind} {number}") for number, each in enumerate(made)]


def test_every_policy_beside_the_oracle(tmp_path: Path) -> None:
    groups = {"good": recordings(0.9, "good", 3), "bad": recordings(0.0, "bad", 1, first_seed=9)}
    path = tmp_path / "both.npz"
    save_recordings(path, [*groups["good"], *groups["bad"]])
    figures = replayed(path, "--costs", "Q8_0,F16", "--draft-ms", "2")
    assert figures["drafters"] == ["draft"]
    assert [list(kinds) for kinds in figures["costs"].values()] == [["good", "bad", "mixed"]] * 2
    # In one session, the shorter ones again.
    groups["mixed"] = [each for good in groups["good"] for each in (good, *groups["bad"])]
    profile = measured_profile("Q8_0", 2.0)
    for kind, group in groups.items():
        of_kind = figures["costs"]["Q8_0"][kind]
        assert {"auto", "accept-ratio", "profile-ev", "heuristic"} < set(of_kind)
        fixed = replay(group, FixedPolicy(4), profile)
        best_s = sum(oracle_s(recording, profile) for recording in group)
        assert of_kind["fixed 4"]["tokens_per_second"] == pytest.approx(fixed.tokens_per_second)
        assert of_kind["fixed 4"]["rounds"] == fixed.rounds
        assert of_kind["fixed 4"]["share_of_oracle"] == pytest.approx(best_s / fixed.decode_s)
        # A plain round of Q8_0 takes 29 ms.
        assert of_kind["plain"]["tokens_per_second"] == pytest.approx(1e3 / 29)
        auto = replay(group, AutoPolicy(profile), profile)
        assert of_kind["auto"]["of_plain"] == pytest.approx(29e-3 * (auto.tokens_per_second or 0))
        assert of_kind["auto"]["lowest_of_plain"] <= of_kind["auto"]["of_plain"]
    of_q8_0, of_f16 = figures["costs"]["Q8_0"], figures["costs"]["F16"]
    assert of_q8_0["bad"]["plain"]["share_of_oracle"] == pytest.approx(1.0)
    assert of_q8_0["good"]["plain"]["share_of_oracle"] < 0.8
    assert of_f16["good"]["auto"]["of_plain"] > of_f16["bad"]["auto"]["of_plain"]


def test_the_best_static_setting_is_that_of_the_bench() -> None:
    group, profile = recordings(0.9, "good", 3), measured_profile("Q4_0", 1.0)
    found = figures_of(group, profile, ["draft"], statics=True)
    best = max(replay_all(group, list(static_variants(["draft"])), profile), key=lambda each: each.per_second)
    plain, auto = replay_all(group, [PLAIN, *policy_variants("auto", ["draft"])], profile)
    assert found["best static"]["setting"] == best.variant.name
    assert found["best static"]["of_plain"] == pytest.approx(best.per_second / plain.per_second)
    assert found["auto"]["of_plain"] == pytest.approx(auto.per_second / plain.per_second)


def test_costs_from_a_file_of_the_profile_command(tmp_path: Path) -> None:
    path, costs = tmp_path / "some.npz", tmp_path / "profile.json"
    save_recordings(path, [synthetic(1, {"draft": Skill(0.5)})])
    for report in (measured_profile("F16", 2.0).to_json(), {"profile": measured_profile("F16", 2.0).to_json()}):
        costs.write_text(json.dumps(report))
        from_file, from_table = replayed(path, "--costs", costs), replayed(path, "--costs", "F16", "--draft-ms", "2")
        for figures in (from_file, from_table):
            (kinds,) = figures["costs"].values()
            for figure in kinds["synthetic"].values():
                # The one figure of the machine that it runs on.
                assert figure.pop("deciding_us") > 0
        assert list(from_file["costs"].values()) == list(from_table["costs"].values())


def test_recording_the_tasks_of_the_bench(tmp_path: Path) -> None:
    path = tmp_path / "bench.npz"
    options = ["--workloads", "hard,editing-forced", "--prompts", 1, "--tokens", 20, "--threads", 1]
    assert "2 recordings of 40 tokens" in run("record", "--output", path, *options, "--drafters", "suffix,draft")
    hard, editing = load_recordings(path)
    assert (hard.name.split()[0], editing.name.split()[0]) == ("hard", "editing-forced")
    assert [trace.name for trace in hard.traces] == ["suffix", "draft"]
    assert hard.temperature == 1.0


def test_recording_the_embedded_pair(tmp_path: Path) -> None:
    path = tmp_path / "pair.npz"
    options = ["--kinds", "code,logs", "--prompts", 1, "--tokens", 6, "--depth", 2, "--siblings", 2, "--threads", 1]
    shown = run("record", "--output", path, *options, "--prompt-characters", 80)
    assert "2 recordings of 12 tokens" in shown
    recordings = load_recordings(path)
    assert [recording.name for recording in recordings] == ["code 1", "logs 1"]
    for recording in recordings:
        assert [trace.name for trace in recording.traces] == ["suffix", "lookup", "draft"]
        draft = recording.traces[-1]
        assert all(len(chain) == 2 and len(chain[0].token_ids) == 2 for chain in draft.chains)
        margins = [margin for chain in draft.chains for level in chain for margin in level.margins[:1]]
        assert all(margin is not None and margin >= 0 for margin in margins)
    assert set(replayed(path)["costs"]["Q4_0"]) == {"code", "logs", "mixed"}


def test_a_target_of_ones_own_needs_no_draft_model_where_none_drafts(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    options = ["--kinds", "logs", "--prompts", 1, "--tokens", 12]
    run("record", "--output", path, "--target", "target", "--drafters", "suffix", *options)
    assert {trace.name for recording in load_recordings(path) for trace in recording.traces} == {"suffix"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["record", "--output", "x.npz", "--target", "big.gguf"], "--target without --draft"),
        (["record", "--output", "missing/x.npz"], "there is no directory missing"),
        (["record", "--output", "x.npz", "--kinds", "poems"], "no held-out text of kind 'poems'"),
        (["record", "--output", "x.npz", "--workloads", "poems"], "unknown workload 'poems'"),
        (["record", "--output", "x.npz", "--workloads", "hard,mixed"], "it is made of the others' tasks"),
        (
            ["record", "--output", "x.npz", "--workloads", "hard", "--depth", "4"],
            "--depth has no effect with --workloads",
        ),
        (["replay", "--recordings", "some.npz", "--costs", "Q9"], "Q9 is neither among Q4_0, F16"),
        (["replay", "--recordings", "some.npz", "--json", "missing/x.json"], "there is no directory missing"),
        (["replay", "--recordings", "some.npz", "--draft-ms", "0"], "--draft-ms 0 is out of range"),
        (["replay", "--recordings", "some.npz", "--drafters", "lookup"], "'lookup' was not recorded"),
        (["replay", "--recordings", "some.npz", "--costs", "lone.json"], "lone.json is of no draft model"),
        (
            ["replay", "--recordings", "some.npz", "--costs", "lone.json", "--draft-ms", "3"],
            "--draft-ms has no effect on costs from a file",
        ),
        (["replay", "--recordings", "short.npz"], "all answers in short.npz are of one token"),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    save_recordings(Path("some.npz"), [synthetic(1, {"draft": Skill(0.5)})])
    save_recordings(Path("short.npz"), [synthetic(1, {"draft": Skill(0.5)}, num_tokens=1)])
    Path("lone.json").write_text(json.dumps(replace(measured_profile("F16", 2.0), draft=None).to_json()))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert sorted(tmp_path.iterdir()) == before
