"""The server's log: one line for each request, and what went wrong; never anything that a client wrote."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import select
import sys
from collections.abc import Iterator
from typing import Final, TextIO

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.clock import Clock, WallClock
from paceline.serving.errors import shorten

_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_FIXED: Final = (
    # A text that the model wrote is never taken for a page or a script.
    (b"x-content-type-options", b"nosniff"),
    # No page of another origin can load an answer as an image or a script. Pages that CORS allows are not affected.
    (b"cross-origin-resource-policy", b"same-origin"),
)


CLIENT_LEFT: Final = 499
"""Logged and counted, never sent: the client left before there was an answer."""
LOGGER: Final = logging.getLogger("paceline.serving.access")
"""Takes a line for each request: at level INFO, or DEBUG for the page's files and paths asked for all the time."""


class RequestLog:
    """Names each request by an id, and logs method, path, status, seconds until the answer's end, and the id.

    The id is the client's own where that is a short plain word. The query string is left out: keys and prompts may be
    in it. uvicorn's own log has it, and no times. Quiet paths are logged at level DEBUG, but for
    requests there without a valid key.
    """

    def __init__(self, app: ASGIApp, *, quiet_paths: frozenset[str], clock: Clock | None = None) -> None:
        self._app = app
        self._quiet_paths = quiet_paths
        self._clock = clock or WallClock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = self._clock.now_s()
        status = CLIENT_LEFT
        complete = False
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        # Anthropic's clients look for the second.
        added = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")] + [*_FIXED]

        async def send_watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                await send({**message, "headers": [*message.get("headers", ()), *added]})
                status = message["status"]
                return
            await send(message)
            if not message.get("more_body", False):
                complete = True

        try:
            await self._app(scope, receive, send_watched)
        except Exception:
            status = 500 if status == CLIENT_LEFT else status
            raise
        finally:
            quiet = status != 401 and scope["path"] in self._quiet_paths
            level = logging.DEBUG if quiet else logging.INFO
            LOGGER.log(
                level,
                "%s %s %d %.3f s %s%s",
                shorten(scope["method"]),
                shorten(scope["path"]),
                status,
                self._clock.now_s() - started_s,
                request_id,
                "" if complete else " (no end)",
            )


_MAX: Final = 3
"""Lines of one kind in a second. What a client brings about again and again would fill the disk."""


_AT_ONCE: Final = 1000
"""Characters that any pipe with room has room for."""


class RepeatFilter(logging.Filter):
    """Lets a few records of one kind pass in a second, and has the next one say how many there were beside them.

    A kind is a place in the code. The lines of requests are of no kind: each stands for something that was done.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written; it says in ``left_out`` how many were not."""
        record.left_out = ""
        if record.name == LOGGER.name:
            return True
        kind = self._kinds.setdefault((record.pathname, record.lineno), _Kind())
        if not 0 <= record.created - kind.began_s < 1:
            kind.began_s, kind.passed = record.created, 0
        if kind.passed == _MAX:
            kind.left_out += 1
            return False
        kind.passed += 1
        if kind.left_out:
            record.left_out = f" ({kind.left_out:,} more of this kind before)"
            kind.left_out = 0
        return True


class _Kind:
    """What was logged at one place in the code."""

    began_s = 0.0
    passed = 0
    left_out = 0


class _NonBlockingStream:
    """Writes what a stream has room for, and drops the rest: nobody waits for a reader of the log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        for start in range(0, len(text), _AT_ONCE):
            if not self._has_room():
                return
            self._stream.write(text[start : start + _AT_ONCE])
            self._stream.flush()

    def _has_room(self) -> bool:
        # Of what is no file of the system, and on Windows of any, nobody can tell.
        with contextlib.suppress(OSError, ValueError):
            return bool(select.select((), (self._stream,), (), 0)[1])
        return True


@contextlib.contextmanager
def logging_to_stderr(*, verbose: bool, with_times: bool = True) -> Iterator[None]:
    """Write the log to standard error for as long as a server runs.

    If it is verbose, it has requests too that are made again and again, such as those for ``/health``. A router adds
    the times to what its models' processes say.
    """
    handler = logging.StreamHandler(_NonBlockingStream(sys.stderr))
    line = "{asctime} {message}{left_out}" if with_times else "{message}{left_out}"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S", style="{"))
    handler.addFilter(RepeatFilter())
    # Of its own life, the server tells by itself. The root takes what libraries say, asyncio among them.
    levels = {"paceline": logging.DEBUG if verbose else logging.INFO, "uvicorn": logging.WARNING}
    before = [(logger, logger.level) for logger in map(logging.getLogger, levels)]
    root = logging.getLogger()
    root.addHandler(handler)
    for logger, _ in before:
        logger.setLevel(levels[logger.name])
    try:
        yield
    finally:
        root.removeHandler(handler)
        for logger, level in before:
            logger.setLevel(level)
