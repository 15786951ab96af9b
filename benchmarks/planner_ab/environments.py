"""Revisions as they are installed: the planner compiled, each in a folder of its own, kept for the next time.

::

    build/planner_ab/package-KEY/site    paceline, as a wheel has it
    build/planner_ab/replays-KEY         the checkout's benchmarks, the worker and the corpus among them
    build/planner_ab/own_times-KEY       what policies of a planner take to decide, whatever else there is of a revision

Keys are made of the content, so the working tree and the commit that is made of it are one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks.planner_ab.charging import OwnTimes, own_times_of
from paceline.atomic_output import atomic_file, atomic_folder
from paceline.core.errors import EngineError, InputError

Job: TypeAlias = Mapping[str, Any]
Result: TypeAlias = dict[str, Any]
"""As ``worker.py`` has them."""

CHECKOUT: Final = Path(__file__).parents[2]
KEPT: Final = CHECKOUT / "build" / "planner_ab"

WORKING_TREE: Final = "the working tree"

_LONGEST_LINE: Final = 1 << 26
"""Bytes of a result."""

_SHORT: Final = 12
"""Digits of a commit."""

# What code is made of; what a wheel needs besides; and what replays.
_PACKAGE: Final = ("src", "pyproject.toml", "hatch_build.py")
_BESIDES: Final = ("README.md", "LICENSE")
_REPLAYS: Final = ("benchmarks",)
_DECIDING: Final = ("src/paceline/planning", "src/paceline/core", "pyproject.toml")
"""What decides: where that is the same, what it takes was measured already, or noise would be taken for a change."""
_WORKER: Final = "benchmarks/planner_ab/worker.py"
_OWN_TIME: Final = "benchmarks/planner_ab/own_time.py"


@dataclass(frozen=True, slots=True)
class Environment:
    """A revision that can be run."""

    name: str
    commit: str
    package: Path
    replays: Path
    kept: Path

    @property
    def title(self) -> str:
        """As tables say it: the name that was given, and what it is short for."""
        short = self.commit[:_SHORT]
        return short if self.commit.startswith(self.name) else f"{self.name} ({short})"

    def own_times(self, policy: str) -> dict[str, OwnTimes] | None:
        """Return what was found that a policy takes to decide here; ``None`` before it was measured."""
        with contextlib.suppress(OSError, ValueError):
            return own_times_of(json.loads(self._own_times_path(policy).read_text(encoding="utf-8")))
        return None

    def keep_own_times(self, policy: str, own_times: Mapping[str, OwnTimes]) -> None:
        path = self._own_times_path(policy)
        path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as partial:
            partial.write_text(json.dumps(own_times), encoding="utf-8")

    def _own_times_path(self, policy: str) -> Path:
        file, _, _ = policy.rpartition(":")
        # A policy of somebody's own is what its file says, not what the file is called.
        content = Path(file).read_bytes() if file else b""
        content += (self.replays / _OWN_TIME).read_bytes()
        return self.kept / f"{hashlib.sha256(policy.encode() + content).hexdigest()[:16]}.json"

    async def run(self, job: Job, told: Callable[[Result], object]) -> list[Result]:
        """Do a job in a worker of the revision's, and return its results; each is told as it comes."""
        paths = os.pathsep.join([str(self.package / "site"), str(self.replays)])
        # Nothing of the folder it is called in (-P).
        command = [sys.executable, "-P", "-m", "benchmarks.planner_ab.worker"]
        found: list[Result] = []
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as errors:
            asked.write(json.dumps(job).encode())
            asked.seek(0)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asked, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=_LONGEST_LINE,
                env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip
            try:
                assert process.stdout is not None
                async for line in process.stdout:
                    found.append(json.loads(line))
                    told(found[-1])
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if process.returncode:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                raise EngineError(f"{self.name}: {said[-1] if said else f'exit status {process.returncode}'}")
        return found


def run_all(jobs: Sequence[tuple[Environment, Job]], told: Callable[[Result], object]) -> list[list[Result]]:
    """Do jobs at once, and return the results of each."""

    async def run() -> list[list[Result]]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(made.run(job, told)) for made, job in jobs]
        return [task.result() for task in tasks]

    try:
        return asyncio.run(run())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def environment(revision: str | None) -> Environment:
    """Return the environment of a revision, built if it was not yet; of the working tree, if none is named."""
    name = WORKING_TREE if revision is None else revision
    tree = _working_tree() if revision is None else _commit(revision)
    if not _git("ls-tree", tree, "--", _WORKER):
        raise InputError(f"revision {name!r} is of before the gate: it has no {_WORKER}; name a later one")
    KEPT.mkdir(parents=True, exist_ok=True)
    package = KEPT / f"package-{_key(tree, _PACKAGE)}"
    if not package.is_dir():
        with atomic_folder(package) as partial:
            _install(name, tree, partial)
    replays = KEPT / f"replays-{_key(tree, _REPLAYS)}"
    if not replays.is_dir():
        with atomic_folder(replays) as partial:
            _unpack(tree, _REPLAYS, partial)
    return Environment(name, tree, package, replays, KEPT / f"own_times-{_key(tree, _DECIDING)}")


def _key(tree: str, paths: Sequence[str]) -> str:
    facts = [_git("ls-tree", tree, "--", *paths), sys.version, platform.machine()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _install(name: str, tree: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as sources:
        # The first revisions have no build hook of their own, and take its variable from another.
        there = _git("ls-tree", "--name-only", tree, "--", *_PACKAGE, *_BESIDES).splitlines()
        _unpack(tree, there, Path(sources))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        built = subprocess.run(
            [*command, "--target", str(folder / "site"), sources],
            env={**os.environ, "HATCH_BUILD_HOOK_ENABLE_MYPYC": "true", "PACELINE_COMPILE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if built.returncode:
        said = built.stderr.strip().splitlines() or ["no reason given"]
        raise EngineError(f"{name} cannot be built: {said[-1]}")


def _unpack(tree: str, paths: Sequence[str], folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(_git_bytes("archive", tree, *paths))) as packed:
        packed.extractall(folder, filter="data")


def _commit(revision: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise InputError(f"there is no revision {revision!r}: name a commit, a branch or a tag") from None


def _working_tree() -> str:
    """Return the tree that a commit of everything here would have; the index stays as it is."""
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        index_path = Path(_git("rev-parse", "--git-path", "index"))
        shutil.copyfile(CHECKOUT / index_path, index)
        with_index = {**os.environ, "GIT_INDEX_FILE": str(index)}
        _git("add", "--all", env=with_index)
        return _git("write-tree", env=with_index)


def _git(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    return _git_bytes(*arguments, env=env).decode().strip()


def _git_bytes(*arguments: str, env: Mapping[str, str] | None = None) -> bytes:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, check=True).stdout
