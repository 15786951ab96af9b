"""A pytest plugin for llama.cpp's server tests: which cases run, how they end, and what they ask.

Environment:
    PARITY_GROUPS: the groups of cases to run, with commas between.
    PARITY_CASES: a file with the names of the cases to run, one a line; all of the groups if not given.
    PARITY_RESULTS: the file that gets the outcomes, as JSON.
    PARITY_RECORD: a file that gets one line of JSON for each request, if given.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.parity import scope

# The modules and classes of HTTP clients, and what a request of theirs calls its body. openai is on either httpx.
CLIENTS = (("requests", "Session", "body"), ("httpx", "Client", "content"), ("httpx2", "Client", "content"))

_outcomes: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not asked for."""
    groups = os.environ["PARITY_GROUPS"].split(",")
    only = os.environ.get("PARITY_CASES")
    cases = Path(only).read_text().splitlines() if only else None
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        wanted = item.nodeid in cases if cases is not None else scope.group_of(item.nodeid) in groups
        (chosen if wanted else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Write where a case begins into the record."""
    _record({"case": item.nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how a case ended: the first of its parts that did not pass counts."""
    case = _outcomes.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
    case["seconds"] = round(case["seconds"] + report.duration, 3)
    if report.outcome != "passed" and case["outcome"] == "passed":
        case["outcome"] = report.outcome
        case["why"], case["line"] = _failure(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes."""
    Path(os.environ["PARITY_RESULTS"]).write_text(json.dumps(_outcomes, indent=1) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note down what is asked from now on, by whichever clients the tests have imported."""
    if "PARITY_RECORD" in os.environ:
        for module, name, body in CLIENTS:
            if module in sys.modules:
                _note_down(getattr(sys.modules[module], name), body)


def _note_down(client: Any, body_name: str) -> None:
    send = client.send

    def noted(self: Any, request: Any, **options: Any) -> Any:
        url = urlsplit(str(request.url))
        if url.path != "/health":
            body = getattr(request, body_name)
            body = body.encode() if isinstance(body, str) else body or b""
            headers = {key.lower(): value for key, value in request.headers.items()}
            names = ("authorization", "x-api-key", "origin", "content-type")
            _record(
                {
                    "method": request.method,
                    "path": f"{url.path}?{url.query}" if url.query else url.path,
                    "headers": {key: headers[key] for key in names if key in headers},
                    "body": base64.b64encode(body).decode(),
                }
            )
        return send(self, request, **options)

    client.send = noted


def _record(line: dict[str, Any]) -> None:
    if "PARITY_RECORD" in os.environ:
        with Path(os.environ["PARITY_RECORD"]).open("a") as record:
            record.write(json.dumps(line) + "\n")


def _failure(report: pytest.TestReport) -> tuple[str, str]:
    """Return the message of a failure and the line of the test that failed."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return str(report.longrepr), ""
    path = Path(crash.path)
    line = path.read_text().splitlines()[crash.lineno - 1].strip() if path.is_file() else ""
    return crash.message, line
