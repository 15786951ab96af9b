"""``python -m benchmarks attack``: every kind of attack in its share of the time, and a row of figures for each."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.table import Table

from benchmarks.attack import commands, files
from benchmarks.attack.serving import SERVER_KINDS, Attacked, Beside
from benchmarks.attack.tries import AttackError, Attempt, Failure, Tries
from benchmarks.reporting import JsonOption, console, progress_bar, split, table, write_figures
from paceline.conversion.quantize import quantize_gguf
from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.models.registry import CACHE_VARIABLE, resolve_model
from paceline.terminal_text import printable

EPILOG = """[bold]Examples[/bold]

python -m benchmarks attack --seconds 3600 --seed 7 --json attack.json

python -m benchmarks attack --kind grammars,queue --seconds 60

python -m benchmarks attack --kind grammars --seed 7 --try 17  [dim]# one that failed, again[/dim]
"""

FILE_KINDS: Final[Mapping[str, tuple[int, Callable[[Path, Path], AbstractAsyncContextManager[Attempt]]]]] = {
    "headers": (2, files.headers),
    "folders": (2, files.folders),
    "kept": (2, files.kept),
    "killed": (4, commands.on_a_command(commands.killed)),
    "full-disk": (4, commands.on_a_command(commands.full_disk)),
    "full-stderr": (2, commands.on_a_command(commands.full_stderr)),
}
"""Shares of the time, and what makes tries for a model in a folder of its own."""

KINDS: Final[Sequence[str]] = (*SERVER_KINDS, *FILE_KINDS)
WEIGHTS: Final[Mapping[str, int]] = {
    **{name: kind.weight for name, kind in SERVER_KINDS.items()},
    **{name: weight for name, (weight, _) in FILE_KINDS.items()},
}

LATE_S: Final = 30.0
"""Seconds after its end in which a campaign still begins with a kind."""

PATIENCE_S: Final = 150.0
"""Of a try that runs several commands, none of which may take longer than a minute."""

_MAX_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a kind: 0 tries with no failure where others left no time."""

    kind: str
    tries: int
    seconds: float
    failures: Sequence[Failure] = field(default_factory=list)
    beside: Beside | None = None


def attack(
    kinds: Annotated[
        str | None, typer.Option("--kind", help=f"Among {', '.join(KINDS)}. \\[all]", metavar="KIND[,...]")
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="For all kinds, shared out by weight.")] = 120.0,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of all that is chosen.")] = 0,
    only: Annotated[
        int | None, typer.Option("--try", help="The one try of the one kind to make again.", metavar="NUMBER")
    ] = None,
    model: Annotated[
        str, typer.Option("-m", "--model", help="What is served: a GGUF file or a name, which is served in F32.")
    ] = "target",
    json_file: JsonOption = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Where to leave the server's log and the files.")] = None,
) -> None:
    """Attack paceline by requests, connections and files, beside a client that must not notice.

    Each try follows from the seed and its number. It fails where a text changes, where a server answers 500, writes a
    traceback, dies, takes far more memory, or keeps others waiting for long.
    """
    chosen = split(kinds) if kinds is not None else list(KINDS)
    if not chosen or not set(chosen) <= set(KINDS):
        raise InputError(f"--kind {kinds}: kinds are {', '.join(KINDS)}")
    if seconds <= 0:
        raise InputError(f"{seconds:g} seconds: give more than 0 (--seconds)")
    if only is not None and len(chosen) != 1:
        raise InputError("--try makes one try of one kind again: name that by --kind")
    with tempfile.TemporaryDirectory() as temporary, progress_bar() as bar:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        # In other types than F32 the wider passes that attackers make would turn near-ties, which are no wrong texts.
        served = folder / "served.gguf"
        quantize_gguf(resolve_model(model), served, "F32")
        os.environ[CACHE_VARIABLE] = str(folder / "cache" / "models")
        task = bar.add_task("", total=len(chosen))

        def progress(kind: str) -> None:
            bar.update(task, description=kind, completed=chosen.index(kind))

        tries = [Tries(kind, seed, only) for kind in chosen]
        rows = asyncio.run(campaign(tries, seconds, served, folder, progress))
    console().print(_table(rows))
    for row in rows:
        for failure in row.failures[:_MAX_SHOWN]:
            print(f"{failure.again}: {printable(failure.what)}")
        if len(row.failures) > _MAX_SHOWN:
            print(f"... and {len(row.failures) - _MAX_SHOWN} more of {row.kind} (--json has all)")
    if left_out := [row.kind for row in rows if not row.tries and not row.failures]:
        print(f"no time was left for {', '.join(left_out)}: give more (--seconds)")
    write_figures("attack", {"seed": seed, "seconds": seconds, "rows": [_as_dict(row) for row in rows]}, json_file)
    failures = sum(len(row.failures) for row in rows)
    if failures:
        raise EngineError(f"{failures} failures in {sum(row.tries for row in rows)} tries")


async def campaign(
    kinds: Sequence[Tries], seconds: float, model: Path, folder: Path, progress: Callable[[str], None]
) -> list[Row]:
    """Try all kinds on a model in F32, in their order; what is made meanwhile is put into a folder."""
    rows = []
    ends_s = time.monotonic() + seconds
    async with contextlib.AsyncExitStack() as stack:
        servers = {tls: _Server(folder, model, tls=tls) for tls in (False, True)}
        for server in servers.values():
            stack.push_async_callback(server.close)
        for number, tries in enumerate(kinds):
            progress(tries.kind)
            began_s, beside = time.monotonic(), None
            # What others took too much or left over is shared among those that are still to come.
            share = WEIGHTS[tries.kind] / sum(WEIGHTS[other.kind] for other in kinds[number:])
            if began_s <= ends_s + LATE_S:
                if tries.kind in SERVER_KINDS:
                    beside = await servers[SERVER_KINDS[tries.kind].tls].attack(tries, share, ends_s)
                else:
                    await _attack_files(tries, share, ends_s, model, folder / tries.kind)
            rows.append(Row(tries.kind, tries.count, time.monotonic() - began_s, tries.failures, beside))
    return rows


async def _attack_files(tries: Tries, share: float, ends_s: float, model: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        async with FILE_KINDS[tries.kind][1](model, folder) as attempt:
            until_s = _until_s(share, ends_s)
            await tries.run(attempt, at_once=1, until_s=until_s, patience_s=PATIENCE_S, overrun_s=PATIENCE_S)
    except AttackError as error:
        tries.fail(str(error))


def _until_s(share: float, ends_s: float) -> float:
    now_s = time.monotonic()
    return now_s + max(0.0, ends_s - now_s) * share


class _Server:
    """A server that the kinds share, until one of them does something to it; then another one."""

    def __init__(self, folder: Path, model: Path, *, tls: bool) -> None:
        self._folder, self._model, self._tls = folder, model, tls
        self._stack = contextlib.AsyncExitStack()
        self._attacked: Attacked | None = None

    async def attack(self, tries: Tries, share: float, ends_s: float) -> Beside | None:
        try:
            if self._attacked is None or not self._attacked.whole:
                await self.close()
                started = Attacked.start(self._folder, self._model, tls=self._tls)
                self._attacked = await self._stack.enter_async_context(started)
            return await self._attacked.stand(tries, SERVER_KINDS[tries.kind], _until_s(share, ends_s))
        except (CapabilityError, ConnectionError, TimeoutError, httpx.TransportError) as error:
            await self.close()
            tries.fail(f"{type(error).__name__}: {error}")
            return None

    async def close(self) -> None:
        self._attacked = None
        await self._stack.aclose()


def _as_dict(row: Row) -> dict[str, Any]:
    failures = [{**dataclasses.asdict(failure), "again": failure.again} for failure in row.failures]
    return {**dataclasses.asdict(row), "failures": failures}


def _table(rows: Sequence[Row]) -> Table:
    """Return the figures; those of the undisturbed client alone stand in brackets."""
    seen_of = ("gap, ms", "first, ms", "text", "/health, ms", "new, ms", "MiB before, after, peak", "log lines")
    made = table("", "kind", "tries", "failures", *seen_of)
    for row in rows:
        cells = [row.kind, str(row.tries), str(len(row.failures))]
        if row.beside is not None:
            seen, alone = row.beside.noticed, row.beside.alone
            waits = [
                f"{1e3 * getattr(seen, name):.0f} ({1e3 * getattr(alone, name):.0f})"
                for name in ("longest_gap_s", "longest_first_s", "slowest_health_s", "slowest_new_s")
            ]
            text = "other" if seen.wrong else "equal" if seen.answers else "none"
            sizes = (row.beside.before_bytes, row.beside.after_bytes, row.beside.peak_bytes)
            size = ", ".join(str(each >> 20) for each in sizes)
            cells += [*waits[:2], text, *waits[2:], size, str(row.beside.log_lines)]
        made.add_row(*cells)
    return made
