"""The folder that distilling works in: what is done so far, and how much of the time is spent."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paceline.atomic_output import atomic_file, check_parent
from paceline.core.errors import InputError
from paceline.models.files import read_json_if_present

SUFFIX: Final = ".distil"
"""Of the folder's name, behind that of what is made."""
_PLAN: Final = "plan.json"
"""The file that says whose work it is, and how far it is."""
_KEEP_S: Final = 5.0
"""Seconds between two notes of the time that is spent: what a killed process may lose of it."""


class WorkFolder:
    """Holds the steps' results while the block of :meth:`held` runs, and afterwards unless :meth:`remove` was called.

    Attributes:
        facts: of the plan, for steps to note what they decided; kept by :meth:`keep`.
        total_s: seconds that all steps may take together, over all runs.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], total_s: float) -> None:
        self.path = path
        self.total_s = total_s
        self.facts: dict[str, Any] = {}
        self._key = json.loads(json.dumps(key))  # as it is read again
        self._before_s = 0.0
        self._started_s = time.monotonic()
        self._kept_s = self._started_s

    @classmethod
    def beside(cls, made: Path, key: Mapping[str, Any], total_s: float) -> WorkFolder:
        return cls(made.with_name(made.name + SUFFIX), key, total_s)

    @property
    def spent_s(self) -> float:
        """Seconds that were spent so far, in this run and those before."""
        return self._before_s + time.monotonic() - self._started_s

    def has_time(self, share: float) -> bool:
        """Whether less than this share of the time is spent."""
        return self.spent_s < share * self.total_s

    @contextmanager
    def held(self) -> Iterator[None]:
        """Go on with what the folder holds, or make it. No other process has it for as long as the block runs.

        Raises ``InputError`` where it holds the work of other models or options, another process has it, or the disk
        does not take what is written.
        """
        from huggingface_hub.utils import WeakFileLock  # takes a while to import

        check_parent(self.path)
        if self.path.exists() and not (self.path / _PLAN).is_file() and any(self.path.iterdir()):
            raise InputError(f"{self.path} is in the way, and no work of paceline distil: move it, or give another OUT")
        try:
            self.path.mkdir(exist_ok=True)
            with contextlib.ExitStack() as stack:
                try:
                    stack.enter_context(WeakFileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0.1))
                except TimeoutError:
                    raise InputError(
                        f"{self.path} is in the hands of another process that distils: wait for it"
                    ) from None
                self._read()
                try:
                    yield
                finally:
                    self._leave()
                    with contextlib.suppress(OSError):
                        self.path.with_name(f".{self.path.name}.lock").unlink()
        except OSError as error:
            raise InputError(
                f"{error.filename or self.path} cannot be written: {error.strerror or error}; free some room, and the "
                "same command goes on where it stood"
            ) from None

    def keep(self, *, often: bool = False) -> None:
        """Write the plan and the time spent; with ``often`` no more than every few seconds."""
        if often and time.monotonic() - self._kept_s < _KEEP_S:
            return
        self._kept_s = time.monotonic()
        content = {"key": self._key, "spent_s": round(self.spent_s, 1), "facts": self.facts}
        with atomic_file(self.path / _PLAN) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _leave(self) -> None:
        """Note the time that was spent; what is of no use to another run is removed."""
        if not self.path.is_dir():
            return
        if any(each.name != _PLAN for each in self.path.iterdir()):
            self.keep()
        else:
            self.remove()

    def _read(self) -> None:
        plan = read_json_if_present(self.path / _PLAN)
        if plan and plan.get("key") != self._key:
            theirs = plan.get("key") or {}
            others = ", ".join(name for name in self._key if theirs.get(name) != self._key[name])
            raise InputError(
                f"{self.path} holds the work of another command, with another {others}: delete it to begin again, or "
                "give another OUT"
            )
        self._before_s, self.facts = float(plan.get("spent_s", 0.0)), dict(plan.get("facts", {}))
        self._started_s = time.monotonic()
