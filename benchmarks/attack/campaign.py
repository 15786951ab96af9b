"""The campaign: every kind of attack in its share of the time, and a row of figures for each."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from benchmarks.attack import commands, files
from benchmarks.attack.serving import SERVER_KINDS, Attacked, Beside
from benchmarks.attack.tries import AttackError, Attempt, Failure, Tries
from paceline.core.errors import CapabilityError

LATE_S: Final = 30.0
"""Seconds after its end in which a campaign still begins with a kind."""

FILE_KINDS: Final[Mapping[str, tuple[int, Callable[[Path, Path], AbstractAsyncContextManager[Attempt]]]]] = {
    "headers": (2, files.headers),
    "folders": (2, files.folders),
    "kept": (2, files.kept),
    "killed": (4, commands.killed),
    "full-disk": (4, commands.full_disk),
    "full-stderr": (2, commands.full_stderr),
}
"""Shares of the time, and what makes tries for a model in a folder of its own."""

KINDS: Final[Sequence[str]] = (*SERVER_KINDS, *FILE_KINDS)
PATIENCE_S: Final = 150.0
"""Of a try that runs several commands, none of which may take longer than a minute."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a kind.

    Attributes:
        kind: its name.
        tries: made; 0 with no failure where others left no time.
        seconds: that they took, with all that comes before and after.
        failures: what they brought about.
        beside: what was seen beside an attack on a server.
    """

    kind: str
    tries: int
    seconds: float
    failures: Sequence[Failure] = field(default_factory=list)
    beside: Beside | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign is to do.

    Attributes:
        kinds: by name, in their order.
        seconds: for all of them.
        seed: of all choices.
        only: number of the one try of the one kind that is made, where it is one.
        model: that is served.
        folder: for what is made meanwhile.
    """

    kinds: Sequence[str]
    seconds: float
    seed: int
    only: int | None
    model: Path
    folder: Path


async def campaign(plan: Plan, progress: Callable[[str], None] = lambda kind: None) -> list[Row]:
    """Try all kinds.

    Args:
        plan: what is done.
        progress: told which kind it is at.
    """
    rows = []
    ends_s = time.monotonic() + plan.seconds
    weights = {name: kind.weight for name, kind in SERVER_KINDS.items()}
    weights |= {name: weight for name, (weight, _) in FILE_KINDS.items()}
    async with contextlib.AsyncExitStack() as stack:
        servers = {tls: _Server(plan, tls=tls) for tls in (False, True)}
        for server in servers.values():
            stack.push_async_callback(server.close)
        for number, name in enumerate(plan.kinds):
            progress(name)
            tries = Tries(name, plan.seed, plan.only)
            began_s = time.monotonic()
            beside = None
            # What others took too much or left over is shared among those that are still to come.
            share = weights[name] / sum(weights[other] for other in plan.kinds[number:])
            if began_s <= ends_s + LATE_S:
                if name in SERVER_KINDS:
                    beside = await _attack_server(servers[SERVER_KINDS[name].tls], tries, share, ends_s)
                else:
                    await _attack_files(plan, tries, share, ends_s)
            rows.append(Row(name, tries.count, time.monotonic() - began_s, tries.failures, beside))
    return rows


async def _attack_server(server: _Server, tries: Tries, share: float, ends_s: float) -> Beside | None:
    try:
        attacked = await server.ready()
        return await attacked.stand(tries, SERVER_KINDS[tries.kind], _until_s(share, ends_s))
    except (CapabilityError, ConnectionError, TimeoutError, httpx.TransportError) as error:
        await server.close()
        tries.fail(f"{type(error).__name__}: {error}")
        return None


async def _attack_files(plan: Plan, tries: Tries, share: float, ends_s: float) -> None:
    _, making = FILE_KINDS[tries.kind]
    folder = plan.folder / tries.kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        async with making(plan.model, folder) as attempt:
            until_s = _until_s(share, ends_s)
            await tries.run(attempt, at_once=1, until_s=until_s, patience_s=PATIENCE_S, overrun_s=PATIENCE_S)
    except AttackError as error:
        tries.fail(str(error))


def _until_s(share: float, ends_s: float) -> float:
    now_s = time.monotonic()
    return now_s + max(0.0, ends_s - now_s) * share


class _Server:
    """A server that the kinds share, until one of them does something to it."""

    def __init__(self, plan: Plan, *, tls: bool) -> None:
        self._plan = plan
        self._tls = tls
        self._stack = contextlib.AsyncExitStack()
        self._attacked: Attacked | None = None

    async def ready(self) -> Attacked:
        """Return it, or another one where something has happened to it."""
        if self._attacked is None or not self._attacked.whole:
            await self.close()
            started = Attacked.start(self._plan.folder, self._plan.model, tls=self._tls)
            self._attacked = await self._stack.enter_async_context(started)
        return self._attacked

    async def close(self) -> None:
        """End it."""
        self._attacked = None
        await self._stack.aclose()
