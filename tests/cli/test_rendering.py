"""How answers are laid out on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from paceline.cli import rendering
from paceline.cli.rendering import MarkdownView, WordWrap, make_markdown

PROSE = "The quick brown fox jumps over the lazy dog, and runs.\n\n    indented code\nend"


def wrapped(text: str, columns: int, monkeypatch: pytest.MonkeyPatch, *, size: int = 3) -> str:
    """Write a text in pieces of a size on a terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    put: list[str] = []
    wrap = WordWrap(put.append)
    for begin in range(0, len(text), size):
        wrap.write(text[begin : begin + size], lambda part: part)
    wrap.end()
    return "".join(put)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_words_are_whole_however_the_text_comes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    assert wrapped(PROSE, 20, monkeypatch, size=size) == (
        "The quick brown fox\njumps over the lazy\ndog, and runs.\n\n    indented code\nend"
    )


def test_a_line_that_fits_is_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("a  b c", "x" * 20, "ab cd " * 3 + "ef", "  two\n\n\n  three"):
        assert wrapped(text, 20, monkeypatch) == text


def test_a_word_that_no_line_holds_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrapped("see " + "x" * 50 + " it", 20, monkeypatch).replace("\n", "") == "see" + "x" * 50 + " it"


def test_wide_characters_take_two_columns_and_need_no_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = wrapped("日本語" * 9, 20, monkeypatch, size=2).split("\n")
    assert "".join(lines) == "日本語" * 9
    assert [cell_len(line) for line in lines] == [20, 20, 14]


MARKDOWN = """# Title

A *word* and `code`,
on <b>two</b> lines.

1. one
2. two

```python
return 1
```

| a | b |
|---|---|
| 1 | 2 |

[site](http://x.y)"""


def plain(text: str) -> str:
    screen = io.StringIO()
    Console(file=screen, width=40, color_system=None).print(make_markdown(text))
    return screen.getvalue()


def test_markdown_keeps_every_word() -> None:
    lines = [line.strip() for line in plain(MARKDOWN).splitlines()]
    for line in (
        "Title",
        "A word and code,",
        "on <b>two</b> lines.",
        "1 one",
        "2 two",
        "return 1",
        "site (http://x.y)",
    ):
        assert line in lines
    assert "\x1b]8" not in plain(MARKDOWN)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_stays_is_the_whole_text_however_it_came(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_DRAW_S", 0)
    screen = io.StringIO()
    view = MarkdownView(Console(file=screen, width=40, height=5, color_system=None))
    for begin in range(0, len(MARKDOWN), size):
        view.write(MARKDOWN[begin : begin + size])
    view.end()
    # A console that is no terminal shows what stays alone.
    assert [line for line in screen.getvalue().splitlines() if line.strip()] == [
        line for line in plain(MARKDOWN).splitlines() if line.strip()
    ]
