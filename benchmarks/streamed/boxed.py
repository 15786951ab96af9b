"""A job done in a box: a process that reads it, and writes a line for every result."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.streamed.box import Limits, command_in, device_of, drop_cached, groups, was_killed
from paceline.cli import exits
from paceline.conversion.own_draft import OwnDraft
from paceline.core.errors import EngineError, InputError
from paceline.models.gguf_model import part_paths
from paceline.models.registry import CACHE_VARIABLE, drafts_folder, resolve_model

_ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Boxed:
    """Where jobs about one model are done.

    Attributes:
        model: the file of the target, of a split model the first.
        limits: of the box; ``None`` for none.
        cache: folder for what paceline keeps, in place of the user's.
        draft: the file of the draft model, if there is one.
    """

    model: Path
    limits: Limits | None
    cache: Path
    draft: Path | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a job.

    Attributes:
        results: as the process told them, in its order.
        killed: the system ended it, as it needed more memory than there is.
        peak_bytes: most memory that it held at once, pages of files included; 0 without a box.
        bytes_read: from the disk; 0 without a box.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    killed: bool = False
    peak_bytes: int = 0
    bytes_read: int = 0


def do(boxed: Boxed, job: Mapping[str, Any], told: Callable[[dict[str, Any]], object] = lambda result: None) -> Outcome:
    """Do a job in a process of its own; nothing that it is about lies in the page cache when it starts.

    Args:
        boxed: where.
        job: what; see :mod:`benchmarks.streamed.worker`.
        told: told every result at once.

    Raises:
        CapabilityError: no box can be made here.
        InputError: the process says that it cannot do what was asked.
        EngineError: it failed.
    """
    for path in _files(boxed):
        drop_cached(path)
    command: Sequence[str] = [sys.executable, "-m", "benchmarks.streamed.worker"]
    outcome = Outcome()
    with ExitStack() as stack:
        made = None
        if boxed.limits is not None:
            made = stack.enter_context(groups(boxed.limits, device_of(boxed.model)))
            command = command_in(made, command)
        asked, said = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
        json.dump({**job, "model": str(boxed.model), "groups": None if made is None else made.to_json()}, asked)
        asked.seek(0)
        process = subprocess.Popen(
            command,
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=_ROOT,
            env={**os.environ, CACHE_VARIABLE: str(boxed.cache)},
        )
        with process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    outcome.results.append(json.loads(line))
                    told(outcome.results[-1])
            except BaseException:
                process.kill()
                raise
        if made is not None:
            outcome = dataclasses.replace(outcome, peak_bytes=made.peak_bytes, bytes_read=made.bytes_read)
        if made is not None and was_killed(process):
            return dataclasses.replace(outcome, killed=True)
        if process.returncode:
            said.seek(0)
            last = (said.read().strip().splitlines() or ["it says nothing"])[-1]
            kind = InputError if process.returncode == exits.BAD_INPUT else EngineError
            raise kind(f"{job['task']}, {job.get('variant', 'alone')}: {last}")
    return outcome


def _files(boxed: Boxed) -> list[Path]:
    """Return the files whose pages are to be paid for in the box."""
    return [*part_paths(boxed.model), *([] if boxed.draft is None else part_paths(boxed.draft))]


def draft_of(name: str, target: Path, cache: Path) -> tuple[str, Path]:
    """Return what a draft is called in a box, and its file; one of the target's own is made if it is not there yet.

    It is made outside of the box, and kept among those of the user, as it is made once in the life of a model.

    Args:
        name: of a model, or ``self``.
        target: the target's file.
        cache: the folder that is the cache of the box.

    Raises:
        InputError: there is no such model, or none can be made.
    """
    own = OwnDraft.parse(name)
    if own is None:
        path = resolve_model(name)
        return str(path), path
    path = own.of(target).make()
    (cache / drafts_folder().name).symlink_to(drafts_folder(), target_is_directory=True)
    return name, path
