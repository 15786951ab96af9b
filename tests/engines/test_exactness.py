"""Engines whose logits do not depend on how many rows a pass has, and those that are refused."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers import some_long

import paceline
from paceline.conversion.convert import folder_to_gguf, gguf_to_folder
from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ClosedError, InputError
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.exactness import EXACT_TO, check_exact, read_rows
from paceline.engines.loading import open_engine
from paceline.engines.options import CacheType, ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedOutput, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_target
from paceline.planning.policies.fixed import FixedPolicy

SIZE = 12
SETTINGS = ModelOptions(embedded_target(), context_length=1024, threads=1, exact=True)


def open_exact(**types: Any) -> Engine:
    """Open the embedded target, unless this processor's kernels for Q8_0 are others where there are more rows."""
    try:
        return open_engine(dataclasses.replace(SETTINGS, **types))
    except CapabilityError as error:
        if platform.machine() in ("x86_64", "AMD64"):
            # Seen to be exact: then it is this code that is not.
            raise
        pytest.skip(str(error))


class WideEngine(ScriptedEngine):
    """Adds an error to the logits of passes that have so many rows, or more."""

    def __init__(self, widest_exact: int, amount: float) -> None:
        super().__init__(random_model(SIZE, seed=1), ScriptedVocabulary.of_size(SIZE), max_sequences=1)
        self._widest_exact = widest_exact
        self._amount = amount

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        inner = super().forward(steps)
        is_wide = sum(len(step.token_ids) for step in steps) > self._widest_exact
        return ScriptedOutput(lambda tokens: inner._model(tokens) + self._amount * is_wide, inner._prefixes)


@pytest.mark.parametrize("widest_exact", [1, 2, 3, 7, 15])
def test_a_pass_that_rounds_differently_from_one_of_a_single_row_is_refused(widest_exact: int) -> None:
    engine = WideEngine(widest_exact, 10 * EXACT_TO)
    with pytest.raises(CapabilityError, match=f"rounds passes of {widest_exact + 1} tokens .* leave out `exact`"):
        check_exact(engine)
    engine.open()  # none was left open


@pytest.mark.parametrize(("widest_exact", "amount"), [(16, 1.0), (7, EXACT_TO / 10)])
def test_what_no_pass_of_a_round_shows_and_a_last_bit_are_none(widest_exact: int, amount: float) -> None:
    check_exact(WideEngine(widest_exact, amount))


class WaitingEngine(WideEngine):
    """One whose passes wait, so that few are made; it counts them."""

    slow_passes = object()

    def __init__(self, widest_exact: int, amount: float) -> None:
        super().__init__(widest_exact, amount)
        self.widths: list[int] = []

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        self.widths.append(sum(len(step.token_ids) for step in steps))
        return super().forward(steps)


@pytest.mark.parametrize("widest_exact", [1, 2, 3, 7, 15])
def test_where_passes_wait_six_of_them_tell(widest_exact: int) -> None:
    with pytest.raises(CapabilityError, match=r"rounds passes of \d+ tokens differently from passes of one"):
        check_exact(WaitingEngine(widest_exact, 10 * EXACT_TO))
    exact = WaitingEngine(widest_exact, EXACT_TO / 10)
    check_exact(exact)
    assert exact.widths == [16, 8, 4, 3, 2, 1]
    exact.open()  # none was left open


@pytest.mark.parametrize("types", some_long(["f16", "q8_0", "q4_0"], quick=["q4_0"]))
def test_every_row_is_the_same_in_passes_of_any_width_over_a_long_context(types: CacheType) -> None:
    """llama.cpp's kernels for one row change where the cache holds 512 tokens."""
    is_usual = types == "f16"
    engine = open_exact(**({} if is_usual else {"cache_type_k": types, "cache_type_v": types}))
    try:
        assert not engine.capabilities.trees
        said = "" if is_usual else f", keys in {types}, values in {types}"
        assert engine.description.endswith(f" on CPU, 1 threads, exact{said}")
        vocabulary = engine.vocabulary
        token_ids = vocabulary.tokenize(Path(paceline.__file__).read_text(encoding="utf-8") * 3)[:620]
        plain = rows_of(engine, token_ids, [500] + [1] * 120)
        assert len(plain) == 120
        for width in (2, 5, 17):
            wider = rows_of(engine, token_ids, [500, *[width] * (120 // width), 120 % width])
            np.testing.assert_array_equal(plain, wider)
    finally:
        engine.close()


def rows_of(engine: Engine, token_ids: Sequence[int], widths: Sequence[int]) -> list[FloatArray]:
    """Read a text in passes of given widths; return the rows of all but the first pass."""
    sequence = engine.open()
    rows: list[FloatArray] = []
    start = 0
    for number, width in enumerate(width for width in widths if width):
        chunk = token_ids[start : start + width]
        start += width
        wanted = range(len(chunk)) if number else range(0)
        output = engine.forward([Step(sequence, chunk, range(COMMITTED_END, len(chunk) - 1), wanted)])
        rows += [output.logits(0, row).copy() for row in wanted]
        engine.commit(sequence, range(len(chunk)))
    engine.close_sequence(sequence)
    return rows


@pytest.mark.parametrize("temperature", some_long([0.0, 0.8], quick=[0.8]))
def test_drafts_leave_the_text_as_it_was(temperature: float) -> None:
    open_exact().close()
    with paceline.load(SETTINGS, drafters=["suffix", "lookup"], policy=FixedPolicy(5), remember=False) as model:
        for seed in range(3):
            prompt = f"for number in range({seed}):\n    print(number)\n" * 30
            plain, drafted = (
                model.generate(
                    prompt, max_tokens=60, temperature=temperature, seed=seed, ignore_end=True, speculate=speculate
                )
                for speculate in (False, True)
            )
            assert drafted.token_ids == plain.token_ids
            assert drafted.stats.num_drafted > drafted.stats.num_accepted > 0


def test_requests_side_by_side_say_what_each_says_alone_to_the_last_bit() -> None:
    """Each in a cache of its own, and in passes of its own; shared ones rounded some rows otherwise."""
    open_exact().close()
    asked = [
        (
            "def add(a, b):\n    return a + b\n\n" * (40 if number == 3 else number % 3) + f"def f{number}(x):",
            paceline.GenerateOptions(
                max_tokens=20 + 17 * (number % 4), temperature=0.8, seed=number, ignore_end=True, logprobs=1
            ),
        )
        for number in range(8)
    ]

    def said(max_sequences: int) -> list[tuple[Sequence[int], Sequence[float]]]:
        settings = dataclasses.replace(SETTINGS, max_sequences=max_sequences)
        with paceline.load(settings, drafters=["suffix", "lookup"], policy=FixedPolicy(5), remember=False) as model:
            streams = [model.stream(prompt, **options) for prompt, options in asked]
            answers = [stream.result() for stream in streams]
        assert sum(answer.stats.num_accepted for answer in answers) > 0
        return [(answer.token_ids, [each.logprob for each in answer.logprobs]) for answer in answers]

    assert said(max_sequences=3) == said(max_sequences=1)


def test_what_was_forked_is_there_at_once() -> None:
    """llama.cpp copies from one cache to another in the next pass; what was saved before it was of nothing."""
    open_exact().close()
    engine = open_engine(dataclasses.replace(SETTINGS, max_sequences=4))
    try:
        assert not engine.capabilities.shares_passes
        token_ids = engine.vocabulary.tokenize(Path(paceline.__file__).read_text(encoding="utf-8"))[:60]
        sequence = engine.open()
        engine.forward([Step(sequence, token_ids[:50], range(COMMITTED_END, 49), [])])
        engine.commit(sequence, range(50))
        fork = engine.fork(sequence)
        restored = engine.restore(engine.save(fork))
        for start in range(50, 60, 2):
            rows = []
            for handle in (sequence, fork, restored):
                output = engine.forward([Step(handle, token_ids[start : start + 2], range(COMMITTED_END, 1), range(2))])
                rows.append([output.logits(0, row).copy() for row in range(2)])
                engine.commit(handle, range(2))
            np.testing.assert_array_equal(rows[0], rows[1])
            np.testing.assert_array_equal(rows[0], rows[2])
    finally:
        engine.close()


def test_a_cache_that_requests_share_is_refused() -> None:
    with pytest.raises(InputError, match="need a cache for each, so they cannot share 2048 cells"):
        open_engine(dataclasses.replace(SETTINGS, max_sequences=2, cells=2048))


def test_a_model_whose_kernels_differ_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "halves.gguf"
    gguf_to_folder(embedded_target(), tmp_path / "folder", dtype="F32")
    folder_to_gguf(tmp_path / "folder", path, dtype="F16")
    with pytest.raises(CapabilityError, match=r"halves\.gguf .* rounds passes of 2 tokens"):
        # Not in kernels for AMX, which round alike at every width.
        open_engine(ModelOptions(path, threads=1, exact=True, repack=False))


def test_what_goes_against_it_is_refused() -> None:
    with pytest.raises(InputError, match="need fused attention: leave out `flash_attention=False`"):
        open_engine(ModelOptions(embedded_target(), exact=True, flash_attention=False))
    with pytest.raises(InputError, match="leave out `cache_type_v=f16`"):
        open_engine(ModelOptions(embedded_target(), exact=True, cache_type_v="f16"))
    pytest.importorskip("torch", reason="needs paceline[torch]")
    with pytest.raises(CapabilityError, match=r"exactness \(`exact`\) has no effect on torch_hf"):
        open_engine(ModelOptions(".", engine="torch_hf", exact=True))


TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class NotingEngine(ScriptedEngine):
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
    engine = NotingEngine()
    rows = list(read_rows(engine, TEXT, width, num_prompt=num_prompt))
    assert engine.passes == passes
    assert len(rows) == len(TEXT)
    for index, row in enumerate(rows):
        np.testing.assert_allclose(row, engine.model(tuple(TEXT[: index + 1])), rtol=1e-6)
    engine.open()  # the only sequence is free again


def test_the_last_rows_alone_and_what_is_done_before_passes_behind_the_prompt() -> None:
    engine = NotingEngine()
    before: list[int] = []
    wanted = read_rows(
        engine, TEXT, 2, num_prompt=5, first_wanted=7, before_pass=lambda: before.append(len(engine.passes))
    )
    rows = list(wanted)
    assert engine.passes == [4, 1, 2, 2, 1]
    assert before == [2, 3, 4]
    np.testing.assert_allclose(rows, [engine.model(tuple(TEXT[:length])) for length in (8, 9, 10)], rtol=1e-6)


def test_a_reading_that_is_abandoned_leaves_no_sequence_open() -> None:
    engine = NotingEngine()
    rows = read_rows(engine, TEXT, 1)
    next(rows)
    rows.close()
    with pytest.raises(ClosedError):
        engine.length(0)
    engine.open()
