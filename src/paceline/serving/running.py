"""A server from its start to its end: sockets, the model that is loaded meanwhile, signals, and the last answers.

::

    bind ──> answer with 503 ──> the model is there: answer ──SIGTERM──> take nothing more ──> answers end ──> free
                  └── loading ────────┘                                        (grace_s, then they are ended)
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from paceline.serving.security import SecuritySettings, socket_options
from paceline.serving.security.accepting import AcceptingServer
from paceline.serving.server import Server

_SWITCH_S: Final = 0.0005
"""Seconds for which a thread that computes may hold the interpreter. The engine's thread waits for it after each pass:
rounds of 1.4 ms beside a busy one take 11 ms with Python's own 5 ms, and 3 to 4 ms with this."""

_FLUSH_S: Final = 1.0
"""Seconds after the grace time in which clients may read what ended then. Connections are dropped afterwards."""

_HARD_S: Final = 5
"""Seconds after the grace time in which nothing may be under way any more, in threads too."""

_HANGUP: Final = getattr(signal, "SIGHUP", None)
"""What a terminal sends that is closed; Windows has no such signal."""

_OTHER_FILES: Final = 512
"""Files that are open beside the connections of requests, at most: spare connections, the model's files, sockets to
listen on."""

_FEWEST: Final = 16
"""Connections that are taken however few files the system allows."""


class _Uvicorn(AcceptingServer):
    """uvicorn's server, which tells ours of signals to end."""

    def __init__(self, config: uvicorn.Config, security: SecuritySettings, told: Callable[[int], None]) -> None:
        super().__init__(config, security)
        self._told = told
        self.signals = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal: the first ends the server in good order, another one at once."""
        if self.signals and sig == _HANGUP:
            # A terminal that is closed says so twice, by its shell too, and systemd says so after SIGTERM.
            return
        self.signals += 1
        # uvicorn would leave requests at the second as they are, and report each of them as a failure.
        self.should_exit = True
        self._told(self.signals)

    def drop_connections(self) -> None:
        """Close what clients still hold open, whatever they have not read."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals while the server runs; the process ends as it likes afterwards."""
        asked = [number for number in (signal.SIGINT, signal.SIGTERM, _HANGUP) if number is not None]
        # What was ignored from the start still is, as SIGHUP under nohup.
        taken = [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(
    app: ASGIApp,
    server: Server,
    security: SecuritySettings,
    sockets: Sequence[socket.socket],
) -> int:
    """Serve until a signal comes, or the model cannot be loaded.

    Args:
        app: the application.
        server: answers.
        security: who may ask; its part below the application is set up here.
        sockets: bound.

    Returns:
        How many signals came.

    Raises:
        PacelineError: the model cannot be loaded.
    """
    sys.setswitchinterval(_SWITCH_S)
    files = _allow_files(security.max_connections + _OTHER_FILES)
    most = security.max_connections if files is None else min(security.max_connections, files - _OTHER_FILES)
    security = replace(security, max_connections=max(most, _FEWEST))
    return asyncio.run(_serve(app, server, security, sockets))


def _allow_files(most: int) -> int | None:
    """Let the process have so many files open, or as many as the system lets it have.

    Returns:
        How many it may have open; ``None`` for any number.
    """
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft
    return max(soft, wanted)


async def _serve(
    app: ASGIApp,
    server: Server,
    security: SecuritySettings,
    sockets: Sequence[socket.socket],
) -> int:
    host, grace_s = server.host, server.options.grace_s
    loop = asyncio.get_running_loop()
    ending: list[asyncio.TimerHandle] = []

    def end(delay_s: float, flush_s: float) -> None:
        ending.append(loop.call_later(delay_s, server.end_answers))
        ending.append(loop.call_later(delay_s + flush_s, web.drop_connections))

    def told(signals: int) -> None:
        if signals == 1:
            host.stop_taking()
            loop.call_soon_threadsafe(end, grace_s, _FLUSH_S)
        else:
            loop.call_soon_threadsafe(end, 0.0, 0.0)

    config = uvicorn.Config(
        app,
        log_config=None,
        lifespan="off",
        timeout_graceful_shutdown=int(grace_s) + _HARD_S,
        timeout_keep_alive=75,
        **socket_options(security),
    )
    web = _Uvicorn(config, security, told)

    async def load() -> None:
        try:
            await host.load()
        finally:
            if host.state != "ready":
                # Whatever it was, nobody is to wait for a model that never comes.
                web.should_exit = True

    loading = asyncio.create_task(load())
    try:
        await web.serve(list(sockets))
    finally:
        for timer in ending:
            timer.cancel()
        host.stop_taking()
        await loading
        server.work.close()
        await host.close()
    if host.error is not None:
        raise host.error
    return web.signals
