"""From a model to a smaller one, and what that costs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline.engines.options import ModelOptions
from paceline.lab.comparison import Stopped
from paceline.lab.intervals import ALL
from paceline.lab.prune import measuring, writer
from paceline.lab.prune.pruner import Asked, Pruner
from paceline.lab.prune.vocabulary import choose_tokens
from paceline.lab.samples import heldout_samples
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.gguf_file import GGUFFile

QUICK = {"choosing": (2, 16), "judging": (2, 16)}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(measuring, "_SHAPES", QUICK)
    monkeypatch.setattr(measuring, "_PASSES", 4)


def prune(asked: Asked, stopped: Callable[[], bool] = lambda: False, target: Path | None = None) -> Pruner:
    return Pruner(
        ModelOptions(embedded_draft(), threads=1),
        asked,
        target=None if target is None else ModelOptions(target, threads=1),
        samples=heldout_samples()[:16],
        temperature=0.8,
        seed=1,
        keep_answers=False,
        stopped=stopped,
        tell=lambda doing, done, total: None,
    )


def test_what_was_expected_comes_out(tmp_path: Path) -> None:
    pruning = prune(Asked(vocab=1024, width=0.2))
    forecast = pruning.forecast()
    made = pruning.make(tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").stat().st_size == made.bytes_after
    assert made.bytes_after == pytest.approx(forecast.bytes_after, rel=0.02)
    assert made.pass_share == pytest.approx(forecast.pass_share, abs=0.01)
    assert made.tokens is not None
    assert made.respelled is not None
    assert made.blocks is not None
    assert GGUFFile(tmp_path / "out.gguf").integer("llama.feed_forward_length") == 384 - made.blocks.removed * 32
    assert {path.name for path in tmp_path.iterdir()} == {"out.gguf"}


@pytest.mark.long
def test_a_smaller_vocabulary_drafts_by_translation(tmp_path: Path) -> None:
    pruning = prune(Asked(vocab=2048))
    pruning.make(tmp_path / "out.gguf")
    verdict = pruning.measure(tmp_path / "out.gguf")
    assert verdict.accepted is not None
    assert verdict.accepted.agreement is None
    assert 0.3 < verdict.accepted.accepted <= measuring.DEPTH
    assert verdict.uncut is None
    assert verdict.times.before_s > 0
    assert verdict.times.after_s > 0


@pytest.mark.long
def test_layers_are_measured_against_the_target(tmp_path: Path) -> None:
    pruning = prune(Asked(layers=1), target=embedded_target())
    made = pruning.make(tmp_path / "out.gguf")
    assert made.layers is not None
    alone = made.layers.alone
    assert len(alone) == made.layers_before == 3
    assert made.layers.removed == (max(alone, key=lambda layer: alone[layer]),)
    assert not made.by_itself
    verdict = pruning.measure(tmp_path / "out.gguf")
    assert verdict.accepted is not None
    assert verdict.uncut is not None
    for found in (verdict.accepted, verdict.uncut):
        assert found.agreement is not None
        overlap = found.agreement.overlap[ALL].value
        assert overlap is not None
        assert 0.05 < overlap < 1.0


def test_a_type_alone_is_a_way_to_cut(tmp_path: Path) -> None:
    pruning = prune(Asked(file_type="Q4_0"))
    made = pruning.make(tmp_path / "out.gguf")
    assert made.bytes_after == pytest.approx(pruning.forecast().bytes_after, rel=0.05)
    assert made.pass_share == pytest.approx(pruning.forecast().pass_share, abs=0.05)
    assert made.bytes_after < 0.8 * embedded_draft().stat().st_size
    file = GGUFFile(tmp_path / "out.gguf")
    assert file.get("paceline.pruned.file_type") == "Q4_0"
    assert file.tensors["blk.0.ffn_gate.weight"].kind.name == "Q4_0"


def test_a_full_disk_is_seen_before_and_during_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: type("Usage", (), {"free": 1_000})())
        with pytest.raises(InputError, match="free there"):
            prune(Asked(width=0.2)).make(tmp_path / "out.gguf")

    def no_space(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_gguf", no_space)
    with pytest.raises(InputError, match="No space left on device"):
        prune(Asked(width=0.2)).make(tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_whoever_stops_it_finds_nothing(tmp_path: Path) -> None:
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > 3

    with pytest.raises(Stopped):
        prune(Asked(width=0.2), stopped).make(tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_run_any_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_numbers_out(*given: Any) -> Any:
        row = read(*given)
        return np.full_like(row, np.nan)

    read = measuring.read_tokens
    monkeypatch.setattr(measuring, "read_tokens", leave_numbers_out)
    with pytest.raises(InputError, match="no finite numbers"):
        prune(Asked(width=0.2)).make(tmp_path / "out.gguf")

    def keep_one(*given: Any) -> Any:
        chosen = choose_tokens(*given)
        return type(chosen)(chosen.token_ids[:1], chosen.always, chosen.of_text, chosen.before)

    monkeypatch.setattr(measuring, "read_tokens", read)
    monkeypatch.setattr("paceline.lab.prune.pruner.choose_tokens", keep_one)
    with pytest.raises(InputError):
        prune(Asked(vocab=1024)).make(tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []
