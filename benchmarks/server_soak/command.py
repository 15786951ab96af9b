"""``python -m benchmarks server-soak``: options, progress and the figures."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.server_soak.clients import SoakError
from benchmarks.server_soak.soaking import soak
from paceline.core.errors import EngineError, InputError
from paceline.machine import machine

EPILOG = """[bold]Examples[/bold]

python -m benchmarks server-soak  [dim]# 2,000 clients of the embedded pair[/dim]

python -m benchmarks server-soak --requests 200 --seed 7
"""

MIN = 20


def server_soak(
    requests: Annotated[int, typer.Option("-n", "--requests", help="Clients in all.")] = 2000,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of all that they choose.")] = 0,
    log: Annotated[Path | None, typer.Option("--log", help="Where to keep what the server writes.")] = None,
) -> None:
    """Soak paceline serve in clients that cancel, stall, break off and send what is wrong; say what is left of them.

    Nothing here is about speed. It fails where a client is answered with an error of the server's own, where the
    server keeps a request, a place or memory, or where it does not end in time when it is told to.
    """
    if requests < MIN:
        raise InputError(f"{requests} requests: the least is {MIN} (--requests)")
    with tempfile.TemporaryDirectory() as folder:
        kept = log or Path(folder) / "serve.log"
        try:
            figures = asyncio.run(soak(requests, seed=seed, log=kept, progress=lambda line: print(line, flush=True)))
        except SoakError as error:
            raise EngineError(f"the server does not stand it: {error}") from None
    for name, count in figures["outcomes"].items():
        print(f"{name:28} {count}")
    print(json.dumps({"machine": machine(), "server soak": figures}))
