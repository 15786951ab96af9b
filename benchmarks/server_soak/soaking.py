"""``python -m benchmarks server-soak``: clients by the thousand, what is left of them, and a server that is to end."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.reporting import as_line
from benchmarks.server import Server
from benchmarks.server_soak.clients import BEHAVIOURS, CONTEXT_TOKENS, MAX_BODY_MIB, Client, SoakError
from benchmarks.server_soak.wire import Connection, post_bytes, request_bytes
from paceline.core.errors import EngineError

EPILOG = """[bold]Examples[/bold]

python -m benchmarks server-soak  [dim]# 2,000 clients of the embedded pair[/dim]

python -m benchmarks server-soak --requests 200 --seed 7
"""

PARALLEL: Final = 4
CONNECTIONS: Final = 24
MAX_WAITING: Final = 12
GRACE_S: Final = 3.0
LATE_S: Final = 3.0
"""Seconds after the grace time in which the process has to be gone: what was ended is written, and the model freed."""

GROWTH_BYTES: Final = 16 << 20
"""Most that the process may grow after its first 500 requests: caches are bounded and full by then, heaps scatter."""

_HANG_S: Final = 120.0
_CANCELS: Final = 20
_BACK_OFF_S: Final = 0.1
"""Shorter than the server asks for, so that its queue stays full."""

FLAGS: Final = (
    *("-np", str(PARALLEL), "-c", str(PARALLEL * CONTEXT_TOKENS), "--max-waiting", str(MAX_WAITING)),
    *("--chat-template", "chatml"),
    *("--max-body", str(MAX_BODY_MIB), "--cache-ram", "8", "--grace", f"{GRACE_S:g}", "--metrics", "--no-remember"),
)


@dataclass(slots=True)
class Tally:
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    times_full: int = 0


def server_soak(
    requests: Annotated[int, typer.Option("-n", "--requests", help="Clients in all.", min=20)] = 2000,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of all that they choose.")] = 0,
    log: Annotated[Path | None, typer.Option("--log", help="Where to keep what the server writes.")] = None,
) -> None:
    """Soak paceline serve in clients that cancel, stall, break off and send what is wrong; say what is left of them.

    Nothing here is about speed. It fails where a client is answered with an error of the server's own, where the
    server keeps a request, a place or memory, or where it does not end in time when it is told to.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = log or Path(folder) / "serve.log"
        try:
            figures = asyncio.run(soak(requests, seed=seed, log=kept, progress=lambda line: print(line, flush=True)))
        except SoakError as error:
            raise EngineError(f"the server does not stand it: {error}") from None
    for name, count in figures["outcomes"].items():
        print(f"{name:28} {count}")
    print(as_line("server soak", figures))


async def soak(
    requests: int, *, seed: int, log: Path, progress: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Soak a server, and return the figures."""
    rng, tally = random.Random(seed), Tally()
    with Server.start(FLAGS, log) as server:
        resident = [server.resident_bytes()]
        began_s = time.monotonic()
        for share in _shares(requests):
            await _run(server.port, share, rng, tally)
            server.wait_until_idle(_HANG_S)
            resident.append(server.resident_bytes())
            progress(f"{tally.outcomes.total()} requests, {resident[-1] >> 20} MiB")
        took_s = time.monotonic() - began_s
        busy = [slot["id"] for slot in server.web.get("/slots").json() if slot["is_processing"]]
        metrics = server.metrics()
        cancels = [await _rounds_of_cancel(server, rng, waits=bool(number % 2)) for number in range(_CANCELS)]
        ended_s, status, ends = await _terminate(server, rng)
        text = server.text()
    growth = resident[-1] - resident[1]
    problems = [
        *tally.failures[:20],
        *([f"places {busy} are still busy"] if busy else []),
        *(
            [f"{text.count('Traceback')} tracebacks in the log: {_first_traceback(text)}"]
            if "Traceback" in text
            else []
        ),
        *([f"memory grew by {growth >> 20} MiB"] if growth > GROWTH_BYTES else []),
        *([f"exit status {status}"] if status else []),
        *([f"it ended {ended_s:.1f} s after SIGTERM"] if ended_s > GRACE_S + LATE_S else []),
        *(f"a stream ended in flight by {end}" for end in ends if end.startswith("!")),
        *(f"{name} is {value:g}" for name, value in metrics.items() if 'status="500"' in name and value),
    ]
    if problems:
        raise SoakError("; ".join(problems))
    return {
        "requests": tally.outcomes.total(),
        "seconds": took_s,
        "times_full": tally.times_full,
        "outcomes": dict(sorted(tally.outcomes.items())),
        "resident_bytes": resident,
        "growth_bytes": growth,
        "growth_limit_bytes": GROWTH_BYTES,
        "rounds_until_a_cancelled_one_is_gone": sorted(cancels),
        "seconds_from_sigterm_to_exit": ended_s,
        "exit_status": status,
        "in_flight_ends": dict(Counter(ends)),
    }


def _shares(requests: int) -> list[int]:
    """Return how many requests are made before each look at the memory: 500 at first, or a quarter of fewer."""
    first = min(500, max(1, requests // 4))
    step = max(1, (requests - first) // 3)
    return [first, step, step, requests - first - 2 * step]


async def _run(port: int, requests: int, rng: random.Random, tally: Tally) -> None:
    weights = [weight for weight, _ in BEHAVIOURS]
    left = [(behaviour, rng.getrandbits(64)) for _, behaviour in rng.choices(BEHAVIOURS, weights, k=requests)]

    async def work() -> None:
        while left:
            behaviour, seed = left.pop()
            name = getattr(behaviour, "__name__", "")
            try:
                async with asyncio.timeout(_HANG_S):
                    client = Client(port, random.Random(seed))
                    while (outcome := await behaviour(client)) == "full":
                        tally.times_full += 1
                        await asyncio.sleep(_BACK_OFF_S)
            except (SoakError, OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                outcome = "failed"
                tally.failures.append(f"{name} {seed}: {type(error).__name__} {error}")
            tally.outcomes[f"{name} {outcome}"] += 1

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))


async def _rounds_of_cancel(server: Server, rng: random.Random, *, waits: bool) -> int:
    """Return the rounds between two scrapes around the end of a request: before its client left, and once it is gone.

    Rounds that are made while the scrapes travel are among them, so this is an upper bound.
    """
    body = {"prompt": f"{rng.random()}", "n_predict": 400, "ignore_eos": True}
    others = [await Connection.open(server.port) for _ in range(PARALLEL if waits else 0)]
    for other in others:
        await other.send(post_bytes("/completion", {**body, "stream": True}))
        await other.head()
    connection = await Connection.open(server.port)
    await connection.send(post_bytes("/completion", body))
    while sum(server.in_flight()[:2]) <= len(others):
        pass
    before = server.metrics()["paceline:rounds_total"]
    await connection.leave()
    while True:
        metrics = server.metrics()
        in_flight = metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        if in_flight <= len(others):
            break
    for other in others:
        await other.leave()
    server.wait_until_idle(_HANG_S)
    return int(metrics["paceline:rounds_total"] - before)


async def _terminate(server: Server, rng: random.Random) -> tuple[float, int, list[str]]:
    """Send SIGTERM with all kinds of requests in flight; return seconds to the exit, its status, and how they ended."""
    port = server.port
    body = {"prompt": f"{rng.random()}", "n_predict": 400, "ignore_eos": True}
    streams = [await Connection.open(port) for _ in range(PARALLEL + 2)]
    for stream in streams:
        await stream.send(post_bytes("/v1/completions", {**body, "stream": True}))
    whole = await Connection.open(port)
    await whole.send(post_bytes("/completion", body))
    idle, half, stuck = [await Connection.open(port, receive_bytes=2048) for _ in range(3)]
    await idle.send(request_bytes("GET", "/health"))
    await idle.answer()
    await half.send(request_bytes("POST", "/completion", b'{"prompt":', length=1000))
    await stuck.send(post_bytes("/completion", {**body, "stream": True, "n_probs": 200}))
    heads = [await stream.head() for stream in streams[:PARALLEL]]
    server.terminate()
    began_s = time.monotonic()

    async def end_of(stream: Connection, number: int) -> str:
        head = heads[number] if number < len(heads) else await stream.head()
        if head.status != 200:
            return str(head.status)
        said = b"".join([chunk async for chunk in stream.chunks(head)])
        if b'"error"' in said:
            return "ended, and told so"
        return "whole" if b'"timings"' in said else f"!{said[-100:]!r}"

    async def end_of_whole() -> str:
        answer = await whole.answer()
        return "whole" if answer.status == 200 else str(answer.status)

    ends = [asyncio.create_task(end_of(stream, number)) for number, stream in enumerate(streams)]
    ends.append(asyncio.create_task(end_of_whole()))
    status = await asyncio.to_thread(server.ended, _HANG_S)
    took_s = time.monotonic() - began_s
    said = [
        each if isinstance(each, str) else f"!{type(each).__name__} {each}"
        for each in await asyncio.gather(*ends, return_exceptions=True)
    ]
    for connection in (*streams, whole, idle, half, stuck):
        connection.close()
    return took_s, status, said


def _first_traceback(text: str) -> str:
    lines = text[text.index("Traceback") :].splitlines()
    end = next((number for number, line in enumerate(lines[1:], 1) if not line.startswith(" ")), len(lines) - 1)
    return lines[end]
