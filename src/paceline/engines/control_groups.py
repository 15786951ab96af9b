"""Control groups: the folders in which Linux says how much processor and memory a process may use."""

from __future__ import annotations

from collections.abc import Iterator
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
