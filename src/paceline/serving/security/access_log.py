"""The layer that writes one line for each request: nothing of what was asked, nothing of what was answered."""

from __future__ import annotations

import logging
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.clock import Clock, WallClock
from paceline.serving.security.answer_headers import request_id_of
from paceline.serving.security.scopes import LONGEST_SHOWN
from paceline.terminal_text import printable_line

LOGGER: Final = logging.getLogger("paceline.serving.access")
"""Takes a line for each request: at level INFO, or DEBUG for paths that are asked for all the time."""
CLIENT_LEFT: Final = 499
"""Logged and counted, never sent: the client left before there was an answer."""


class AccessLog:
    """Logs method, path, status, seconds until the answer's end, and the request's id.

    The query string is left out: keys and prompts may be in it.
    """

    def __init__(self, app: ASGIApp, *, quiet_paths: frozenset[str], clock: Clock | None = None) -> None:
        """Put the log in front of an application.

        Args:
            app: the application.
            quiet_paths: are logged at level DEBUG.
            clock: gives the seconds; by default the machine's.
        """
        self._app = app
        self._quiet_paths = quiet_paths
        self._clock = clock or WallClock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and log it at its end."""
        started_s = self._clock.now_s()
        status = CLIENT_LEFT
        complete = False

        async def send_watched(message: Message) -> None:
            nonlocal status, complete
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = True

        try:
            await self._app(scope, receive, send_watched)
        except Exception:
            status = 500 if status == CLIENT_LEFT else status
            raise
        finally:
            level = logging.DEBUG if scope["path"] in self._quiet_paths else logging.INFO
            LOGGER.log(
                level,
                "%s %s %d %.3f s %s%s",
                printable_line(scope["method"])[:LONGEST_SHOWN],
                printable_line(scope["path"])[:LONGEST_SHOWN],
                status,
                self._clock.now_s() - started_s,
                request_id_of(scope),
                "" if complete else " (no end)",
            )
