"""Tries of one kind: each by a number, from which all its choices follow, so that it can be made again alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

_MAX_FAILURES: Final = 20
"""Of one kind, after which it has shown enough."""


class AttackError(Exception):
    """Something happened that no attack may bring about."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What an attack brought about; ``number`` is that of the try, ``None`` where it was not one alone."""

    kind: str
    seed: int
    number: int | None
    what: str

    @property
    def again(self) -> str:
        """Return the command that makes it again."""
        number = "" if self.number is None else f" --try {self.number}"
        return f"python -m benchmarks attack --kind {self.kind} --seed {self.seed}{number}"


Attempt = Callable[[random.Random], Awaitable[None]]


@dataclass(slots=True)
class Tries:
    """The tries of a kind, or ``only`` the one of that number; ``count`` is how many came to their end."""

    kind: str
    seed: int
    only: int | None = None
    count: int = 0
    failures: list[Failure] = field(default_factory=list)

    def fail(self, what: str, number: int | None = None) -> None:
        self.failures.append(Failure(self.kind, self.seed, number if number is not None else self.only, what))

    async def run(self, attempt: Attempt, *, at_once: int, until_s: float, patience_s: float, overrun_s: float) -> None:
        """Make tries, at least one, until the time is over or there are failures enough.

        Args:
            attempt: makes one; raises :class:`AttackError`, or an error of the connection, where it fails.
            at_once: tries under way.
            until_s: of the monotonic clock; no try begins later.
            patience_s: longest that a try may take.
            overrun_s: for what is under way at the end. What is under way even then is given up, and counts for
                nothing.
        """
        numbers = iter([self.only] if self.only is not None else range(1 << 62))
        workers = [asyncio.create_task(self._work(attempt, numbers, until_s, patience_s)) for _ in range(at_once)]
        _, late = await asyncio.wait(workers, timeout=max(0.0, until_s + overrun_s - time.monotonic()))
        for worker in late:
            worker.cancel()
        for result in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        if not self.count:
            self.fail(f"no try had come to its end {overrun_s:g} s after the time for all of them")

    async def _work(self, attempt: Attempt, numbers: Iterator[int], until_s: float, patience_s: float) -> None:
        for number in numbers:
            try:
                async with asyncio.timeout(patience_s):
                    await attempt(random.Random(f"{self.seed} {self.kind} {number}"))
            except AttackError as error:
                self.fail(str(error), number)
            except TimeoutError:
                self.fail(f"no answer after {patience_s:g} s", number)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                self.fail(f"{type(error).__name__}: {error}", number)
            self.count += 1
            if time.monotonic() >= until_s or len(self.failures) >= _MAX_FAILURES:
                return
