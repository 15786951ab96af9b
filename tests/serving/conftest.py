"""Servers that several tests ask. Whoever stops a server, or fills it, starts one of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.server_options import ServerOptions
from tests.cli.invoking import refused
from tests.serving.hosted import Hosted, hosted, pair, scripted

__all__ = ["refused"]


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
