"""llama.cpp with streamed layers says what it says without, whatever happens to passes and files."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tests.engines.streamed import ASKED_BYTES, TOKENS, config, mostly_streamed, rows
from tests.models.helpers import in_f32

import paceline
from paceline.core.errors import CapabilityError, EngineError, InputError, ModelWarning
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine, loading, native, streaming
from paceline.engines.llama_cpp.streaming import LayerStream, _separable
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.engines.slow_passes import dry
from paceline.engines.streaming.disk import WeightFiles
from paceline.engines.streaming.layout import BLOCK, Extent, Span, read_gguf_layout
from paceline.models.embedded import embedded_draft, embedded_target, heldout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="weights are streamed on Linux alone")


@pytest.fixture
def exact() -> Path:
    return in_f32(embedded_draft())


@pytest.fixture
def streamed() -> Iterator[None]:
    """Have most of the weights streamed."""
    with mostly_streamed(1 << 17):
        yield


def _ending_of(engine: LlamaCppEngine) -> str:
    """Make a pass; return how it failed."""
    try:
        rows(engine)
    except EngineError as error:
        return str(error)
    return ""


@pytest.fixture
def engine(exact: Path, streamed: None) -> Iterator[LlamaCppEngine]:
    engine = LlamaCppEngine(config(exact, max_sequences=2))
    yield engine
    engine.close()


def test_rows_are_those_of_the_same_engine_without(engine: LlamaCppEngine, exact: Path) -> None:
    mapped = LlamaCppEngine(ModelOptions(exact, context_length=64, threads=1))
    assert engine.description.endswith(", layers streamed")
    for count in (1, 2, 8):
        np.testing.assert_array_equal(rows(engine, TOKENS[:count]), rows(mapped, TOKENS[:count]))
    mapped.close()


def test_a_pass_reads_what_is_streamed_and_no_more(engine: LlamaCppEngine) -> None:
    stream = engine._stream
    assert stream is not None
    rows(engine)
    before = stream.bytes_read
    for _ in range(10):
        rows(engine)
    # Most of the model.
    weights = sum(span.end - span.start for span in stream._layout.layers.values())
    assert 0.6 * weights < stream.pass_bytes < 0.9 * weights
    # What is read ahead when one looks is not to be known.
    assert abs(stream.bytes_read - before - 10 * stream.pass_bytes) <= 2 * stream._slot_bytes


def test_a_read_that_fails_fails_its_pass_alone(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(engine)
    read = WeightFiles.read

    def failing(self: WeightFiles, extents: Sequence[Extent], slot: memoryview) -> None:
        raise EngineError("the weights cannot be read at byte 4096: Input/output error")

    sequence = engine.open()
    engine.forward([Step(sequence, TOKENS[:3], [COMMITTED_END, 0, 1], [])])
    engine.commit(sequence, range(3))
    monkeypatch.setattr(WeightFiles, "read", failing)
    # The ring may hold all that the first of these needs.
    ends = [_ending_of(engine) for _ in range(3)]
    assert "the weights cannot be read at byte 4096: Input/output error" in ends
    assert set(ends[1:]) == {ends[-1]}
    assert engine.length(sequence) == 3
    monkeypatch.setattr(WeightFiles, "read", read)
    np.testing.assert_array_equal(rows(engine), expected)
    output = engine.forward([Step(sequence, TOKENS[3:4], [COMMITTED_END], [0])])
    np.testing.assert_allclose(output.logits(0, 0), expected[3], atol=engine.capabilities.logit_tolerance)


def test_an_interrupt_in_a_pass_leaves_a_usable_engine(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(engine)
    stream = engine._stream
    assert stream is not None
    move_on = stream._move_on

    def interrupted(number: int) -> None:
        move_on(number)
        if number == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(stream, "_move_on", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            rows(engine)
    monkeypatch.setattr(stream, "_move_on", move_on)
    for _ in range(3):
        np.testing.assert_array_equal(rows(engine), expected)


def test_passes_without_their_weights_leave_the_next_ones_alone(engine: LlamaCppEngine) -> None:
    expected = rows(engine)
    stream = engine._stream
    assert stream is not None
    before = stream.bytes_read
    stream.set_dry(True)
    for _ in range(3):
        rows(engine)
    assert stream.bytes_read - before <= 2 * stream._slot_bytes
    stream.set_dry(False)
    np.testing.assert_array_equal(rows(engine), expected)


def test_a_file_that_changes_is_told(exact: Path, streamed: None, tmp_path: Path) -> None:
    path = tmp_path / "copy.gguf"
    shutil.copyfile(exact, path)
    engine = LlamaCppEngine(config(path))
    rows(engine)
    os.utime(path, (1, 1))
    with pytest.raises(
        EngineError, match=r"copy\.gguf was changed while its weights are streamed: load the model again"
    ):
        rows(engine)
    engine.close()


def test_a_file_that_changes_within_a_pass_gives_out_none_of_its_rows(
    exact: Path, streamed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "copy.gguf"
    shutil.copyfile(exact, path)
    engine = LlamaCppEngine(config(path))
    stream = engine._stream
    assert stream is not None
    move_on = stream._move_on

    def overwritten(number: int) -> None:
        if number == 2:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(bytes(path.stat().st_size // 4))
        move_on(number)

    monkeypatch.setattr(stream, "_move_on", overwritten)
    with pytest.raises(EngineError, match=r"copy\.gguf was changed while its weights are streamed"):
        rows(engine)
    engine.close()


def test_a_model_that_fits_is_not_streamed(exact: Path) -> None:
    engine = LlamaCppEngine(ModelOptions(exact, context_length=64, threads=1, memory=1 << 34))
    assert engine._stream is None
    assert "layers streamed" not in engine.description
    engine.close()


def test_too_little_memory_is_refused_with_what_is_needed(exact: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"^1M of memory \(`memory`\) are too little for draft-f32\.gguf: it takes [\d.]+[MG] besides its "
        r"layers, and "
        r"\d+M are the minimum for streaming them; give [\d.]+[MG], or a shorter context \(`context_length`\)$",
    ):
        LlamaCppEngine(config(exact))


def test_weights_that_are_more_than_what_is_free_are_streamed_by_default(
    exact: Path, streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: exact.stat().st_size - 1)
    engine = LlamaCppEngine(ModelOptions(exact, context_length=64, threads=1))
    assert engine._stream is not None
    engine.close()
    engine = LlamaCppEngine(ModelOptions(exact, context_length=64, threads=1, stream=False))
    assert engine._stream is None
    engine.close()


def test_what_cannot_be_streamed_is_run_as_before_where_nobody_asked_for_it(
    exact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: exact.stat().st_size - 1)
    monkeypatch.setattr(LayerStream, "least_bytes", 1 << 40)
    options = ModelOptions(exact, context_length=64, threads=1)
    with pytest.warns(ModelWarning, match="^layers are not streamed, and the file is left to the system: .* too littl"):
        engine = open_engine(options)
    assert "layers streamed" not in engine.description
    engine.close()
    with pytest.raises(InputError, match="of memory \\(`memory`\\) are too little"):
        open_engine(dataclasses.replace(options, memory="40M"))


def test_a_disk_that_is_too_slow_to_be_of_use_is_told_before_a_pass_waits_for_it(
    exact: Path, streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "_SLOW_S", 0.0)
    passes: list[LayerStream] = []
    monkeypatch.setattr(LayerStream, "begin", lambda stream: passes.append(stream) if stream.is_streaming else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ModelWarning)
        with pytest.raises(
            ModelWarning,
            match=r"draft-f32\.gguf: [\d.]+ MB are read for every pass, which takes 0 s from this disk: give it more "
            r"memory \(`memory`\), a faster disk, or a smaller quantisation$",
        ):
            LlamaCppEngine(config(exact))
    assert not passes


def test_what_was_never_tried_is_refused(exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CapabilityError, match=r"placed by hand \(`override_tensors`\) are not streamed"):
        LlamaCppEngine(config(exact, override_tensors=(("blk", "CPU"),)))
    monkeypatch.setattr(native, "default_device_names", lambda: ["CUDA0"])
    with pytest.raises(CapabilityError, match="layers on a GPU are not streamed: give `gpu_layers=0`"):
        LlamaCppEngine(config(exact))
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(CapabilityError, match="streamed on Linux alone, and this is darwin"):
        LlamaCppEngine(config(exact))


def test_weights_that_no_pass_reads_are_left_alone(
    exact: Path, streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = read_gguf_layout(exact)
    more = dataclasses.replace(layout, layers={**layout.layers, "blk.4.unused": Span(0, 0, BLOCK)})
    monkeypatch.setattr(loading, "read_gguf_layout", lambda path: more)
    engine = LlamaCppEngine(config(exact))
    mapped = LlamaCppEngine(ModelOptions(exact, context_length=64, threads=1))
    np.testing.assert_array_equal(rows(engine), rows(mapped))
    assert engine._stream is not None
    assert "blk.4.unused" not in engine._stream._section_of
    engine.close()
    mapped.close()


def test_weights_that_are_in_use_together_are_read_together() -> None:
    reads = [(1, "norm"), (2, "q"), (3, "k"), (4, "q"), (5, "up"), (6, "down"), (6, "scale"), (8, "down"), (9, "next")]
    assert _separable(reads) == [["norm"], ["q", "k"], ["up"], ["down", "scale"], ["next"]]
    assert _separable([]) == []


def test_rows_that_come_out_otherwise_are_refused(exact: Path, streamed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = WeightFiles.read

    def bad(self: WeightFiles, extents: Sequence[Extent], slot: memoryview) -> None:
        read(self, extents, slot)
        slot[-5000:-4000] = bytes(1000)

    monkeypatch.setattr(WeightFiles, "read", bad)
    with pytest.raises(CapabilityError, match="rows come out otherwise; run it with `stream=False`"):
        LlamaCppEngine(config(exact))


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_texts_are_those_of_plain_decoding_for_several_requests(
    verify: Literal["coupled", "rejection"], exact: Path, streamed: None
) -> None:
    options = ModelOptions(exact, memory=ASKED_BYTES, max_sequences=2, context_length=256)
    prompts = [text[:300] for text in heldout("logs")[:3]]
    with paceline.load(options, draft=embedded_draft(), policy=paceline.FixedPolicy(4), verify=verify) as model:
        streams = [model.stream(prompt, max_tokens=30, temperature=0.0, seed=1) for prompt in prompts]
        answers = [stream.result() for stream in streams]
        assert sum(answer.stats.num_accepted for answer in answers) > 0
        for prompt, answer in zip(prompts, answers, strict=True):
            plain = model.generate(prompt, max_tokens=30, temperature=0.0, seed=1, speculate=False)
            assert plain.token_ids == answer.token_ids


@pytest.mark.parametrize(("place", "function"), [("ring", "read"), ("weights", "_read_chunk")])
def test_a_finalizer_in_a_thread_that_passes_wait_for_waits_for_none_of_them(
    place: str, function: str, exact: Path, streamed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is collected wherever something is allocated, and a generator that is garbage closes its stream."""
    options = ModelOptions(exact, memory=ASKED_BYTES, context_length=256)
    with paceline.load(options, policy=paceline.NO_SPECULATION) as model:
        left = model.stream("def f(x):", max_tokens=200)
        plain = getattr(WeightFiles, function)
        threads: list[str] = []

        def reading(files: WeightFiles, *arguments: object) -> None:
            if not threads:
                threads.append(threading.current_thread().name)
                left.close()
            plain(files, *arguments)

        monkeypatch.setattr(WeightFiles, function, reading)
        answer = model.generate("import os", max_tokens=4)
        monkeypatch.undo()
        assert len(answer.token_ids) == 4
        assert place in threads[0]
        assert left.result().finish_reason == "cancelled"


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="`stream=False` streams none: give one"):
        ModelOptions(embedded_target(), memory="12G", stream=False)
    with pytest.raises(InputError, match="'12 bananas' is not a size: give a number and a unit, such as 12G or 800M"):
        ModelOptions(embedded_target(), memory="12 bananas")
    with pytest.raises(InputError, match="memory is 0, but must be from 1"):
        ModelOptions(embedded_target(), memory=0)


def test_what_passes_without_their_weights_cached_is_not_read() -> None:
    """Weights of another section may be read as no numbers, which a mask does not take out of a sum."""
    with mostly_streamed():
        engine = LlamaCppEngine(ModelOptions(embedded_target(), context_length=256, threads=1, memory=ASKED_BYTES))
    try:
        expected = rows(engine)
        with dry(engine):
            for _ in range(3):
                rows(engine, range(100, 200))
        np.testing.assert_array_equal(rows(engine), expected)
    finally:
        engine.close()
