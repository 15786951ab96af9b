"""A task for a client: which word is in a file, or to mark it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.clients.scripted_agent import agent_server

WORD: Final = "WORD-48151623"
LONGEST_S: Final = 300.0


@dataclass(frozen=True)
class Task:
    """A file with a word, and the server whose model knows what to do with it.

    Attributes:
        clients: folder of the clients that ``make test-clients`` installed.
        home: the client's home folder.
        file: has the word.
        url: of the server, without ``/v1``.
    """

    clients: Path
    home: Path
    file: Path
    url: str

    @property
    def question(self) -> str:
        return f"Which word is in {self.file}?"

    @property
    def variables(self) -> dict[str, str]:
        """Variables of this process, but for those of other servers, with the client's home."""
        others = ("ANTHROPIC_", "OPENAI_", "CLAUDE", "CODEX_", "LITELLM_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return {**kept, "HOME": str(self.home), "PYTHONPATH": "", "NO_COLOR": "1"}

    def program(self, name: str) -> str:
        return str(self.clients / name)

    def run(self, command: list[str], variables: Mapping[str, str] | None = None) -> str:
        """Return what a client that ends well prints."""
        ended = subprocess.run(
            command,
            cwd=self.file.parent,
            env={**self.variables, **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
        return ended.stdout


@pytest.fixture
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Task]:
    home, file = tmp_path / "home", tmp_path / "work" / "notes.txt"
    home.mkdir()
    file.parent.mkdir()
    file.write_text(f"Nothing but\n{WORD}\nis here.\n")
    with agent_server(file) as server:
        yield Task(Path(request.config.getoption("--clients")).absolute(), home, file, server.url)
    # Some leave a process that waits for their next call.
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("HOME") == str(home):
            process.kill()
