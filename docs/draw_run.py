"""Draws docs/run.svg, the picture of a run in the README: ``python docs/draw_run.py``.

It needs the model of ``paceline inflate 1b --type Q4_0``. The program runs on a terminal of its own, and what it writes
there is drawn as it is.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ARGUMENTS = ["run", "-m", "target-1b-q4_0", "-md", "draft", "--sample", "logs:6", "--temp", "0.8", "--seed", "1"]
WIDTH = 110


def main() -> None:
    """Run paceline and draw what it shows."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ paceline {' '.join(ARGUMENTS)}\n", style="bold"))
    console.print(Text.from_ansi(on_a_terminal([sys.executable, "-m", "paceline", *ARGUMENTS])))
    drawn = console.export_svg(title="paceline run")
    # Readers have a font of their own; rich would have them fetch one.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    Path(__file__).with_name("run.svg").write_text(drawn, encoding="utf-8")


def on_a_terminal(command: list[str]) -> str:
    """Return what a program writes to a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": "50", "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        written = bytearray()
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # how a terminal says that the program has ended
                break
            if not piece:
                break
            written += piece
    os.close(ours)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{written.decode(errors='replace')}")
    return written.decode().replace("\r\n", "\n")


if __name__ == "__main__":
    main()
