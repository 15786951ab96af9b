"""``python -m benchmarks attack``: options, progress, the table and the exit status."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.attack.campaign import KINDS, Plan, Row, campaign
from benchmarks.reporting import console, progress_bar, split
from paceline.conversion.quantize import quantize_gguf
from paceline.core.errors import EngineError, InputError
from paceline.machine import machine
from paceline.models.registry import CACHE_VARIABLE, resolve_model
from paceline.terminal_text import printable

EPILOG = """[bold]Examples[/bold]

python -m benchmarks attack --seconds 3600 --seed 7 --json attack.json

python -m benchmarks attack --kind grammars,queue --seconds 60

python -m benchmarks attack --kind grammars --seed 7 --try 17  [dim]# one that failed, again[/dim]
"""

_MAX_SHOWN = 5


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
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to put all figures and failures.")] = None,
    keep: Annotated[Path | None, typer.Option("--keep", help="Where to leave the server's log and the files.")] = None,
) -> None:
    """Attack paceline by requests, connections and files, beside a client that must not notice.

    Each try follows from the seed and its number. It fails where a text changes, where a server answers 500, writes a
    traceback, dies, takes far more memory, or keeps others waiting for long.
    """
    chosen = split(kinds) if kinds is not None else list(KINDS)
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown or not chosen:
        raise InputError(f"--kind {kinds}: kinds are {', '.join(KINDS)}")
    if seconds <= 0:
        raise InputError(f"{seconds:g} seconds: give more than 0 (--seconds)")
    if only is not None and len(chosen) != 1:
        raise InputError("--try makes one try of one kind again: name that by --kind")
    with tempfile.TemporaryDirectory() as temporary, progress_bar() as bar:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        task = bar.add_task("", total=len(chosen))

        def progress(kind: str) -> None:
            bar.update(task, description=kind, completed=chosen.index(kind))

        # In other types than F32 the wider passes that attackers make would turn near-ties, which are no wrong texts.
        served = folder / "served.gguf"
        quantize_gguf(resolve_model(model), served, "F32")
        os.environ[CACHE_VARIABLE] = str(folder / "cache" / "models")
        plan = Plan(chosen, seconds, seed, only, served, folder)
        rows = asyncio.run(campaign(plan, progress))
    console().print(_table(rows))
    for row in rows:
        for failure in row.failures[:_MAX_SHOWN]:
            print(f"{failure.again}: {printable(failure.what)}")
        if len(row.failures) > _MAX_SHOWN:
            print(f"... and {len(row.failures) - _MAX_SHOWN} more of {row.kind} (--json has all)")
    if left_out := [row.kind for row in rows if not row.tries and not row.failures]:
        print(f"no time was left for {', '.join(left_out)}: give more (--seconds)")
    if json_file is not None:
        figures = {"seed": seed, "seconds": seconds, "rows": [_as_dict(row) for row in rows]}
        text = json.dumps({"machine": machine(), "attack": figures}, indent=1, ensure_ascii=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    failures = sum(len(row.failures) for row in rows)
    if failures:
        raise EngineError(f"{failures} failures in {sum(row.tries for row in rows)} tries")


def _as_dict(row: Row) -> dict[str, Any]:
    failures = [{**dataclasses.asdict(failure), "again": failure.again} for failure in row.failures]
    return {**dataclasses.asdict(row), "failures": failures}


def _table(rows: Sequence[Row]) -> Table:
    """Return the figures; those of the undisturbed client alone stand in brackets."""
    table = Table(box=None, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    memory = "MiB before, after, peak"
    for name in ("tries", "failures", "gap, ms", "first, ms", "text", "/health, ms", "new, ms", memory, "log lines"):
        table.add_column(name, justify="right", no_wrap=True)
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
        table.add_row(*cells)
    return table
