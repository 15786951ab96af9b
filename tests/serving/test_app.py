"""The table of routes: who may call which, and what the server's log has of them."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from paceline.server_options import ServerOptions
from paceline.serving.app import Handlers, create_app
from paceline.serving.logs import LOGGER
from paceline.serving.model_host import ModelHost
from paceline.serving.security import ApiKeys, SecuritySettings
from paceline.serving.server import Server
from tests.serving.asking import HOME, run

PUBLIC = {"/health", "/v1/health", "/ping"}
POLLED = PUBLIC | {"/metrics", "/v1/models", "/models", "/props", "/slots", "/load"}


def loading_server(prefix: str = "") -> Server:
    """Return a server whose model is not there yet: what passes the layers gets status 503, 404, 405 or 501."""

    def load(report: Any) -> Any:
        raise AssertionError

    return Server(ModelHost(load), ServerOptions(prefix=prefix))


def ask_each(security: SecuritySettings, *methods: str, prefix: str = "") -> dict[str, set[int]]:
    """Return the statuses that each path of the table gets."""
    server = loading_server(prefix)
    app = create_app(server, security)

    async def statuses() -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=HOME + prefix) as client:
            for route in Handlers(server).routes():
                for path in route.paths:
                    for method in methods:
                        found.setdefault(path, set()).add((await client.request(method, path)).status_code)
        return found

    return run(statuses)


@pytest.mark.parametrize("prefix", ["", "/ai"])
def test_without_a_key_nothing_of_the_table_but_health_may_be_read(prefix: str) -> None:
    statuses = ask_each(SecuritySettings(keys=ApiKeys(["k"])), "GET", "HEAD", prefix=prefix)
    assert {path for path, found in statuses.items() if 401 not in found} == PUBLIC
    assert all(401 in found for found in ask_each(SecuritySettings(keys=ApiKeys(["k"])), "POST").values())


def test_head_is_answered_as_get() -> None:
    assert ask_each(SecuritySettings(), "GET") == ask_each(SecuritySettings(), "HEAD")


def test_what_is_polled_is_logged_quietly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER.name)
    ask_each(SecuritySettings(), "GET")
    lines = [
        (record.levelno, record.getMessage().split()[1]) for record in caplog.records if record.name == LOGGER.name
    ]
    assert {path for level, path in lines if level == logging.DEBUG} == POLLED
