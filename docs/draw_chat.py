"""Draws docs/chat.svg, the picture of a chat in the README: ``python docs/draw_chat.py MODEL.gguf``.

It needs ``pip install pyte``. The program runs on a terminal of its own, where messages are typed once it waits for
them, and the screen is drawn as it is at the end.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

MESSAGES = (
    "Correct the spelling, and change nothing else: The harbour of Lindow was built in three stages. The first quay, "
    "of oak, was finshed in 1842 and burned in the same winter. The second, of granite, took eleven yeras.",
    "Repeat the corrected text word for word.",
)
OPTIONS = ("--temp", "0", "-n", "120", "--no-markdown")
WIDTH, HEIGHT = 110, 36
_COLOURS = {"brown": "yellow"}
"""Names of pyte that rich has others for."""


def main() -> None:
    """Chat, and draw what is on the screen."""
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} MODEL.gguf")
    screen = chatted([sys.executable, "-m", "paceline", "chat", "-m", sys.argv[1], *OPTIONS])
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ paceline chat -m {Path(sys.argv[1]).name} {' '.join(OPTIONS)}\n", style="bold"))
    lines = [line_of(screen, row) for row in range(HEIGHT)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    for line in lines:
        console.print(line, soft_wrap=True)
    drawn = console.export_svg(title="paceline chat")
    # Readers have a font of their own; rich would have them fetch one.
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL).replace("Fira Code, monospace", "monospace")
    Path(__file__).with_name("chat.svg").write_text(drawn, encoding="utf-8")


def chatted(command: list[str]) -> pyte.Screen:
    """Return the screen after the conversation."""
    screen = pyte.Screen(WIDTH, HEIGHT)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (HEIGHT, WIDTH))
    environment = {**os.environ, "COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            for message in MESSAGES:
                wait_for_prompt(ours, screen, stream)
                os.write(ours, message.encode() + b"\r")
            wait_for_prompt(ours, screen, stream)
        finally:
            os.write(ours, b"\x04")
            process.wait()
    os.close(ours)
    return screen


def wait_for_prompt(terminal: int, screen: pyte.Screen, stream: pyte.ByteStream) -> None:
    """Show what the program writes until it waits for a message."""
    said = False
    while True:
        piece = os.read(terminal, 1 << 16)
        stream.feed(piece)
        if b"\x1b[6n" in piece:
            # The program asks where the cursor is.
            os.write(terminal, f"\x1b[{screen.cursor.y + 1};{screen.cursor.x + 1}R".encode())
        here = screen.display[screen.cursor.y]
        said = said or not here.startswith("> ")
        if said and here.rstrip() == ">":
            return


def line_of(screen: pyte.Screen, row: int) -> Text:
    """Return a row of the screen with its colours."""
    line = Text()
    for column in range(WIDTH):
        cell = screen.buffer[row][column]
        colour = None if cell.fg == "default" else _COLOURS.get(cell.fg, cell.fg)
        if colour is not None and re.fullmatch(r"[0-9a-f]{6}", colour):
            colour = f"#{colour}"
        line.append(cell.data, Style(color=colour, bold=cell.bold, italic=cell.italics))
    line.rstrip()
    return line


if __name__ == "__main__":
    main()
