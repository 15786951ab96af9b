"""Reading weights past the page cache, which would evict what is needed next for what was needed last.

``O_DIRECT`` reads straight into the memory of a slot. Where a file system has none, reads go through the page cache and
what was read is dropped from it again.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from paceline.core.errors import EngineError, InputError
from paceline.engines.streaming.layout import BLOCK, Extent
from paceline.engines.waited_for import be_waited_for

CHUNK: Final = 4 << 20
"""Bytes of a single read."""

READERS: Final = 4
"""Reads at once: one keeps a disk of 1 GB/s busy, faster ones want several. [A disk here: one 1.1 to 1.5 GB/s, eight
1.97.]"""

_DIRECT: Final = getattr(os, "O_DIRECT", 0)
# Errors of open and read where there is no O_DIRECT, or not with these sizes.
_REFUSALS: Final = frozenset((errno.EINVAL, errno.EOPNOTSUPP))


class WeightFiles:
    """The files of a model, opened for reading into slots.

    Attributes:
        is_direct: whether reads go past the page cache.
        bytes_read: by now.
        read_s: seconds that reading them took.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._files: list[int] = []
        self.is_direct = bool(_DIRECT)
        self.bytes_read = 0
        self.read_s = 0.0
        try:
            for path in paths:
                self._files.append(self._open(path))
            self._as_opened = [self._state(number) for number in range(len(paths))]
        except OSError as error:
            self._close_files()
            raise InputError(f"the weights in {path} cannot be read: {error.strerror or error}") from error
        self._pool = ThreadPoolExecutor(READERS, "paceline-weights", initializer=be_waited_for)

    def read(self, extents: Sequence[Extent], slot: memoryview) -> None:
        """Read extents to their places in a slot; raise ``EngineError`` where a file was changed or the disk failed."""
        started_s = time.perf_counter()
        futures: list[Future[None]] = []
        for extent in extents:
            for start in range(extent.start, extent.end, CHUNK):
                end = min(start + CHUNK, extent.end)
                offset = extent.offset + start - extent.start
                futures.append(
                    self._pool.submit(self._read_chunk, extent.file, start, slot[offset : offset + end - start])
                )
        wait(futures)
        for future in futures:
            future.result()
        self.bytes_read += sum(extent.num_bytes for extent in extents)
        self.read_s += time.perf_counter() - started_s

    def drop_cached(self) -> None:
        """Let the page cache forget the files."""
        if hasattr(os, "posix_fadvise"):
            for file in self._files:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """Raise ``EngineError`` if a file was written to, or replaced, since it was opened."""
        for number, path in enumerate(self._paths):
            if self._state(number) != self._as_opened[number]:
                raise EngineError(f"{path} was changed while its weights are streamed: load the model again")

    def close(self) -> None:
        """Close the files, once the reads that run are done."""
        self._pool.shutdown()
        self._close_files()

    def _open(self, path: Path) -> int:
        if self.is_direct:
            try:
                return _open_direct(path)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                self.is_direct = False
        return os.open(path, os.O_RDONLY)

    def _state(self, number: int) -> tuple[int, int]:
        found = os.fstat(self._files[number])
        return found.st_size, found.st_mtime_ns

    def _read_chunk(self, number: int, start: int, into: memoryview) -> None:
        """Fill ``into``; a file may end within its last block, and what lies behind its end is undefined."""
        path, file = self._paths[number], self._files[number]
        wanted = min(len(into), self._as_opened[number][0] - start)
        done = 0
        while done < wanted:
            try:
                got = os.preadv(file, [into[done:]], start + done)
            except OSError as error:
                raise EngineError(
                    f"the weights in {path} cannot be read at byte {start + done}: {error.strerror or error}"
                ) from error
            # A direct read begins on a block: of one that was not read to its end, all is read again.
            further = done + got if not self.is_direct or done + got == wanted else (done + got) // BLOCK * BLOCK
            if further <= done:
                raise EngineError(
                    f"{path} ends at byte {start + done + got}: it was cut while its weights are streamed"
                )
            done = further
        if not self.is_direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, start, wanted, os.POSIX_FADV_DONTNEED)

    def _close_files(self) -> None:
        for file in self._files:
            os.close(file)
        self._files.clear()


def own_memory(num_bytes: int) -> mmap.mmap:
    """Return memory that begins on a block, as reads past the page cache need it, and that no fork sees."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back(memory: mmap.mmap) -> None:
    """Give memory of :func:`own_memory` back to the system. Nothing may read it any more."""
    try:
        memory.close()
    except BufferError:
        # The error of a failed read keeps its frames, and so this memory: the mapping stays, without pages.
        if hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_DONTNEED)


def _open_direct(path: Path) -> int:
    """Open a file for reads past the page cache; raise ``OSError`` where the file system has none."""
    file = os.open(path, os.O_RDONLY | _DIRECT)
    try:
        with mmap.mmap(-1, BLOCK) as block:
            # Some file systems refuse direct reads only now.
            os.preadv(file, [block], 0)
    except BaseException:
        os.close(file)
        raise
    return file
