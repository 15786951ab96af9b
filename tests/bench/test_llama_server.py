"""The other server as a contestant, against a small program that speaks as llama-server does."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.bench.llama_server import LlamaServers, program_version
from paceline.bench.sessions import Stopped
from paceline.bench.variants import (
    SERVER_NGRAM_VARIANTS,
    SERVER_PLAIN,
    server_draft_and_ngram,
    server_draft_variants,
)
from paceline.bench.workloads import Task
from paceline.core.errors import CapabilityError, EngineError, InputError, PacelineError
from paceline.engines.loading import ModelOptions
from paceline.models.embedded import embedded_draft, embedded_target

TASK = Task("new-code", "code:1", (5, 6, 7), 4, seed=3)

_SPEAKS = """
    import http.server, json, sys

    if "--version" in sys.argv:
        print("version: 1 (simulated)", file=sys.stderr)
        sys.exit()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["seed"] == 13:
                self.send_response(400)
                self.end_headers()
                self.wfile.write(b'{"error": {"message": "unlucky"}}')
                return
            self.send_response(200)
            self.end_headers()
            for token_id in range(body["n_predict"]):
                self.say({"tokens": [len(body["prompt"]) + token_id]})
            timings = {"predicted_n": body["n_predict"], "predicted_ms": 1500.0, "draft_n": 6, "draft_n_accepted": 1}
            self.say({"tokens": [], "stop": True, "timings": timings, "asked": [sys.argv[1:], body]})

        def say(self, event):
            self.wfile.write(f"data: {json.dumps(event)}\\n\\n".encode())

        def log_message(self, *what):
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(folder: Path, body: str) -> Path:
    """Write an executable."""
    path = folder / "llama-server"
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(body)}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def target() -> ModelOptions:
    return ModelOptions(embedded_target(), threads=2)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[LlamaServers]:
    options = ModelOptions(embedded_draft())
    with LlamaServers(program(tmp_path, _SPEAKS), target(), options, 512) as running:
        yield running


def test_an_answer_has_the_servers_own_time_and_counts(servers: LlamaServers) -> None:
    answer = servers.contestant(SERVER_PLAIN).answer(TASK, 0.0, lambda: False)
    assert answer.token_ids == [3, 4, 5, 6]
    assert answer.seconds == 1.5
    assert answer.per_second == 2.0
    assert (answer.num_drafted, answer.num_accepted, answer.rounds) == (6, 1, 2)
    assert answer.spent is None
    assert answer.generation is None


def test_one_setting_has_one_process_and_closing_ends_all(servers: LlamaServers) -> None:
    first = servers.contestant(SERVER_PLAIN)
    assert servers.contestant(SERVER_PLAIN) is first
    other = servers.contestant(SERVER_NGRAM_VARIANTS[0])
    assert other is not first
    for each in (first, other):
        each.answer(TASK, 0.0, lambda: False)
    processes = [each.process_id for each in (first, other)]
    assert len(set(processes)) == 2
    servers.close()
    for process_id in processes:
        assert process_id is not None
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_settings_become_arguments(servers: LlamaServers) -> None:
    draft = next(each for each in server_draft_variants() if each.fixed and each.fixed.p_min == 0.4)
    plain = servers.command(SERVER_PLAIN)
    assert plain[1:7] == ["-m", str(embedded_target()), "-c", "512", "-np", "1"]
    assert "--spec-type" not in plain
    assert "-md" not in plain
    both = servers.command(server_draft_and_ngram(draft, SERVER_NGRAM_VARIANTS[1]))
    assert both[: len(plain)] == plain
    assert both[len(plain) :] == [
        *("--spec-type", "ngram-simple,draft-simple"),
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
        *("-md", str(embedded_draft()), "-ngld", "all"),
        *("--spec-draft-n-max", "1", "--spec-draft-p-min", "0.4"),
    ]


def test_whoever_wants_no_more_leaves_at_once(servers: LlamaServers) -> None:
    contestant = servers.contestant(SERVER_PLAIN)
    contestant.answer(TASK, 0.0, lambda: False)
    with pytest.raises(Stopped):
        contestant.answer(TASK, 0.0, lambda: True)


def test_what_a_server_refuses_is_told(servers: LlamaServers) -> None:
    with pytest.raises(EngineError, match=r"llama-server, plain failed: .*unlucky"):
        servers.contestant(SERVER_PLAIN).answer(Task("new-code", "code:1", (5,), 4, seed=13), 0.0, lambda: False)


def test_a_server_that_ends_says_its_last_words(tmp_path: Path) -> None:
    executable = program(
        tmp_path,
        """
        import sys

        print("version: 1 (simulated)" if "--version" in sys.argv else "error: no such model")
        sys.exit(0 if "--version" in sys.argv else 3)
        """,
    )
    with (
        LlamaServers(executable, target(), None, 512) as servers,
        pytest.raises(EngineError, match="ended with status 3: error: no such model"),
    ):
        servers.contestant(SERVER_PLAIN).answer(TASK, 0.0, lambda: False)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (None, InputError, "does not exist: give the path of llama-server"),
        ("print('hello')", CapabilityError, "names no version"),
    ],
)
def test_a_program_that_is_no_llama_server_is_refused(
    body: str | None, error: type[PacelineError], message: str, tmp_path: Path
) -> None:
    executable = tmp_path / "none" if body is None else program(tmp_path, body)
    with pytest.raises(error, match=message):
        program_version(executable)


def test_a_target_that_is_not_a_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}), encoding="utf-8")
    with pytest.raises(InputError, match="GGUF files only"):
        LlamaServers(program(tmp_path, _SPEAKS), ModelOptions(tmp_path), None, 512)
