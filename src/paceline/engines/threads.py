"""How many threads a pass runs on: one a core on a quiet machine, fewer while others use the cores.

All threads of a pass meet after every operation, some hundred times a pass. One that has to wait for its core holds up
the others, which spin meanwhile and so lose their own claim to a core: beside a single busy process a pass on all cores
takes several times as long as one that leaves a core free (docs/benchmarks.md, "A busy machine").

What others use is what all cores were busy for, less this process's own time. That needs no privilege, no probing and
no knowledge of how long a pass should take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil

from paceline.engines.memory import GROUPS, PROC, group_folders

_VERSION_1: Final = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
"""Files of a control group of version 1; version 2 has both figures in ``cpu.max``."""

PERIOD_S: Final = 0.2
"""How often the cores are looked at: systems count their time in hundredths of a second."""

_LONGEST_S: Final = 1.5 * PERIOD_S
"""Seconds between two looks, as between two answers, above which the load that was measured says little of now."""
_SOON_S: Final = 0.1
"""Seconds until the next look after such a gap."""


def usable_cores(proc: Path = PROC, groups: Path = GROUPS) -> int:
    """Return how many physical cores this process may keep busy: affinity mask, hardware threads, container quota."""
    return max(1, min([count_cores(), *_quotas(proc, groups)]))


def _quotas(proc: Path, groups: Path) -> Iterator[int]:
    """Yield how many whole cores each control group of this process allows; the rest of one is no core.

    Two threads in one and a half cores use up a period's time together, and wait for the next one in the middle of a
    pass.
    """
    for version, folder in group_folders("cpu", proc, groups):
        try:
            if version == 1:
                quota, period = (int((folder / name).read_text()) for name in _VERSION_1)
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
        except (OSError, ValueError):  # no such file, or a quota of "max"
            continue
        if quota > 0 < period:  # version 1 says -1 where there is no quota
            yield quota // period


def count_cores() -> int:
    """Return how many physical cores this process may run on: affinity mask and hardware threads."""
    try:
        cpus = os.sched_getaffinity(0)
    except AttributeError:  # not on this platform
        return os.cpu_count() or 1
    found = set()
    for cpu in cpus:
        try:
            found.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            found.add(str(cpu))
    return max(1, len(found))


def busy_seconds() -> float:
    """Return the seconds that the cores of this process's mask were busy since the machine was started, in sum."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (psutil.Error, NotImplementedError, RuntimeError, ValueError, IndexError) as error:
        raise OSError(f"the system does not say how busy its cores are: {error}") from error
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
    # A guest's time is counted as the user's; time that the host took (steal) is not this machine's to give.
    return float(sum(sum(times[cpu]) - times[cpu].idle - _more_idle(times[cpu]) for cpu in mask if cpu < len(times)))


def _more_idle(times: object) -> float:
    """Return what is counted beside busy and idle time: waiting for a disk, and what counts twice."""
    return sum(float(getattr(times, name, 0.0)) for name in ("iowait", "steal", "guest", "guest_nice"))


class SpareCores:
    """Says how many threads to run a pass on, by what other processes leave.

    Others' work takes the spare ``cores`` of this process first: there are more than ``most`` where a quota or the user
    allows fewer threads. ``own_s`` gives the seconds that this process has had on cores, all its threads together.

    Attributes:
        threads: of the next pass.
        most: threads on a quiet machine.
    """

    def __init__(
        self,
        most: int,
        cores: int,
        *,
        busy_s: Callable[[], float] = busy_seconds,
        own_s: Callable[[], float] = time.process_time,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.threads = most
        self.most = most
        self._cores = cores
        self._busy_s, self._own_s, self._clock_s = busy_s, own_s, clock_s
        self._due_s = 0.0
        self._seen: tuple[float, float, float] | None = None
        if most > 1:
            self._look()

    def look(self) -> int:
        """Return how many threads the next pass should have; cheap, as the cores are looked at now and then only."""
        if self.most > 1 and self._clock_s() >= self._due_s:
            self._look()
        return self.threads

    def _look(self) -> None:
        try:
            now = self._clock_s(), self._busy_s(), self._own_s()
        except OSError:
            # What other processes use is not known on this system.
            self._due_s, self.threads = float("inf"), self.most
            return
        self._due_s = now[0] + PERIOD_S
        before, self._seen = self._seen, now
        if before is None:
            self._due_s = now[0] + _SOON_S
            return
        wall_s, busy_s, own_s = (after - earlier for after, earlier in zip(now, before, strict=True))
        if wall_s > _LONGEST_S:
            self._due_s = now[0] + _SOON_S
        others = max(0.0, busy_s - own_s) / max(wall_s, 1e-9)
        # Half a core in use counts as a core: its user would hold up a thread every other time.
        free = int(self._cores - others + 0.5)
        self.threads = min(max(free, 1), self.most)


class PassThreads:
    """The threads of passes of one row, and of wider ones: as the user set them, or as others leave cores.

    ``None`` is as many as :func:`usable_cores`, less what others use; for wider passes, the same as for narrow ones.

    Attributes:
        most: both numbers on a quiet machine.
    """

    def __init__(self, threads: int | None, threads_batch: int | None) -> None:
        most = threads or usable_cores()
        self.most = most, threads_batch or most
        self._wide_follows = threads_batch is None
        self._spare = SpareCores(most, count_cores()) if threads is None else None

    def look(self) -> tuple[int, int]:
        if self._spare is None:
            return self.most
        spare = self._spare.look()
        return spare, spare if self._wide_follows else self.most[1]
