"""What is tried as a draft, and what is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.core.errors import InputError, ModelFileError
from paceline.lab.doctor.candidates import find_candidates
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target

TARGET = describe(embedded_target())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a draft, the target, a copy of it, a file that is no model, and a draft two folders down."""
    folder = tmp_path / "models"
    (folder / "publisher" / "model").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    shutil.copy(embedded_draft(), folder / "draft.gguf")
    (folder / "link.gguf").symlink_to(embedded_target())
    shutil.copy(embedded_target(), folder / "copy.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    (folder / "notes.txt").write_text("nothing")
    shutil.copy(embedded_draft(), folder / "publisher" / "model" / "small.gguf")
    shutil.copy(embedded_draft(), folder / ".hidden" / "draft.gguf")
    (folder / "again.gguf").symlink_to(folder / "draft.gguf")
    return folder


def test_a_folder_is_searched(folder: Path) -> None:
    candidates, skipped = find_candidates([str(folder)], TARGET)
    assert {candidate.name for candidate in candidates} == {"again.gguf", "publisher/model/small.gguf"}, "each once"
    assert {each.name for each in skipped} == {"broken.gguf", "copy.gguf"}
    why = {each.name: each.why for each in skipped}
    assert "too large to draft" in why["copy.gguf"]
    assert str(folder) not in why["broken.gguf"]


def test_what_is_named_is_tried(folder: Path) -> None:
    candidates, skipped = find_candidates([str(folder / "copy.gguf"), "draft", str(folder / "copy.gguf")], TARGET)
    assert [candidate.name for candidate in candidates] == [str(folder / "copy.gguf"), "draft"]
    assert not skipped


def test_what_is_named_must_be_a_model(folder: Path) -> None:
    for name in ("broken.gguf", "notes.txt"):
        with pytest.raises(ModelFileError, match=name):
            find_candidates([str(folder / name)], TARGET)
    with pytest.raises(ModelFileError, match="there is no file"):
        find_candidates([str(folder / "absent.gguf")], TARGET)


def test_a_folder_without_models_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("nothing")
    with pytest.raises(InputError, match="holds no model"):
        find_candidates([str(empty)], TARGET)


def test_without_names_all_that_have_one_are_tried() -> None:
    candidates, _ = find_candidates([], TARGET)
    assert "draft" in {candidate.name for candidate in candidates}
    assert "target" not in {candidate.name for candidate in candidates}


def test_the_target_quantised_smaller_is_a_candidate(cache: Path) -> None:
    (own,), _ = find_candidates(["self"], TARGET)
    assert own.name == "self:Q4_0"
    assert own.path.parent == cache / "drafts"
    assert not own.path.exists(), "it is made when its turn comes"


def test_linked_folders_are_searched_too(folder: Path, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "disk").symlink_to(folder)
    (folder / "back").symlink_to(shelf)
    (shelf / "again").symlink_to(folder)
    (tmp_path / "linked").symlink_to(shelf)
    for named in (shelf, tmp_path / "linked"):
        candidates, skipped = find_candidates([str(named)], TARGET)
        assert {Path(candidate.name).name for candidate in candidates} == {"again.gguf", "small.gguf"}, "each once"
        assert {Path(each.name).name for each in skipped} == {"broken.gguf", "copy.gguf"}
        assert len(skipped) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_no_model_and_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "pipe.gguf")
    _, skipped = find_candidates([str(folder)], TARGET)
    assert [each.why for each in skipped if each.name == "pipe.gguf"] == [
        "is a pipe; give the path of a file, as models are read more than once"
    ]
    with pytest.raises(ModelFileError, match=r"pipe\.gguf is a pipe; give the path of a file"):
        find_candidates([str(folder / "pipe.gguf")], TARGET)
