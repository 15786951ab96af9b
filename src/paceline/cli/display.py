"""What is printed: the answer, reports, JSON and paths, on any stream, and safe on a terminal."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from paceline.cli.rendering import MarkdownView, WordWrap
from paceline.core.request import SOURCE_TARGET
from paceline.core.text import TextSegment
from paceline.terminal_text import json_text, printable

if TYPE_CHECKING:
    from paceline.chat.assembler import AnswerEvent

SOURCE_STYLES = {
    "draft": Style(color="green"),
    "suffix": Style(color="cyan"),
    "lookup": Style(color="magenta"),
    "prediction": Style(color="blue"),
}
"""Colours of accepted tokens by drafter; the target's own tokens keep the terminal's colour."""

_PROMPT_STYLE = Style(dim=True)
_REASONING_STYLE = Style(dim=True, italic=True)
_COLOUR_SYSTEMS = {
    "standard": ColorSystem.STANDARD,
    "256": ColorSystem.EIGHT_BIT,
    "truecolor": ColorSystem.TRUECOLOR,
    "windows": ColorSystem.WINDOWS,
}


def prepare_streams() -> None:
    r"""Let no command fail for its standard streams but for an answer that cannot be written.

    What their encoding lacks is written as ``\xHH`` or ``\uXXXX``: Windows writes redirected output in the system's own
    code page, and a name of a file may hold bytes that are no text. What standard error cannot take (closed, on a full
    disk, a pipe that nobody reads any more) is dropped. To be called once, before anything is printed.
    """
    for number in range(3):
        # A file that is opened later would else take the place of a closed stream, and get what is written there.
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stderr is None:
        # Where it is None, print() takes standard output.
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # it stays open
    elif isinstance(sys.stderr, io.TextIOWrapper) and not isinstance(sys.stderr, _IgnoringStream):
        sys.stderr = _IgnoringStream(sys.stderr.buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)


class _IgnoringStream(io.TextIOWrapper):
    """Writes where another stream does, and drops what that cannot take.

    What is below it, down to the file, is Python's own: an interrupt in the middle of code of ours would have written
    a line that counts as unwritten, and comes again.
    """

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()

    def close(self) -> None:
        """Leave the other stream as it is."""
        self.flush()


class _PrintableConsole(Console):
    """A console that spells out control characters in the texts it is given; its own colours are not theirs."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def output_console(*, soft_wrap: bool = True) -> Console:
    """Return a console on standard output, for reports; ``soft_wrap`` leaves lines as long as they are."""
    return _PrintableConsole(file=sys.stdout, highlight=False, soft_wrap=soft_wrap, emoji=False)


def error_console(*, soft_wrap: bool = True) -> Console:
    """Return a console on standard error, where everything but the answer goes; ``soft_wrap`` as for the other."""
    return _PrintableConsole(stderr=True, highlight=False, soft_wrap=soft_wrap, emoji=False)


def print_json(facts: Any) -> None:
    print(json_text(facts, encoding=sys.stdout.encoding or "ascii"))


def print_path(path: Path) -> None:
    """Print a path on standard output: into a pipe its exact bytes, for other programs to open."""
    if sys.stdout.isatty() or os.name != "posix":
        print(printable(str(path)))
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.buffer.flush()


class AnswerWriter:
    """Writes an answer to standard output as it arrives.

    On a terminal the prompt comes first, dimmed, and accepted tokens have their drafter's colour; colour respects
    ``NO_COLOR``. Lines are broken between words. Reasoning is dimmed and stands before the answer; without colours, a
    line says which is which. Control characters are spelled out there. Into a pipe goes the answer alone, as it is.

    Args:
        prompt: what the answer continues.
        drafters: names of those that the colours stand for.
        silent: whether nothing is written.
        markdown: whether a terminal shows the answer as markdown, and no drafter's colours.
    """

    def __init__(self, prompt: str = "", drafters: Sequence[str] = (), *, silent: bool, markdown: bool = False) -> None:
        console = Console(file=sys.stdout)
        self._silent = silent
        # Not rich's word for it, which FORCE_COLOR changes: the layout is for people, a pipe gets the text alone.
        self._terminal = sys.stdout.isatty() and not silent
        self._colours = None if console.no_color else _COLOUR_SYSTEMS.get(console.color_system or "")
        self._ends_in_newline = True
        self._is_reasoning = False
        self._wrap = WordWrap(self._put)
        self._markdown = MarkdownView(console) if markdown and self._terminal else None
        if self._terminal:
            if self._markdown is None and self._colours is not None and drafters:
                self._put(self._legend(drafters) + "\n\n")
            self._lay_out(prompt, _PROMPT_STYLE)
            self._ends_in_newline = prompt.endswith("\n")

    def write(self, segments: Sequence[TextSegment]) -> None:
        if self._silent or not segments:
            return
        if self._markdown is not None:
            self._markdown.write("".join(printable(segment.text) for segment in segments))
        for segment in segments if self._markdown is None else ():
            self._lay_out(segment.text, SOURCE_STYLES.get(segment.source))
        sys.stdout.flush()
        self._ends_in_newline = segments[-1].text.endswith("\n")

    def write_parts(self, parts: Sequence[AnswerEvent]) -> None:
        for is_reasoning, group in itertools.groupby(parts, key=lambda part: part.kind == "reasoning"):
            segments = [part.segment for part in group]
            if is_reasoning:
                self._write_reasoning(segments)
                continue
            if self._is_reasoning:
                self._is_reasoning = False
                self._wrap.end()
                self._put("\n" if self._ends_in_newline else "\n\n")
                self._head("answer")
            self.write(segments)

    def _write_reasoning(self, segments: Sequence[TextSegment]) -> None:
        if not self._terminal:
            return
        if not self._is_reasoning:
            self._is_reasoning = True
            self._head("reasoning")
        for segment in segments:
            self._lay_out(segment.text, SOURCE_STYLES.get(segment.source, Style()) + _REASONING_STYLE)
        sys.stdout.flush()
        self._ends_in_newline = segments[-1].text.endswith("\n")

    def finish(self, *, line: bool = False) -> None:
        """End the answer's last line on a terminal. ``line`` does so in a pipe as well, where more is to come."""
        self._is_reasoning = False
        self._wrap.end()
        if self._markdown is not None:
            self._markdown.end()
            self._ends_in_newline = True
        if (self._terminal or line) and not self._ends_in_newline and not self._silent:
            self._put("\n")
            self._ends_in_newline = True

    def _head(self, what: str) -> None:
        """Say what follows, where it cannot be told by how it looks."""
        if self._colours is None:
            self._put(f"[{what}]\n")

    def _legend(self, drafters: Sequence[str]) -> str:
        names = [self._render(name, SOURCE_STYLES.get(name)) for name in drafters]
        return f"tokens accepted from: {', '.join(names)}; the rest are the {SOURCE_TARGET}'s own"

    def _lay_out(self, text: str, style: Style | None) -> None:
        if not self._terminal:
            self._put(text)
            return
        # Rendered here and not by rich's print, which would cost more than a small model's whole round.
        self._wrap.write(printable(text), lambda part: self._render(part, style))

    def _render(self, shown: str, style: Style | None) -> str:
        return shown if style is None or self._colours is None else style.render(shown, color_system=self._colours)

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
