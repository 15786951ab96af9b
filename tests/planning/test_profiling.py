"""Measuring costs on engines whose costs are known: the scripted engine, in virtual time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.core.clock import VirtualClock
from paceline.core.errors import CapabilityError, ContextLengthError, EngineError, InputError, NoRoomError
from paceline.engines.base import EngineCapabilities, Step
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput, ScriptedVocabulary, random_model
from paceline.planning.costs.meter import ProfilingBudget
from paceline.planning.costs.profile import CostProfile
from paceline.planning.costs.profiling import TARGET_WIDTHS, measure_profile

UNLIMITED = ProfilingBudget(max_s=1e6, max_passes=None)
VOCABULARY = 16

Curve = Callable[[int, int], float]


def staircase(rows: int, context: int) -> float:
    """Cliffs both ways: odd widths are dear, every eighth row starts a new stair."""
    return 0.010 + 0.004 * ((rows - 1) // 8) + 0.003 * (rows % 2) + 1e-6 * context


def sloped(rows: int, context: int) -> float:
    return 0.001 * rows + 2e-6 * context + 3e-7 * context * rows


def engine_of(curve: Curve, clock: VirtualClock | None = None, **options: int | bool) -> ScriptedEngine:
    model = random_model(VOCABULARY, seed=5)
    return ScriptedEngine(model, ScriptedVocabulary.of_size(VOCABULARY), cost=curve, clock=clock, **options)  # type: ignore[arg-type]


class Recorded(ScriptedEngine):
    """Remembers every pass: rows, rows read, tokens in the cache before."""

    def __init__(self, curve: Curve, clock: VirtualClock | None = None, **options: int | bool) -> None:
        self.passes: list[tuple[int, int, int]] = []
        self.fed: list[int] = []
        self.committed: list[tuple[int, int]] = []
        super().__init__(
            random_model(VOCABULARY, seed=5),
            ScriptedVocabulary.of_size(VOCABULARY, end_ids=(3,)),
            cost=curve,
            clock=clock,
            **options,  # type: ignore[arg-type]
        )

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        before = sum(self.length(step.sequence) for step in steps)
        output = super().forward(steps)
        self.passes.append((sum(len(s.token_ids) for s in steps), sum(len(s.outputs) for s in steps), before))
        self.fed += [token_id for step in steps for token_id in step.token_ids]
        return output

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        self.committed.append((self.passes[-1][0], len(path)))
        super().commit(sequence, path)

    @property
    def open_sequences(self) -> int:
        return len(self._sequences)


def test_any_curve_comes_back_exactly() -> None:
    engine = engine_of(staircase)
    cost = measure_profile(engine, budget=UNLIMITED, clock=engine.clock)
    for rows in TARGET_WIDTHS:
        assert cost.target.is_measured(rows)
        for context in (0, 32, 500, 4000):
            assert cost.round_s(rows, context) == pytest.approx(staircase(rows, context), rel=1e-6)
    for width in cost.target.widths:
        assert width.low_s == pytest.approx(width.high_s)


def test_random_curves_come_back_exactly() -> None:
    for seed in range(5):
        steps = np.random.default_rng(seed).uniform(0.001, 0.1, size=600)
        engine = engine_of(lambda rows, context, steps=steps: float(steps[rows]))  # type: ignore[misc]
        cost = measure_profile(engine, budget=UNLIMITED, clock=engine.clock, seed=seed)
        assert [cost.round_s(rows) for rows in TARGET_WIDTHS] == pytest.approx([steps[rows] for rows in TARGET_WIDTHS])
        assert (cost.target.token_s, cost.target.token_row_s) == pytest.approx((0, 0), abs=1e-12)


def test_the_context_slope_is_split_into_its_fixed_part_and_that_of_every_row() -> None:
    engine = engine_of(sloped)
    cost = measure_profile(engine, budget=UNLIMITED, clock=engine.clock)
    assert cost.target.token_s == pytest.approx(2e-6)
    assert cost.target.token_row_s == pytest.approx(3e-7)
    assert cost.target.long_context == 1024
    assert cost.round_s(5, context=3000) == pytest.approx(sloped(5, 3000))


def test_an_engine_that_copies_cells_has_a_long_context_however_slowly_it_reads() -> None:
    def slow(rows: int, context: int) -> float:
        return 0.2 + 0.02 * rows + 1e-5 * context

    class Copying(Recorded):
        def lengthen(self, sequence: int, length: int) -> bool:
            committed = self._sequences[sequence].committed
            committed += committed[:1] * (length - len(committed))
            return True

    for kind, long_context in ((Copying, 1024), (Recorded, None)):
        engine = kind(slow)
        cost = measure_profile(engine, budget=ProfilingBudget(7.0, 40), clock=engine.clock)
        assert cost.target.long_context == long_context
        assert cost.took_s <= 7.0 * 1.1
    engine = Copying(slow)
    target = measure_profile(engine, budget=ProfilingBudget(7.0, 40), clock=engine.clock).target
    assert target.seconds(1, 2000) == pytest.approx(slow(1, 2000))


@pytest.mark.parametrize("budget", [ProfilingBudget(5.0, None), ProfilingBudget(5.0, 40, 0.0)])
@pytest.mark.parametrize("slow", ["from the long context on", "up to its end"])
def test_a_machine_that_changes_meanwhile_is_not_taken_for_the_context(slow: str, budget: ProfilingBudget) -> None:
    def restless(rows: int, context: int) -> float:
        is_long, is_later = context > 64, any(before > 64 for _, _, before in engine.passes)
        is_slow = is_long or (is_later if slow == "from the long context on" else not is_later)
        return sloped(rows, context) * (1.3 if is_slow else 1.0)

    engine = Recorded(restless)
    draft = Recorded(lambda rows, context: 1e-4, engine.clock)
    cost = measure_profile(engine, draft, budget=budget, clock=engine.clock)
    assert cost.target.token_s == pytest.approx(1.3 * 2e-6)
    assert cost.target.token_row_s == pytest.approx(1.3 * 3e-7)


def test_target_and_draft_share_a_clock_and_keep_their_own_costs() -> None:
    clock = VirtualClock()
    target = engine_of(staircase, clock)
    draft = engine_of(sloped, clock)
    cost = measure_profile(target, draft, budget=UNLIMITED, clock=clock)
    assert cost.round_s(3, 32) == pytest.approx(staircase(3, 32))
    for rows in (1, 2, 16, 256):
        assert cost.draft_s(rows) == pytest.approx(sloped(rows, 0))
    assert cost.draft_s(1, 2000) == pytest.approx(sloped(1, 2000), rel=1e-6)


def test_several_requests_in_a_round() -> None:
    class Pooled(Recorded):
        def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
            self.clock.advance(0.002 * (len(steps) - 1))
            return super().forward(steps)

    pooled = Pooled(staircase, max_sequences=8)
    cost = measure_profile(pooled, budget=UNLIMITED, clock=pooled.clock)
    assert cost.request_s == pytest.approx(0.002)
    assert cost.round_s(4, 100, requests=4) == pytest.approx(staircase(4, 100) + 3 * 0.002)
    alone = engine_of(staircase, max_sequences=1)
    assert measure_profile(alone, budget=UNLIMITED, clock=alone.clock).request_s is None


def test_sampling_costs_are_measured_on_real_rows() -> None:
    class Ticking(VirtualClock):
        """Every look at it takes a little, so that whatever is timed takes as much."""

        def now_s(self) -> float:
            self.advance(1e-6)
            return super().now_s()

    clock = Ticking()
    engine = engine_of(staircase, clock)
    assert measure_profile(engine, budget=UNLIMITED, clock=clock).sampling_row_s == pytest.approx(1e-6)


def test_passes_are_those_of_rounds() -> None:
    """Every row is read, a part of the path is committed, and the context is the same before each pass."""
    engine = Recorded(staircase, max_sequences=1)
    measure_profile(engine, clock=engine.clock, widths=(1, 2, 4, 8))
    rounds = [(rows, read, before) for rows, read, before in engine.passes if before >= 32]
    assert {before for _, _, before in rounds} == {32, 32 + 512, 1024}
    assert all(read == rows for rows, read, before in rounds if rows in (1, 2, 4, 8))
    kept = {rows: kept for rows, kept in engine.committed if rows in (2, 4, 8)}
    assert kept == {2: 1, 4: 2, 8: 4}
    assert 3 not in engine.fed  # the end of an answer is no part of one
    assert len(set(engine.fed)) == VOCABULARY - 1


def test_draft_passes_read_one_row_and_keep_all() -> None:
    clock = VirtualClock()
    target = engine_of(staircase, clock)
    draft = Recorded(sloped, clock)
    measure_profile(target, draft, budget=UNLIMITED, clock=clock)
    assert {read for _, read, _ in draft.passes} == {1}
    assert all(rows == kept for rows, kept in draft.committed)
    assert {1, 2, 16, 64} <= {rows for rows, *_ in draft.passes}


def test_a_model_can_draft_for_itself() -> None:
    engine = engine_of(staircase)
    cost = measure_profile(engine, engine, budget=UNLIMITED, clock=engine.clock)
    assert cost.draft is not None
    assert cost.round_s(12) == pytest.approx(staircase(12, 0), rel=0.01)
    assert cost.draft_s(256) == pytest.approx(staircase(256, 0), rel=0.01)


def test_the_engine_is_left_as_it_was() -> None:
    engine, draft = Recorded(staircase, max_sequences=3), Recorded(sloped)
    mine = engine.open()
    engine.forward([Step(mine, [1, 2], [-1, 0], ())])
    engine.commit(mine, [0, 1])
    measure_profile(engine, draft, clock=engine.clock)
    assert (engine.open_sequences, draft.open_sequences) == (1, 0)
    assert engine.length(mine) == 2


@pytest.mark.parametrize("stop_at", [1, 2, 3, 10, 20])
@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineError])
def test_an_interrupt_or_error_leaves_no_sequence_behind(stop_at: int, error: type[BaseException]) -> None:
    class Failing(Recorded):
        def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
            if len(self.passes) == stop_at:
                raise error("stopped")
            return super().forward(steps)

    engine, draft = Failing(staircase, max_sequences=8), Recorded(sloped)
    with pytest.raises(error, match="stopped"):
        measure_profile(engine, draft, clock=engine.clock)
    assert (engine.open_sequences, draft.open_sequences) == (0, 0)


def test_the_first_load_takes_forty_passes_at_most() -> None:
    for sequences in (1, 8):
        clock = VirtualClock()
        target = Recorded(staircase, clock, max_sequences=sequences)
        draft = Recorded(lambda rows, context: 1e-4, clock)
        cost = measure_profile(target, draft, clock=clock)
        assert len(target.passes) + len(draft.passes) == cost.num_passes <= 40
        assert cost.num_passes >= 38
        samples = {width.rows: width.samples for width in cost.target.widths}
        assert {1, 2, 3, 4, 6, 8, 12} <= set(samples)
        assert samples[1] == max(samples.values()) >= 3
        assert cost.draft is not None
        assert cost.draft.long_context is not None
        assert cost.draft.is_measured(1)
        assert cost.target.long_context is not None


def test_a_longer_budget_measures_the_context_of_a_large_model() -> None:
    """Hundreds of rows that fill a cache take seconds; the narrow passes after them are not taken to do so as well."""

    def large(rows: int, context: int) -> float:
        return 0.06 + 0.0125 * rows + 8e-6 * rows * context

    clock = VirtualClock()
    target = Recorded(large, clock)
    draft = Recorded(lambda rows, context: 1e-3, clock)
    cost = measure_profile(target, draft, budget=ProfilingBudget(60.0, None), clock=clock)
    assert cost.target.long_context is not None
    assert cost.target.token_row_s == pytest.approx(8e-6)


def test_passes_of_a_tiny_model_are_measured_for_a_quarter_of_a_second() -> None:
    clock = VirtualClock()
    target = Recorded(lambda rows, context: 5e-4 + 1e-4 * rows, clock)
    draft = Recorded(lambda rows, context: 3e-4, clock)
    cost = measure_profile(target, draft, clock=clock)
    assert cost.num_passes > 100
    assert cost.took_s < 0.3
    samples = {width.rows: width.samples for width in cost.target.widths}
    assert min(samples[rows] for rows in (1, 2, 3, 4, 6, 8)) >= 5


def test_it_stops_by_time_with_what_tells_most_measured() -> None:
    """A model of a second a pass has room for a few; the first pass, which reads it from the disk, is not counted."""
    engine = Recorded(lambda rows, context: 60.0 if len(engine.passes) < 1 else 1.0 + 0.01 * rows)
    cost = measure_profile(engine, clock=engine.clock)
    assert 7 < cost.took_s < 10
    assert {1, 2, 4, 8} <= {width.rows for width in cost.target.widths}
    assert cost.target.long_context is None
    assert cost.round_s(8) == pytest.approx(1.08)


def test_a_budget_of_nothing_still_measures_one_row() -> None:
    clock = VirtualClock()
    target, draft = engine_of(staircase, clock), engine_of(sloped, clock)
    for budget in (ProfilingBudget(max_s=1e-9), ProfilingBudget(max_passes=1, least_s=0.0)):
        cost = measure_profile(target, draft, budget=budget, clock=clock)
        assert len(cost.target.widths) <= 2
        assert cost.num_passes <= 6
        assert cost.round_s(1) == pytest.approx(staircase(1, 0), rel=0.01)
        assert cost.draft_s(1) == pytest.approx(sloped(1, 0), rel=0.1)


def test_widths_are_shuffled_and_interleaved() -> None:
    orders = []
    for seed in (1, 2):
        engine = Recorded(staircase)
        measure_profile(engine, clock=engine.clock, seed=seed, budget=ProfilingBudget(max_passes=None))
        orders.append([rows for rows, _, before in engine.passes if before == 32 and rows <= 64])
    assert orders[0] != orders[1]
    for order in orders:
        changes = sum(a != b for a, b in itertools.pairwise(order))
        assert changes > 0.9 * len(order)
        # A machine that becomes slower half-way must not make one width look dear: each is measured in both halves.
        half = len(order) // 2
        assert set(order[:half]) == set(order[half:])


def test_an_outlier_changes_no_median() -> None:
    engine = Recorded(lambda rows, context: staircase(rows, 0) * (50 if len(engine.passes) % 17 == 5 else 1))
    cost = measure_profile(engine, budget=ProfilingBudget(max_s=1e6, max_passes=None), clock=engine.clock)
    assert [cost.round_s(rows) for rows in TARGET_WIDTHS] == pytest.approx([staircase(r, 0) for r in TARGET_WIDTHS])


def test_what_looks_like_a_cliff_is_measured_until_it_can_be_believed() -> None:
    """The first pass of a width is disturbed, which in forty passes would make the widths around look like cliffs."""
    for rows in (2, 3, 6, 12):
        disturbed: list[int] = []

        def curve(width: int, context: int, rows: int = rows, disturbed: list[int] = disturbed) -> float:
            first = width == rows and not disturbed
            disturbed += [width] * first
            return (0.010 + 0.001 * width) * (30 if first else 1)

        engine = engine_of(curve, max_sequences=1)
        cost = measure_profile(engine, clock=engine.clock)
        samples = {width.rows: width.samples for width in cost.target.widths}
        assert disturbed
        assert samples[rows] >= 3
        assert cost.round_s(rows) == pytest.approx(0.010 + 0.001 * rows)


def test_small_engines_are_measured_within_their_limits() -> None:
    engine = Recorded(staircase, max_rows=6, max_outputs=4, context_length=40, trees=False)
    cost = measure_profile(engine, budget=UNLIMITED, clock=engine.clock)
    assert [width.rows for width in cost.target.widths] == [1, 2, 3, 4]
    assert cost.target.context == 32
    tiny = engine_of(staircase, context_length=4)
    assert [w.rows for w in measure_profile(tiny, clock=tiny.clock).target.widths] == [1, 2]
    with pytest.raises(ContextLengthError, match="context of 3 tokens"):
        measure_profile(engine_of(staircase, context_length=3))


def test_widths_without_room_are_left_out() -> None:
    engine = Recorded(staircase, cells=40, max_sequences=4)
    cost = measure_profile(engine, budget=UNLIMITED, clock=engine.clock)
    assert [width.rows for width in cost.target.widths] == [1, 2, 3, 4, 5, 6, 7, 8]
    full = Recorded(staircase, cells=1)
    with pytest.raises(NoRoomError):
        measure_profile(full, clock=full.clock)
    assert full.open_sequences == 0


class Recurrent(Recorded):
    """Takes back rows of the latest pass only, and few of them."""

    def __init__(self, curve: Curve, rollback: int, **options: int | bool) -> None:
        super().__init__(curve, None, **options)
        limited = dataclasses.replace(self.capabilities, max_rollback=rollback, trees=False)
        self.capabilities: EngineCapabilities = limited

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        if self.passes[-1][0] - len(path) > self.capabilities.max_rollback:  # type: ignore[operator]
            raise CapabilityError("too far back")
        super().commit(sequence, path)

    def trim(self, sequence: int, length: int) -> None:
        raise CapabilityError("no way back")


@pytest.mark.parametrize("rollback", [0, 3])
def test_engines_that_cannot_take_tokens_back(rollback: int) -> None:
    engine = Recurrent(lambda rows, context: staircase(rows, 0), rollback, context_length=300, max_sequences=4)
    cost = measure_profile(engine, budget=UNLIMITED, clock=engine.clock)
    assert [cost.round_s(rows) for rows in TARGET_WIDTHS] == pytest.approx([staircase(r, 0) for r in TARGET_WIDTHS])
    assert engine.open_sequences == 0
    assert max(before for *_, before in engine.passes) < 300


def test_costs_of_nothing_are_above_nothing() -> None:
    engine = engine_of(lambda rows, context: 0.0)
    assert measure_profile(engine, budget=ProfilingBudget(max_s=1.0), clock=engine.clock).round_s(5) > 0


def test_progress_runs_from_nothing_to_all() -> None:
    engine = engine_of(staircase)
    seen: list[float] = []
    measure_profile(engine, clock=engine.clock, report=seen.append)
    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.1
    assert seen[-1] == 1.0
    assert len(seen) > 30


def test_widths_can_be_given_and_one_row_is_always_among_them() -> None:
    engine = engine_of(staircase)
    cost = measure_profile(engine, budget=UNLIMITED, clock=engine.clock, widths=(7, 3, 7, 100_000))
    assert [width.rows for width in cost.target.widths] == [1, 3, 7]


def test_bad_input_is_one_clear_line() -> None:
    engine = engine_of(staircase)
    with pytest.raises(InputError, match="0 rows cannot be measured"):
        measure_profile(engine, widths=(1, 0))
    for budget in ({"max_s": 0.0}, {"max_s": float("nan")}, {"max_passes": 0}, {"least_s": -1.0}):
        with pytest.raises(InputError, match="to measure"):
            ProfilingBudget(**budget)


def test_an_engine_without_a_spare_sequence_says_so() -> None:
    engine = Recorded(staircase, max_sequences=1)
    engine.open()
    with pytest.raises(CapabilityError, match="sequences are open"):
        measure_profile(engine, clock=engine.clock)
    assert engine.open_sequences == 1


def test_broken_models_are_reported_as_such() -> None:
    def broken(tokens: Sequence[int]) -> Float64Array:
        return np.full(VOCABULARY, np.nan)

    engine = ScriptedEngine(broken, ScriptedVocabulary.of_size(VOCABULARY))
    with pytest.raises(EngineError):
        measure_profile(engine, clock=engine.clock)


def test_the_result_is_a_profile_that_can_be_stored() -> None:
    clock = VirtualClock()
    cost = measure_profile(engine_of(staircase, clock), engine_of(sloped, clock), clock=clock)
    assert CostProfile.from_json(cost.to_json()) == cost


class Graphs(ScriptedEngine):
    """Takes longer for a pass of another width than the one before, and records in the second of a width."""

    CHANGE_S = (0.002, 0.0005)

    def __init__(self, clock: VirtualClock) -> None:
        self._latest, self._repeats = 0, 0
        super().__init__(
            random_model(VOCABULARY, seed=5), ScriptedVocabulary.of_size(VOCABULARY), cost=self._seconds, clock=clock
        )

    def _seconds(self, rows: int, context: int) -> float:
        self._repeats = self._repeats + 1 if rows == self._latest else 0
        self._latest = rows
        return staircase(rows, context) + (self.CHANGE_S[self._repeats] if self._repeats < len(self.CHANGE_S) else 0.0)


@pytest.mark.parametrize("budget", [UNLIMITED, ProfilingBudget()], ids=["unlimited", "first load"])
def test_what_a_change_of_width_costs_is_told_from_what_passes_cost(budget: ProfilingBudget) -> None:
    engine = Graphs(VirtualClock())
    cost = measure_profile(engine, budget=budget, clock=engine.clock)
    assert cost.change_s == pytest.approx(0.002, rel=0.02)
    for width in cost.target.widths:
        assert cost.round_s(width.rows, 32) == pytest.approx(staircase(width.rows, 32), rel=0.02)
    assert cost.target.token_s == pytest.approx(1e-6, rel=0.5)


def test_an_engine_that_does_not_mind_changes_has_none() -> None:
    noise = np.random.default_rng(3)
    engine = engine_of(lambda rows, context: staircase(rows, context) * noise.uniform(0.97, 1.03))
    assert measure_profile(engine, budget=UNLIMITED, clock=engine.clock).change_s == 0.0


def test_a_machine_that_becomes_slower_is_no_change_of_width() -> None:
    passes = itertools.count()
    engine = engine_of(lambda rows, context: staircase(rows, context) * (1.0 if next(passes) < 12 else 1.3))
    assert measure_profile(engine, budget=UNLIMITED, clock=engine.clock).change_s == 0.0
