"""Work on lists that clients made long, beside which other requests go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")

_MOST_LISTED: Final = 500
"""Items that are read or written at once, in about 2 ms; of more a thread takes care, and other requests go on."""


async def in_turn(work: Callable[[], _T], num_listed: int) -> _T:
    """Return what work comes to, done in a thread where that takes long.

    Args:
        work: reads or writes items.
        num_listed: number of items.
    """
    return work() if num_listed <= _MOST_LISTED else await asyncio.to_thread(work)
