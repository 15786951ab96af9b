"""The server's log: one line for each request, and what went wrong; never anything that a client wrote."""

from __future__ import annotations

import logging
import sys
from typing import Final

_SHOWN: Final = ("paceline", "uvicorn.error")


def log_to_stderr(*, verbose: bool) -> None:
    """Write the log to standard error.

    Args:
        verbose: tell of requests too that are made again and again, such as those for ``/health``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("{asctime} {message}", datefmt="%H:%M:%S", style="{"))
    for name in _SHOWN:
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("paceline").setLevel(logging.DEBUG if verbose else logging.INFO)
    # Of its own life, the server tells by itself.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
