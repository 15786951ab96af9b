"""A box: a process that has so much memory and no more, and reads from its disk no faster than so many bytes a second.

Two control groups of version 1 make it, below those that this process is in: ``memory`` bounds what the process holds,
the pages of files that it has read included, and ``blkio`` bounds its reads. Both need root.

The page cache belongs to whoever read a page first, so the model's file is dropped from it before a process starts:
pages that lie there already would cost the box nothing. The process is moved into the groups before its program starts,
so that all it ever holds is counted. It reads one job, and writes a line for every result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.cli import exits
from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.models.gguf_model import part_paths
from paceline.models.registry import CACHE_VARIABLE

_GROUPS: Final = Path("/sys/fs/cgroup")
_DEVICES: Final = Path("/sys/dev/block")
_LIMIT, _PEAK = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
_RATE, _SERVED = "blkio.throttle.read_bps_device", "blkio.throttle.io_service_bytes"
_UNBOUNDED: Final = 1 << 40
"""Bytes a second that no disk reads: the kernel counts what a group reads where some rule bounds it."""

_ENTER: Final = """
echo $$ > "$1/cgroup.procs" && echo $$ > "$2/cgroup.procs" || exit 125
shift 2
exec "$@"
"""
"""Moves a shell into two groups; it then becomes a program."""

_ROOT: Final = Path(__file__).parents[2]
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a box allows.

    Attributes:
        memory_bytes: most that its process holds, pages of files included.
        bytes_per_s: of its reads from the disk at most; ``None`` as fast as the disk is.
    """

    memory_bytes: int
    bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """The control groups of a box, as anybody may read them."""

    memory: Path
    disk: Path
    device: str

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Groups:
        return cls(Path(data["memory"]), Path(data["disk"]), data["device"])

    def to_json(self) -> dict[str, str]:
        return {"memory": str(self.memory), "disk": str(self.disk), "device": self.device}

    @property
    def peak_bytes(self) -> int:
        """Most that was in use at any time."""
        return int((self.memory / _PEAK).read_text())

    @property
    def bytes_read(self) -> int:
        """Bytes read from the disk by now."""
        for line in (self.disk / _SERVED).read_text().splitlines():
            fields = line.split()
            if fields[:2] == [self.device, "Read"]:
                return int(fields[2])
        return 0


@dataclass(frozen=True, slots=True)
class Outcome:
    results: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False
    peak_bytes: int = 0


def measure_in_box(model: Path, limits: Limits | None, cache: Path, job: Mapping[str, Any]) -> Outcome:
    """Measure passes in a process of its own; nothing of the model lies in the page cache when it starts."""
    for path in part_paths(model):
        drop_cached(path)
    command: Sequence[str] = [sys.executable, "-m", "benchmarks.streamed.passing"]
    outcome = Outcome()
    with ExitStack() as stack:
        made = None
        if limits is not None:
            made = stack.enter_context(groups(limits, device_of(model)))
            command = command_in(made, command)
        asked, said = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
        json.dump({**job, "model": str(model), "groups": None if made is None else made.to_json()}, asked)
        asked.seek(0)
        process = subprocess.Popen(
            command, stdin=asked, stdout=subprocess.PIPE, stderr=said, text=True, cwd=_ROOT,
            env={**os.environ, CACHE_VARIABLE: str(cache)},
        )  # fmt: skip
        with process:
            try:
                assert process.stdout is not None
                outcome.results.extend(json.loads(line) for line in process.stdout)
            except BaseException:
                process.kill()
                raise
        if made is not None:
            outcome = dataclasses.replace(outcome, peak_bytes=made.peak_bytes, killed=was_killed(process))
        if process.returncode and not outcome.killed:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it says nothing"])[-1]
            kind = InputError if process.returncode == exits.BAD_INPUT else EngineError
            raise kind(f"{job.get('variant', 'passes')}: {last}")
    return outcome


def device_of(path: Path) -> str:
    """Return the numbers of the disk that a file lies on, such as ``254:0``: of the whole disk, whose reads count."""
    number = path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    folder = _DEVICES / device
    if not folder.exists():
        raise CapabilityError(f"{path} lies on no disk whose reads could be bounded (device {device}): put it on one")
    if (folder / "partition").exists():
        device = (folder.resolve().parent / "dev").read_text().strip()
    return device


def drop_cached(path: Path) -> None:
    """Let the page cache forget a file."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)  # what is yet to be written stays otherwise
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@contextlib.contextmanager
def groups(limits: Limits, device: str) -> Iterator[Groups]:
    """Yield the control groups of a box; they are gone afterwards."""
    if sys.platform != "linux":
        raise CapabilityError(f"a box is made of Linux's control groups, and this is {sys.platform}")
    name = f"paceline-{os.getpid()}-{next(_numbers)}"
    with _group("memory", name) as memory, _group("blkio", name) as disk:
        rate = _UNBOUNDED if limits.bytes_per_s is None else limits.bytes_per_s
        for file, value in ((memory / _LIMIT, f"{limits.memory_bytes}"), (disk / _RATE, f"{device} {rate}")):
            try:
                file.write_text(value)
            except OSError as error:
                raise InputError(f"{value} is refused by {file}: {error.strerror or error}") from None
        yield Groups(memory, disk, device)


def command_in(groups: Groups, command: Sequence[str]) -> list[str]:
    """Return a command that is in the groups from its beginning on."""
    return ["/bin/sh", "-c", _ENTER, "box", str(groups.memory), str(groups.disk), *command]


def anonymous_bytes() -> int:
    """Return the memory that this process holds for itself, without pages of files."""
    held = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert held is not None
    return int(held[1]) << 10


def was_killed(process: subprocess.Popen[str]) -> bool:
    """Return whether the system ended a process that has ended, as it does where its memory is used up."""
    return process.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)


@contextlib.contextmanager
def _group(controller: str, name: str) -> Iterator[Path]:
    root = _GROUPS / controller
    folder = root / _own_group(controller).strip("/") / name
    try:
        folder.mkdir()
    except OSError as error:
        raise CapabilityError(
            f"no control group can be made at {folder}: {error.strerror or error}; run it as root, where version 1 of "
            f"the {controller} controller is mounted at {root}"
        ) from None
    try:
        yield folder
    finally:
        folder.rmdir()


def _own_group(controller: str) -> str:
    """Return the path of the group of a controller that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"
