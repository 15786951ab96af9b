"""The server's log on standard error: nothing that a client can bring about at will fills it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading

import pytest

from paceline.serving.logs import AtMostAFew, logging_to_stderr
from paceline.serving.security.access_log import LOGGER as ACCESS
from tests.timing import WAIT_S


def record(created: float, line: int = 1, name: str = "asyncio") -> logging.LogRecord:
    made = logging.LogRecord(name, logging.ERROR, "file.py", line, "a message", None, None)
    made.created = created
    return made


def written(limit: AtMostAFew, made: logging.LogRecord) -> str | None:
    """Return what a line says of those that were left out; ``None`` where it is left out too."""
    return str(made.left_out) if limit.filter(made) else None  # type: ignore[attr-defined]


def test_of_one_kind_a_few_a_second_are_written_and_the_next_says_how_many_there_were() -> None:
    limit = AtMostAFew()
    assert [written(limit, record(5.0 + i / 5000)) for i in range(4000)] == ["", "", "", *[None] * 3997]
    # Another kind is not held up by it.
    assert written(limit, record(5.9, line=2)) == ""
    assert written(limit, record(6.1)) == " (3,997 more of this kind before)"
    assert written(limit, record(6.2)) == ""
    # A clock that was put back ends nothing.
    assert written(limit, record(1.0)) == ""


def test_each_request_has_its_line() -> None:
    limit = AtMostAFew()
    assert [written(limit, record(1.0, name=ACCESS.name)) for _ in range(100)] == [""] * 100


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
