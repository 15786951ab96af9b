"""Whether attention is fused, by what plain rounds cost, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.core.clock import VirtualClock
from paceline.engines.loading import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.planning.costs.attention import MAX_S, like_target, measure_attention

Costs = Callable[[bool, int, int, float], float]
"""Seconds of a pass by fused, rows, context and the time."""


class EitherEngine(ScriptedEngine):
    """Passes take other times with fused attention than without."""

    def __init__(self, costs: Costs, context_length: int = 4096, max_sequences: int = 1) -> None:
        self.fused_attention = False
        self.changes = 0
        clock = VirtualClock()
        super().__init__(
            random_model(20, seed=1, order=1),
            ScriptedVocabulary.of_size(20),
            context_length=context_length,
            max_sequences=max_sequences,
            cost=lambda rows, context: costs(self.fused_attention, rows, context, clock.now_s()),
            clock=clock,
        )

    def fuse_attention(self, fused: bool) -> None:
        assert not self._sequences, "what is cached would be lost"
        self.fused_attention = fused
        self.changes += 1


def constant(ratio: float, row_s: float = 0.002) -> Costs:
    return lambda fused, rows, context, now_s: row_s * (0.5 + 0.5 * rows) * (ratio if fused else 1.0)


@pytest.mark.parametrize(("ratio", "fused"), [(0.93, True), (0.975, True), (0.985, False), (1.0, False), (1.1, False)])
def test_attention_is_fused_where_plain_rounds_gain_by_it(ratio: float, fused: bool) -> None:
    engine = EitherEngine(constant(ratio))
    assert measure_attention(engine, clock=engine.clock) is fused
    assert not engine._sequences


@pytest.mark.parametrize(("ratio", "fused"), [(0.985, True), (1.0, True), (1.015, True), (1.03, False)])
def test_attention_of_several_requests_is_fused_unless_plain_rounds_lose_by_it(ratio: float, fused: bool) -> None:
    engine = EitherEngine(constant(ratio), max_sequences=4)
    assert measure_attention(engine, clock=engine.clock) is fused


def test_long_contexts_count_as_much_as_short_ones() -> None:
    def costs(fused: bool, rows: int, context: int, now_s: float) -> float:
        return 1e-4 + 1e-7 * context * (3.0 if fused else 1.0) - (1e-5 if fused else 0.0)

    engine = EitherEngine(costs)
    assert measure_attention(engine, clock=engine.clock) is False
    short = EitherEngine(costs, context_length=256)
    assert measure_attention(short, clock=short.clock) is True, "there is no long context to lose in"


def test_wide_passes_do_not_count() -> None:
    engine = EitherEngine(lambda fused, rows, context, now_s: 1e-3 * (0.9 if rows == 1 else 3.0) if fused else 1e-3)
    assert measure_attention(engine, clock=engine.clock) is True


@pytest.mark.parametrize("per_second", [0.2, -0.2])
def test_a_machine_that_changes_meanwhile_decides_nothing(per_second: float) -> None:
    for ratio in (0.97, 1.0):
        engine = EitherEngine(drifting(constant(ratio), per_second))
        assert measure_attention(engine, clock=engine.clock) is (ratio < 1.0)


def drifting(costs: Costs, per_second: float) -> Costs:
    return lambda fused, rows, context, now_s: costs(fused, rows, context, now_s) * (1.0 + per_second * now_s)


@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.02, 0.1])
def test_it_takes_two_seconds_and_what_the_first_passes_take(row_s: float) -> None:
    engine = EitherEngine(constant(0.9, row_s))
    assert measure_attention(engine, clock=engine.clock) is True
    filling_s = 4 * row_s * (0.5 + 0.5 * 32)
    assert engine.clock.now_s() <= MAX_S * 1.05 + 4 * row_s * 3 + filling_s


def test_progress_is_told_to_its_end() -> None:
    told: list[float] = []
    engine = EitherEngine(constant(0.9))
    measure_attention(engine, clock=engine.clock, report=told.append)
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_a_draft_takes_its_targets_attention() -> None:
    target = ModelOptions(embedded_target(), flash_attention=True)
    draft = ModelOptions(embedded_draft())
    assert like_target(draft, target).flash_attention is True
    assert like_target(ModelOptions(embedded_draft(), flash_attention=False), target).flash_attention is False
    assert like_target(draft, ModelOptions(embedded_target(), exact=True)).flash_attention is None
