"""Heads of the target's distributions, in files that a later run goes on with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.engines.scripted import ScriptedEngine, random_model
from paceline.lab.agreement import read_predicting_rows
from paceline.lab.comparison import Stopped
from paceline.lab.distil.rows import HEAD, load_rows, row_bytes, write_rows
from tests.lab.distil.helpers import answer
from tests.lab.scripted_pairs import bytes_vocabulary

VOCAB = 256
ANSWERS = [answer(number) for number in range(20)]


def engine() -> ScriptedEngine:
    return ScriptedEngine(random_model(VOCAB, seed=3), bytes_vocabulary())


def write(folder: Path, *, unshared: tuple[int, ...] = (), in_time: bool = True, stops_after: int = 999) -> list[int]:
    told: list[int] = []
    write_rows(
        engine(),
        ANSWERS,
        folder,
        unshared,
        in_time=lambda: in_time,
        stopped=lambda: len(told) >= stops_after,
        report=told.append,
    )
    return told


def test_rows_are_the_engine_s_distributions(tmp_path: Path) -> None:
    write(tmp_path)
    found = load_rows(ANSWERS, tmp_path, VOCAB)
    assert [len(rows) for rows in found] == [len(each.token_ids) for each in ANSWERS]
    for number in (0, 17):
        each = ANSWERS[number]
        whole = read_predicting_rows(engine(), [*each.task.prompt_ids, *each.token_ids], len(each.task.prompt_ids))
        for row, kept in zip(whole, found[number], strict=True):
            probs = np.exp(row - row.max())
            probs /= probs.sum()
            assert set(kept["ids"].tolist()) == set(np.argsort(probs)[-HEAD:].tolist())
            assert np.exp(kept["logprobs"].astype(np.float64)) == pytest.approx(probs[kept["ids"]], rel=1e-2)
            assert np.exp(float(kept["tail"])) == pytest.approx(1 - probs[kept["ids"]].sum(), rel=1e-2)


def test_what_is_no_token_of_the_draft_counts_among_the_others(tmp_path: Path) -> None:
    unshared = tuple(range(100, VOCAB))
    write(tmp_path, unshared=(*unshared, 9999))
    for rows in load_rows(ANSWERS, tmp_path, VOCAB):
        assert rows["ids"].max() < 100
        masses = np.exp(rows["logprobs"].astype(float)).sum(axis=1) + np.exp(rows["tail"].astype(float))
        assert masses == pytest.approx(1.0, abs=5e-3)


def test_files_that_are_there_are_kept_and_damaged_ones_written_again(tmp_path: Path) -> None:
    write(tmp_path)
    first, second = sorted(tmp_path.iterdir())
    whole = second.read_bytes()
    second.write_bytes(whole[:-7])
    before = first.stat().st_mtime_ns
    assert len(load_rows(ANSWERS, tmp_path, VOCAB)) == 16
    write(tmp_path)
    assert first.stat().st_mtime_ns == before
    assert second.read_bytes() == whole


def test_an_interrupt_leaves_whole_files(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        write(tmp_path, stops_after=1)
    assert [path.name for path in tmp_path.iterdir()] == ["rows-000000.npy"]
    write(tmp_path)
    assert len(load_rows(ANSWERS, tmp_path, VOCAB)) == len(ANSWERS)


def test_where_time_is_over_the_first_file_is_written_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, in_time=False)
    assert len(load_rows(ANSWERS, tmp_path, VOCAB)) == 16


def test_a_row_takes_a_third_of_a_kilobyte_whatever_the_vocabulary() -> None:
    assert row_bytes(50_000) == 258
    assert row_bytes(262_144) == 386
    assert row_bytes(32) < 200
