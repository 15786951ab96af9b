r"""``python -m benchmarks fuzz-server``: odd bodies by the thousand, and a server that has to refuse them or to answer.

Nothing here is about speed. These bodies know where the OpenAPI document is silent. What it says is fuzzed by
schemathesis, which is no dependency. More than 50,000 requests are made like this, in an environment of its own::

    python -m venv fuzz && fuzz/bin/pip install schemathesis
    paceline serve --port 18080 -np 4 -c 2048 -n 8 --max-seconds 5 --metrics 2> serve.log &
    fuzz/bin/st run http://127.0.0.1:18080/openapi.json --phases coverage,fuzzing --mode all --max-examples 5200 \
        --checks not_a_server_error --request-timeout 30 --continue-on-failure --suppress-health-check all --seed 3
    grep -c Traceback serve.log

Its coverage also asks for ``POST /props``, which the server answers with 501, as llama-server does. A file
``schemathesis.toml`` in the same folder allows that, with ``expected-statuses = ["2xx", "4xx", 501, 503]`` under
``[checks.not_a_server_error]``.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.fuzz_bodies import Bodies
from benchmarks.server_soak.process import Serving
from benchmarks.server_soak.wire import ask, request_bytes
from paceline.core.errors import EngineError, InputError
from paceline.machine import machine

EPILOG = """[bold]Examples[/bold]

python -m benchmarks fuzz-server  [dim]# the embedded pair, 10,000 bodies[/dim]

python -m benchmarks fuzz-server --requests 2000 -m SmolLM2-135M-Instruct.Q4_1.gguf
"""

FLAGS: Final = ("-np", "4", "-c", "2048", "-n", "8", "--max-seconds", "5", "--metrics", "--no-remember")
_CONNECTIONS: Final = 8
_HANG_S: Final = 60.0
_SHOWN: Final = 5
_HARMLESS_STATUS: Final = (*range(200, 500), 501, 503)


def fuzz_server(
    requests: Annotated[int, typer.Option("-n", "--requests", help="Bodies in all.")] = 10_000,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of all bodies.")] = 0,
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="A GGUF file; by default the embedded pair.")
    ] = None,
    log: Annotated[Path | None, typer.Option("--log", help="Where to keep what the server writes.")] = None,
) -> None:
    """Send paceline serve bodies that nobody would write. It fails at a status of 500, a hang, or a traceback."""
    if requests < 1:
        raise InputError(f"{requests} requests: the least is 1 (--requests)")
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_fuzz(requests, seed, model, log or Path(folder) / "serve.log"))
    print(json.dumps({"machine": machine(), "fuzz": figures}))


async def _fuzz(requests: int, seed: int, model: str | None, log: Path) -> dict[str, Any]:
    bodies, statuses = Bodies(random.Random(seed)), Counter[int]()
    problems: list[str] = []
    slowest_s, left = 0.0, requests
    flags = (*FLAGS, "-m", model) if model is not None else FLAGS
    began_s = time.monotonic()

    async def work() -> None:
        nonlocal left, slowest_s
        while left and len(problems) < _SHOWN:
            left -= 1
            route, body = bodies.next()
            sent_s = time.monotonic()
            try:
                async with asyncio.timeout(_HANG_S):
                    answer = await ask(serving.port, request_bytes("POST", route, body))
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                problems.append(f"{type(error).__name__} after {route} {body[:2000]!r}")
                continue
            slowest_s = max(slowest_s, time.monotonic() - sent_s)
            statuses[answer.status] += 1
            if answer.status not in _HARMLESS_STATUS or b'"server_error"' in answer.body:
                problems.append(f"status {answer.status} after {route} {body[:2000]!r}")
            elif b"application/json" in answer.head.headers.get("content-type", "").encode():
                json.loads(answer.body)

    async with Serving.start(flags, log) as serving:
        await asyncio.gather(*(work() for _ in range(_CONNECTIONS)))
        await asyncio.wait_for(serving.wait_until_idle(), _HANG_S)
        text = serving.text()
    if "Traceback" in text:
        problems.append(f"{text.count('Traceback')} tracebacks in the log")
    if problems:
        raise EngineError("; ".join(problems))
    return {
        "requests": statuses.total(),
        "seconds": time.monotonic() - began_s,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "slowest_s": slowest_s,
    }
