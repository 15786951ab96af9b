"""``paceline convert`` as its users call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from paceline.conversion.convert import exact_dtype
from paceline.models.embedded import embedded_draft
from tests.cli.interrupted import interrupt_while_it_writes
from tests.cli.invoking import Invoke, Outcome

Run = Callable[..., Outcome]


@pytest.fixture
def run(invoke: Invoke) -> Run:
    return lambda *arguments: invoke("convert", *map(str, arguments))


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    assert run(embedded_draft(), tmp_path / "folder")[0] == 0
    return tmp_path / "folder"


def matrix_types(path: Path) -> set[str]:
    return {tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) == 2}


def test_there_and_back(run: Run, tmp_path: Path) -> None:
    status, out, err = run(embedded_draft(), tmp_path / "folder", "--type", "bf16")
    assert (status, out) == (0, "")
    assert err.startswith(f"wrote {tmp_path / 'folder'}: ")
    assert "BF16" in err
    assert exact_dtype(tmp_path / "folder") == "BF16"
    status, out, err = run(tmp_path / "folder", tmp_path / "again.gguf", "--dtype", "F32", "--name", "mine", "--json")
    assert (status, err) == (0, "")
    outcome = json.loads(out)
    assert outcome.keys() == {"source", "destination", "file_type", "num_bytes", "took_s"}
    assert outcome["file_type"] == "F32"
    assert outcome["num_bytes"] == (tmp_path / "again.gguf").stat().st_size
    assert matrix_types(tmp_path / "again.gguf") == {"F32"}
    assert gguf.GGUFReader(tmp_path / "again.gguf").fields["general.name"].contents() == "mine"


def test_a_folder_is_quantised_on_the_way(run: Run, folder: Path, tmp_path: Path) -> None:
    assert run(folder, tmp_path / "small.gguf", "--type", "q8_0")[0] == 0
    assert matrix_types(tmp_path / "small.gguf") == {"Q8_0"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "small.gguf"]


def test_a_source_is_found_by_its_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("draft", "out", "--json")
    assert (status, json.loads(out)["source"]) == (0, str(embedded_draft()))
    (tmp_path / "draft").rmdir()
    (tmp_path / "out").rename("draft")  # a folder that holds a model is meant itself
    status, out, _ = run("draft", "again.gguf", "--json")
    assert (status, json.loads(out)["source"]) == (0, "draft")
    assert matrix_types(tmp_path / "again.gguf") == {"F16"}


def test_replacing_needs_force(run: Run, folder: Path, tmp_path: Path) -> None:
    assert run(embedded_draft(), folder, "--type", "F32")[0] == 2
    assert exact_dtype(folder) == "F16"
    assert run(embedded_draft(), folder, "--type", "F32", "--force")[0] == 0
    assert exact_dtype(folder) == "F32"
    (tmp_path / "model.gguf").write_bytes(b"former")
    status, _, err = run(folder, tmp_path / "model.gguf")
    assert (status, (tmp_path / "model.gguf").read_bytes()) == (2, b"former")
    assert err == f"paceline: {tmp_path / 'model.gguf'} exists; give another name, or replace it with --force\n"
    assert run(folder, tmp_path / "model.gguf", "--force")[0] == 0
    assert matrix_types(tmp_path / "model.gguf") == {"F16"}


@pytest.mark.parametrize("destination", ["out.gguf", "other"])
def test_ctrl_c_leaves_nothing_behind(folder: Path, tmp_path: Path, destination: str) -> None:
    source = folder if destination == "out.gguf" else embedded_draft()
    status, err, written = interrupt_while_it_writes(tmp_path, "convert", str(source), str(tmp_path / destination))
    assert (status, err) == (130, b"")
    assert len(written - {"folder"}) == 1, "something is being written"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
