"""The server's log on standard error: nothing that a client can bring about at will fills it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading

import pytest
from starlette.types import Receive, Scope, Send

from paceline.core.clock import VirtualClock
from paceline.serving.logs import LOGGER as ACCESS
from paceline.serving.logs import RepeatFilter, RequestLog, logging_to_stderr
from paceline.serving.middleware import with_security
from paceline.serving.security import ApiKeys, SecuritySettings
from tests.serving.asking import answer, ask, body_part, call, http_scope
from tests.timing import WAIT_S


def record(created: float, line: int = 1) -> logging.LogRecord:
    made = logging.LogRecord("asyncio", logging.ERROR, "file.py", line, "a message", None, None)
    made.created = created
    return made


def written(limit: RepeatFilter, made: logging.LogRecord) -> str | None:
    """Return what a line says of those that were left out; ``None`` where it is left out too."""
    return str(made.left_out) if limit.filter(made) else None  # type: ignore[attr-defined]


def test_of_one_kind_a_few_a_second_are_written_and_the_next_says_how_many_there_were() -> None:
    limit = RepeatFilter()
    assert [written(limit, record(5.0 + i / 5000)) for i in range(4000)] == ["", "", "", *[None] * 3997]
    # Another kind is not held up by it.
    assert written(limit, record(5.9, line=2)) == ""
    assert written(limit, record(6.1)) == " (3,997 more of this kind before)"
    assert written(limit, record(6.2)) == ""
    # A clock that was put back ends nothing.
    assert written(limit, record(1.0)) == ""


def test_what_libraries_say_is_in_the_log_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr(verbose=False):
        for name in ("asyncio", "uvicorn.error", "paceline.serving", "another.library"):
            for _ in range(5000):
                logging.getLogger(name).warning("again")
            logging.getLogger(name).info("not said")
        for number in range(100):
            ACCESS.info("request %d", number)
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.endswith("again") for line in lines) < 100
    assert sum(" request " in line for line in lines) == 100


def test_nobody_waits_for_a_reader_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    unread = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            unread += os.write(writing, b"x" * 1000)
    os.set_blocking(writing, True)
    with os.fdopen(reading, "rb") as read, os.fdopen(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with logging_to_stderr(verbose=False):
            logging_one = threading.Thread(target=lambda: ACCESS.info("one request" * 200), daemon=True)
            logging_one.start()
            logging_one.join(WAIT_S)
            waited = logging_one.is_alive()
            assert read.read(unread) == b"x" * unread
            assert not waited
            ACCESS.info("another request")
            assert read.readline().endswith(b" another request\n")


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

    app = RequestLog(routes, quiet_paths=frozenset(), clock=clock)
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
            call(with_security(routes, SecuritySettings()), scope, body_part(b"", more=False))
    call(with_security(silent, SecuritySettings()), scope, {"type": "http.disconnect"})
    statuses = [(line.split()[2], line.endswith("mine (no end)")) for _, line in lines(caplog)]
    assert statuses == [("200", True), ("500", True), ("499", True)]


@pytest.mark.parametrize("given", ["a", "req_1234", "0b5e-8:1/2.3+4=", "x" * 128])
def test_a_sane_id_is_kept(given: str) -> None:
    answer = ask(SecuritySettings(), headers={"X-Request-Id": given})
    assert answer.headers.get_list("x-request-id") == [given]
    assert answer.json()["id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "a\x1bb", "ä", "<script>", '"'])
def test_another_id_is_replaced(given: str) -> None:
    first, second = (ask(SecuritySettings(), headers={"X-Request-Id": given.encode()}) for _ in range(2))
    assert re.fullmatch("req-[0-9a-f]{24}", first.headers["x-request-id"])
    assert first.json()["id"] == first.headers["x-request-id"] != second.headers["x-request-id"]
