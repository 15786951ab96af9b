"""``paceline serve`` as a command: how it begins, what it refuses, and how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer.main

from paceline.cli.llama_flags import FOREIGN, remarks_on
from paceline.cli.main import app
from paceline.cli.setup import FoundModels, size_models
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.environment import ModelChoice
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.server_options import ServerOptions
from paceline.serving.errors import NotReadyError
from paceline.serving.model_host import ModelHost, ServedModel
from tests.cli.invoking import Refused
from tests.serving.certificates import CERTIFICATE, KEY
from tests.serving.hosted import events_of, hosted, scripted
from tests.serving.processes import BODY, UNMEASURED, poll, served
from tests.timing import WAIT_S

# How it begins


def test_a_server_answers_with_503_until_the_model_is_there() -> None:
    go_on = threading.Event()

    def load() -> Any:
        assert go_on.wait(WAIT_S)
        return scripted()

    loading = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error", "param": None}}
    with hosted(load, wait=False) as running:
        for path in ("/health", "/v1/health", "/v1/models", "/props", "/slots"):
            response = running.get(path)
            assert (response.status_code, response.json()) == (503, loading)
            assert response.headers["retry-after"]
        for path in ("/completion", "/v1/chat/completions", "/tokenize"):
            body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
            assert (running.post(path, body).status_code, running.post(path, body).json()) == (503, loading)
        go_on.set()
        poll(lambda: running.get("/health").status_code == 200)
        assert running.get("/health").json() == {"status": "ok"}
        assert running.answer("/completion", {"prompt": "a", "n_predict": 1})["tokens_predicted"] == 1


async def test_how_far_the_measuring_is_is_told_meanwhile() -> None:
    reported, go_on = threading.Event(), threading.Event()

    def load(report: Callable[[float], None]) -> ServedModel:
        report(0.25)
        reported.set()
        assert go_on.wait(WAIT_S)
        return scripted()

    host = ModelHost(load)
    loading = asyncio.create_task(host.load())
    await asyncio.to_thread(reported.wait, WAIT_S)
    with pytest.raises(NotReadyError, match=r"^Loading model: 25% of what it costs here is measured$"):
        _ = host.served
    go_on.set()
    await loading
    await host.close()


def test_a_port_that_is_taken_is_told_in_one_line(refused: Refused) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused("--port", port)
        assert port in said
        assert "--port" in said


def test_a_model_that_is_missing_is_told_in_one_line(refused: Refused, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.gguf")
    assert missing in refused("-m", missing, "--port", "0")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    assert "broken.gguf" in refused("-m", str(broken), "--port", "0")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--host", ","], "--host"),
        (["--api-prefix", "llm"], "--api-prefix 'llm'"),
        (["--max-n", "0"], "--max-n"),
        (["--grace", "-1"], "--grace"),
        (["--lora", "adapter.gguf"], "--lora is not supported"),
        (["--mmproj", "x.gguf"], "--mmproj is not supported"),
        (["--context-shift"], "--context-shift is not supported"),
        (["--grammar", 'root ::= "a"'], "--grammar is not supported"),
        (["-ctk", "q9"], "-ctk"),
        (["-ctv", "q8_0", "-fa", "off"], "-ctv q8_0 needs fused attention"),
        (["-mm", "x.gguf"], "-mm is not supported"),
        (["--prot", "80"], "did you mean --port?"),
        (["-sm", "row"], "-sm row is not supported"),
        (["--mirostat=2"], "--mirostat=2 is not supported"),
        (["-zq", "1"], "there is no option -zq"),
        (["--frobnicate"], "--frobnicate"),
        (["stray"], "stray"),
        (["--embedding", "-md", str(embedded_draft())], "leave out -md"),
        (["--reranking", "--pooling", "mean"], "--pooling"),
        (["--temp", "-1"], "temperature"),
        (["-c", "3", "-np", "4", "--no-kv-unified"], "-np"),
    ],
)
def test_what_cannot_be_had_is_told_in_one_line(refused: Refused, options: list[str], said: str) -> None:
    assert said in refused(*options, *(() if "--port" in options else ("--port", "0")))


def test_every_flag_of_llama_server_is_known_with_its_values() -> None:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name: option for option in serve.params for name in (*option.opts, *option.secondary_opts)}
    lines = (Path(__file__).parent / "llama_server_flags.txt").read_text().splitlines()
    for line in lines[1:]:
        count, *names = line.split()
        for name in names:
            if name in options:
                assert int(count) == (0 if options[name].is_flag else 1), name
            elif name not in ("-h", "--help", "--usage"):
                assert FOREIGN[name].values == int(count), name
    assert not FOREIGN.keys() & options.keys()


def test_a_flag_that_is_not_here_may_have_the_value_that_changes_nothing() -> None:
    words = "--mirostat 0 --adaptive-target=-1.0 --cache-reuse 9 -sm layer -mg 0 --lazy-mode x"
    remarks = remarks_on(words.split(), [])
    assert len(remarks) == 6
    assert all("changes nothing" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("theirs", "value", "said"),
    [
        ("LLAMA_ARG_PORT", "many", "LLAMA_ARG_PORT"),
        ("LLAMA_ARG_CTX_SIZE", "much", "LLAMA_ARG_CTX_SIZE"),
        ("PACELINE_PORT", "many", "PACELINE_PORT"),
    ],
)
def test_a_variable_that_cannot_be_read_is_told_by_its_name(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, theirs: str, value: str, said: str
) -> None:
    monkeypatch.setenv(theirs, value)
    assert said in refused()


def test_variables_of_llama_server_and_flags_that_change_nothing() -> None:
    variables = {
        "LLAMA_ARG_MODEL": str(embedded_target()),
        "LLAMA_ARG_ALIAS": "zeta,alpha",
        "LLAMA_ARG_N_PARALLEL": "2",
        "LLAMA_ARG_ENDPOINT_METRICS": "1",
        "LLAMA_ARG_API_PREFIX": "/llm",
        "LLAMA_API_KEY": "one,two",
        "LLAMA_ARG_N_PREDICT": "7",
    }
    flags = ("-b", "512", "-cb", "--jinja", "-sps", "0.5", "--cache-reuse=256")
    with served(*flags, variables=variables) as running:
        assert running.said[:5] == [
            "-b 512 changes nothing: passes are as wide as pays here",
            "-cb changes nothing: always so here",
            "--jinja changes nothing: always so here",
            "-sps 0.5 changes nothing: beginnings are reused",
            "--cache-reuse=256 changes nothing: what stands behind a change was read after another text, and would "
            "change the answer: beginnings are reused, and the rest is read",
        ]
        assert running.url.endswith("/llm")
        assert httpx.get(f"{running.url}/health", timeout=WAIT_S).status_code == 200
        assert httpx.get(f"{running.url}/v1/models", timeout=WAIT_S).status_code == 401
        for key in ("one", "two"):
            with httpx.Client(
                base_url=running.url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S
            ) as client:
                (model,) = client.get("/v1/models").json()["data"]
                assert (model["id"], model["aliases"]) == ("alpha", ["alpha", "zeta"])
                assert client.get("/metrics").status_code == 200
                assert client.get("/props").json()["total_slots"] == 2
                answer = client.post("/completion", json=BODY, timeout=WAIT_S).json()
                assert answer["tokens_predicted"] == 7
        running.signal(signal.SIGTERM)
        assert running.status() == 0


def test_tls_by_two_flags_at_a_port_and_a_unix_socket_at_once(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text(KEY)
    (tmp_path / "certificate.pem").write_text(CERTIFICATE)
    files = ("--ssl-key-file", str(tmp_path / "key.pem"), "--ssl-cert-file", str(tmp_path / "certificate.pem"))
    path, trusting = tmp_path / "s.sock", ssl.create_default_context(cadata=CERTIFICATE)
    with served("--host", f"127.0.0.1,{path}", *files) as running:
        assert running.url.startswith("https://127.0.0.1:")
        for url, socket_path in ((running.url, None), ("https://localhost", str(path))):
            transport = httpx.HTTPTransport(uds=socket_path, verify=trusting)
            with httpx.Client(transport=transport, base_url=url, timeout=WAIT_S) as client:
                assert client.post("/completion", json={**BODY, "n_predict": 5}).json()["tokens_predicted"] == 5
                chunks = events_of(client.post("/completion", json={**BODY, "n_predict": 5, "stream": True}))
                assert json.loads(chunks[-1])["stop"] is True
        running.signal(signal.SIGTERM)
        assert running.status() == 0
        assert not path.exists()


# How it ends; more of it is in test_deployment.py


def test_a_terminal_that_is_closed_ends_the_server_in_good_order() -> None:
    with served("--grace", "60") as running, httpx.Client(base_url=running.url, timeout=WAIT_S) as client:
        with client.stream("POST", "/completion", json={**BODY, "n_predict": 300, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines)
            running.signal(signal.SIGHUP)
            poll(lambda: not takes_requests(running.url))
            # The terminal's own comes after that of its shell.
            running.signal(signal.SIGHUP)
            assert json.loads([line for line in lines if line][-1].removeprefix("data: "))["tokens_predicted"] == 300
        assert running.status() == 0
    assert not any("Traceback" in line for line in running.said)


def test_under_nohup_a_second_signal_ends_the_server_at_once() -> None:
    """Long before the grace time, which is longer than the test waits."""
    ignoring = served("--grace", "600", before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    with ignoring as running, httpx.Client(base_url=running.url, timeout=WAIT_S) as client:
        running.signal(signal.SIGHUP)
        assert client.post("/completion", json={**BODY, "n_predict": 3}).status_code == 200
        with client.stream("POST", "/completion", json={**BODY, "n_predict": 10**6, "stream": True}) as response:
            lines = response.iter_lines()
            assert next(lines)
            running.signal(signal.SIGTERM)
            poll(lambda: not takes_requests(running.url))
            running.signal(signal.SIGTERM)
            assert running.status() == 0
    assert not any("Traceback" in line for line in running.said)


@pytest.mark.parametrize("streams", ["full", "closed"])
def test_a_server_needs_no_standard_stream(streams: str, tmp_path: Path) -> None:
    path, redirected = tmp_path / "s.sock", "<&- >&- 2>&-" if streams == "closed" else "> /dev/full 2> /dev/full"
    command = [sys.executable, "-m", "paceline", "serve", *UNMEASURED, "--host", str(path)]
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {redirected}', "sh", *command])
    try:
        poll(lambda: path.is_socket() or process.poll() is not None)
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=WAIT_S
        ) as client:
            poll(lambda: client.get("/health").status_code == 200)
            assert client.post("/completion", json={**BODY, "n_predict": 5}).json()["tokens_predicted"] == 5
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def takes_requests(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


LOADING = """
import sys
import paceline.cli.setup as command
from paceline.cli.main import main

def load(*arguments, report, **options):
    print("measuring", file=sys.stderr, flush=True)
    while True:
        report(0.5)

command.load = load
sys.argv = ["paceline", "serve", "--port", "0"]
main()
"""


def test_a_signal_while_costs_are_measured_gives_that_up() -> None:
    process = subprocess.Popen([sys.executable, "-c", LOADING], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("loading ")
    assert process.stderr.readline() == "measuring\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=WAIT_S)
    assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize(
    ("exact", "number", "unified", "sized"),
    [
        (False, 1, None, (4, 512, 512)),
        (True, 1, None, (1, 512, None)),
        (True, 2, None, (2, 256, None)),
        (True, 2, True, (2, 512, 512)),
    ],
)
def test_exact_texts_have_room_of_their_own(
    exact: bool, number: int, unified: bool | None, sized: tuple[Any, ...]
) -> None:
    """Unless it is to be shared, which the engine refuses."""
    context: Any = SimpleNamespace(get_parameter_source=lambda name: None)
    target = ModelOptions(embedded_target(), context_length=512, exact=exact)
    models = ModelChoice(None, ModelOptions("", max_sequences=number), False, DraftOptions())
    found = size_models(context, FoundModels(target, None), models, ServerOptions(kv_unified=unified)).target
    assert (found.max_sequences, found.context_length, found.cells) == sized
