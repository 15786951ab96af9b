"""Reading a known text in passes of a width, and what models can be opened with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from paceline.core.errors import ClosedError, InputError
from paceline.engines.base import Step
from paceline.engines.exactness import read_rows
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput, ScriptedVocabulary, random_model

SIZE = 12
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class CountingEngine(ScriptedEngine):
    """Notes how many rows each pass has."""

    def __init__(self) -> None:
        model = random_model(SIZE, seed=1)
        super().__init__(model, ScriptedVocabulary.of_size(SIZE), max_sequences=1, max_rows=4)
        self.model = model
        self.passes: list[int] = []

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        self.passes.append(sum(len(step.token_ids) for step in steps))
        return super().forward(steps)


@pytest.mark.parametrize(
    ("width", "num_prompt", "passes"),
    [(1, 0, [1] * 10), (4, 0, [4, 4, 2]), (3, 6, [4, 2, 3, 1]), (1, 9, [4, 4, 1, 1])],
)
def test_the_rows_are_the_text_s_whatever_the_passes(width: int, num_prompt: int, passes: list[int]) -> None:
    engine = CountingEngine()
    rows = list(read_rows(engine, TEXT, width, num_prompt=num_prompt))
    assert engine.passes == passes
    assert len(rows) == len(TEXT)
    for index, row in enumerate(rows):
        np.testing.assert_allclose(row, engine.model(tuple(TEXT[: index + 1])), rtol=1e-6)
    engine.open()  # the only sequence is free again


def test_the_last_rows_alone_and_what_is_done_before_passes_behind_the_prompt() -> None:
    engine = CountingEngine()
    before: list[int] = []
    wanted = read_rows(
        engine, TEXT, 2, num_prompt=5, first_wanted=7, before_pass=lambda: before.append(len(engine.passes))
    )
    rows = list(wanted)
    assert engine.passes == [4, 1, 2, 2, 1]
    assert before == [2, 3, 4]
    np.testing.assert_allclose(rows, [engine.model(tuple(TEXT[:length])) for length in (8, 9, 10)], rtol=1e-6)


def test_a_reading_that_is_abandoned_leaves_no_sequence_open() -> None:
    engine = CountingEngine()
    rows = read_rows(engine, TEXT, 1)
    next(rows)
    rows.close()
    with pytest.raises(ClosedError):
        engine.length(0)
    engine.open()


def test_fused_attention_is_no_word_of_the_command_line() -> None:
    with pytest.raises(InputError, match="flash_attention is 'off': give True, False, or None"):
        ModelOptions("model.gguf", flash_attention=cast(Any, "off"))
