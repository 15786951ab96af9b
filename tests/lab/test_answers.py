"""Answers that are kept, so that a second run goes on where the first was ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.options import ModelOptions
from paceline.lab.answers import Answers, WrittenAnswer
from paceline.lab.comparison import Stopped
from paceline.lab.sessions import Engines
from paceline.lab.task import Task
from paceline.models.embedded import embedded_target
from tests.lab.scripted_pairs import constant_model, engines

TARGET = ModelOptions(embedded_target())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "answers"


def tasks(tokens: int = 40, count: int = 4) -> list[Task]:
    return [Task("code", f"code:{number}", tuple(range(number, number + 9)), tokens, number) for number in range(count)]


class Counted:
    """Engines that count how many passes the target makes."""

    def __init__(self, **options: Any) -> None:
        self.engines: Engines = engines(**options)
        self.passes = 0
        forward = self.engines.target.forward

        def counting(steps: Any) -> Any:
            self.passes += 1
            return forward(steps)

        self.engines.target.forward = counting

    def write(
        self, asked: list[Task], count: int = 4, *, keep: bool = True, stop_after: int | None = None
    ) -> list[WrittenAnswer]:
        answers = Answers(TARGET, 0.0, keep=keep)
        return answers.write(
            self.engines,
            asked,
            count,
            stopped=lambda: stop_after is not None and self.passes > stop_after,
            in_time=lambda: True,
            report=lambda count: None,
        )


def same(one: list[WrittenAnswer], other: list[WrittenAnswer]) -> bool:
    return [each.token_ids for each in one] == [each.token_ids for each in other]


def test_a_second_run_makes_no_passes() -> None:
    first, second = Counted(), Counted()
    written = first.write(tasks())
    again = second.write(tasks())
    assert second.passes == 0
    assert same(written, again)
    assert all(each.passes_s is not None for each in written)
    assert all(each.passes_s is None for each in again), "these were timed another day"
    for one, other in zip(written, again, strict=True):
        for (ids, probs), (kept_ids, kept_probs) in zip(one.places, other.places, strict=True):
            assert ids.tolist() == kept_ids.tolist()
            assert probs == pytest.approx(kept_probs, abs=1e-6)


def test_an_ended_run_is_gone_on_with() -> None:
    first, second = Counted(), Counted()
    with pytest.raises(Stopped):
        first.write(tasks(), stop_after=100)
    assert len(second.write(tasks())) == 4
    assert 0 < second.passes < 4 * 41 - 60, "two were kept"


def test_shorter_answers_are_the_beginnings_of_longer_ones() -> None:
    long = Counted().write(tasks(40))
    other = Counted()
    short = other.write(tasks(20))
    assert other.passes == 0
    assert [each.token_ids for each in short] == [each.token_ids[:20] for each in long]
    Counted().write(tasks(60))
    assert len(Counted().write(tasks(60))[0].token_ids) == 60


def test_answers_of_other_settings_are_others() -> None:
    Counted().write(tasks())
    other = Counted()
    answers = Answers(TARGET, 0.5, keep=True)
    answers.write(other.engines, tasks(), 1, stopped=lambda: False, in_time=lambda: True, report=lambda count: None)
    assert other.passes > 0


def test_a_user_s_own_texts_are_not_kept(cache: Path) -> None:
    assert len(Counted().write(tasks(), keep=False)) == 4
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", None])
def test_what_is_damaged_is_written_anew(cache: Path, damage: bytes | None) -> None:
    Counted().write(tasks())
    (path,) = cache.iterdir()
    if damage is None:
        entry = json.loads(path.read_text())
        for kept in entry["data"].values():
            del kept["places"][3:]
        damage = json.dumps(entry).encode()
    path.write_bytes(damage)
    other = Counted()
    assert len(other.write(tasks())) == 4
    assert other.passes > 0


def test_answers_that_loop_are_left_out() -> None:
    assert Counted(target=constant_model()).write(tasks()) == []


def test_nothing_more_is_written_when_time_is_over() -> None:
    found = Counted()
    answers = Answers(TARGET, 0.0, keep=False)
    written = answers.write(
        found.engines, tasks(), 4, stopped=lambda: False, in_time=lambda: False, report=lambda count: None
    )
    assert len(written) == 1, "one there must be"
