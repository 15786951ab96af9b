"""What is printed, on streams of any encoding and on terminals."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from paceline.chat.reasoning import AnswerPart
from paceline.cli.display import AnswerWriter, error_console, output_console, prepare_streams, print_path
from paceline.core.text import TextSegment

HOSTILE = "a\x1b]0;title\x07\x9b2J\u202eb"
SPELLED = r"a\x1b]0;title\x07\x9b2J\u202eb"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard output a terminal; not in a fixture, as pytest sets its own for the test after those."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    return screen


def answer(prompt: str, pieces: list[str]) -> None:
    writer = AnswerWriter(prompt, [], silent=False)
    for piece in pieces:
        writer.write([TextSegment(piece, "target")])
    writer.finish()


def test_a_terminal_obeys_neither_prompt_nor_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = show_on_terminal(monkeypatch)
    # Every character by itself: the model decides where the pieces of an answer end.
    answer(HOSTILE + "\n", [*HOSTILE, "\n"])
    assert terminal.getvalue() == f"{SPELLED}\n{SPELLED}\n"


def test_colours_are_the_programs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = show_on_terminal(monkeypatch)
    writer = AnswerWriter("", [], silent=False)
    writer.write([TextSegment(HOSTILE, "draft")])
    writer.finish()
    assert terminal.getvalue() == f"\x1b[32m{SPELLED}\x1b[0m\n"


def reasoned() -> None:
    """Write an answer that reasons, and comes in pieces."""
    writer = AnswerWriter(silent=False)
    for parts in (
        [AnswerPart("reasoning", TextSegment("2 + ", "target"))],
        [AnswerPart("reasoning", TextSegment("2 is 4.", "draft")), AnswerPart("content", TextSegment("Four", "draft"))],
        [AnswerPart("content", TextSegment(HOSTILE, "target"))],
    ):
        writer.write_parts(parts)
    writer.finish()


def test_reasoning_is_dimmed_and_stands_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = show_on_terminal(monkeypatch)
    reasoned()
    said, answered = terminal.getvalue().split("\n\n")
    target, draft = (f"\x1b[2;3{colour}m{{}}\x1b[0m" for colour in ("", ";32"))
    assert said == " ".join([target.format("2"), target.format("+"), *map(draft.format, ("2", "is", "4."))])
    assert answered == f"\x1b[32mFour\x1b[0m{SPELLED}\n"


def test_without_colours_a_line_says_what_is_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = show_on_terminal(monkeypatch)
    reasoned()
    assert terminal.getvalue() == f"[reasoning]\n2 + 2 is 4.\n\n[answer]\nFour{SPELLED}\n"


def test_a_pipe_gets_the_answer_alone_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    answer("prompt", [HOSTILE])
    assert capsys.readouterr().out == HOSTILE
    reasoned()
    assert capsys.readouterr().out == f"Four{HOSTILE}"


def test_consoles_spell_what_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (output_console(), error_console()):
        console.print(f"{HOSTILE}\nnext", markup=False)
    assert capsys.readouterr() == (f"{SPELLED}\nnext\n", f"{SPELLED}\nnext\n")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_what_a_stream_lacks_is_spelled(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    prepare_streams()
    print("日\udcff")
    stream.flush()
    shown = written.getvalue().decode(encoding)
    assert shown == ("日\\udcff\n" if encoding == "utf-8" else "\\u65e5\\udcff\n")


@pytest.mark.skipif(os.name != "posix", reason="elsewhere names of files are text")
def test_a_path_reaches_a_pipe_byte_by_byte_and_a_terminal_spelled(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(os.fsdecode(b"/x/\xff\x1b"))
    print_path(path)
    assert capfdbinary.readouterr().out == b"/x/\xff\x1b\n"
    screen = show_on_terminal(monkeypatch)
    print_path(path)
    assert screen.getvalue() == "/x/\\udcff\\x1b\n"
