"""Asks agents to do one task with a server of ours, each in its own loop: say which word is in a file.

::

    python -m venv agents && agents/bin/pip install openai-agents smolagents
    npm install @anthropic-ai/claude-code @openai/codex
    python -m tests.agents --python agents/bin/python --claude node_modules/.bin/claude \\
        --codex node_modules/.bin/codex --aider aider/bin/aider

Each that is named is run, with a home folder of its own. The model says what a script says (``scripted_agent.py``), so
that a client's protocol is tested and no model's wits. pytest does not collect what is here.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.agents.scripted_agent import agent_server

HERE: Final = Path(__file__).parent
WORD: Final = "WORD-48151623"
ASKED: Final = "Which word is in {path}?"
LONGEST_S: Final = 300.0

_CODEX: Final = """\
model = "scripted"
model_provider = "paceline"

[model_providers.paceline]
name = "paceline"
base_url = "{url}/v1"
wire_api = "responses"
"""


class Run(NamedTuple):
    """A client and how it is called; ``edits`` where the word is marked in the file instead of said."""

    name: str
    command: list[str]
    variables: tuple[tuple[str, str], ...] = ()
    edits: bool = False


def runs(given: argparse.Namespace, url: str, path: Path, home: Path) -> Iterator[Run]:
    asked = ASKED.format(path=path)
    if given.python:
        for api in ("chat", "responses"):
            yield Run(f"openai-agents, {api}", [given.python, str(HERE / "with_openai_agents.py"), url, api, str(path)])
        yield Run("smolagents", [given.python, str(HERE / "with_smolagents.py"), url, str(path)])
    if given.claude:
        yield Run(
            "Claude Code",
            [given.claude, "-p", asked, "--allowedTools", "Read"],
            (
                ("ANTHROPIC_BASE_URL", url),
                ("ANTHROPIC_AUTH_TOKEN", "none"),
                ("ANTHROPIC_MODEL", "scripted"),
                ("ANTHROPIC_SMALL_FAST_MODEL", "scripted"),
                ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
            ),
        )
    if given.codex:
        (home / ".codex").mkdir()
        (home / ".codex" / "config.toml").write_text(_CODEX.format(url=url))
        yield Run("Codex", [given.codex, "exec", "--skip-git-repo-check", asked])
    if given.aider:
        flags = ["--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--edit-format", "diff"]
        served = ["--model", "openai/scripted", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none"]
        yield Run("aider", [given.aider, *served, *flags, "--message", "Mark the word.", path.name], edits=True)


def fails(run: Run, path: Path, home: Path) -> str:
    """Return what went wrong; nothing where the task was done."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC_", "OPENAI_"))}
    try:
        ended = subprocess.run(
            run.command,
            cwd=path.parent,
            env={**inherited, "HOME": str(home), "PYTHONPATH": "", **dict(run.variables)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LONGEST_S:.0f} s"
    said = path.read_text() if run.edits else ended.stdout
    expected = f"changed: {WORD}" if run.edits else f"The word is {WORD}."
    if ended.returncode == 0 and expected in said:
        return ""
    return f"status {ended.returncode}: {ended.stdout[-1000:]}{ended.stderr[-1000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="with openai-agents and smolagents", metavar="PYTHON")
    for name in ("claude", "codex", "aider"):
        parser.add_argument(f"--{name}", metavar="PROGRAM")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        home, path = Path(folder) / "home", Path(folder) / "work" / "notes.txt"
        home.mkdir()
        path.parent.mkdir()
        with agent_server(path) as server:
            for run in runs(given, server.url, path, home):
                path.write_text(f"Nothing but\n{WORD}\nis here.\n")
                began_s = time.monotonic()
                fault = fails(run, path, home)
                failed += bool(fault)
                print(f"{run.name}: {fault or 'done'}, {time.monotonic() - began_s:.0f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
