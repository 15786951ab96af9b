"""Whether attention is fused, by what plain rounds cost: in virtual time, and on a real file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import EngineError
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.loading import ModelOptions, open_engine
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.planning.costs import attention
from paceline.planning.costs.attention import MAX_S, like_target, measure_attention, open_model

Costs = Callable[[bool, int, int, float], float]
"""Seconds of a pass by fused, rows, context and the time."""


class EitherEngine(ScriptedEngine):
    """Passes take other times with fused attention than without."""

    def __init__(self, costs: Costs, context_length: int = 4096) -> None:
        self.fused_attention = False
        self.changes = 0
        clock = VirtualClock()
        super().__init__(
            random_model(20, seed=1, order=1),
            ScriptedVocabulary.of_size(20),
            context_length=context_length,
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


# --- on a real file ---------------------------------------------------------------------------------------------------


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """What measuring finds, one after the other."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    answers: list[bool] = []
    monkeypatch.setattr(attention, "measure_attention", lambda engine, **_: answers.pop(0))
    return answers


OPTIONS = ModelOptions(embedded_draft(), context_length=128, threads=1)


def test_what_was_found_is_kept_and_opened_with(found: list[bool]) -> None:
    found += [True]
    for measured in (True, False):
        opened = open_model(OPTIONS)
        assert opened.measured is measured
        assert opened.options.flash_attention is True
        assert isinstance(opened.engine, LlamaCppEngine)
        assert opened.engine.capabilities.context_length == 128
        assert opened.engine.forward is not None
        opened.engine.close()
    assert not found


def test_another_context_length_is_measured_for_itself_and_so_is_force(found: list[bool], tmp_path: Path) -> None:
    found += [True, False, False]
    open_model(OPTIONS).engine.close()
    longer = ModelOptions(embedded_draft(), context_length=256, threads=1)
    assert open_model(longer).options.flash_attention is False
    assert open_model(OPTIONS, force=True).options.flash_attention is False
    entries = [json.loads(path.read_text())["data"] for path in (tmp_path / "attention").iterdir()]
    assert entries == [{"fused": False}] * 2


def test_a_spoiled_entry_is_measured_again(found: list[bool], tmp_path: Path) -> None:
    found += [True, False]
    open_model(OPTIONS).engine.close()
    (path,) = (tmp_path / "attention").iterdir()
    path.write_text(path.read_text().replace("true", "7"))
    assert open_model(OPTIONS).options.flash_attention is False


@pytest.mark.parametrize("asked", [True, False])
def test_what_the_user_said_stays(found: list[bool], asked: bool) -> None:
    opened = open_model(ModelOptions(embedded_draft(), context_length=128, threads=1, flash_attention=asked))
    assert isinstance(opened.engine, LlamaCppEngine)
    assert opened.engine.fused_attention is None
    assert opened.options.flash_attention is asked
    assert not opened.measured


def test_an_error_closes_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    opened: list[LlamaCppEngine] = []

    def fails(engine: LlamaCppEngine, **_: object) -> bool:
        opened.append(engine)
        raise EngineError("a pass failed")

    monkeypatch.setattr(attention, "measure_attention", fails)
    with pytest.raises(EngineError, match="a pass failed"):
        open_model(OPTIONS)
    with pytest.raises(Exception, match="closed"):
        opened[0].open()
    assert not (tmp_path / "attention").exists()


def test_a_draft_takes_its_targets_attention() -> None:
    target = ModelOptions(embedded_target(), flash_attention=True)
    draft = ModelOptions(embedded_draft())
    assert like_target(draft, target).flash_attention is True
    assert like_target(ModelOptions(embedded_draft(), flash_attention=False), target).flash_attention is False
    assert like_target(draft, ModelOptions(embedded_target(), exact=True)).flash_attention is None


def test_the_engine_changes_its_attention_and_goes_on() -> None:
    engine = open_engine(OPTIONS)
    assert isinstance(engine, LlamaCppEngine)
    assert engine.fused_attention is False
    tolerance = engine.capabilities.logit_tolerance
    for fused in (True, True, False):
        engine.fuse_attention(fused)
        assert engine.fused_attention is fused
        sequence = engine.open()
        engine.close_sequence(sequence)
    assert engine.capabilities.logit_tolerance == tolerance
    engine.close()
