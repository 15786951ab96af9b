"""What explains a divergence: rounding that plain reading shows as well, and never rollback that is broken."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.api import Model
from paceline.core.arrays import Float64Array
from paceline.core.divergence import Divergence
from paceline.core.errors import ClosedError
from paceline.core.stats import RequestStats
from paceline.engines.base import Engine, Step
from paceline.engines.loading import open_engine
from paceline.engines.options import EngineName, ModelOptions
from paceline.engines.scripted import (
    LogitFunction,
    ScriptedEngine,
    ScriptedOutput,
    ScriptedVocabulary,
    random_model,
)
from paceline.engines.sequence_pool import SequencePool
from paceline.lab.comparison import (
    Comparison,
    OpenReader,
    Stop,
    Stopped,
    Trial,
    answer,
    explain,
    measure_rounding,
    run_trials,
    summarise,
)
from paceline.models.embedded import embedded_draft
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy
from paceline.streams import Generation
from tests.helpers import ForcedDrafter

SIZE = 20
TOLERANCE = 0.06
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]
NUM_PROMPT = 5
EFFECT = np.where(np.arange(SIZE) % 2 == 0, 1.0, -1.0)


def counting_model(tokens: Sequence[int]) -> Float64Array:
    """Counts upwards, and after 6 prefers 7 to 8 by 0.05 only."""
    row = np.zeros(SIZE)
    row[(tokens[-1] + 1) % SIZE] = 9.0
    if tokens[-1] == 6:
        row[8] = 8.95
    return row


def spread_model(tokens: Sequence[int]) -> Float64Array:
    """Counts likewise, and its other logits spread by four, as in a real vocabulary."""
    counting = counting_model(tokens)
    return np.where(counting > 0.0, counting + 20.0, np.linspace(-6.0, 6.0, SIZE))


class RoundedOutput(ScriptedOutput):
    """Another output with an error added to each row."""

    def __init__(self, inner: ScriptedOutput, errors: list[list[float]]) -> None:
        self._inner = inner
        self._errors = errors

    def logits(self, step: int, output: int) -> Float64Array:
        return self._inner.logits(step, output) + self._errors[step][output] * EFFECT


class RoundingEngine(ScriptedEngine):
    """Adds ``amount`` of error to the logits of the rows that :meth:`errs` names."""

    def __init__(
        self,
        amount: float,
        *,
        max_sequences: int = 2,
        cells: int | None = None,
        model: LogitFunction = counting_model,
    ) -> None:
        vocabulary = ScriptedVocabulary.of_size(SIZE)
        super().__init__(model, vocabulary, max_sequences=max_sequences, cells=cells)
        self.capabilities = dataclasses.replace(self.capabilities, logit_tolerance=TOLERANCE)
        self.amount = amount

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        before = [len(self._sequences[step.sequence].pending) for step in steps]
        inner = super().forward(steps)
        return RoundedOutput(
            inner,
            [
                [self.amount * self.errs(step.sequence, first + row) for row in step.outputs]
                for step, first in zip(steps, before, strict=True)
            ],
        )

    def errs(self, sequence: int, node: int) -> bool:
        """Whether the row of a pending node gets the error."""
        raise NotImplementedError


class PlacingEngine(RoundingEngine):
    """Gives each token the first free cell; where these are not the first ones in their order, rows are in error."""

    def __init__(self, amount: float, **settings: Any) -> None:
        super().__init__(amount, **settings)
        self._committed_cells: dict[int, list[int]] = {}
        self._pending_cells: dict[int, list[int]] = {}

    def open(self) -> int:
        sequence = super().open()
        self._committed_cells[sequence], self._pending_cells[sequence] = [], []
        return sequence

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        for step in steps:
            for _ in step.token_ids:
                used = {*itertools.chain(*self._committed_cells.values(), *self._pending_cells.values())}
                cell = next(cell for cell in range(len(used) + 1) if cell not in used)
                self._pending_cells[step.sequence].append(cell)
        return super().forward(steps)

    def errs(self, sequence: int, node: int) -> bool:
        path = self._sequences[sequence].pending.path_to(node)
        cells = self._committed_cells[sequence] + [self._pending_cells[sequence][node] for node in path]
        return cells != list(range(len(cells)))

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        super().commit(sequence, path)
        self._committed_cells[sequence] += [self._pending_cells[sequence][node] for node in path]
        self._pending_cells[sequence] = []

    def close_sequence(self, sequence: int) -> None:
        super().close_sequence(sequence)
        del self._committed_cells[sequence], self._pending_cells[sequence]


class RarelyPlacingEngine(PlacingEngine):
    """Few placements have an effect, as where weights are quantised."""

    def errs(self, sequence: int, node: int) -> bool:
        return super().errs(sequence, node) and sum(self._committed_cells[sequence]) % 211 == 0


class WidthEngine(RoundingEngine):
    """Rows of wide passes are in error, one of every few."""

    def __init__(self, amount: float, *, every: int) -> None:
        super().__init__(amount)
        self._every = every

    def errs(self, sequence: int, node: int) -> bool:
        pending = self._sequences[sequence].pending
        place = len(self._sequences[sequence].committed) + len(pending.path_to(node))
        return len(pending) > 1 and place % self._every == 0


class LeakingEngine(RoundingEngine):
    """Dropped rows still have an effect on all that follows in their sequence: rollback is broken."""

    def __init__(self, amount: float) -> None:
        super().__init__(amount)
        self._stained: set[int] = set()

    def errs(self, sequence: int, node: int) -> bool:
        return sequence in self._stained

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        if len(path) < len(self._sequences[sequence].pending):
            self._stained.add(sequence)
        super().commit(sequence, path)


def divergence_on(
    engine: Engine,
    open_reader: OpenReader | None = None,
    stopped: Stop = lambda: False,
    pool: SequencePool | None = None,
) -> Divergence | None:
    """Count from 2, with drafts of which the first is wrong and its sibling right."""
    drafter = ForcedDrafter(lambda request: [[0], [(request.token_ids[-1] + 1) % SIZE]])
    with Model(engine, [drafter], FixedPolicy(2), pool=pool) as model:
        options: GenerateOptions = {"max_tokens": 10, "temperature": 0.0}
        plain = answer(model, [1], options, speculate=False)
        assert plain.token_ids == list(range(2, 12))
        speculative = answer(model, [1], options, speculate=True)
        return explain(model, [1], options, plain, speculative, open_reader=open_reader, stopped=stopped)


def test_where_nothing_is_rounded_nothing_is_measured() -> None:
    engine = ScriptedEngine(random_model(SIZE, seed=1, order=4), ScriptedVocabulary.of_size(SIZE), max_sequences=2)
    assert measure_rounding(engine, TEXT, NUM_PROMPT) == 0.0


def test_the_effect_of_places_in_the_cache_is_measured() -> None:
    assert measure_rounding(PlacingEngine(0.1), TEXT, NUM_PROMPT) == pytest.approx(0.1)


def test_a_rare_effect_of_places_is_looked_for_where_a_difference_is_to_be_explained() -> None:
    assert measure_rounding(RarelyPlacingEngine(0.1), TEXT, NUM_PROMPT) == 0.0
    assert measure_rounding(RarelyPlacingEngine(0.1), TEXT, NUM_PROMPT, enough=0.05) == pytest.approx(0.1)


def test_a_tie_that_places_in_the_cache_turn_is_a_near_tie() -> None:
    divergence = divergence_on(PlacingEngine(0.1))
    assert divergence is not None
    assert (divergence.index, divergence.plain_token, divergence.speculative_token) == (5, 7, 8)
    assert divergence.logit_difference == pytest.approx(0.1)
    assert divergence.rounding == pytest.approx(0.1)
    assert divergence.verdict == "near-tie"


def test_where_no_sequence_is_to_spare_the_target_is_loaded_once_more() -> None:
    loaded: list[PlacingEngine] = []

    def open_reader(num_tokens: int) -> Engine:
        assert num_tokens == len([1, 2, 3, 4, 5, 6])
        loaded.append(PlacingEngine(0.1))
        return loaded[-1]

    alone = divergence_on(PlacingEngine(0.1, max_sequences=1))
    assert alone is not None
    assert (alone.rounding, alone.verdict) == (0.0, "bug")
    divergence = divergence_on(PlacingEngine(0.1, max_sequences=1), open_reader)
    assert divergence is not None
    assert divergence.verdict == "near-tie"
    assert divergence.rounding == pytest.approx(0.1)
    (reader,) = loaded
    with pytest.raises(ClosedError):
        reader.open()


def test_an_answer_that_is_kept_in_the_only_sequence_is_moved_out_before_rounding_is_measured() -> None:
    engine = PlacingEngine(0.1, max_sequences=1)
    pool = SequencePool(engine, least_reuse=2)
    kept = divergence_on(engine, lambda num_tokens: PlacingEngine(0.1), pool=pool)
    assert kept is not None
    assert kept.verdict == "near-tie"
    assert kept.rounding == pytest.approx(0.1)


def test_a_difference_that_does_not_come_again_is_not_judged() -> None:
    drafts = iter([[[0], [6]]])
    drafter = ForcedDrafter(lambda request: next(drafts, []) if request.num_output == 4 else [])
    with Model(PlacingEngine(0.1), [drafter], FixedPolicy(2)) as model:
        options: GenerateOptions = {"max_tokens": 10, "temperature": 0.0}
        plain, speculative = (answer(model, [1], options, speculate=speculate) for speculate in (False, True))
        divergence = explain(model, [1], options, plain, speculative)
    assert plain.token_ids != speculative.token_ids
    assert divergence is not None
    assert divergence.verdict == "unrepeatable"


def test_a_plain_answer_that_does_not_come_again_is_not_held_against_drafts() -> None:
    """Plain decoding said 8 after 6 before, as where a prompt was read in other passes, and says 7 like the drafts."""
    with Model(PlacingEngine(0.0), [ForcedDrafter(lambda request: [])], FixedPolicy(2)) as model:
        options: GenerateOptions = {"max_tokens": 10, "temperature": 0.0}
        speculative = answer(model, [1], options, speculate=True)
        plain = dataclasses.replace(speculative, token_ids=[2, 3, 4, 5, 6, 8, 9, 10, 11, 12])
        divergence = explain(model, [1], options, plain, speculative)
    assert divergence is not None
    assert (divergence.index, divergence.verdict) == (5, "unrepeatable")


@pytest.mark.parametrize(("heard", "trials_made"), [(1, 0), (9, 0), (14, 0), (25, 0), (30, 1), (40, 1)])
def test_whoever_wants_no_more_trials_waits_for_one_round_only(heard: int, trials_made: int) -> None:
    """A plain answer of ten tokens takes ten rounds, a drafted one five or six."""
    asked = itertools.count(1)
    drafter = ForcedDrafter(lambda request: [[(request.token_ids[-1] + 1) % SIZE]])
    engine = PlacingEngine(0.0)
    with Model(engine, [drafter], FixedPolicy(1)) as model:
        options: GenerateOptions = {"max_tokens": 10, "temperature": 0.0}
        trials = run_trials(model, [1], options, 5, stopped=lambda: next(asked) >= heard)
        made: list[object] = []
        with pytest.raises(Stopped):
            made.extend(trials)
        assert not engine._sequences
    assert next(asked) == heard + 1
    assert len(made) == trials_made


@pytest.mark.parametrize("heard", [1, 8, 16, 22])
def test_whoever_wants_no_more_gets_no_verdict(heard: int) -> None:
    """Asked between rounds of each answer that is made again, and before each reading."""
    asked = itertools.count(1)
    divergence = divergence_on(PlacingEngine(0.1), stopped=lambda: next(asked) >= heard)
    assert divergence is not None
    assert (divergence.index, divergence.plain_token, divergence.speculative_token) == (5, 7, 8)
    assert divergence.verdict == "not judged"
    assert divergence.logit_difference is None
    assert next(asked) == heard + 1


@pytest.mark.parametrize(
    ("engine", "amount"), [*((LeakingEngine, amount) for amount in (0.1, 0.2, 5.0)), (PlacingEngine, 1.0)]
)
def test_broken_rollback_and_sequences_that_disturb_each_other_do_not_pass_for_rounding(
    engine: Callable[[float], Engine], amount: float
) -> None:
    """Not even where rollback does no more than rounding might: what is measured takes nothing back."""
    divergence = divergence_on(engine(amount))
    assert divergence is not None
    assert divergence.logit_difference == pytest.approx(amount)
    assert divergence.rounding == 0.0
    assert divergence.verdict == "bug"


@pytest.mark.parametrize("num_output", [1, 2, 5, 23])
def test_widths_are_measured_of_an_answer_of_any_length(num_output: int) -> None:
    engine = WidthEngine(0.5, every=1)
    assert measure_rounding(engine, TEXT, len(TEXT) - num_output) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("amount", "every", "rounding"), [(0.5, 1, 0.5), (0.7, 1, 0.0), (0.7, 4, 0.7), (1.7, 4, 1.7), (1.9, 4, 0.0)]
)
def test_single_rows_may_be_rounded_by_more_than_half_of_them(amount: float, every: int, rounding: float) -> None:
    assert measure_rounding(WidthEngine(amount, every=every), TEXT, NUM_PROMPT) == pytest.approx(rounding)


def test_rounding_explains_more_where_logits_spread_more() -> None:
    divergence = divergence_on(PlacingEngine(1.0, model=spread_model))
    assert divergence is not None
    assert divergence.rounding == pytest.approx(1.0)
    assert divergence.verdict == "near-tie"
    disturbed = divergence_on(PlacingEngine(4.0, model=spread_model))
    assert disturbed is not None
    assert (disturbed.rounding, disturbed.verdict) == (0.0, "bug")


@pytest.mark.parametrize(
    ("max_sequences", "cells"), [(1, None), (2, len(TEXT))], ids=["one sequence", "no cells to spare"]
)
def test_without_room_beside_the_text_only_widths_are_measured(max_sequences: int, cells: int | None) -> None:
    engine = PlacingEngine(0.1, max_sequences=max_sequences, cells=cells)
    assert measure_rounding(engine, TEXT, NUM_PROMPT) == 0.0
    for _ in range(max_sequences):
        engine.open()  # none was left open


@pytest.mark.parametrize("name", ["llama_cpp", "torch_hf"])
def test_real_engines_are_measured_and_left_as_they_were(name: EngineName) -> None:
    if name == "torch_hf":
        pytest.importorskip("torch", reason="needs paceline[torch]")
    engine = open_engine(
        ModelOptions(embedded_draft(), engine=name, context_length=len(TEXT), threads=1, max_sequences=2)
    )
    try:
        assert measure_rounding(engine, TEXT, NUM_PROMPT) <= 10 * engine.capabilities.logit_tolerance
        for _ in range(2):
            engine.open()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("speed", "num_drafted", "verdict"),
    [
        (150.0, 9, "speculation is faster"),
        (50.0, 9, "plain is faster"),
        (100.0, 9, "no difference beyond the noise"),
        (150.0, 0, "nothing was drafted"),
        (50.0, 0, "nothing was drafted"),
    ],
)
def test_a_winner_is_named_only_where_something_was_drafted(speed: float, num_drafted: int, verdict: str) -> None:
    """Two ways that do the same are never equally fast: one of them is ahead by a little, every time or not."""
    generation = Generation("", [], [], "length", 0, RequestStats())
    trials = [Trial(100.0, speed, 100.0)] * 3
    assert Comparison(trials, generation, generation, None, True, num_drafted).verdict == verdict


@pytest.mark.parametrize(("drafts", "num_drafted"), [([], 0), ([[8]], 2), ([[9]], 2)])
def test_a_comparison_counts_the_drafts_of_all_its_runs(drafts: list[list[int]], num_drafted: int) -> None:
    engine = ScriptedEngine(counting_model, ScriptedVocabulary.of_size(SIZE))
    drafter = ForcedDrafter(lambda request: drafts if request.token_ids[-1] == 7 else [])
    with Model(engine, [drafter], FixedPolicy(2)) as model:
        options: GenerateOptions = {"max_tokens": 5, "temperature": 0.0, "seed": 0}
        runs = list(run_trials(model, [4], options, 2))
        assert summarise(model, [4], options, runs).num_drafted == num_drafted
