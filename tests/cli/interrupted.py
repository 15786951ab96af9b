"""A command that Ctrl-C reaches while it writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.timing import WAIT_S

_SCRIPT = """
import os, signal, sys
from contextlib import contextmanager

import paceline.cli.{command} as command
from paceline.cli.main import main

@contextmanager
def interrupting():
    def report(stage, done, total):
        if 0 < done < total:
            print(*os.listdir({folder!r}), sep="\\n", flush=True)
            signal.raise_signal(signal.SIGINT)

    yield report

signal.signal(signal.SIGINT, signal.default_int_handler)
command.stage_progress = interrupting
main()
"""


def interrupt_while_it_writes(folder: Path, command: str, *arguments: str) -> tuple[int, bytes, set[str]]:
    """Run a command in a process of its own and interrupt it where it reports that some of its work is done.

    Args:
        folder: what it writes into.
        command: one that reports to :func:`~paceline.cli.progress.stage_progress`.
        arguments: the command's own.

    Returns:
        The exit status, what was said on stderr, and what lay in ``folder`` when the signal came.
    """
    script = _SCRIPT.format(command=command, folder=str(folder))
    process = subprocess.run(
        [sys.executable, "-c", script, command, *arguments], capture_output=True, timeout=WAIT_S, check=False
    )
    return process.returncode, process.stderr, set(process.stdout.decode().splitlines())
