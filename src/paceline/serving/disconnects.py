"""Work for clients that may leave meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from paceline.serving.errors import RefusedError
from paceline.serving.security.access_log import CLIENT_LEFT

_T = TypeVar("_T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return what work comes to, or give it up once the client has left.

    Args:
        request: of the client; its body has been read.
        work: is cancelled where the client leaves. What it does in threads goes on, and nobody hears of it.

    Raises:
        RefusedError: the client has left.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise RefusedError(CLIENT_LEFT, "client_left", "the client left before its answer was there")
    finally:
        for each in (task, gone):
            each.cancel()


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
