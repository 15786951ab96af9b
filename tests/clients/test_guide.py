"""Clients that others made, set up by the blocks of docs/guides/clients.md, each in its own loop.

``make test-clients`` installs them. The model says what a script says (``scripted_agent.py``), so that a client's
protocol is tested and no model's wits.
"""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.clients.conftest import WORD, Task
from tests.clients.guide import block
from tests.serving.processes import poll
from tests.timing import WAIT_S

HERE = Path(__file__).parent
ANSWER = f"The word is {WORD}."


def test_claude_code(task: Task) -> None:
    script = block("Claude Code", "sh", task.url)
    started, program = script.rsplit("\n", 2)[:2]
    assert program == "claude"
    called = f'{started}\nexec "$@"'
    command = [task.program("node_modules/.bin/claude"), "-p", task.question, "--allowedTools", "Read"]
    assert ANSWER in task.run(["sh", "-c", called, "sh", *command])


def test_codex(task: Task) -> None:
    settings = block("Codex", "toml", task.url)
    # The script's tokens are bytes: so many more of them are in a context.
    settings, changed = re.subn(r"(?<=^model_context_window = )\d+$", "1000000", settings, flags=re.MULTILINE)
    assert changed == 1
    (task.home / ".codex").mkdir()
    (task.home / ".codex" / "config.toml").write_text(settings)
    assert ANSWER in task.run([task.program("node_modules/.bin/codex"), "exec", "--skip-git-repo-check", task.question])


def test_continue(task: Task) -> None:
    (task.home / ".continue").mkdir()
    settings = task.home / ".continue" / "config.yaml"
    settings.write_text(block("Continue", "yaml", task.url))
    command = [task.program("node_modules/.bin/cn"), "--config", str(settings), "-p", task.question]
    assert ANSWER in task.run(command, {"CONTINUE_TELEMETRY_ENABLED": "0"})


def test_cline(task: Task) -> None:
    program, *words = block("Cline", "sh", task.url).split()
    assert program == "cline"
    cline = task.program("node_modules/.bin/cline")
    quiet = {"CLINE_TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1"}
    task.run([cline, *words], quiet)
    assert ANSWER in task.run([cline, task.question], quiet)


def test_aider(task: Task) -> None:
    program, *words = block("aider", "sh", task.url).split()
    assert program == "aider"
    quiet = ["--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--analytics-disable"]
    message = ["--edit-format", "diff", "--message", "Mark the word.", task.file.name]
    task.run([task.program("aider/bin/aider"), *words, *quiet, *message])
    assert f"changed: {WORD}" in task.file.read_text()


def test_langchain(task: Task) -> None:
    code = block("LangChain", "python", task.url)
    asked = f"print(model.invoke({task.file.read_text()!r}).content)"
    streamed = f"print(''.join(each.text for each in model.stream({task.file.read_text()!r})))"
    said = task.run([task.program("python/bin/python"), "-c", f"{code}\n{asked}\n{streamed}"])
    assert said.splitlines() == [ANSWER, ANSWER]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(task: Task, api: str) -> None:
    program = str(HERE / "with_openai_agents.py")
    assert task.run([task.program("python/bin/python"), program, task.url, api, str(task.file)]).count(ANSWER) == 2


def test_smolagents(task: Task) -> None:
    program = str(HERE / "with_smolagents.py")
    assert ANSWER in task.run([task.program("python/bin/python"), program, task.url, str(task.file)])


def test_litellm(task: Task) -> None:
    settings = task.home / "config.yaml"
    settings.write_text(block("LiteLLM", "yaml", task.url))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        task.program("litellm/bin/litellm"),
        "--config",
        str(settings),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (
        (task.home / "log").open("w+") as log,
        subprocess.Popen(command, env={**task.variables, **offline}, stdout=log, stderr=log) as proxy,
    ):
        try:

            def is_ready() -> bool:
                assert proxy.poll() is None, (task.home / "log").read_text()[-2000:]
                try:
                    return httpx.get(f"{url}/health/liveliness").status_code == 200
                except httpx.TransportError:
                    return False

            poll(is_ready)
            body = {"model": "local", "max_tokens": 50, "messages": [{"role": "user", "content": WORD}]}
            chat = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=WAIT_S).json()
            assert chat["choices"][0]["message"]["content"] == ANSWER
            message = httpx.post(f"{url}/v1/messages", json=body, timeout=WAIT_S).json()
            assert [each["text"] for each in message["content"] if each["type"] == "text"] == [ANSWER]
        finally:
            proxy.terminate()
