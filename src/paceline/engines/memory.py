"""How much memory can be had: what the system says is free, and what control groups leave of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")

# Of control groups of version 2 and 1: the limit, what is taken, and what of that is file pages, which give way.
_VERSION_2: Final = ("memory.max", "memory.current", ("active_file", "inactive_file"))
_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def available_memory(proc: Path = _PROC, groups: Path = _GROUPS) -> int | None:
    """Return how many bytes of memory can be had without swapping, or ``None`` where the system does not say.

    Args:
        proc: where the system says it.
        groups: where control groups lie.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *_left_by_groups(proc, groups)])
    return None


def _left_by_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Yield what each control group that this process is in leaves."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(groups, path, *_VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _left(groups / "memory", path, *_VERSION_1)


def _left(root: Path, path: str, limit: str, usage: str, file_pages: Sequence[str]) -> Iterator[int]:
    """Yield what a group and those around it leave; a container sees its own as the outermost."""
    group = root / path.strip("/")
    for folder in (group, *group.parents):
        try:
            limit_bytes, used_bytes = int((folder / limit).read_text()), int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            given_way_bytes = sum(int(stat.get(name, 0)) for name in file_pages)
        except (OSError, ValueError):  # none there, or a limit of "max"
            pass
        else:
            yield max(limit_bytes - used_bytes + given_way_bytes, 0)
        if folder == root:
            return
