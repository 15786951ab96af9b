"""Huge pages: memory that the processor looks up by 2 MiB instead of 4 KiB, for weights, which every pass reads.

A pass of one row reads every weight once, and with small pages it looks in the page tables for each 4 KiB of that.
Linux gives huge pages to memory of a process that asks for them (transparent huge pages, by default ``madvise``), and
seldom to mapped files. So weights are read into memory of the process where there is room for that beside the cached
file.

[Two cores of an EPYC in a virtual machine, ms of a plain pass with small pages and with huge ones, in turns: a 1b in
Q4_0 14.6 and 13.1, in Q8_0 28.2 and 25.7; SmolLM2-135M in Q4_1 6.4 and 5.9.]
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from paceline.core.clock import Clock, WallClock
from paceline.engines.memory import PROC, read_control_file

Range: TypeAlias = tuple[int, int]
"""Addresses: the first, and the one behind the last."""

MIN_BYTES: Final = 32 << 20
"""Memory below this is left alone: the processor's caches hold much of so small a model, and the stack of a thread is
memory, too.
"""

MAX_WAIT_S: Final = 1.0
"""Seconds that a load may wait for huge pages. Where free memory lies in small pieces the system has to move others
together first, a gigabyte in two seconds."""
_BYTES_PER_S: Final = 2e9
"""Memory that a system hands out in a second where it has huge pages; about as much with small ones."""
_STEP_BYTES: Final = 32 << 20
_PAGE_BYTES: Final = 2 << 20

_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""File in which the system says whether it gives huge pages."""

_HUGE: Final = 14
"""Linux's ``MADV_HUGEPAGE``."""

_POPULATE: Final = 23
"""Linux's ``MADV_POPULATE_WRITE``, since 5.14."""


def gives_huge_pages(setting: Path = _SETTING) -> bool:
    """Whether the system gives huge pages to memory that asks for them, and says when it has."""
    try:
        # One of ``always [madvise] never``.
        is_on = "[never]" not in setting.read_text()
    except OSError:
        return False
    # Linux before 5.14 knows no such advice, and other systems have no such setting.
    return is_on and _advise((0, 0), _POPULATE)


class HugePages:
    """Huge pages for what is allocated from now on."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or WallClock()
        self._known = private_ranges()
        self._later: list[Range] = []

    def take(self) -> None:
        """Ask for huge pages, once the memory is allocated and before it is written to, as far as there is time."""
        waited_s = 0.0
        for first, end in subtract_ranges(private_ranges(), self._known):
            while first < end:
                # Steps end at a huge page: one that lies in two steps would be made of small pages.
                step_end = min((first + _STEP_BYTES) // _PAGE_BYTES * _PAGE_BYTES, end)
                began_s = self._clock.now_s()
                if waited_s > MAX_WAIT_S or not all(_advise((first, step_end), each) for each in (_HUGE, _POPULATE)):
                    self._later.append((first, end))
                    break
                waited_s += max(self._clock.now_s() - began_s - (step_end - first) / _BYTES_PER_S, 0.0)
                first = step_end

    def take_rest(self) -> None:
        """Have the system make huge pages of the rest in the background, once all is written."""
        for each in self._later:
            _advise(each, _HUGE)


def private_ranges(proc: Path = PROC) -> list[Range]:
    """Return the large ranges of memory of this process that no file is behind; none where the system does not say."""
    try:
        lines = read_control_file(proc / "self" / "maps").split("\n")
    except OSError:
        return []
    ranges = []
    for line in lines:
        fields = line.split(maxsplit=5)
        # The sixth column is the file, if there is one.
        if len(fields) == 5 and fields[1] == "rw-p":
            first, end = (int(address, 16) for address in fields[0].split("-"))
            if end - first >= MIN_BYTES:
                ranges.append((first, end))
    return ranges


def subtract_ranges(ranges: Iterable[Range], known: Sequence[Range]) -> list[Range]:
    """Return the parts of ranges that are not in ``known``. The system merges neighbours, so one may hold another."""
    rest = list(ranges)
    for first, end in known:
        rest = [
            part
            for start, stop in rest
            for part in ((start, min(stop, first)), (max(start, end), stop))
            if part[0] < part[1]
        ]
    return rest


_madvise: Final = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def _advise(memory: Range, advice: int) -> bool:
    first, end = memory
    return _madvise is not None and _madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice) == 0
