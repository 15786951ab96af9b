"""Servers that several tests ask. Whoever stops a server, or fills it, starts one of its own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server

from paceline.server_options import ServerOptions
from tests.cli.invoking import refused
from tests.serving.calling import SAID, TEMPLATE, saying
from tests.serving.hosted import Hosted, hosted, pair, scripted
from tests.timing import WAIT_S

__all__ = ["refused"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own, for no longer than anything takes."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def within_time() -> None:
        async with asyncio.timeout(WAIT_S):
            await pyfuncitem.obj(**given)

    asyncio.run(within_time())
    return True


@pytest.fixture(scope="package", autouse=True)
def servers_end_at_once() -> Iterator[None]:
    """Have uvicorn look every 20 ms whether it is to end, not every 100: these tests start some hundred servers."""

    async def sleep(delay_s: float) -> None:
        await asyncio.sleep(delay_s / 5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
        yield


@pytest.fixture(scope="session")
def server() -> Iterator[Hosted]:
    """A scripted model with drafters, chats, and every route."""
    with hosted(scripted, ServerOptions(metrics=True)) as running:
        yield running


@pytest.fixture(scope="session")
def pair_server() -> Iterator[Hosted]:
    """The embedded pair."""
    with hosted(pair) as running:
        yield running


@pytest.fixture(scope="session")
def writing() -> Iterator[Hosted]:
    """A scripted model that writes anything, and whose template tells of tools."""
    with hosted(lambda: scripted(TEMPLATE)) as running:
        yield running


@pytest.fixture(scope="session")
def calling() -> Iterator[Hosted]:
    """A scripted model that says something and makes two calls."""
    with hosted(lambda: scripted(TEMPLATE, target=saying(SAID))) as running:
        yield running
