"""How an answer is laid out on a terminal while it is written: lines broken between words, or markdown."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from rich.live import Live
    from rich.markdown import Markdown

_PART: Final = re.compile(r"\n|[^\S\n]+|\S+")

_DRAW_S: Final = 0.1
"""Seconds between two drawings of what is being written, which would else cost more than a small model's rounds."""


class WordWrap:
    """Breaks lines between words at the terminal's width. A word that is not whole yet is held back.

    Args:
        put: writes a text on the terminal.
    """

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put = put
        self._column = 0
        self._space = ""
        self._word: list[str] = []
        self._word_cells = 0

    def write(self, text: str, render: Callable[[str], str]) -> None:
        """Write a text; ``render`` gives its parts their colours."""
        for part in _PART.findall(text):
            if part == "\n":
                self._end_word()
                self._put("\n")
                self._column, self._space = 0, ""
            elif part.isspace():
                self._end_word()
                self._space += part
            elif cell_len(part) == len(part):
                self._add(part, render)
            else:
                # Between wide characters a line may end anywhere.
                for character in part:
                    if cell_len(character) > 1:
                        self._end_word()
                    self._add(character, render)

    def end(self) -> None:
        """Write what is held back."""
        self._end_word()
        self._space = ""

    def _add(self, part: str, render: Callable[[str], str]) -> None:
        self._word.append(render(part))
        self._word_cells += cell_len(part)
        if self._word_cells >= shutil.get_terminal_size().columns:
            self._end_word()

    def _end_word(self) -> None:
        if not self._word:
            return
        space = (" " * self._column + self._space).expandtabs(8)[self._column :]
        width = shutil.get_terminal_size().columns
        if self._column and self._column + len(space) + self._word_cells > width:
            space, self._column = "\n", -1
        self._put(space + "".join(self._word))
        # A full line counts as such: the next word begins another one.
        self._column = (self._column + len(space) + self._word_cells - 1) % max(width, 1) + 1
        self._space, self._word, self._word_cells = "", [], 0


class MarkdownView:
    """Shows markdown while it is written: its last block is drawn again until the next one begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._drawn_s = 0.0
        self._live: Live | None = None
        self._has_blocks = False

    def write(self, text: str) -> None:
        self._text += text
        if time.monotonic() - self._drawn_s >= _DRAW_S:
            self._draw()
            self._drawn_s = time.monotonic()

    def end(self) -> None:
        """Show the last block as it stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._text.strip():
            self._print(self._text)
        self._text, self._has_blocks = "", False

    def _draw(self) -> None:
        from rich.live import Live

        begins = [token.map[0] for token in _parser().parse(self._text) if token.level == 0 and token.map]
        if not begins:
            return
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="visible",
            )
            self._live.start()
        if begins[-1] > 0 and any(self._text.splitlines()[: begins[-1]]):
            lines = self._text.splitlines(keepends=True)
            self._print("".join(lines[: begins[-1]]))
            self._text = "".join(lines[begins[-1] :])
        self._live.update(_LastLines(make_markdown(self._text), has_blocks=self._has_blocks), refresh=True)

    def _print(self, text: str) -> None:
        if self._has_blocks:
            self._console.print()
        self._console.print(make_markdown(text))
        self._has_blocks = True


class _LastLines:
    """The end of something, as much as a terminal has lines for: what is scrolled off could not be drawn again."""

    def __init__(self, shown: Markdown, *, has_blocks: bool) -> None:
        self._shown = shown
        self._has_blocks = has_blocks

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        lines = console.render_lines(self._shown, options, pad=False)
        if self._has_blocks:
            lines.insert(0, [])
        for line in lines[-max(console.height - 2, 1) :]:
            yield from line
            yield Segment.line()


def make_markdown(text: str) -> Markdown:
    """Return a text to print as markdown, of which nothing is lost: HTML is text, and a line ends where it ends."""
    from rich.markdown import Markdown

    shown = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    shown.parsed = _parser().parse(text)
    for token in _all_tokens(shown.parsed):
        if token.type == "softbreak":
            token.type = "hardbreak"
    return shown


def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])


def _all_tokens(tokens: list[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _all_tokens(token.children or [])
