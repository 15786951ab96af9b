from __future__ import annotations

import logging
import re

import pytest
from starlette.types import Receive, Scope, Send

from paceline.core.clock import VirtualClock
from paceline.serving.security import ApiKeys, SecuritySettings, secured
from paceline.serving.security.access_log import AccessLog
from paceline.serving.security.answer_headers import AnswerHeaders
from tests.serving.security.asking import answer, ask, body_part, call, http_scope

NAME = "paceline.serving.access"


@pytest.fixture(autouse=True)
def _listen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, NAME)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == NAME]


def test_a_line_says_how_long_the_whole_answer_took(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        clock.advance(1.25)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    app = AnswerHeaders(AccessLog(routes, quiet_paths=frozenset(), clock=clock))
    call(app, http_scope(x_request_id="mine"))
    assert lines(caplog) == [(logging.INFO, "POST /v1/completions 201 1.250 s mine")]


@pytest.mark.parametrize("settings", [SecuritySettings(), SecuritySettings(keys=ApiKeys(["sk-secret"]))])
def test_nothing_of_a_request_but_its_path_is_logged(
    settings: SecuritySettings, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer sk-secret", "User-Agent": "secret", "Cookie": "secret"}
    ask(settings, url="/v1/x?api_key=secret&secret", headers=headers, content=b"the secret prompt")
    ((_, line),) = lines(caplog)
    assert re.fullmatch(r"POST /v1/x 200 0\.\d{3} s mine", line)
    assert "secret" not in caplog.text


def test_control_characters_are_spelled_and_long_paths_cut(caplog: pytest.LogCaptureFixture) -> None:
    ask(SecuritySettings(), "GET", "/a%1B[31m%0AGET /fake 200%C2%9B" + "x" * 500)
    ((_, line),) = lines(caplog)
    assert line.startswith(r"GET /a\x1b[31m\nGET /fake 200\x9bxxx")
    assert line.isprintable()
    assert len(line) < 300


@pytest.mark.parametrize(
    ("path", "level"), [("/health", logging.DEBUG), ("/metrics", logging.DEBUG), ("/x", logging.INFO)]
)
def test_what_is_polled_is_logged_quietly(path: str, level: int, caplog: pytest.LogCaptureFixture) -> None:
    ask(SecuritySettings(), "GET", path)
    assert [found for found, _ in lines(caplog)] == [level]


def test_refusals_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    settings = SecuritySettings(keys=ApiKeys(["k"]), max_body_bytes=1)
    ask(settings, headers={"X-Request-Id": "a"})
    ask(settings, headers={"X-Request-Id": "b", "X-Api-Key": "k"}, content=b"xx")
    assert [line.split()[2] + line.split()[5] for _, line in lines(caplog)] == ["401a", "413b"]


def test_an_answer_without_end_is_marked(caplog: pytest.LogCaptureFixture) -> None:
    async def breaking(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        raise RuntimeError("gone")

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("gone")

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send, b"never")

    scope = http_scope(x_request_id="mine")
    for routes in (breaking, failing):
        with pytest.raises(RuntimeError, match="gone"):
            call(secured(routes, SecuritySettings()), scope, body_part(b"", more=False))
    call(secured(silent, SecuritySettings()), scope, {"type": "http.disconnect"})
    statuses = [(line.split()[2], line.endswith("mine (no end)")) for _, line in lines(caplog)]
    assert statuses == [("200", True), ("500", True), ("499", True)]
