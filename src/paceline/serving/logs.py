"""The server's log: one line for each request, and what went wrong; never anything that a client wrote."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Final

from paceline.serving.security.access_log import LOGGER as ACCESS

_MOST: Final = 3
"""Lines of one kind in a second. What a client brings about again and again would fill the disk."""


class AtMostAFew(logging.Filter):
    """Lets a few records of one kind pass in a second, and has the next one say how many there were beside them.

    A kind is a place in the code. The lines of requests are of no kind: each stands for something that was done.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, int], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written; it says in ``left_out`` how many were not."""
        record.left_out = ""
        if record.name == ACCESS.name:
            return True
        kind = self._kinds.setdefault((record.pathname, record.lineno), _Kind())
        if not 0 <= record.created - kind.began_s < 1:
            kind.began_s, kind.passed = record.created, 0
        if kind.passed == _MOST:
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


@contextlib.contextmanager
def logging_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Write the log to standard error for as long as a server runs.

    Args:
        verbose: tell of requests too that are made again and again, such as those for ``/health``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("{asctime} {message}{left_out}", datefmt="%H:%M:%S", style="{"))
    handler.addFilter(AtMostAFew())
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
