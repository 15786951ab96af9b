"""A client that behaves, in a process of its own, beside which others attack: what it is told, and how late.

It speaks the lines of JSON that :class:`Undisturbed` reads: first what it is told while nobody else asks, then, for
each pair of lines ``begin`` and ``end`` on standard input, what it was told between them. It asks for the same texts
again and again, each on the connection that it has, and polls ``/health`` all the while.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.server_soak.wire import Answer, Connection, post_bytes, request_bytes

TOKENS: Final = 48
BODIES: Final[Sequence[Mapping[str, Any]]] = tuple(
    {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, "stream": True, "seed": 7, "temperature": temperature}
    for prompt in ("def add(a, b):\n    return", "Once upon a time")
    for temperature in (0.0, 0.8)
)
"""What it asks for: greedy and sampled."""

ALONE_S: Final = 1.0
"""Seconds for which it is alone once it knows its texts."""

_HEALTH_S: Final = 0.02
_NEW_S: Final = 0.5
_PAUSE_S: Final = 0.1
_GIVE_UP_S: Final = 60.0
_MAX_NAMED: Final = 5


@dataclass(slots=True)
class Noticed:
    """What the client noticed.

    Attributes:
        answers: texts that it was told to their end.
        wrong: texts that are other than alone.
        refused: what it was told in place of a text, and connections that broke.
        longest_gap_s: between two tokens.
        longest_first_s: from a request to its first token.
        slowest_health_s: of ``/health`` every 20 ms, on a connection that stays.
        slowest_new_s: of ``/health`` on new connections.
    """

    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    longest_first_s: float = 0.0
    slowest_health_s: float = 0.0
    slowest_new_s: float = 0.0


class Undisturbed:
    """The client's process, as a campaign sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.alone = Noticed()

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, port: int, key: str, certificate: str | None = None) -> AsyncIterator[Undisturbed]:
        """Start the client and wait until it knows its texts; leaving ends it."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.attack.undisturbed",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        client = cls(process)
        try:
            client._say(json.dumps({"port": port, "key": key, "certificate": certificate}))
            client.alone = await client._noticed()
            yield client
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    def begin(self) -> None:
        self._say("begin")

    async def end(self) -> Noticed:
        """Let it stop, and return what it noticed; what it still waits for counts as it is."""
        self._say("end")
        return await self._noticed()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _noticed(self) -> Noticed:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _GIVE_UP_S)
        if not line:
            raise ConnectionError("the undisturbed client ended")
        return Noticed(**json.loads(line))


class Witness:
    """The client itself, in its process."""

    def __init__(self, port: int, key: str, tls: ssl.SSLContext | None) -> None:
        self._port = port
        self._headers = {"Authorization": f"Bearer {key}"}
        self._tls = tls
        self._texts: dict[int, str] = {}
        self.noticed = Noticed()

    async def learn(self) -> None:
        """Find out what the texts are, and how long they take."""
        async with await self._connect() as connection:
            # What is read for the first time takes longer.
            for turn in range(2):
                self.noticed = Noticed()
                for number in range(len(BODIES)):
                    self._texts[number] = await self._ask(connection, number)
                if self.noticed.refused or (turn and self.noticed.wrong):
                    raise ConnectionError(f"alone, it was told {self.noticed.refused or self.noticed.wrong}")
        await self.during(asyncio.sleep(ALONE_S))

    async def during(self, time_left: Any) -> None:
        """Ask and poll for as long as something takes; what is under way then counts by what it took so far."""
        self.noticed = Noticed()
        tasks = [asyncio.create_task(work()) for work in (self._ask_on, self._poll, self._poll_anew)]
        await time_left
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self) -> Connection:
        return await Connection.open(self._port, tls=self._tls)

    async def _ask_on(self) -> None:
        while True:
            try:
                async with await self._connect() as connection:
                    while True:
                        for number, text in self._texts.items():
                            found = await self._ask(connection, number)
                            if found != text and text.startswith(found):
                                self._note(self.noticed.refused, f"a text was cut off after {found!r}")
                            elif found != text:
                                self._note(self.noticed.wrong, f"{found!r} in place of {text!r}")
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self._note(self.noticed.refused, f"{type(error).__name__}: {error}")
                await asyncio.sleep(_PAUSE_S)

    async def _ask(self, connection: Connection, number: int) -> str:
        seen_s, pieces = time.monotonic(), list[str]()
        try:
            await connection.send(post_bytes("/completion", BODIES[number], headers=self._headers))
            head = await connection.head()
            async for chunk in connection.chunks(head):
                now_s = time.monotonic()
                if head.status != 200:
                    raise ValueError(f"status {head.status}: {chunk[:200]!r}")
                events = [json.loads(line[6:]) for line in chunk.split(b"\n") if line.startswith(b"data: {")]
                if events:
                    self._took(now_s - seen_s, first=not pieces)
                    seen_s = now_s
                pieces += [event["content"] if "content" in event else json.dumps(event) for event in events]
            self.noticed.answers += 1
        finally:
            self._took(time.monotonic() - seen_s, first=not pieces)
        return "".join(pieces)

    def _took(self, seconds: float, *, first: bool) -> None:
        if first:
            self.noticed.longest_first_s = max(self.noticed.longest_first_s, seconds)
        else:
            self.noticed.longest_gap_s = max(self.noticed.longest_gap_s, seconds)

    async def _poll(self) -> None:
        while True:
            try:
                async with await self._connect() as connection:
                    while True:
                        began_s = time.monotonic()
                        try:
                            await self._health(connection)
                        finally:
                            took_s = time.monotonic() - began_s
                            self.noticed.slowest_health_s = max(self.noticed.slowest_health_s, took_s)
                        await asyncio.sleep(max(0.0, _HEALTH_S - took_s))
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self._note(self.noticed.refused, f"/health: {type(error).__name__}: {error}")
                await asyncio.sleep(_PAUSE_S)

    async def _poll_anew(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                async with await self._connect() as connection:
                    await self._health(connection)
            except (OSError, ValueError, asyncio.IncompleteReadError) as error:
                self._note(self.noticed.refused, f"new connection: {type(error).__name__}: {error}")
            finally:
                took_s = time.monotonic() - began_s
                self.noticed.slowest_new_s = max(self.noticed.slowest_new_s, took_s)
            await asyncio.sleep(_NEW_S)

    async def _health(self, connection: Connection) -> Answer:
        await connection.send(request_bytes("GET", "/health"))
        answer = await connection.answer()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.body[:200]!r}")
        return answer

    def _note(self, notes: list[str], text: str) -> None:
        if len(notes) < _MAX_NAMED:
            notes.append(text)


async def _main() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    plan = json.loads(await reader.readline())
    tls = None if plan["certificate"] is None else ssl.create_default_context(cafile=plan["certificate"])
    client = Witness(plan["port"], plan["key"], tls)
    await client.learn()
    while True:
        print(json.dumps(asdict(client.noticed)), flush=True)
        if not await reader.readline():
            break
        await client.during(reader.readline())


if __name__ == "__main__":
    asyncio.run(_main())
