"""The server's log: one line for each request, and what went wrong; never anything that a client wrote."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def logging_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Write the log to standard error for as long as a server runs.

    Args:
        verbose: tell of requests too that are made again and again, such as those for ``/health``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("{asctime} {message}", datefmt="%H:%M:%S", style="{"))
    # Of its own life, the server tells by itself.
    levels = {"paceline": logging.DEBUG if verbose else logging.INFO, "uvicorn.error": logging.WARNING}
    before = []
    for name, level in levels.items():
        logger = logging.getLogger(name)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
