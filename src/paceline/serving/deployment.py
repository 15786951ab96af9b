"""A server from its start to its end: sockets, the model that is loaded meanwhile, signals, and the last answers.

::

    bind ──> answer with 503 ──> the model is there: answer ──SIGTERM──> take nothing more ──> answers end ──> free
                  └── loading ────────┘                                        (grace_s, then they are ended)

Sockets are bound before anything takes long, so that a port that is taken is told at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from paceline.core.errors import InputError
from paceline.serving.connections import AcceptingServer, socket_options
from paceline.serving.security import SecuritySettings, is_socket_path
from paceline.serving.server import Server

BACKLOG: Final = 256
"""Connections that the kernel takes before us."""


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return sockets that listen.

    Args:
        hosts: names, of which all addresses are taken, addresses, or paths of Unix sockets, which end in ``.sock``.
        port: 0 takes a free one, the same for all addresses.
    """
    bound: list[socket.socket] = []
    try:
        for host in hosts:
            if is_socket_path(host):
                bound.append(_bind_path(host))
                continue
            for found in _resolve(host, port):
                bound.append(_bind_address(host, port, found))
                port = bound[-1].getsockname()[1]
    except BaseException:
        for each in bound:
            each.close()
        raise
    return bound


@contextlib.contextmanager
def listening(hosts: Sequence[str], port: int) -> Iterator[list[socket.socket]]:
    """Yield what :func:`bind` returns; it is closed afterwards, and the paths of Unix sockets are removed."""
    bound = bind(hosts, port)
    try:
        yield bound
    finally:
        for each in bound:
            each.close()
        for host in filter(is_socket_path, hosts):
            Path(host).unlink(missing_ok=True)


def server_url(bound: socket.socket, *, has_tls: bool, prefix: str) -> str:
    """Return where clients find a server by one of its sockets."""
    name = bound.getsockname()
    if bound.family == getattr(socket, "AF_UNIX", None):
        return f"unix:{name}{prefix}"
    host = f"[{name[0]}]" if bound.family == socket.AF_INET6 else name[0]
    return f"{'https' if has_tls else 'http'}://{host}:{name[1]}{prefix}"


def notify_service_manager(state: str) -> None:
    """Tell systemd a state such as ``READY=1``, where a service is of ``Type=notify``; else do nothing."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path or not hasattr(socket, "AF_UNIX"):
        return
    address = "\0" + path[1:] if path.startswith("@") else path  # @ stands for an abstract socket
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.sendto(state.encode(), address)


def _resolve(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return what a name stands for here, as ``getaddrinfo`` has it: ``localhost`` may be two addresses."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise InputError(f"`host` {host} is not an address of this machine: {error.strerror or error}") from None
    # A file of names may say a thing twice, and name what is switched off, as IPv6 often is.
    return [each for each in dict.fromkeys(found) if _can_bind(each)] or found[:1]


def _can_bind(found: tuple[Any, ...]) -> bool:
    """Return whether this machine has the address now."""
    family, kind, protocol, _, address = found
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _bind_address(host: str, port: int, found: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, address = found
    address = (address[0], port, *address[2:])
    # Not by socket.create_server: of a socket that does not say its protocol asyncio would not switch Nagle's algorithm
    # off, and answers of two writes would wait 40 ms for an acknowledgement.
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise InputError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; end what uses it, or take another port "
            "(`port`, 0 takes a free one)"
        ) from None
    return bound


def _bind_path(path: str) -> socket.socket:
    if not hasattr(socket, "AF_UNIX"):
        raise InputError(f"`host` {path}: this system has no Unix sockets; give an address")
    if Path(path).is_socket():
        # Left over, or in use: only one that nobody answers may be taken.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                Path(path).unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise InputError(
            f"cannot listen on {path}: {error.strerror or error}; end what uses it, or name another"
        ) from None
    return bound


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
    *,
    files_each: int = 1,
) -> int:
    """Serve until a signal comes; returns how many came. That the model cannot be loaded ends it by that error.

    A request has ``files_each`` connections: that of its client, and what a router has to a model's process.
    """
    sys.setswitchinterval(_SWITCH_S)
    most = security.max_connections
    files = _allow_files(most * files_each + _OTHER_FILES)
    if files is not None:
        most = min(most, (files - _OTHER_FILES) // files_each)
    security = replace(security, max_connections=max(most, _FEWEST))
    return asyncio.run(_serve(app, server, security, sockets))


def _allow_files(most: int) -> int | None:
    """Let the process have so many files open, or as many as the system lets it; returns how many, ``None`` for any."""
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
            notify_service_manager("STOPPING=1")
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
