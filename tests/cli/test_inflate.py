"""``paceline inflate`` as its users call it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.cli.inflate import LARGE_PRESET, large_target
from paceline.lab.inflate import PRESETS, LlamaShape, is_up_to_date
from paceline.models.embedded import embedded_target
from tests.cli.interrupted import interrupt_while_it_writes
from tests.cli.invoking import Invoke
from tests.engines.tiny_models import write_eagle_head, write_model
from tests.lab.llama_files import LARGE, SMALL, logits, write_llama

TO_LARGE = (
    *("--layers", "5", "--width", "1024", "--feed-forward", "768"),
    *("--heads", "24", "--kv-heads", "6", "--head-size", "64"),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a preset that is quick to make."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PRESETS, "0.3b", replace(LARGE, vocab_size=4096))
    return tmp_path / "cache" / "models"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "small.gguf")


def test_a_preset_goes_into_the_cache_once(invoke: Invoke, cache: Path, small: Path) -> None:
    path = cache / "small-0.3b-q8_0.gguf"
    first = invoke("inflate", str(small), "0.3b", "--type", "q8_0")
    assert (first.status, first.out) == (0, f"{path}\n")
    assert "parameters" in first.err
    assert "MB of Q8_0, made in" in first.err
    made = path.stat().st_mtime_ns
    second = invoke("inflate", str(small), "0.3B", "--type", "Q8_0")
    assert (second.status, second.out) == (0, f"{path}\n")
    assert "already there" in second.err
    assert path.stat().st_mtime_ns == made
    assert invoke("inflate", str(small), "0.3b", "--type", "Q8_0", "--force").status == 0
    assert path.stat().st_mtime_ns > made
    assert [file.name for file in cache.iterdir()] == [path.name]


def test_the_large_target_is_made_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PRESETS, LARGE_PRESET, replace(LARGE, vocab_size=4096, feed_forward=1024))
    path = large_target("Q8_0")
    assert path == cache / f"target-{LARGE_PRESET}-q8_0.gguf"
    assert f"made {path.name}, " in capsys.readouterr().err
    made = path.stat().st_mtime_ns
    assert large_target("Q8_0") == path
    assert path.stat().st_mtime_ns == made
    assert capsys.readouterr().err == ""
    path.write_bytes(b"half of it")
    assert large_target("Q8_0") == path
    assert is_up_to_date(path, embedded_target(), LlamaShape.from_gguf(path), "Q8_0")


def test_a_cached_model_of_another_source_is_made_again(invoke: Invoke, cache: Path, small: Path) -> None:
    (path,) = [Path(invoke("inflate", str(small), "0.3b", "--type", "F16").out.strip())]
    before = logits(path)
    write_llama(small, replace(SMALL, layers=3))
    outcome = invoke("inflate", str(small), "0.3b", "--type", "F16")
    assert outcome.status == 0
    assert "made in" in outcome.err
    assert np.abs(logits(path) - before).max() > 0.1


def test_dimensions_replace_those_of_the_preset_or_the_source(invoke: Invoke, tmp_path: Path, small: Path) -> None:
    target = str(tmp_path / "large.gguf")
    outcome = invoke("inflate", str(small), *TO_LARGE, "--vocab", "1000", "-o", target, "--type", "Q4_0", "--json")
    facts = json.loads(outcome.out)
    assert outcome.err == ""
    assert facts["path"] == target
    assert facts["num_bytes"] == Path(target).stat().st_size
    assert facts["already_there"] is False
    assert (
        LlamaShape(**facts["shape"])
        == replace(LARGE, vocab_size=1000, tied=False)
        == LlamaShape.from_gguf(Path(target))
    )
    assert facts["num_parameters"] == LlamaShape(**facts["shape"]).num_parameters
    again = json.loads(
        invoke("inflate", str(small), *TO_LARGE, "--vocab", "1000", "-o", target, "--type", "Q4_0", "--json").out
    )
    assert again["already_there"] is True


def test_a_file_that_is_something_else_is_kept(invoke: Invoke, tmp_path: Path, small: Path) -> None:
    target = tmp_path / "large.gguf"
    target.write_text("precious")
    outcome = invoke("inflate", str(small), *TO_LARGE, "-o", str(target))
    assert (outcome.status, outcome.out) == (2, "")
    assert "--force" in outcome.err
    assert target.read_text() == "precious"
    assert invoke("inflate", str(small), *TO_LARGE, "-o", str(target), "--force").status == 0
    assert LlamaShape.from_gguf(target) == LARGE


def test_a_path_without_gguf_becomes_a_folder(invoke: Invoke, tmp_path: Path, small: Path) -> None:
    folder = tmp_path / "hf"
    arguments = ("inflate", str(small), "--width", "512", "-o", str(folder), "--type", "BF16")
    assert invoke(*arguments).status == 0
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 512
    refused = invoke(*arguments)
    assert refused.status == 2
    assert "--force" in refused.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "small.gguf"]


def test_ctrl_c_leaves_no_file(tmp_path: Path, small: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    to = ("--width", "256", "--layers", "2", "--type", "F32", "-o", str(folder / "x.gguf"))
    status, err, written = interrupt_while_it_writes(folder, "inflate", str(small), *to)
    assert (status, err) == (130, b"")
    assert any(name.endswith(".partial") for name in written)
    assert list(folder.iterdir()) == []


def test_a_head_goes_beside_the_model(invoke: Invoke, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source.gguf", "llama", tokenizer="bytes", layers=4)
    head = write_eagle_head(tmp_path / "head.gguf", 32)
    path = tmp_path / "large.gguf"
    command = (
        "inflate",
        str(source),
        "--width",
        "256",
        "--feed-forward",
        "256",
        "--heads",
        "16",
        "--head",
        str(head),
        "--type",
        "F32",
        "-o",
    )
    first = invoke(*command, str(path))
    made = tmp_path / "eagle3-large.gguf"
    assert (first.status, first.out) == (0, f"{path}\n{made}\n")
    before = made.stat().st_mtime_ns
    assert json.loads(invoke(*command, str(path), "--json").out)["head"] == str(made)
    assert made.stat().st_mtime_ns == before
    made.write_bytes(b"something else")
    second = invoke(*command, str(path))
    assert (second.status, second.out) == (2, "")
    assert "eagle3-large.gguf exists and is another model" in second.err
    third = invoke(*command, str(tmp_path / "folder"))
    assert third.status == 2
    assert "--head needs a model in GGUF" in third.err
