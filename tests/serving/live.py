"""A server on a socket in the event loop of the test, in front of a scripted model whose rounds can be held."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.server_soak.wire import Answer, Connection, ask, post_bytes, request_bytes

import paceline
from paceline.engines.options import ModelOptions
from paceline.engines.scripted import LogitFunction, ScriptedEngine, random_model
from paceline.models.embedded import embedded_draft
from paceline.planning.base import RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.server_options import ServerOptions
from paceline.serving.app import create_app
from paceline.serving.deployment import bind
from paceline.serving.model_host import ModelHost, Served
from paceline.serving.security import SecuritySettings
from paceline.serving.server import Server
from tests.serving.hosted import chatting
from tests.serving.scripted import SIZE, VOCABULARY
from tests.serving.starting import in_this_loop
from tests.timing import WAIT_S


class Gate:
    """An observer that holds every round, once it is closed, until it is let through.

    Attributes:
        rounds: made so far.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self._held = threading.Semaphore(0)
        self._is_open = True
        self._arrived = threading.Semaphore(0)

    def observe(self, record: RoundRecord) -> None:
        self.rounds += 1
        if not self._is_open:
            self._arrived.release()
            assert self._held.acquire(timeout=WAIT_S)

    def close(self) -> None:
        """Hold rounds from the next one on."""
        self._is_open = False

    async def arrived(self) -> None:
        """Wait until a round is held."""
        assert await asyncio.to_thread(self._arrived.acquire, True, WAIT_S)

    def let_through(self) -> None:
        """Let one round through."""
        self._held.release()

    def open(self) -> None:
        """Hold no round any more."""
        self._is_open = True
        self._held.release(1000)


@dataclass
class Live:
    """A server that runs.

    Attributes:
        port: where it listens.
        server: answers.
        model: of it.
        gate: holds rounds.
        ended: done once the server has ended.
    """

    port: int
    server: Server
    model: paceline.Model
    gate: Gate
    ended: asyncio.Task[int]

    async def post(self, path: str, body: dict[str, Any]) -> Answer:
        return await ask(self.port, post_bytes(path, body))

    async def get(self, path: str) -> Answer:
        return await ask(self.port, request_bytes("GET", path))

    async def refusal(self, path: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        """Return the error of a request that is refused."""
        answer = await self.post(path, body)
        assert answer.status == status, answer.body
        error: dict[str, Any] = answer.json()["error"]
        return error

    async def send(self, path: str, body: dict[str, Any], *, receive_bytes: int | None = None) -> Connection:
        """Return a connection on which a request was sent."""
        connection = await Connection.open(self.port, receive_bytes=receive_bytes)
        await connection.send(post_bytes(path, body))
        return connection

    def active(self) -> int:
        """Return how many requests the engine has; between two rounds."""
        return self.model.worker.call(lambda: len(self.model.loop.active))

    async def until(self, holds: Any) -> None:
        """Let the event loop go on until something holds."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0)

    def terminate(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Send the process a signal to end, which the server takes."""
        os.kill(os.getpid(), by)


@asynccontextmanager
async def live(
    options: ServerOptions | None = None,
    *,
    security: SecuritySettings | None = None,
    logits: LogitFunction | None = None,
    max_waiting: int | None = None,
    **engine: Any,
) -> AsyncIterator[Live]:
    """Serve a scripted model on a free port of the loopback; the server is ended afterwards.

    Args:
        options: of the server; by default it ends at once when told to.
        security: who may ask.
        logits: what the model says; by default anything.
        max_waiting: most requests that wait.
        engine: of the engine.
    """
    options = options or ServerOptions(grace_s=0.0, metrics=True)
    made = ScriptedEngine(
        logits or random_model(SIZE, seed=1, order=2),
        VOCABULARY,
        **{"context_length": 512, "max_sequences": 4, **engine},
    )
    described = ModelOptions(embedded_draft())
    model = paceline.Model(made, [], NO_SPECULATION, target_options=described, max_waiting=max_waiting)
    gate = Gate()
    model.add_observer(gate)
    ready = asyncio.Event()
    server: Server

    def on_ready(served: Served) -> None:
        server.ready(served)
        ready.set()

    host = ModelHost(lambda report: chatting(model), on_ready=on_ready)
    server = Server(host, options)
    security = security or SecuritySettings()
    (listener,) = bind(options.host, 0)
    async with in_this_loop(create_app(server, security), server, security, listener, ready) as ended:
        try:
            yield Live(listener.getsockname()[1], server, model, gate, ended)
        finally:
            gate.open()


def repeated(token: str) -> LogitFunction:
    """Return what says one character for ever."""

    def logits(token_ids: Sequence[int]) -> Any:
        row = np.zeros(SIZE)
        row[ord(token)] = 50.0
        return row

    return logits
