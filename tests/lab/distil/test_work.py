"""The folder that distilling works in."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from paceline.core.errors import InputError
from paceline.lab.distil.work import WorkFolder

KEY = {"--temp": 0.8, "--seed": 1}


def begin(made: Path) -> None:
    work = WorkFolder.beside(made, KEY, 60.0)
    with work.held():
        (work.path / "answers.jsonl").write_text("{}")


def test_a_run_that_did_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError), WorkFolder.beside(tmp_path / "out", KEY, 60.0).held():
        raise InputError("no")
    assert not list(tmp_path.iterdir())


def test_a_later_run_goes_on_with_facts_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    work = WorkFolder.beside(tmp_path / "out.gguf", KEY, 60.0)
    with work.held():
        (work.path / "answers.jsonl").write_text("{}")
        work.facts["steps"] = 3
        now += 20.0
        assert work.has_time(0.5)
        assert not work.has_time(0.25)
    now += 1000.0
    again = WorkFolder.beside(tmp_path / "out.gguf", KEY, 60.0)
    with again.held():
        assert again.facts == {"steps": 3}
        now += 15.0
        assert again.spent_s == pytest.approx(35.0)
        again.remove()
    assert not list(tmp_path.iterdir())


def test_the_work_of_another_command_is_refused_by_what_differs(tmp_path: Path) -> None:
    made = tmp_path / "out.gguf"
    begin(made)
    with pytest.raises(InputError, match="--temp"), WorkFolder.beside(made, {**KEY, "--temp": 0.0}, 60.0).held():
        pass
    # More time is the same work.
    with WorkFolder.beside(made, KEY, 600.0).held():
        pass


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out.distil").mkdir()
    (tmp_path / "out.distil" / "precious").write_text("kept")
    with pytest.raises(InputError), WorkFolder.beside(tmp_path / "out", KEY, 60.0).held():
        pass
    assert (tmp_path / "out.distil" / "precious").read_text() == "kept"


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    made = tmp_path / "out"
    with (
        WorkFolder.beside(made, KEY, 60.0).held(),
        pytest.raises(InputError, match="another process"),
        WorkFolder.beside(made, KEY, 60.0).held(),
    ):
        pass


def test_a_full_disk_is_one_line_and_the_work_stays(tmp_path: Path) -> None:
    made = tmp_path / "out"
    begin(made)
    with pytest.raises(InputError, match="No space left"), WorkFolder.beside(made, KEY, 60.0).held():
        raise OSError(errno.ENOSPC, "No space left on device", "rows.npy")
    assert json.loads((tmp_path / "out.distil" / "plan.json").read_text())["key"] == KEY
