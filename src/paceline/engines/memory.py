"""Memory: how much is available, how much this process holds, and how it is shared out when layers are streamed."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

PROC: Final = Path("/proc")
"""Where the system says which control groups a process is in."""
GROUPS: Final = Path("/sys/fs/cgroup")
"""Where the system has the folders of control groups."""

Version: TypeAlias = Literal[1, 2]
"""Of control groups: their files are called otherwise, and version 1 has a tree for each controller."""


def group_folders(controller: str, proc: Path = PROC, groups: Path = GROUPS) -> Iterator[tuple[Version, Path]]:
    """Yield the folders of the groups that this process is in, and of those around them: each may have a limit.

    A container sees its own group as the outermost, whatever path the host knows it by. So folders may be missing.
    ``controller`` is ``cpu`` or ``memory``.
    """
    try:
        # Split at "\n" alone: names may have characters that end a line in Python.
        lines = read_control_file(proc / "self" / "cgroup").split("\n")
    except OSError:
        return
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _with_those_around(groups, path):
                yield 2, folder
        elif controller in controllers.split(","):
            for folder in _with_those_around(groups / controller, path):
                yield 1, folder


def _with_those_around(root: Path, path: str) -> Iterator[Path]:
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        yield folder
        if folder == root:
            return


def read_control_file(file: Path) -> str:
    """Return the text of a control file. Names in it are bytes, which need not be UTF-8."""
    return file.read_text(encoding="utf-8", errors="surrogateescape")


# Files of a control group: the limit, the use, and the part of the use that is reclaimable file pages.
_FILES: Final[dict[Version, tuple[str, str, tuple[str, str]]]] = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}

_malloc_trim: Final = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""``malloc_trim``, which only glibc has."""

PROCESS_BYTES: Final = 128 << 20
"""Bytes that a process which serves a model takes besides: Python, libraries, and what a few first passes touch."""

SPARE_BYTES: Final = 32 << 20
"""Bytes left free for what Python comes to hold, and for the pages of the file that are looked up."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a loaded model takes of the memory of its process.

    Attributes:
        num_bytes: of weights in memory of the process, of what is cached of texts, and of scratch memory.
        untouched_bytes: the part of ``num_bytes`` that was not written to yet, so that the system does not count it.
    """

    num_bytes: int = 0
    untouched_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Bytes that the system counts."""
        return self.num_bytes - self.untouched_bytes


NO_FOOTPRINT: Final = Footprint()
"""The footprint of no model."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What a model will take once it is loaded, as far as that can be known before.

    Attributes:
        context_length: tokens that one request may have.
        cells: tokens that all requests may have together.
        weights_bytes: of weights, wherever they lie.
        cache_bytes: of keys, values and recurrent states.
        compute_bytes: most scratch memory, of the widest pass at the end of the longest text; it is taken as far as
            passes need it. ``None`` where only passes tell.
        other_bytes: of the vocabulary and of tables about tokens and cells.
        device_bytes: the part of all these that goes to devices such as GPUs.
        devices: names of these devices; empty where all of it is in the machine's memory.
    """

    context_length: int
    cells: int
    weights_bytes: int
    cache_bytes: int
    compute_bytes: int | None = None
    other_bytes: int = 0
    device_bytes: int = 0
    devices: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + (self.compute_bytes or 0) + self.other_bytes


@dataclass(frozen=True, slots=True)
class OtherMemory:
    """What a process is to hold besides the model that it loads within so much memory.

    Attributes:
        draft: of a draft model that is open already.
        prompts_bytes: for what finished requests have read.
    """

    draft: Footprint = NO_FOOTPRINT
    prompts_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return self.draft.num_bytes + self.prompts_bytes


NO_OTHER_MEMORY: Final = OtherMemory()
"""A process that holds nothing besides the model."""


@dataclass(frozen=True, slots=True)
class Room:
    """What memory there is for the weights of a model whose layers are streamed.

    Attributes:
        total_bytes: limit of the process.
        process_bytes: of Python and its libraries.
        working_bytes: of the model, but for its weights.
    """

    total_bytes: int
    process_bytes: int
    other: OtherMemory
    working_bytes: int

    @property
    def weights_bytes(self) -> int:
        return self.total_bytes - self.process_bytes - self.other.num_bytes - self.working_bytes - SPARE_BYTES


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the memory of a process is shared out where layers of a model are read while they are used.

    Attributes:
        total_bytes: limit of the process.
        process_bytes: of Python and its libraries.
        draft_bytes: of the draft model, its cache and scratch memory included.
        prompts_bytes: for what finished requests have read.
        working_bytes: of the model, but for its weights: its cache and scratch memory.
        others_bytes: of weights of no layer that every pass reads.
        resident_bytes: of layers that stay.
        ring_bytes: of the slots for the other layers.
        spare_bytes: left for what Python comes to hold.
        pass_bytes: read for every pass.
        bytes_per_s: of reading while the model was loaded.
        is_direct: whether reads go past the page cache.
        experts: of each layer of a mixture: all of them are read, whatever a token uses.
    """

    total_bytes: int
    process_bytes: int
    draft_bytes: int
    prompts_bytes: int
    working_bytes: int
    others_bytes: int
    resident_bytes: int
    ring_bytes: int
    spare_bytes: int
    pass_bytes: int
    bytes_per_s: float
    is_direct: bool
    experts: int

    @property
    def pass_s(self) -> float:
        """Seconds of every pass that reading takes."""
        return self.pass_bytes / self.bytes_per_s


def held_memory(proc: Path = PROC) -> int:
    """Return the bytes that this process holds for itself; 0 where the system does not say."""
    try:
        status = read_control_file(proc / "self" / "status")
    except OSError:
        return 0
    held = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(held[1]) << 10 if held else 0


def give_back_freed() -> None:
    """Have the C library give what was freed back to the system, where it can.

    It keeps much of that, for each thread that ever allocated. What a closed model had taken would count as held when
    the next one is planned.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


def available_memory(proc: Path = PROC, groups: Path = GROUPS) -> int | None:
    """Return how many bytes of memory can be had without swapping; ``None`` where the system does not say."""
    try:
        lines = read_control_file(proc / "meminfo").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_left_by_groups(proc, groups)])
    return None


def _left_by_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Yield what each control group of this process leaves."""
    for version, folder in group_folders("memory", proc, groups):
        limit, usage, file_pages = _FILES[version]
        try:
            limit_bytes, used_bytes = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            given_way_bytes = sum(int(stat.get(name, 0)) for name in file_pages)
        except (OSError, ValueError):  # no such file, or a limit of "max"
            continue
        yield max(limit_bytes - used_bytes + given_way_bytes, 0)
