"""Passes made at load: which ones, and that nothing is left of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import EngineError
from paceline.engines import warming
from paceline.engines.base import Step
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput, ScriptedVocabulary, random_model
from paceline.engines.warming import ROUND_WIDTHS, warm_up


class Watched(ScriptedEngine):
    """Remembers the rows of every pass."""

    def __init__(self, **limits: int) -> None:
        self.passes: list[int] = []
        self.fails = False
        super().__init__(random_model(8, seed=1), ScriptedVocabulary.of_size(8), clock=VirtualClock(), **limits)  # type: ignore[arg-type]

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        if self.fails:
            raise EngineError("the device is gone")
        assert all(len(step.outputs) == len(step.token_ids) for step in steps)
        self.passes += [len(step.token_ids) for step in steps]
        return super().forward(steps)


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_MAX_S", math.inf)


@pytest.mark.parametrize(
    ("limits", "asked", "passes"),
    [
        ({}, [], ROUND_WIDTHS),
        ({"max_rows": 8, "context_length": 6}, [[1, 4, 8, 16, 2]], [1, 4, 2]),
        ({"max_rows": 64, "cells": 8}, [[4, 16, 2]], [4, 16]),
    ],
    ids=["all", "some that the engine cannot have", "until the cache is full"],
)
def test_every_width_is_made_once_and_nothing_is_left(
    limits: dict[str, int], asked: Sequence[Sequence[int]], passes: Sequence[int]
) -> None:
    engine = Watched(**limits)
    warm_up(engine, *asked)
    assert engine.passes == [*passes]
    assert not engine._sequences


def test_slow_passes_are_not_made_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_MAX_S", -1.0)
    engine = Watched(max_rows=64)
    warm_up(engine, [1, 2, 4])
    assert not engine.passes


def test_an_error_leaves_no_sequence() -> None:
    engine = Watched()
    engine.fails = True
    with pytest.raises(EngineError, match="the device is gone"):
        warm_up(engine, [1])
    assert not engine._sequences
