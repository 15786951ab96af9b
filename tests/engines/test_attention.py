"""Whether attention is fused, as it is found for a real file, kept, and opened with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from tests.engines.tiny_models import write_model
from tests.planning.helpers import engine_of

from paceline.core.arrays import FloatArray
from paceline.core.errors import EngineError
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft
from paceline.planning.costs import attention
from paceline.planning.costs.attention import AttentionTimes, RoundTimes, measure_attention, open_model
from paceline.planning.costs.profile_cache import find_or_measure


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[bool]:
    """What measuring finds to be faster, one after the other."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    answers: list[bool] = []
    monkeypatch.setattr(attention, "measure_attention", lambda engine, **_: times(answers.pop(0)))
    return answers


def times(narrow: bool, wide: bool | None = None) -> AttentionTimes:
    """Rounds of one row and of eight that are faster with fused attention, or not."""
    found = [(1, narrow), (8, narrow if wide is None else wide)]
    return AttentionTimes(128, tuple(RoundTimes(1, rows, 32, 0.01, 0.009 if fused else 0.011) for rows, fused in found))


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
    assert [AttentionTimes.from_json(entry) for entry in entries] == [times(False), times(False)]


@pytest.mark.parametrize(
    ("good", "spoiled"),
    [
        ('"fused_s": 0.009', '"fused_s": -1'),
        ('"fused_s": 0.009', '"fused_s": "no"'),
        ('"rows": 1,', '"rows": true,'),
        # What an earlier rule decided.
        ('"version": 3', '"fused": true, "version": 2'),
    ],
)
def test_a_spoiled_entry_and_an_older_one_are_measured_again(
    found: list[bool], tmp_path: Path, good: str, spoiled: str
) -> None:
    found += [True, False]
    open_model(OPTIONS).engine.close()
    (path,) = (tmp_path / "attention").iterdir()
    assert good in path.read_text()
    path.write_text(path.read_text().replace(good, spoiled))
    assert open_model(OPTIONS).options.flash_attention is False
    assert not found


@pytest.mark.parametrize(("narrow", "wide"), [(True, False), (False, True)])
def test_what_drafts_decides_by_what_was_measured_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, narrow: bool, wide: bool
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(attention, "measure_attention", lambda engine, **_: times(narrow, wide))
    chosen = {}
    for has_draft in (True, False):
        opened = open_model(OPTIONS, has_draft=has_draft)
        chosen[has_draft] = opened.options.flash_attention
        assert opened.measured is has_draft, "the second load goes by what the first kept"
        opened.engine.close()
    assert chosen == {True: wide, False: narrow}


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

    def fails(engine: LlamaCppEngine, **_: object) -> AttentionTimes:
        opened.append(engine)
        raise EngineError("a pass failed")

    monkeypatch.setattr(attention, "measure_attention", fails)
    with pytest.raises(EngineError, match="a pass failed"):
        open_model(OPTIONS)
    with pytest.raises(Exception, match="closed"):
        opened[0].open()
    assert not (tmp_path / "attention").exists()


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


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_lengthened_sequence_has_so_many_tokens_and_others_are_as_they_were(
    kind: str, fused: bool, tmp_path: Path
) -> None:
    path = embedded_draft()
    if kind != "llama":
        # Its layers look back 48 tokens.
        write_model(path := tmp_path / "windowed.gguf", kind)
    engine = open_engine(ModelOptions(path, context_length=256, threads=1, max_sequences=2, flash_attention=fused))
    assert isinstance(engine, LlamaCppEngine)
    sequence, other = engine.open(), engine.open()

    def feed(sequence: int, count: int) -> FloatArray:
        step = Step(sequence, [20] * count, range(COMMITTED_END, COMMITTED_END + count), (count - 1,))
        row = np.array(engine.forward([step]).logits(0, 0))
        engine.commit(sequence, range(count))
        return row

    def said() -> FloatArray:
        row = feed(other, 1)
        engine.trim(other, 9)
        return row

    feed(other, 9)
    before = said()
    feed(sequence, 3)
    assert engine.lengthen(sequence, 3)
    assert engine.lengthen(sequence, 200)
    assert engine.length(sequence) == 200
    assert engine.saved_bytes(sequence) > 3 * engine.saved_bytes(other), "every token has its cell"
    assert np.isfinite(feed(sequence, 5)).all()
    # The copied keys are turned to their places, and no others.
    assert said() == pytest.approx(before, abs=engine.capabilities.logit_tolerance)
    assert not engine.lengthen(sequence, 257), "the context is full before"
    engine.trim(sequence, 190)
    assert engine.lengthen(sequence, 256)
    engine.close_sequence(sequence)
    # No cell is lost.
    feed(other, 240)
    feed(engine.open(), 250)
    engine.close()


def test_what_has_no_tokens_is_not_lengthened() -> None:
    engine = open_engine(dataclasses.replace(OPTIONS, flash_attention=False))
    assert isinstance(engine, LlamaCppEngine)
    assert not engine.lengthen(engine.open(), 10)
    engine.close()


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_recurrent_states_are_not_lengthened(kind: str, tmp_path: Path) -> None:
    write_model(path := tmp_path / "recurrent.gguf", kind)
    options = ModelOptions(path, context_length=128, threads=1, flash_attention=False, rollback=kind != "mamba")
    engine = open_engine(options)
    assert isinstance(engine, LlamaCppEngine)
    engine.forward([Step(sequence := engine.open(), [20], (COMMITTED_END,), (0,))])
    engine.commit(sequence, [0])
    assert not engine.lengthen(sequence, 10)
    assert engine.length(sequence) == 1
    engine.close()


def test_measuring_leaves_nothing_behind_and_tells_both_contexts_apart() -> None:
    engine = open_engine(dataclasses.replace(OPTIONS, context_length=512, max_sequences=4))
    assert isinstance(engine, LlamaCppEngine)
    found = measure_attention(engine)
    kinds = {(each.requests, each.rows, each.context) for each in found.rounds}
    assert kinds == {(n, r, c) for n, wide in ((1, 8), (4, 4)) for r in (1, wide) for c in (32, 256)}
    assert AttentionTimes.from_json(json.loads(json.dumps(found.to_json()))) == found
    sequence = engine.open()
    assert engine.length(sequence) == 0
    engine.close()


@pytest.mark.parametrize(
    ("slower", "kept"), [(1.0, True), (1.2, True), (1.4, False), (0.7, False)], ids=["same", "near", "busy", "quiet"]
)
def test_what_was_found_on_a_machine_that_was_busy_is_found_anew_at_the_next_load(
    monkeypatch: pytest.MonkeyPatch, found: list[bool], tmp_path: Path, slower: float, kept: bool
) -> None:
    found += [True, False]
    open_model(OPTIONS).engine.close()
    # The engine's own passes are of no account: those of a machine that is measured in virtual time are.
    engine = engine_of(8.0)
    opened = dataclasses.replace(OPTIONS, flash_attention=True)
    then_s = times(True).plain_s(fused=True)
    find_or_measure(engine, opened, clock=engine.clock)
    assert len(list((tmp_path / "attention").iterdir())) == 1  # nothing is known of the machine now
    engine._cost = lambda rows, context: then_s * slower
    find_or_measure(engine, opened, clock=engine.clock)
    assert len(list((tmp_path / "attention").iterdir())) == kept
    again = open_model(OPTIONS)
    again.engine.close()
    assert again.measured is not kept
    assert again.options.flash_attention is kept
