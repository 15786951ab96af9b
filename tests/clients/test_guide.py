"""Clients that others made, set up by the blocks of docs/guides/clients.md, each in its own loop.

``make test-clients`` installs them. The model says what a script says (``scripted_agent.py``), so that a client's
protocol is tested and no model's wits.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.conftest import WORD, Task
from tests.clients.guide import block
from tests.clients.servers import free_port, served
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


def test_openai_and_anthropic(task: Task) -> None:
    messages: list[Any] = [{"role": "user", "content": WORD}]
    names: dict[str, Any] = {}
    exec(block("OpenAI's library", "python", task.url), names)
    with names["client"] as openai:
        chat = openai.chat.completions.create(model="any", messages=messages)
    assert chat.choices[0].message.content == ANSWER
    exec(block("Anthropic's library", "python", task.url), names)
    with names["client"] as anthropic:
        message = anthropic.messages.create(model="any", max_tokens=50, messages=messages)
    assert [each.text for each in message.content] == [ANSWER]


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
    port = free_port()
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
    key = f"sk-{secrets.token_hex(32)}"
    variables = {**task.variables, "LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with served(command, variables, url, "/health/liveliness", task.home):
        body = {"model": "local", "max_tokens": 50, "messages": [{"role": "user", "content": WORD}]}
        with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S) as web:
            chat = web.post("/v1/chat/completions", json=body).json()
            message = web.post("/v1/messages", json=body).json()
        assert chat["choices"][0]["message"]["content"] == ANSWER
        assert [each["text"] for each in message["content"] if each["type"] == "text"] == [ANSWER]


def test_open_webui(task: Task) -> None:
    program = task.program("webui/bin/open-webui")
    if not Path(program).exists():
        pytest.skip("Open WebUI takes 6 GB: make build/clients/webui installs it")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    script, changed = re.subn(
        r"^open-webui serve --port 3000$",
        f"exec {program} serve --host 127.0.0.1 --port {port}",
        block("Open WebUI", "sh", task.url),
        flags=re.MULTILINE,
    )
    assert changed == 1
    offline = dict.fromkeys(("OFFLINE_MODE", "HF_HUB_OFFLINE", "DO_NOT_TRACK", "SCARF_NO_ANALYTICS"), "true")
    own = {"WEBUI_AUTH": "false", "WEBUI_SECRET_KEY": "x", "DATA_DIR": str(task.home), "RAG_EMBEDDING_ENGINE": "openai"}
    with served(["sh", "-c", script], {**task.variables, **offline, **own}, url, "/health", task.home):
        account = {"email": "admin@localhost", "password": "admin"}
        key = httpx.post(f"{url}/api/v1/auths/signin", json=account, timeout=WAIT_S).json()["token"]
        web = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=WAIT_S)
        with web:
            (model,) = [each["id"] for each in web.get("/api/models").json()["data"]]
            body = {"model": model, "messages": [{"role": "user", "content": WORD}]}
            answer = web.post("/api/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == ANSWER
