"""Fingerprints of models: the same for the same content, another for any other, and soon taken."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from paceline.core.errors import ModelFileError
from paceline.models.fingerprints import fingerprint

MEBIBYTE = 1 << 20


def write(path: Path, size: int, changes: dict[int, int] | None = None) -> Path:
    data = bytearray(size)
    for place, value in (changes or {}).items():
        data[place] = value
    path.write_bytes(data)
    return path


def test_fingerprints_do_not_depend_on_place_or_time(tmp_path: Path) -> None:
    one = write(tmp_path / "one.gguf", 3 * MEBIBYTE)
    (tmp_path / "other").mkdir()
    assert fingerprint(one) == fingerprint(write(tmp_path / "other" / "two.gguf", 3 * MEBIBYTE))


@pytest.mark.parametrize("size", [10, MEBIBYTE, MEBIBYTE + 10, 3 * MEBIBYTE, 9 * MEBIBYTE])
def test_fingerprints_tell_heads_tails_and_sizes_apart(tmp_path: Path, size: int) -> None:
    one = fingerprint(write(tmp_path / "a", size))
    for changes in ({0: 1}, {min(size, MEBIBYTE) - 1: 1}, {size - 1: 1}):
        assert fingerprint(write(tmp_path / "a", size, changes)) != one
    assert fingerprint(write(tmp_path / "a", size + 1)) != one


def test_fingerprints_of_folders_and_split_files_cover_all_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = write(tmp_path / "model.safetensors", 100)
    (tmp_path / "README.md").write_text("one")
    one = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("other")
    assert fingerprint(tmp_path) == one
    write(weights, 100, {50: 1})
    assert fingerprint(tmp_path) != one

    first = write(tmp_path / "big-00001-of-00002.gguf", 100)
    second = write(tmp_path / "big-00002-of-00002.gguf", 100)
    write(tmp_path / "bigger-00002-of-00002.gguf", 100)
    whole = fingerprint(first)
    write(tmp_path / "bigger-00002-of-00002.gguf", 101)
    assert fingerprint(first) == whole
    write(second, 100, {7: 1})
    assert fingerprint(first) != whole


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        fingerprint(tmp_path / "none.gguf")


def test_a_fingerprint_of_a_large_file_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "large", 64 * MEBIBYTE)
    num_read = []

    class Counting(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size)
            num_read.append(len(data))
            return data

    monkeypatch.setattr(Path, "open", lambda self, mode: Counting(self, mode))
    fingerprint(path)
    assert 1 * MEBIBYTE < sum(num_read) < 6 * MEBIBYTE
