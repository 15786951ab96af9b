"""Whether attention is fused, as it is found for a real file, kept, and opened with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.errors import EngineError
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.loading import ModelOptions, open_engine
from paceline.models.embedded import embedded_draft
from paceline.planning.costs import attention
from paceline.planning.costs.attention import open_model


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
    assert [entry["fused"] for entry in entries] == [False, False]


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
