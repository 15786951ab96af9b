"""What a model's process and its router say to each other, beside HTTP.

::

    router ──standard input:  one line, the key and the name; its end is the end of the process──> model
    router <──standard output: a line of JSON for each state──────────────────────────────────────  model

The system closes the router's end of the pipe however the router ended, by ``kill -9`` too: no process is left over.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias

from paceline.core.errors import InputError
from paceline.server_options import ServerOptions
from paceline.serving.security import ApiKeys, SecuritySettings

News: TypeAlias = Literal["listening", "loaded", "sleeping"]

_STDIN: Final = 0
_STDOUT: Final = 1
_STDERR: Final = 2

_END_S: Final = 5.0
"""Seconds after the router's end in which a process ends in good order."""


class RouterLink:
    """A model's side: what it is told at the start, and what it tells."""

    def __init__(self) -> None:
        line = bytearray()
        # Not by sys.stdin, whose lock a thread that waits would hold while Python ends.
        while not line.endswith(b"\n") and (byte := os.read(_STDIN, 1)):
            line += byte
        try:
            told = json.loads(line)
            self._key, self._name, self._tags = told["key"], told["name"], tuple(told["tags"])
        except (ValueError, KeyError, TypeError):
            raise InputError("--routed is of processes that a server of several models starts: leave it out") from None
        # What libraries print is no news.
        sys.stdout.flush()
        self._out = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
        self._lock = threading.Lock()
        threading.Thread(target=self._end_with_router, name="paceline-router", daemon=True).start()

    def taken_into(self, options: ServerOptions, security: SecuritySettings) -> tuple[ServerOptions, SecuritySettings]:
        """Return options and settings with what the router told."""
        options = replace(options, alias=(self._name,), tags=self._tags)
        return options, replace(security, keys=ApiKeys([self._key]), behind_router=True)

    def tell(self, news: News, **more: Any) -> None:
        line = json.dumps({"state": news, **more}).encode() + b"\n"
        try:
            with self._lock:
                while line:
                    line = line[os.write(self._out, line) :]
        except OSError:
            # The router is gone, and so will this process be.
            pass

    def _end_with_router(self) -> None:
        while os.read(_STDIN, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(_END_S)
        os._exit(1)
