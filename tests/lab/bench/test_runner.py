"""The runner on engines whose costs are known: what it reports is what can be worked out by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.clock import VirtualClock
from paceline.core.errors import EngineError, InputError
from paceline.engines.base import Step
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput
from paceline.lab.bench.forecast import QUICK_WORKLOADS, fit_settings
from paceline.lab.bench.report import build_report
from paceline.lab.bench.results import BenchResult, VariantResult
from paceline.lab.bench.runner import Runner
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.comparison import Stop
from paceline.lab.prompt_keeper import PromptKeeper
from paceline.lab.replaying.recorder import record
from paceline.lab.report import render_page
from paceline.lab.sessions import Answer, Contestant, Engines, Session
from paceline.lab.task import Task
from paceline.lab.variants import Variant, drafter_sets, replay_all, static_variants
from paceline.planning.auto.learned import DrafterState, Learned
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from tests.lab.scripted_pairs import LEVEL_S, PASS_S, bytes_vocabulary, constant_model, counting_model, engines, profile

FORCED_AND_FREE = ("new-code", "structured-forced")


def settings(**changes: Any) -> BenchSettings:
    values: dict[str, Any] = {
        "workloads": ("new-code",),
        "variants": ("static",),
        "drafters": ("draft",),
        "laps": 3,
        "tokens": 33,
        "prompts": 2,
        "num_static": 2,
        "coarse": True,
    }
    return BenchSettings(**{**values, **changes})


def run(loaded: Engines, wanted: BenchSettings, **options: Any) -> BenchResult:
    return Runner(loaded, profile(), wanted, **options).run()


def speed_of_perfect_drafts(draft_max: int, tokens: int) -> float:
    """Rounds of ``draft_max`` levels and a pass, each of ``draft_max + 1`` tokens, the last as short as is left."""
    seconds = 0.0
    left = tokens
    while left:
        drafted = min(draft_max, left - 1)
        seconds += PASS_S + LEVEL_S * drafted
        left -= drafted + 1
    return tokens / seconds


def named(result: BenchResult, name: str) -> VariantResult:
    return next(each for each in result.workloads[0].variants if each.variant.name == name)


def test_ratios_are_exact_in_virtual_time_live_and_by_replay() -> None:
    result = run(engines(), settings())
    assert result.ended_by == "done"
    (workload,) = result.workloads
    assert [each.variant.kind for each in workload.variants] == ["plain", "static", "static"]
    for each in workload.variants[1:]:
        fixed = each.variant.fixed
        assert fixed is not None
        expected = speed_of_perfect_drafts(fixed.draft_max, 32) * PASS_S
        ratio = each.ratio()
        assert ratio is not None
        assert ratio.count == 3
        assert (ratio.median, ratio.low, ratio.high) == pytest.approx((expected,) * 3)
        assert each.replayed is not None
        assert each.replayed.ratio == pytest.approx(expected)
        assert each.accept_share == 1.0
        assert each.num_equal == 3
        assert all(value == pytest.approx(expected) for value in each.by_task().values())
    plain = workload.variants[0].ratio()
    assert plain is not None
    assert (plain.median, plain.low, plain.high) == pytest.approx((1.0, 1.0, 1.0))


def test_replay_finds_the_best_static_setting() -> None:
    (workload,) = run(engines(), settings(coarse=False)).workloads
    by_length = {length: speed_of_perfect_drafts(length, 32) for length in (1, 2, 3, 4, 5, 6, 8, 12, 16)}
    best = max(by_length, key=lambda length: by_length[length])
    first = workload.variants[1]
    assert first.variant.fixed is not None
    assert first.variant.fixed.draft_max == best
    assert len(workload.static) == 9 * 3


def test_plain_is_compared_with_plain_so_that_noise_shows() -> None:
    """Passes take three times in turn, and a run's number of them is no multiple of three."""
    (workload,) = run(engines(pass_s=(1.0, 1.5, 2.0)), settings(tokens=32, laps=4, variants=("heuristic",))).workloads
    plain = workload.variants[0].ratio()
    assert plain is not None
    assert plain.low is not None
    assert plain.high is not None
    assert plain.low < 1.0 < plain.high
    assert plain.high - plain.low < 0.1


def test_every_variant_lies_between_plain_runs_and_keeps_its_session() -> None:
    result = run(engines(), settings(variants=("static", "accept-ratio"), workloads=FORCED_AND_FREE))
    for workload in result.workloads:
        assert [each.variant.kind for each in workload.variants] == ["plain", "static", "static", "policy"]
        for each in workload.variants:
            assert [pair.lap for pair in each.pairs] == [0, 1, 2]
            # Two prompts in turn.
            assert each.pairs[0].task == each.pairs[2].task != each.pairs[1].task
            assert all(pair.trial.plain_before == pytest.approx(1 / PASS_S) for pair in each.pairs)
        policy = workload.variants[-1]
        if workload.name == "new-code":
            # It lengthens its drafts while all are accepted, up to the 16 levels that it has.
            assert policy.pairs[0].rounds < 32 / 4


def test_useless_drafts_are_reported_as_a_loss() -> None:
    (workload,) = run(engines(draft=counting_model(step=9)), settings(num_static=1)).workloads
    static = workload.variants[1]
    ratio = static.ratio()
    assert ratio is not None
    assert static.accept_share == 0.0
    # The best of the worst: a level is paid in every round but the last.
    assert ratio.median == pytest.approx(32 * PASS_S / (32 * PASS_S + 31 * LEVEL_S))
    assert static.by_depth()[0] == (0, 93)


def test_prompts_whose_plain_output_loops_are_left_out_and_counted() -> None:
    loaded = engines(target=constant_model())
    result = run(loaded, settings(workloads=FORCED_AND_FREE))
    free, forced = result.workloads
    assert (free.looped, free.tried) == (12, 12)
    assert free.variants == []
    assert forced.looped == 0
    assert forced.variants[1].pairs
    assert result.measured


def seeds_of_runs(monkeypatch: pytest.MonkeyPatch, wanted: BenchSettings) -> list[list[int]]:
    """Run, and return the seeds of a workload's runs, a list for each lap of two variants between plain runs."""
    seeds: list[int] = []
    answer = Session.answer

    def noted(self: Session, task: Task, *args: Any, **options: Any) -> Answer:
        seeds.append(task.seed)
        return answer(self, task, *args, **options)

    monkeypatch.setattr(Session, "answer", noted)
    run(engines(), wanted)
    return [seeds[start : start + 5] for start in range(0, len(seeds), 5)]


def test_sampled_answers_are_drawn_anew_in_each_lap_and_alike_for_all_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    laps = seeds_of_runs(monkeypatch, settings(temperature=0.8, num_static=1))
    assert [len(lap) for lap in laps] == [5, 5, 5]
    assert all(len(set(lap)) == 1 for lap in laps)
    recorded = {0, 1}
    assert len({lap[0] for lap in laps} | recorded) == 5


@pytest.mark.parametrize("change", [{"temperature": 0.0}, {"temperature": 0.8, "workloads": ("structured-forced",)}])
def test_answers_without_a_choice_are_those_that_were_recorded(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    laps = seeds_of_runs(monkeypatch, settings(num_static=1, **change))
    assert laps == [[0] * 5, [1] * 5, [0] * 5]


def test_draws_that_loop_give_way_to_the_recorded_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.bench.runner.is_repetitive", lambda token_ids: True)
    laps = seeds_of_runs(monkeypatch, settings(temperature=0.8, num_static=1, laps=1))
    seeds = [seed for lap in laps for seed in lap]
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == [0] * 5


def test_mixed_is_one_session_through_all_others() -> None:
    result = run(engines(), settings(workloads=("mixed",), laps=2, prompts=1, tokens=17))
    (mixed,) = result.workloads
    static = mixed.variants[1]
    assert static.lap_tasks == 8
    assert len(static.pairs) == 16
    assert len(static.laps()) == 2
    assert len({pair.workload for pair in static.pairs}) == 8
    lap = static.laps()[0]
    pairs = static.pairs[:8]
    expected = sum(pair.tokens for pair in pairs) / sum(pair.tokens / pair.trial.speculative for pair in pairs)
    assert lap.per_second == pytest.approx(expected)
    assert lap.ratio == pytest.approx(expected * PASS_S)


def test_an_interrupt_keeps_the_pairs_that_are_done() -> None:
    rounds = 0

    def stopped() -> bool:
        nonlocal rounds
        rounds += 1
        return done > 0 and rounds > stop_at

    done, stop_at = 0, 0

    def progress(doing: str, done_s: float, total_s: float) -> None:
        nonlocal done, stop_at
        if "lap 2 of 3" in doing and not done:
            done, stop_at = 1, rounds + 100

    result = run(engines(), settings(), stopped=stopped, progress=progress)
    assert result.ended_by == "interrupt"
    (workload,) = result.workloads
    counts = [len(each.pairs) for each in workload.variants]
    assert all(1 <= count <= 2 for count in counts)
    assert 3 < sum(counts) < 6
    assert result.measured
    json.dumps(result.to_json())


def test_an_interrupt_while_prompts_are_looked_for_leaves_an_empty_report() -> None:
    result = run(engines(), settings(), stopped=lambda: True)
    assert result.ended_by == "interrupt"
    assert not result.measured
    json.dumps(result.to_json())


def test_a_time_limit_ends_after_whole_laps_of_every_workload() -> None:
    loaded = engines()
    start_s = loaded.clock.now_s()
    result = run(
        loaded,
        settings(workloads=FORCED_AND_FREE, laps=50),
        remaining_s=lambda: 5000.0 - (loaded.clock.now_s() - start_s),
    )
    assert result.ended_by == "time limit"
    counts = {len(each.pairs) for workload in result.workloads for each in workload.variants}
    assert max(counts) - min(counts) <= 1
    assert min(counts) > 1
    assert loaded.clock.now_s() - start_s <= 5000.0


def test_a_lap_that_does_not_fit_says_what_it_would_take() -> None:
    loaded = engines()
    left_s = 1000.0

    def progress(doing: str, done_s: float, total_s: float) -> None:
        nonlocal left_s
        if "settings chosen" in doing:
            left_s = 3.0

    result = run(loaded, settings(), remaining_s=lambda: left_s, progress=progress)
    assert result.ended_by == "time limit"
    assert not result.measured
    pair, speed = result.notes
    name, needed_s, rest = re.fullmatch(r"(.+): a pair takes (\d+) s, and (.+)", pair).groups()  # type: ignore[union-attr]
    assert (name, rest) == (result.workloads[0].name, "3 were left: with shorter answers it takes less")
    assert float(needed_s) > 3.0
    assert speed.startswith("plain decoding: 1 t/s, by the passes that were measured first, of 1 s each; ")
    # What replay says is all there is, and it is there.
    assert result.predicted
    assert all(each.replayed is not None for each in result.workloads[0].variants[1:])


@pytest.mark.parametrize("pass_s", [0.06, 0.2, 1.0])
def test_a_slow_machine_has_something_to_show_within_two_minutes(pass_s: float) -> None:
    """As ``bench --quick`` does it, with a draft model that takes a quarter of a pass."""
    loaded = engines(pass_s=(pass_s,), level_s=pass_s / 4)

    def flat(seconds: float) -> PassCost:
        return PassCost((WidthCost.of(1, [seconds]), WidthCost.of(64, [seconds])), long_context=1024)

    costs = CostProfile(flat(pass_s), flat(pass_s / 4))
    wanted = settings(workloads=QUICK_WORKLOADS, variants=("static", "auto"), tokens=256, prompts=3, num_static=1)
    start_s = loaded.clock.now_s()
    chosen = fit_settings(wanted, costs, 4096, 120.0)
    result = Runner(loaded, costs, chosen, remaining_s=lambda: 120.0 - (loaded.clock.now_s() - start_s)).run()
    assert loaded.clock.now_s() - start_s <= 120.0
    assert result.measured
    auto = [workload.best("auto") for workload in result.workloads if workload.measured]
    assert all(each is not None and each.num_equal == len(each.pairs) for each in auto)
    assert auto


def test_the_time_that_is_left_for_a_lap_goes_to_the_variants_that_are_most_missed() -> None:
    loaded = engines()
    left_s = 1000.0

    def progress(doing: str, done_s: float, total_s: float) -> None:
        nonlocal left_s
        if "settings chosen" in doing:
            # Three answers of 33 tokens, and a little.
            left_s = 3 * 33 * PASS_S * 1.2

    result = run(loaded, settings(variants=("static", "auto"), laps=1), remaining_s=lambda: left_s, progress=progress)
    ran = {each.variant.kind: len(each.pairs) for each in result.workloads[0].variants}
    assert ran == {"plain": 0, "static": 0, "auto": 1}
    assert result.ended_by == "time limit"
    (note,) = result.notes
    assert note.startswith("new-code: without plain, draft-max ")


def test_no_answer_goes_on_when_the_time_is_over() -> None:
    loaded = engines()
    start_s = loaded.clock.now_s()
    result = run(loaded, settings(), remaining_s=lambda: 10.0 - (loaded.clock.now_s() - start_s))
    assert result.ended_by == "time limit"
    assert not result.measured
    assert not result.predicted
    # Rounds in virtual time may be ahead of whoever reads them, but no further answer is begun.
    assert loaded.clock.now_s() - start_s <= 10.0 + 33 * PASS_S
    assert result.notes[-1].startswith("plain decoding: 1 t/s")


def unsteady_engines() -> Engines:
    """Return a target whose rows depend on how many are in the pass: its speculative texts differ from plain's."""
    counting, is_wide = counting_model(), False

    def unsteady(tokens: Sequence[int]) -> Float64Array:
        row = counting(tokens)
        return np.roll(row, 1) if is_wide and len(tokens) % 16 == 0 else row

    class Unsteady(ScriptedEngine):
        def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
            nonlocal is_wide
            is_wide = any(len(step.outputs) > 1 for step in steps)
            return super().forward(steps)

    loaded = engines()
    assert isinstance(loaded.clock, VirtualClock)
    target = Unsteady(unsteady, bytes_vocabulary(), clock=loaded.clock)
    return replace(loaded, target=PromptKeeper(target, loaded.clock))


def test_texts_that_differ_from_plain_are_judged() -> None:
    result = run(unsteady_engines(), settings(laps=1))
    plain, *others = result.workloads[0].variants
    assert plain.num_equal == len(plain.pairs) == 1
    for each in others:
        assert each.num_equal == 0
        assert [judgement.verdict for judgement in each.judgements] == ["bug"]


def test_pairs_are_reported_whatever_becomes_of_explaining_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise EngineError("no memory is left")

    monkeypatch.setattr("paceline.lab.bench.runner.explain", fail)
    result = run(unsteady_engines(), settings(laps=1))
    assert result.notes == ["new-code: a difference is not judged, as EngineError: no memory is left"] * 2
    for each in result.workloads[0].variants:
        assert len(each.pairs) == 1
        assert [judgement.verdict for judgement in each.judgements] == ["not judged"] * (each.variant.kind != "plain")


def test_the_engines_stay_open_for_their_owner() -> None:
    loaded = engines()
    run(loaded, settings())
    assert loaded.target.open() >= 0
    assert loaded.draft is not None
    assert loaded.draft.open() >= 0


def test_the_json_holds_every_pair_and_what_follows_from_it() -> None:
    facts = json.loads(json.dumps(run(engines(), settings()).to_json()))
    assert facts["format"] == "paceline-bench"
    (workload,) = facts["workloads"]
    assert len(workload["static_by_replay"]) == 12
    for variant in workload["variants"]:
        assert len(variant["pairs"]) == 3
        assert variant["ratio"]["count"] == 3
        for pair in variant["pairs"]:
            assert pair["trial"]["plain_before"] == pytest.approx(1 / PASS_S)
            assert pair["tokens"] == 32


def test_progress_ends_where_it_was_forecast_to() -> None:
    told: list[tuple[str, float, float]] = []
    run(engines(), settings(), progress=lambda *news: told.append(news))
    dones = [done_s for _, done_s, _ in told]
    assert dones == sorted(dones)
    assert 0.9 * told[-1][2] <= dones[-1] <= told[-1][2] * 1.001


def test_sets_of_drafters_and_the_number_of_static_settings() -> None:
    assert drafter_sets(["suffix"]) == [("suffix",)]
    assert drafter_sets(["draft", "suffix"]) == [("draft",), ("suffix",), ("draft", "suffix")]
    variants = list(static_variants(["draft", "suffix", "lookup"]))
    assert len(variants) == 9 * 3 * 4
    assert len({variant.name for variant in variants}) == len(variants)


def test_replays_stand_beside_each_other_on_the_same_recordings() -> None:
    loaded = engines()
    with Session(loaded, ["draft"], NO_SPECULATION) as session:
        recording = record(session, [1, 2, 3], depth=8, temperature=0.0, max_tokens=33)
    variants = [variant for variant in static_variants(["draft"]) if variant.fixed and variant.fixed.p_min == 0.0]
    for each in replay_all([recording], variants, profile()):
        assert each.variant.fixed is not None
        length = min(each.variant.fixed.draft_max, 8)
        assert each.per_second == pytest.approx(speed_of_perfect_drafts(length, 32))


@pytest.mark.parametrize("change", [{"laps": 0}, {"tokens": 1}, {"prompts": 0}])
def test_settings_out_of_range_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(InputError, match="the least is"):
        settings(**change)


def test_a_planning_policy_is_reported_after_its_last_pair() -> None:
    (workload,) = run(engines(), settings(variants=("auto",), workloads=("structured-forced",))).workloads
    auto = workload.variants[-1]
    assert auto.variant.kind == "auto"
    assert auto.snapshot is not None
    assert len(auto.snapshot["ledger"]) >= auto.pairs[0].rounds
    assert auto.replayed is not None
    predicted, accepted, count = auto.snapshot["calibration"]["draft"][0]
    assert 0 <= predicted <= 1
    assert 0 <= accepted <= 1
    assert count > 0
    assert workload.variants[0].snapshot is None
    json.dumps(auto.snapshot)


def test_auto_starts_with_what_was_learned_elsewhere() -> None:
    learned = Learned({"draft": DrafterState.new("draft", is_model=True)})
    for given, names in ((learned, ["draft"]), (None, [])):
        result = run(engines(), settings(variants=("auto",)), learned=given)
        auto = result.workloads[0].variants[-1]
        assert auto.variant.kind == "auto"
        assert auto.snapshot is not None
        assert auto.snapshot["remembered"] == names
        assert ("auto starts with what earlier runs had learned of draft" in result.notes) == bool(names)


def test_what_replay_does_not_know_of_long_contexts_is_said() -> None:
    measured = profile()
    short = replace(measured, target=replace(measured.target, long_context=None))
    result = Runner(engines(), short, settings()).run()
    assert result.notes == ["replays leave out what a longer context adds to passes: there was no time to measure that"]


@pytest.mark.parametrize("passes", [3, 500])
def test_an_engine_that_fails_leaves_a_report_if_there_is_anything_in_it(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = engines()
    forward, made = loaded.target.forward, 0

    def failing(steps: Any) -> Any:
        nonlocal made
        made += 1
        if made > passes:
            raise EngineError("the device is gone")
        return forward(steps)

    monkeypatch.setattr(loaded.target, "forward", failing)
    if passes == 3:
        with pytest.raises(EngineError):
            run(loaded, settings())
        return
    result = run(loaded, settings())
    assert result.ended_by == "error"
    assert result.notes == ["EngineError: the device is gone"]
    assert result.measured


def test_what_a_policy_does_between_rounds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = engines()
    assert isinstance(loaded.clock, VirtualClock)
    clock = loaded.clock

    class Pondering:
        def __init__(self, inner: FixedPolicy) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def observe(self, record: Any) -> None:
            clock.advance(0.5)

    def build(name: str, *, fixed: FixedPolicy, costs: Any, learned: Any) -> Any:
        return Pondering(fixed) if fixed.draft_max else fixed

    monkeypatch.setattr("paceline.lab.variants.build_policy", build)
    (workload,) = run(loaded, settings(num_static=1)).workloads
    plain, static = workload.variants
    fixed, ratio = static.variant.fixed, static.ratio()
    assert fixed is not None
    assert ratio is not None
    rounds = static.pairs[0].rounds
    # After the prompt's round and all others but the last.
    seconds = 32 / speed_of_perfect_drafts(fixed.draft_max, 32) + 0.5 * rounds
    assert ratio.median == pytest.approx(32 * PASS_S / seconds)
    assert static.own_share == pytest.approx(0.5 * rounds / seconds)
    assert plain.own_share == pytest.approx(0.0)


class SimulatedServers:
    """Servers that take a given time for an answer of their own, and note what they were asked."""

    def __init__(self, seconds: Mapping[str, float], token_ids: Sequence[int] = range(33)) -> None:
        self._seconds = seconds
        self._token_ids = token_ids
        self.asked: list[tuple[str, str]] = []

    def contestant(self, variant: Variant) -> Contestant:
        servers = self

        class Simulated:
            def answer(self, task: Task, temperature: float, stopped: Stop) -> Answer:
                servers.asked.append((variant.name, task.workload))
                named = (seconds for name, seconds in servers._seconds.items() if variant.name.endswith(name))
                return Answer(servers._token_ids, next(named, 64.0), 16, 32, 16)

        return Simulated()


def test_a_server_runs_its_best_settings_between_the_same_plain_runs() -> None:
    servers = SimulatedServers({"ngram-mod": 16.0, "plain": 32.0, "draft-max 5, p-min 0.6": 20.0})
    result = run(engines(), settings(workloads=FORCED_AND_FREE), servers=servers)
    free, forced = result.workloads
    ran = [each for each in free.variants if each.variant.kind == "server"]
    assert [each.variant.name for each in ran] == [
        "llama-server, plain",
        "llama-server, ngram-mod",
        "llama-server, draft-max 5, p-min 0.6",
        "llama-server, draft-max 5, p-min 0.6, ngram-mod",
    ]
    ratios = [each.ratio() for each in ran]
    assert [ratio.median for ratio in ratios if ratio] == pytest.approx([1.0, 2.0, 1.6, 2.0])
    assert all(len(each.pairs) == 3 and each.own_share is None and not each.judgements for each in ran)
    assert ran[0].acceptance_length == 2.0
    # Every setting was tried once, on the first prompt only.
    assert len([name for name, _ in servers.asked if name == "llama-server, ngram-cache"]) == 1
    assert {workload for _, workload in servers.asked} == {"new-code"}
    assert not [each for each in forced.variants if each.variant.kind == "server"]
    assert result.notes == ["structured-forced: no server ran, as none can be made to follow a text"]
    json.dumps(result.to_json())
    assert "llama-server, ngram-mod" in render_page(build_report(result))


@pytest.mark.parametrize("token_ids", [(65,) * 33, range(3)])
def test_a_servers_own_text_that_loops_or_ends_at_once_tells_nothing(token_ids: Sequence[int]) -> None:
    (workload,) = run(engines(), settings(), servers=SimulatedServers({}, token_ids)).workloads
    for each in workload.variants:
        if each.variant.kind == "server":
            assert (len(each.pairs), each.left_out) == (0, 3)
        else:
            assert (len(each.pairs), each.left_out) == (3, 0)


class PickyServers(SimulatedServers):
    """Servers that fail under some settings.

    Args:
        seconds: of an answer, by what a setting's name ends in.
        fails: says which settings, by their names.
    """

    def __init__(self, seconds: Mapping[str, float], fails: Callable[[str], bool]) -> None:
        super().__init__(seconds)
        self._fails = fails

    def contestant(self, variant: Variant) -> Contestant:
        if not self._fails(variant.name):
            return super().contestant(variant)

        class Failing:
            def answer(self, task: Task, temperature: float, stopped: Stop) -> Answer:
                raise EngineError("it cannot")

        return Failing()


def test_a_setting_that_a_server_cannot_run_is_left_out() -> None:
    servers = PickyServers({"ngram-mod": 16.0}, lambda name: "ngram-cache" in name)
    result = run(engines(), settings(), servers=servers)
    assert result.ended_by == "done"
    assert result.notes == ["new-code: left out, as it cannot"]
    assert named(result, "llama-server, ngram-mod").pairs


def test_a_server_that_runs_none_of_the_settings_is_compared_without_drafts() -> None:
    servers = PickyServers({"plain": 32.0}, lambda name: not name.endswith("plain"))
    result = run(engines(), settings(), servers=servers)
    assert result.ended_by == "done"
    assert [each.variant.name for each in result.workloads[0].variants if each.variant.kind == "server"] == [
        "llama-server, plain"
    ]
