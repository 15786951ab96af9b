"""Applications served on a free port of the loopback: in a thread, or in the event loop of the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext

import uvicorn
from starlette.types import ASGIApp

from paceline.serving.connections import AcceptingServer, socket_options
from paceline.serving.deployment import _serve
from paceline.serving.security import SecuritySettings
from paceline.serving.server import Server
from tests.timing import WAIT_S


@contextmanager
def in_thread(
    app: ASGIApp,
    security: SecuritySettings,
    listener: socket.socket,
    beside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> Iterator[None]:
    """Serve an application in a thread while the block runs; ``beside`` is held in the thread's event loop."""
    web = AcceptingServer(uvicorn.Config(app, log_config=None, lifespan="off", **socket_options(security)), security)

    async def serve() -> None:
        async with beside():
            await web.serve([listener])

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield
    finally:
        web.should_exit = True
        thread.join(WAIT_S)
        listener.close()
    assert not thread.is_alive()


@asynccontextmanager
async def in_this_loop(
    app: ASGIApp, server: Server, security: SecuritySettings, listener: socket.socket, ready: asyncio.Event
) -> AsyncIterator[asyncio.Task[int]]:
    """Serve as the command does, from when it is ready until it is told to end; gives what is done then."""
    ended = asyncio.create_task(_serve(app, server, security, [listener]))
    try:
        async with asyncio.timeout(WAIT_S):
            await ready.wait()
        yield ended
    finally:
        if not ended.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            await ended
