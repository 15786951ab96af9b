"""The planner's gate: its corpus is frozen, its scenes are what they say, and its verdict is right."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import app
from benchmarks.cost_tables import measured_profile
from benchmarks.planner_ab import corpus as corpus_module
from benchmarks.planner_ab import own_time, worker
from benchmarks.planner_ab.charging import NO_TIME, SLOWER, Charged, MidwayDrift
from benchmarks.planner_ab.corpus import (
    COPIES,
    CORPORA,
    HALVES,
    LAPS,
    PROFILES,
    TEXTS,
    Corpus,
    Priced,
    priced,
    workload_of,
)
from benchmarks.planner_ab.environments import Environment, environment, run_all
from benchmarks.planner_ab.own_time import measure
from benchmarks.planner_ab.policies import builder
from benchmarks.planner_ab.scenes import SCENES, Scene, plain, seconds
from benchmarks.planner_ab.sides import Side, chosen_profiles
from benchmarks.planner_ab.verdict import Answer, figures, more_low, most_lost, reasons
from benchmarks.stopwatch import DROPPED, PLAIN, SILENT, VERIFIED
from scipy.stats import binom
from typer.testing import CliRunner

from paceline.core.clock import VirtualClock
from paceline.core.errors import EngineError, InputError
from paceline.lab.replaying.recording import Recording, save_recordings
from paceline.lab.replaying.replay import replay
from paceline.planning.auto.learned import Learned
from paceline.planning.auto.policy import AutoPolicy
from paceline.planning.base import Policy
from paceline.planning.costs.profile import CostProfile
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from tests.planning.helpers import Skill, synthetic
from tests.tiers import some_long

COSTS = measured_profile("F16", 1.0)
PRICED = Priced(COSTS, own_factor=2.0)
OWN_TIMES = {PLAIN: {1: 10.0}, SILENT: {1: 40.0}, DROPPED: {1: 60.0}, VERIFIED: {1: 100.0, 4: 300.0}}


def texts(count: int, *, right: float = 0.8, first_seed: int = 0) -> list[Recording]:
    made = [
        synthetic(seed, {"suffix": Skill(0.5, silent=0.5, is_model=False), "draft": Skill(right)}, num_tokens=40)
        for seed in range(first_seed, first_seed + count)
    ]
    return [dataclasses.replace(each, name=f"work {number}") for number, each in enumerate(made)]


def scene(name: str) -> Scene:
    (found,) = (each for each in SCENES if each.name == name)
    return found


def fixed(length: int) -> object:
    return lambda costs, learned: FixedPolicy(length)


# -- the corpus ----------------------------------------------------------------------------------------------------


def test_every_file_of_the_corpus_is_the_one_that_was_frozen() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in corpus_module.FOLDER.iterdir()}
    assert found == corpus_module.SHA256
    assert {f"{corpus.name}.npz" for corpus in CORPORA} == set(found)


# What is frozen stays what it is.
@pytest.mark.parametrize("corpus", some_long(CORPORA, quick=[]), ids=lambda corpus: corpus.name)
def test_the_corpus_has_twelve_texts_of_each_workload(corpus: Corpus) -> None:
    halves = corpus.halves()
    assert list(halves) == list(HALVES)
    assert all(len(laps) == LAPS for laps in halves.values())
    by_half = [{recording.name for lap in laps for recording in lap} for laps in halves.values()]
    assert not by_half[0] & by_half[1]
    workloads = [workload_of(name) for names in by_half for name in names]
    assert {workloads.count(name) for name in workloads} == {TEXTS}
    every = [recording for laps in halves.values() for lap in laps for recording in lap]
    assert all((recording.temperature > 0) == corpus.sampled for recording in every)
    names = ["suffix", "lookup", "draft"] if corpus.models == "pair" else ["suffix", "lookup"]
    assert all([trace.name for trace in recording.traces] == names for recording in every)


def test_a_corpus_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_recordings(tmp_path / "pair-greedy.npz", texts(4))
    monkeypatch.setattr(corpus_module, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"not the corpus that was frozen: bring it back with git checkout"):
        CORPORA[0].halves(folder=tmp_path)


def test_there_are_costs_of_many_machines() -> None:
    found = {name: priced(name) for name in PROFILES}
    assert len(found) >= 10
    a_row_s = [each.costs.round_s(1) for each in found.values()]
    assert min(a_row_s) < 1e-3
    assert max(a_row_s) > 1
    # Where a row more is free, where it is as dear as the first, and what lies between.
    four_rows = [each.costs.round_s(4) / each.costs.round_s(1) for each in found.values()]
    assert min(four_rows) == 1
    assert max(four_rows) > 2.5
    with pytest.raises(InputError, match="unknown costs 'q5': choose from"):
        priced("q5")


def test_costs_without_a_draft_go_with_texts_that_have_none() -> None:
    assert {corpus.models for _, _, corpus in worker.pairings(["smollm2-q4_1"])} == {"smollm2", COPIES}
    assert {corpus.models for _, _, corpus in worker.pairings(["f16-quiet"])} == {"smollm2", "pair", COPIES}


# -- what counts -----------------------------------------------------------------------------------------------------


def test_decisions_take_as_long_as_what_became_of_them() -> None:
    (recording,) = texts(1, right=1.0)
    clock = VirtualClock()
    charged = Charged(FixedPolicy(4), clock, OWN_TIMES, 1.0)
    outcome = replay([recording], charged, COSTS, clock=clock).requests[0]
    free = replay([recording], FixedPolicy(4), COSTS).requests[0]
    assert outcome.rounds == free.rounds
    # A last token has nobody asked.
    rounds_us = [100.0] * outcome.rounds
    assert (outcome.decode_s - free.decode_s) * 1e6 == pytest.approx(sum(rounds_us), abs=100)
    clock = VirtualClock()
    plainly = replay([recording], Charged(NO_SPECULATION, clock, OWN_TIMES, 3.0), COSTS, clock=clock)
    without = replay([recording], NO_SPECULATION, COSTS)
    assert (plainly.decode_s - without.decode_s) * 1e6 == pytest.approx(30.0 * plainly.rounds)


def test_what_decisions_take_is_looked_up_by_requests() -> None:
    def taken_us(count: int) -> float:
        group = texts(count, right=1.0)
        clock = VirtualClock()
        charged = Charged(FixedPolicy(4), clock, OWN_TIMES, 1.0)
        outcome = replay(group, charged, COSTS, clock=clock, concurrent=count)
        return (outcome.decode_s - replay(group, FixedPolicy(4), COSTS, concurrent=count).decode_s) * 1e6

    assert taken_us(1) == pytest.approx(taken_us(3), rel=0.25)
    assert taken_us(4) > 2 * taken_us(3)


def test_the_machine_changes_in_the_middle_of_every_answer() -> None:
    group = texts(3)
    drift = MidwayDrift(group)
    clock = VirtualClock()
    outcome = replay(
        group,
        Charged(NO_SPECULATION, clock, NO_TIME, 1.0, drift),
        COSTS,
        drafters=(),
        drift=drift,
        clock=clock,
    )
    shares = []
    for request in outcome.requests:
        arrivals = request.arrivals_s
        steps = [after - before for before, after in itertools.pairwise(arrivals)]
        shares.append((steps[-1] / COSTS.round_s(1), steps[0] / COSTS.round_s(1)))
    assert [end for end, _ in shares] == pytest.approx([SLOWER, 1.0, SLOWER], rel=0.02)
    assert [start for _, start in shares] == pytest.approx([1.0, SLOWER, 1.0], rel=0.02)


def test_a_first_answer_is_of_a_policy_that_knows_nothing_and_with_a_prior_of_one_that_read_other_texts() -> None:
    laps = [texts(2), texts(2, first_seed=2)]
    started_with: list[Learned | None] = []

    def build(costs: CostProfile, learned: Learned | None) -> Policy:
        started_with.append(learned)
        return AutoPolicy(costs, learned=learned)

    first = seconds(scene("first answer"), laps, PRICED, build, NO_TIME)
    assert len(first) == 4
    assert started_with == [None] * 4
    started_with.clear()
    known = seconds(scene("first answer, prior"), laps, PRICED, build, NO_TIME)
    # For each lap, one policy learns from the other lap.
    assert [prior is None for prior in started_with] == [True, False, False, True, False, False]
    assert known != first
    # A session begins like a first answer, and goes on with what it has learned.
    session = seconds(scene("session"), laps, PRICED, build, NO_TIME)
    assert session[0] == first[0]
    assert session[2] == first[2]
    assert session[1] != first[1]


def test_groups_begin_together_and_the_last_one_is_filled_up() -> None:
    laps = [texts(3), texts(3, first_seed=3)]
    for name, count in (("2 requests", 2), ("4 requests", 4), ("8 requests", 8)):
        found = seconds(scene(name), laps, PRICED, fixed(4), NO_TIME)  # type: ignore[arg-type]
        every = [recording for lap in laps for recording in lap]
        assert len(found) == len(every)
        first = replay(every[:count] + every[: max(count - len(every), 0)], FixedPolicy(4), COSTS, concurrent=count)
        assert found[: min(count, 6)] == pytest.approx([request.decode_s for request in first.requests][:6], rel=0.05)
        assert plain(scene(name), laps, PRICED)[0] > 0


def test_own_time_is_measured_by_what_became_of_drafts_and_by_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_time, "SLICES", 2)
    group = [*texts(8), *texts(8, right=0.0)]

    def build(costs: CostProfile, learned: Learned | None) -> Policy:
        return AutoPolicy(costs, learned=learned)

    *_, found = measure(build, group, [COSTS])
    assert list(found) == [PLAIN, SILENT, DROPPED, VERIFIED]
    assert all(set(by_requests) == {1, 2, 4, 8, 16} for by_requests in found.values())
    assert 0 < found[PLAIN][1] < found[VERIFIED][1]
    # Two digits, so that what was measured is the same again.
    assert all(us == float(f"{us:.2g}") for by_requests in found.values() for us in by_requests.values())


# -- the verdict ----------------------------------------------------------------------------------------------------


def answer(text: str, plain_s: float, old_s: float, new_s: float, profile: str = "a") -> Answer:
    return Answer(profile, "pair-greedy", "pair", "greedy", "tuning", "session", text, plain_s, old_s, new_s)


def many(old_s: float, new_s: float) -> list[Answer]:
    # And one that stays the lowest.
    return [*(answer(f"work {number}", 1.0, old_s, new_s) for number in range(40)), answer("slow 1", 1.0, 1.02, 1.02)]


def judged(answers: Sequence[Answer]) -> list[str]:
    found = figures(answers)
    return reasons(found, {"a, greedy": found})


def test_a_policy_against_itself_is_exactly_as_fast() -> None:
    answers = [answer(f"work {number}", 1.0, 0.3 + number / 7, 0.3 + number / 7) for number in range(9)]
    found = figures(answers)
    assert (found.ratio, found.low, found.high, found.grew) == (1.0, 1.0, 1.0, 1.0)
    assert judged(answers) == []
    assert most_lost(answers, 5) == []


def test_the_ratio_is_the_mean_over_texts_and_its_interval_over_texts() -> None:
    # One text comes up often, and says the same every time.
    answers = [answer("work 1", 1.0, 1.0, 0.5)] * 50 + [answer("work 2", 1.0, 1.0, 1.0)]
    found = figures(answers)
    assert found.texts == 2
    assert found.ratio == pytest.approx(math.sqrt(2))
    assert (found.low, found.high) == pytest.approx((1.0, 2.0))
    assert found.new_of_plain == pytest.approx(2 ** (50 / 51))


def test_a_loss_of_one_percent_everywhere_fails_overall_and_one_of_two_in_its_cell() -> None:
    assert judged(many(0.5, 0.5 / 0.996)) == []
    assert [reason.partition(":")[0] for reason in judged(many(0.5, 0.5 / 0.99))] == ["speed over all answers"]
    both = judged(many(0.5, 0.5 / 0.98))
    assert [reason.partition(":")[0] for reason in both] == ["speed over all answers", "speed with a, greedy"]
    assert "0.9805 of the old one, the interval's lower end 0.9800, and the least is 0.985" in both[1]
    assert judged(many(0.5, 0.45)) == []


def test_more_low_answers_fail_where_chance_does_not_bring_them() -> None:
    # Six answers fall from 0.98 to 0.965 of plain; all others gain, so that no mean says so.
    answers = many(0.5, 0.49) + [answer(f"low {number}", 1.0, 1 / 0.98, 1 / 0.975) for number in range(6)]
    assert judged(answers) == []
    answers = many(0.5, 0.49) + [answer(f"low {number}", 1.0, 1 / 0.972, 1 / 0.965) for number in range(4)]
    assert judged(answers) == []
    answers = many(0.5, 0.49) + [answer(f"low {number}", 1.0, 1 / 0.972, 1 / 0.965) for number in range(6)]
    (reason,) = judged(answers)
    assert reason.startswith("answers below 0.97 of plain: 6 of 47, before 0")


def test_the_lowest_answer_may_not_fall_by_more_than_a_hundredth() -> None:
    assert judged([*many(0.5, 0.49), answer("low 1", 1.0, 1 / 0.95, 1 / 0.942)]) == []
    (reason,) = judged([*many(0.5, 0.49), answer("low 1", 1.0, 1 / 0.95, 1 / 0.938)])
    assert reason == "the lowest answer: 0.938 of plain, before 0.950, and the most that it may fall by is 0.01"


def test_where_every_text_has_one_answer_the_test_is_mcnemars() -> None:
    for more, fewer in ((5, 0), (9, 3), (2, 2), (1, 6), (0, 0)):
        differences = [1] * more + [-1] * fewer + [0] * 7
        expected = float(binom.sf(more - 1, more + fewer, 0.5)) if more + fewer else 1.0
        assert more_low(differences) == pytest.approx(expected)


def test_answers_of_one_text_are_one_witness() -> None:
    assert more_low([40]) == pytest.approx(0.5)
    assert more_low([40, 1]) == pytest.approx(0.25)
    assert more_low([3, 2, -1]) == pytest.approx(2 / 8)


# -- the sides ------------------------------------------------------------------------------------------------------


def test_policies_are_named(tmp_path: Path) -> None:
    assert isinstance(builder("auto")(COSTS, None), AutoPolicy)
    assert builder("fixed 3")(COSTS, None) == FixedPolicy(3)
    own = tmp_path / "mine.py"
    own.write_text("from paceline import FixedPolicy\n\ndef build(costs, learned):\n    return FixedPolicy(7)\n")
    assert builder(f"{own}:build")(COSTS, None) == FixedPolicy(7)
    for spec, said in (
        ("best", "unknown policy 'best': choose from auto"),
        (f"{own}:other", "has no function other"),
        (f"{tmp_path / 'none.py'}:build", "is no Python file"),
    ):
        with pytest.raises(InputError, match=said):
            builder(spec)
    own.write_text("1 / 0")
    with pytest.raises(InputError, match="cannot be run: ZeroDivisionError"):
        builder(f"{own}:build")


def worker_of(tmp_path: Path, program: str) -> Environment:
    folder = tmp_path / "benchmarks" / "planner_ab"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "worker.py").write_text(program)
    return Environment("somewhere", "abc", tmp_path / "package", tmp_path, tmp_path / "kept")


def test_a_side_runs_its_own_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The checkout's own is in the working folder, and must not be taken.
    monkeypatch.chdir(Path(corpus_module.__file__).parents[2])
    side = worker_of(
        tmp_path, "import json, sys\njob = json.load(sys.stdin)\nfor _ in range(2): print(json.dumps(job))"
    )
    job = {"task": "replay", "laps": 3}
    assert run_all([(side, job)], lambda result: None) == [[job, job]]


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    side = worker_of(tmp_path, "import sys\nprint('no such corpus', file=sys.stderr)\nsys.exit(1)")
    with pytest.raises(EngineError, match="somewhere: no such corpus"):
        run_all([(side, {"task": "list"})], lambda result: None)


def test_a_side_is_called_what_it_was_given_as(tmp_path: Path) -> None:
    commit = "0123456789abcdef"
    assert Environment("main", commit, tmp_path, tmp_path, tmp_path).title == "main (0123456789ab)"
    assert Environment("01234", commit, tmp_path, tmp_path, tmp_path).title == "0123456789ab"


def test_own_times_are_kept_by_what_a_policy_says(tmp_path: Path) -> None:
    side = Environment("somewhere", "abc", tmp_path, Path(corpus_module.__file__).parents[2], tmp_path / "kept")
    own = tmp_path / "mine.py"
    own.write_text("1")
    assert side.own_times(f"{own}:build") is None
    side.keep_own_times(f"{own}:build", {"pair": {PLAIN: {1: 2.0}}})
    assert side.own_times(f"{own}:build") == {"pair": {PLAIN: {1: 2.0}}}
    assert side.own_times("auto") is None
    own.write_text("2")
    assert side.own_times(f"{own}:build") is None


def test_the_worker_replays_every_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_recordings(tmp_path / "small.npz", texts(12))
    small = Corpus("small", "pair", sampled=False)
    monkeypatch.setattr(worker, "CORPORA", [small])
    monkeypatch.setattr(Corpus, "halves", _halves_in(tmp_path))
    job = {
        "task": "replay",
        "policy": "fixed 2",
        "own_times": {"pair": {kind: {"1": 5.0} for kind in OWN_TIMES}},
        "profiles": ["f16-quiet", "streamed"],
        "laps": 2,
        "halves": ["held-out"],
    }
    found = list(worker.answer(job))
    assert [result["key"] for result in found] == [
        (profile, "small", "held-out", each.name) for profile in ("f16-quiet", "streamed") for each in SCENES
    ]
    assert all(result["texts"] == ["work 6", "work 7"] for result in found)
    assert all(len(result["seconds"]) == len(result["plain_s"]) == 2 for result in found)
    assert found == list(worker.answer(json.loads(json.dumps(job))))
    (listed,) = worker.answer({"task": "list"})
    assert listed["scenes"] == [each.name for each in SCENES]
    assert ("f16-quiet", "small") in listed["cells"]


def test_results_of_several_workers_come_with_their_job(tmp_path: Path) -> None:
    program = (
        "import json, sys\njob = json.load(sys.stdin)\nfor each in job['profiles']: print(json.dumps({'key': each}))"
    )
    made, told = worker_of(tmp_path, program), list[Any]()
    found = run_all([(made, {"profiles": list(names)}) for names in ("a", "bc", "")], told.append)
    assert found == [[{"key": "a"}], [{"key": "b"}, {"key": "c"}], []]
    assert sorted(result["key"] for result in told) == ["a", "b", "c"]


def test_a_worker_that_fails_ends_the_others(tmp_path: Path) -> None:
    # The other one never says anything.
    program = "import sys, time\nif '\"a\"' in sys.stdin.read(): sys.exit('out of memory')\ntime.sleep(600)"
    made = worker_of(tmp_path, program)
    with pytest.raises(EngineError, match="somewhere: out of memory"):
        run_all([(made, {"profiles": [name]}) for name in ("a", "b")], lambda result: None)


def test_profiles_are_those_that_both_sides_have(tmp_path: Path) -> None:
    one = Side(worker_of(tmp_path, ""), "auto", {}, [("a", "small"), ("b", "small")], ["session"])
    other = dataclasses.replace(one, cells=[("b", "small"), ("c", "small")])
    assert chosen_profiles([one, other], None) == ["b"]
    assert chosen_profiles([one, one], ["b"]) == ["b"]
    with pytest.raises(InputError, match=r"--costs 'c': choose from those that every side has, b"):
        chosen_profiles([one, other], ["c"])


def _halves_in(folder: Path) -> object:
    halves = Corpus.halves
    return lambda self, laps=LAPS: halves(self, laps, folder)


def test_bad_input_gets_a_line() -> None:
    runner = CliRunner()
    for arguments, said in (
        (["--old", "no-such-revision"], "there is no revision 'no-such-revision': name a commit, a branch or a tag"),
        (["--old", "HEAD", "--half", "left"], "unknown half 'left': choose from tuning, held-out"),
        (["--old", "HEAD", "--new-policy", "best"], "unknown policy 'best'"),
    ):
        result = runner.invoke(app, ["planner-ab", *arguments])
        assert isinstance(result.exception, InputError)
        assert said in str(result.exception)
    with pytest.raises(InputError, match="there is no revision"):
        environment("no-such-revision")
    assert sys.version_info >= (3, 11)
