"""Weights come as they lie in their files, or an error says why not."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest

from paceline.core.errors import EngineError, InputError
from paceline.engines.streaming import disk
from paceline.engines.streaming.disk import WeightFiles
from paceline.engines.streaming.layout import BLOCK, Extent

SIZE = 5 * BLOCK + 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(1).randbytes(SIZE))
    return path


@pytest.fixture(params=["direct", "refused when opened", "refused when read", "none"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make file systems of every kind."""
    opened, read = os.open, os.preadv

    def refusing_open(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    def refusing_read(file: int, *rest: object) -> int:
        if _is_direct(file):
            raise OSError(errno.EINVAL, "Invalid argument")
        return read(file, *rest)  # type: ignore[arg-type]

    if request.param == "refused when opened":
        monkeypatch.setattr(os, "open", refusing_open)
    elif request.param == "refused when read":
        monkeypatch.setattr(os, "preadv", refusing_read)
    elif request.param == "none":
        monkeypatch.setattr(disk, "_DIRECT", 0)
    return str(request.param)


def _is_direct(file: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def test_extents_come_to_their_places(path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CHUNK", BLOCK)
    data = path.read_bytes()
    files = WeightFiles([path])
    slot = mmap.mmap(-1, 8 * BLOCK)
    # The last one goes on behind the file's end.
    extents = [Extent(0, BLOCK, 3 * BLOCK, 0), Extent(0, 4 * BLOCK, 6 * BLOCK, 2 * BLOCK)]
    with memoryview(slot) as view:
        files.read(extents, view)
    assert slot[: 2 * BLOCK] == data[BLOCK : 3 * BLOCK]
    assert slot[2 * BLOCK : 2 * BLOCK + BLOCK + 100] == data[4 * BLOCK :]
    assert files.bytes_read == 4 * BLOCK
    files.check()
    files.close()
    if way != "direct":
        assert not files.is_direct


def test_a_file_that_was_cut_is_told(path: Path) -> None:
    files = WeightFiles([path])
    os.truncate(path, 2 * BLOCK + 10)
    with memoryview(mmap.mmap(-1, 4 * BLOCK)) as view:
        with pytest.raises(EngineError, match=r"weights ends at byte \d+: it was cut while its weights are streamed"):
            files.read([Extent(0, BLOCK, 5 * BLOCK, 0)], view)
        files.read([Extent(0, 0, 2 * BLOCK, 0)], view)
    with pytest.raises(EngineError, match="was changed while its weights are streamed: load the model again"):
        files.check()
    files.close()


def test_a_disk_that_fails_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = WeightFiles([path])

    def failing(file: int, buffers: object, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with (
        memoryview(mmap.mmap(-1, BLOCK)) as view,
        pytest.raises(EngineError, match=r"the weights in .* cannot be read at byte 4096: Input/output error"),
    ):
        files.read([Extent(0, BLOCK, 2 * BLOCK, 0)], view)
    files.close()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        WeightFiles([tmp_path / "none"])
