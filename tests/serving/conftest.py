"""Servers that several tests ask. Whoever stops a server, or fills it, starts one of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server

from paceline.server_options import ServerOptions
from tests.cli.invoking import refused
from tests.serving.calling import SAID, TEMPLATE, saying
from tests.serving.hosted import Hosted, hosted, pair, scripted

__all__ = ["refused"]


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
