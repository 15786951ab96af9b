"""Attacks on a server: beside an undisturbed client, with an eye on its memory, its log and what it computes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import httpx
from tests.serving.certificates import CERTIFICATE, KEY

from benchmarks.attack import requests
from benchmarks.attack.requests import Target
from benchmarks.attack.tries import Tries
from benchmarks.attack.undisturbed import Noticed, Undisturbed
from benchmarks.server import Server

FLAGS: Final = (
    *("-np", "4", "-c", "4096", "-n", "8", "--max-seconds", "30", "--grace", "2", "--cache-ram", "64"),
    *("--metrics", "--no-remember"),
)
SILENT_S: Final = 10.0
"""Longest that the undisturbed client may wait for what it has begun; all waits are told in the figures."""

PLACE_S: Final = 60.0
"""Longest that it may wait for a first token: attackers may have every place, and it gets one where an answer ends."""

MAX_GROWTH_BYTES: Final = 3 << 29
"""Most memory that attackers may make a server take for a while."""

_ATTACKER, _OTHER = "attacker", "undisturbed"
_LOOK_S: Final = 0.05
_DESCRIPTORS: Final = 1024
_IDLE_S: Final = 15.0
_IDLE_SHARE: Final = 0.05
"""Of a core, beyond which a server that nobody asks is not idle; the undisturbed client rests then, too."""

_FREE_LINES, _LINES_EACH = 200, 3
"""Lines of the log: a few, and so many for each connection."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A kind of attack on a server."""

    weight: int
    attempt: Callable[[Target, Random], Awaitable[None]]
    at_once: int
    tls: bool = False


SERVER_KINDS: Final = {
    "bodies": ServerKind(3, requests.bodies, 8),
    "resets": ServerKind(2, requests.resets, 16),
    "slow-readers": ServerKind(2, requests.slow_readers, 4),
    "slow-writers": ServerKind(2, requests.slow_writers, 16),
    "smuggling": ServerKind(1, requests.smuggling, 4),
    "long-texts": ServerKind(3, requests.long_texts, 4),
    "big-json": ServerKind(2, requests.big_json, 4),
    "queue": ServerKind(2, requests.queue, 1),
    "logprobs": ServerKind(2, requests.logprobs, 2),
    "prompt-logprobs": ServerKind(2, requests.prompt_logprobs, 2),
    "grammars": ServerKind(4, requests.grammars, 2),
    "handshakes": ServerKind(2, requests.handshakes, 4, tls=True),
}
OVERRUN_S: Final = 30.0
"""Seconds beyond a kind's share of the time for the tries that are under way then."""

PATIENCE_S: Final = 60.0
"""Longest that an attacker may be kept waiting: it asks for much, and others go before it."""


@dataclass(slots=True)
class Beside:
    """What was seen beside the tries of a kind."""

    alone: Noticed
    noticed: Noticed = field(default_factory=Noticed)
    before_bytes: int = 0
    after_bytes: int = 0
    peak_bytes: int = 0
    log_lines: int = 0


class Attacked:
    """A server of its own with its undisturbed client, which kinds are tried on one after the other."""

    def __init__(self, server: Server, tls: ssl.SSLContext | None, client: Undisturbed) -> None:
        self._server, self._tls = server, tls
        self._client = client
        self.whole = True

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, folder: Path, model: Path, *, tls: bool) -> AsyncIterator[Attacked]:
        """Start both; leaving ends them."""
        flags = [*FLAGS, "-m", str(model), "--api-key", f"{_ATTACKER},{_OTHER}"]
        certificate, context = folder / "certificate.pem", None
        if tls:
            certificate.write_text(CERTIFICATE)
            (folder / "key.pem").write_text(KEY)
            flags += ["--ssl-cert-file", str(certificate), "--ssl-key-file", str(folder / "key.pem")]
            context = ssl.create_default_context(cafile=str(certificate))
        headers = {"Authorization": f"Bearer {_OTHER}"}
        async with contextlib.AsyncExitStack() as stack:
            with _few_descriptors():
                starting = Server.start(flags, folder / "serve.log", headers=headers, tls=context)
                server = stack.enter_context(starting)
            client = Undisturbed.start(server.port, _OTHER, str(certificate) if tls else None)
            yield cls(server, context, await stack.enter_async_context(client))

    async def stand(self, tries: Tries, kind: ServerKind, until_s: float) -> Beside:
        """Make tries of a kind, and return what was seen beside them."""
        server, before = self._server, len(tries.failures)
        target = Target(server.port, {"Authorization": f"Bearer {_ATTACKER}"}, self._tls)
        seen = Beside(self._client.alone, before_bytes=server.resident_bytes())
        lines, errors = self._lines(), self._errors()
        watcher = asyncio.create_task(self._watch(seen))
        self._client.begin()
        try:
            at_once = kind.at_once if tries.only is None else 1
            await tries.run(
                lambda rng: kind.attempt(target, rng),
                at_once=at_once,
                until_s=until_s,
                patience_s=PATIENCE_S,
                overrun_s=OVERRUN_S,
            )
        finally:
            watcher.cancel()
            seen.noticed = await self._client.end()
        for problem in [*noticed_problems(seen.noticed), *await self._left(seen, lines, errors, target)]:
            tries.fail(problem)
        self.whole = len(tries.failures) == before
        return seen

    async def _watch(self, seen: Beside) -> None:
        while True:
            seen.peak_bytes = max(seen.peak_bytes, self._server.resident_bytes())
            await asyncio.sleep(_LOOK_S)

    async def _left(self, seen: Beside, lines: int, errors: float, target: Target) -> list[str]:
        """Wait until the server is idle, and return what is wrong with it."""
        if not self._server.is_running():
            return [f"the server died: {self._server.text()[-300:]!r}"]
        problems = []
        try:
            self._server.wait_until_idle(_IDLE_S)
            async with asyncio.timeout(_IDLE_S):
                while (share := await self._busy_share()) > _IDLE_SHARE:
                    pass
        except (TimeoutError, httpx.TransportError):
            problems.append(f"{_IDLE_S:g} s after the last try the server is still at it")
        else:
            errors = self._errors() - errors
            problems += [f"{errors:g} answers of status 500"] if errors else []
            assert share <= _IDLE_SHARE
        seen.after_bytes = self._server.resident_bytes()
        seen.peak_bytes = max(seen.peak_bytes, seen.after_bytes)
        text = self._server.text()
        seen.log_lines = self._lines() - lines
        asked = target.statuses.total() + target.connections + seen.noticed.answers
        new = "\n".join(text.splitlines()[lines:])
        growth = seen.peak_bytes - seen.before_bytes
        return [
            *problems,
            *(
                [f"{new.count('Traceback')} tracebacks: {new[new.index('Traceback') :][:1500]}"]
                if "Traceback" in new
                else []
            ),
            *([f"it took {growth >> 20} MiB more for a while"] if growth > MAX_GROWTH_BYTES else []),
            *(
                [f"{seen.log_lines} lines of the log after {asked} requests and connections"]
                if seen.log_lines > _FREE_LINES + _LINES_EACH * asked
                else []
            ),
        ]

    async def _busy_share(self) -> float:
        began_s, computed_s = time.monotonic(), self._server.cpu_s()
        await asyncio.sleep(1.0)
        return (self._server.cpu_s() - computed_s) / (time.monotonic() - began_s)

    def _lines(self) -> int:
        return self._server.text().count("\n")

    def _errors(self) -> float:
        return sum(value for name, value in self._server.metrics().items() if 'status="500"' in name)


@contextlib.contextmanager
def _few_descriptors() -> Iterator[None]:
    """Let what is started have as many as most systems let it, and this process all that it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_DESCRIPTORS, most), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def noticed_problems(noticed: Noticed) -> list[str]:
    """Return what the undisturbed client may not have noticed."""
    waits = (
        ("a token", noticed.longest_gap_s, SILENT_S),
        ("a first token", noticed.longest_first_s, PLACE_S),
        ("/health", noticed.slowest_health_s, SILENT_S),
        ("/health on a new connection", noticed.slowest_new_s, SILENT_S),
    )
    return [
        *(f"the undisturbed client was told {text}" for text in noticed.wrong),
        *(f"the undisturbed client was refused: {text}" for text in noticed.refused),
        *(f"the undisturbed client waited {wait:.1f} s for {what}" for what, wait, most in waits if wait > most),
    ]
