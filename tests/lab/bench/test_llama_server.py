"""The other server as a contestant, against a small program that speaks as llama-server does."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline.core.errors import CapabilityError, EngineError, InputError, PacelineError
from paceline.engines.options import ModelOptions
from paceline.lab.bench.llama_server import LlamaServers, check_llama_server
from paceline.lab.comparison import Stopped
from paceline.lab.task import Task
from paceline.lab.variants import (
    SERVER_DRAFT_VARIANTS,
    SERVER_NGRAM_VARIANTS,
    SERVER_PLAIN,
    server_draft_and_ngram,
)
from paceline.models.embedded import embedded_draft, embedded_target

_SPEAKS = """
    import http.server, json, os, sys, threading

    if "--version" in sys.argv or "--help" in sys.argv:
        print("version: 1 (simulated)\\n--spec-type", file=sys.stderr)
        sys.exit()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.say([{"speculative": "--spec-draft-n-max" in sys.argv}] if self.path == "/slots" else {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["seed"] == 13:
                self.say({"error": {"message": "unlucky"}}, status=400)
                return
            if body["seed"] == 14:
                os._exit(3)
            if body["seed"] == 15:
                threading.Event().wait()
            tokens = [len(body["prompt"]) + number for number in range(body["n_predict"])]
            timings = {"predicted_ms": 1500.0, "draft_n": 6, "draft_n_accepted": 1}
            self.say({"tokens": tokens, "timings": timings, "asked": body, "process": os.getpid()})

        def say(self, what, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(what).encode())

        def log_message(self, *what):
            pass

    print("simulated model loaded", flush=True)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
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
def servers(tmp_path: Path) -> LlamaServers:
    return LlamaServers(program(tmp_path, _SPEAKS), target(), ModelOptions(embedded_draft()), 512)


def never() -> bool:
    return False


def task(seed: int = 3) -> Task:
    return Task("new-code", "code:1", (5, 6, 7), 4, seed=seed)


def test_an_answer_has_the_servers_own_time_and_counts(servers: LlamaServers) -> None:
    answer = servers.contestant(SERVER_PLAIN).answer(task(), 0.0, never)
    assert answer.token_ids == [3, 4, 5, 6]
    assert answer.seconds == 1.5
    assert answer.per_second == 2.0
    assert (answer.num_drafted, answer.num_accepted, answer.rounds) == (6, 1, 2)
    assert answer.spent is None
    assert answer.generation is None


def test_every_answer_has_a_process_of_its_own_that_ends_with_it(
    servers: LlamaServers, processes: list[subprocess.Popen[bytes]]
) -> None:
    """What an n-gram drafter remembers of an earlier answer must not help with a later one."""
    contestant = servers.contestant(SERVER_PLAIN)
    for _ in range(2):
        contestant.answer(task(), 0.0, never)
    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)


def test_no_proxy_is_asked_for_this_machine(servers: LlamaServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert servers.contestant(SERVER_PLAIN).answer(task(), 0.0, never).token_ids


def test_settings_become_arguments(servers: LlamaServers) -> None:
    draft = next(each for each in SERVER_DRAFT_VARIANTS if each.fixed and each.fixed.p_min == 0.6)
    plain = servers.command(SERVER_PLAIN)
    assert plain[1:7] == ["-m", str(embedded_target()), "-c", "512", "-np", "1"]
    assert "--spec-type" not in plain
    assert not {"-md", "-fa"} & set(plain)
    both = servers.command(server_draft_and_ngram(draft, SERVER_NGRAM_VARIANTS[1]))
    assert both[: len(plain)] == plain
    assert both[len(plain) :] == [
        *("--spec-type", "ngram-simple,draft-simple"),
        *("--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8"),
        *("-md", str(embedded_draft()), "-ngld", "all"),
        *("--spec-draft-n-max", "1", "--spec-draft-p-min", "0.6"),
    ]


def test_a_draft_with_threads_of_its_own_has_them_in_the_server_too(tmp_path: Path) -> None:
    draft = ModelOptions(embedded_draft(), threads=1, threads_batch=2)
    servers = LlamaServers(program(tmp_path, _SPEAKS), ModelOptions(embedded_target(), threads=3), draft, 512)
    assert servers.threads == "3 threads"
    command = servers.command(SERVER_DRAFT_VARIANTS[0])
    named = {name: command[command.index(name) + 1] for name in ("-t", "-tb", "-td", "-tbd")}
    assert named == {"-t": "3", "-tb": "3", "-td": "1", "-tbd": "2"}


@pytest.mark.parametrize(("fused", "argument"), [(True, "on"), (False, "off")])
def test_attention_is_fused_as_in_paceline_where_that_was_chosen(tmp_path: Path, fused: bool, argument: str) -> None:
    options = ModelOptions(embedded_target(), flash_attention=fused)
    command = LlamaServers(program(tmp_path, _SPEAKS), options, None, 512).command(SERVER_PLAIN)
    assert command[command.index("-fa") + 1] == argument


def test_the_caches_are_of_the_same_types_as_in_paceline(tmp_path: Path) -> None:
    target = ModelOptions(embedded_target(), cache_type_k="q8_0", exact=True)
    draft = ModelOptions(embedded_draft(), cache_type_v="q4_0")
    command = LlamaServers(program(tmp_path, _SPEAKS), target, draft, 512).command(SERVER_DRAFT_VARIANTS[0])
    named = {name: command[command.index(name) + 1] for name in ("-fa", "-ctk", "-ctv", "-ctvd")}
    assert named == {"-fa": "on", "-ctk": "q8_0", "-ctv": "bf16", "-ctvd": "q4_0"}
    assert "-ctkd" not in command


def test_a_server_that_does_not_draft_though_it_should_is_found_out(servers: LlamaServers) -> None:
    assert servers.contestant(SERVER_DRAFT_VARIANTS[0]).answer(task(), 0.0, never).num_drafted == 6
    with pytest.raises(EngineError, match="serves without drafting"):
        servers.contestant(SERVER_NGRAM_VARIANTS[0]).answer(task(), 0.0, never)


@pytest.mark.parametrize("stops_after", [0, 1, 40])
def test_whoever_wants_no_more_is_heard_while_an_answer_is_made(
    servers: LlamaServers, processes: list[subprocess.Popen[bytes]], stops_after: int
) -> None:
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return asked > stops_after

    with pytest.raises(Stopped):
        servers.contestant(SERVER_PLAIN).answer(task(seed=15), 0.0, stopped)
    assert all(process.returncode is not None for process in processes)


def test_what_a_server_refuses_is_told(servers: LlamaServers) -> None:
    with pytest.raises(EngineError, match=r"llama-server, plain failed: .*unlucky"):
        servers.contestant(SERVER_PLAIN).answer(task(seed=13), 0.0, never)


def test_a_server_that_ends_says_its_last_words(servers: LlamaServers, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ended with status 3: simulated model loaded"):
        servers.contestant(SERVER_PLAIN).answer(task(seed=14), 0.0, never)
    silent = LlamaServers(program(tmp_path, "import sys; sys.exit(4)"), target(), None, 512)
    with pytest.raises(EngineError, match="ended with status 4: it said nothing"):
        silent.contestant(SERVER_PLAIN).answer(task(), 0.0, never)


def test_a_llama_server_says_its_version(tmp_path: Path) -> None:
    assert check_llama_server(program(tmp_path, _SPEAKS), target(), None) == "1 (simulated)"


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (None, InputError, "does not exist: give the path of llama-server"),
        ("print('hello')", CapabilityError, "names no version"),
        ("print('version: 0 (old)')", CapabilityError, "0 \\(old\\) does not know --spec-type: give a newer one"),
    ],
)
def test_a_program_that_is_no_llama_server_is_refused(
    body: str | None, error: type[PacelineError], message: str, tmp_path: Path
) -> None:
    executable = tmp_path / "none" if body is None else program(tmp_path, body)
    with pytest.raises(error, match=message):
        check_llama_server(executable, target(), None)


def test_models_that_are_not_gguf_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}), encoding="utf-8")
    executable = program(tmp_path, _SPEAKS)
    for pair in ((ModelOptions(tmp_path), None), (target(), ModelOptions(tmp_path))):
        with pytest.raises(InputError, match="GGUF files only"):
            check_llama_server(executable, *pair)
