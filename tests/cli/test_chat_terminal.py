"""``paceline chat`` as a person has it: in a terminal, key by key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.invoking import PLAIN, SHORT, by_template
from tests.cli.terminal import ALT_ENTER, CTRL_C, CTRL_D, ENTER, Terminal

ENDLESS = (*PLAIN, "-n", "100000", "--ignore-eos")
PROMPT = r"\n>"
REPORT = r"\d+ tokens; (?:[^\n]+\n)+(?=\n)"


def chat(templates: Path, *options: str, template: str = "chatml", columns: int = 80, **environment: str) -> Terminal:
    return Terminal(["chat", *by_template(templates, template), *options], columns=columns, **environment)


def save(terminal: Terminal, file: Path) -> list[dict[str, Any]]:
    """Have the conversation saved, and return it."""
    terminal.type(f"/save {file}", ENTER)
    terminal.wait_for(r"messages? saved in ")
    terminal.wait_for(PROMPT)
    messages = json.loads(file.read_text())["messages"]
    assert isinstance(messages, list)
    return messages


def said_by_user(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


def test_a_chat(templates: Path, tmp_path: Path) -> None:
    with chat(templates, *SHORT) as terminal:
        beginning = terminal.wait_for(PROMPT)
        assert "on CPU" in beginning
        assert "/help lists commands, Ctrl-D ends the chat" in beginning
        terminal.type("Hello", ENTER)
        terminal.wait_for(REPORT)
        terminal.wait_for(PROMPT)
        (asked, answer) = save(terminal, tmp_path / "it.json")
        assert asked == {"role": "user", "content": "Hello"}
        words = terminal.rest() + terminal.shown
        assert answer["content"].split()[0] in words
        # What exists is written over only by who says so.
        other = tmp_path / "other.json"
        other.write_text("kept")
        terminal.type(f"/save {other}", ENTER)
        terminal.wait_for(r"exists\. Write over it\? \[y/N\]:")
        terminal.type("n", ENTER)
        terminal.wait_for("not saved")
        terminal.wait_for(PROMPT)
        assert other.read_text() == "kept"
        terminal.type(CTRL_D)
        terminal.wait_for("the conversation is saved: paceline chat --resume continues it")
        assert terminal.wait() == 0
        assert terminal.settings == terminal.before
        assert terminal.echoes


def test_ctrl_c_ends_the_answer_and_not_the_chat(templates: Path, tmp_path: Path) -> None:
    with chat(templates, *ENDLESS) as terminal:
        terminal.wait_for(PROMPT)
        for turn in range(2):
            terminal.type(f"Hello {turn}", ENTER)
            terminal.wait_for(r"(?s)Hello \d\n.*?\w")
            assert not terminal.echoes
            terminal.type(CTRL_C)
            assert "; stopped" in " ".join(terminal.wait_for(REPORT).split())
            terminal.wait_for(PROMPT)
        messages = save(terminal, tmp_path / "it.json")
        assert said_by_user(messages) == ["Hello 0", "Hello 1"]
        assert all(message["content"] for message in messages)
        terminal.type("/exit", ENTER)
        assert terminal.wait() == 0
        assert terminal.settings == terminal.before


@pytest.mark.long
def test_ctrl_c_at_the_prompt_empties_the_line_and_then_asks(templates: Path) -> None:
    with chat(templates, *SHORT) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("/nonsense")
        terminal.wait_for("nonsense")
        terminal.type(CTRL_C)
        terminal.wait_for(PROMPT)
        terminal.type("/help", ENTER)
        assert "there is no command" not in terminal.wait_for("Ctrl-C stops an answer")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        terminal.wait_for("Ctrl-D or /exit ends the chat, and so does Ctrl-C now")
        terminal.wait_for(PROMPT)
        # Whoever goes on has not left.
        terminal.type("/system", ENTER)
        terminal.wait_for("there is no system prompt")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        terminal.wait_for("and so does Ctrl-C now")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_C)
        assert terminal.wait() == 0
        assert terminal.settings == terminal.before


@pytest.mark.long
def test_messages_of_several_lines(templates: Path, tmp_path: Path) -> None:
    with chat(templates, *SHORT) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("one", ALT_ENTER, "two\\", ENTER, "three", ENTER)
        terminal.wait_for(REPORT)
        terminal.wait_for(PROMPT)
        # Pasted, where the terminal says so.
        terminal.type("\x1b[200~four\nfive\r\nsix\\\n\x1b[31mseven\x1b[201~", ENTER)
        terminal.wait_for(REPORT)
        terminal.wait_for(PROMPT)
        first, second = said_by_user(save(terminal, tmp_path / "it.json"))
        assert first == "one\ntwo\nthree"
        assert second == "four\nfive\nsix\\\n\x1b[31mseven"
        # The escape is shown as what it is.
        assert "\x1b[31m" not in terminal.shown
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.long
def test_colours_that_are_pasted_where_the_terminal_does_not_say_so(templates: Path) -> None:
    with chat(templates, *SHORT) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[31mred\x1b[0m", ENTER)
        terminal.wait_for(REPORT)
        terminal.wait_for(PROMPT)
        assert "Exception" not in terminal.shown
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.long
def test_what_is_typed_during_an_answer_comes_after_it(templates: Path, tmp_path: Path) -> None:
    with chat(templates, *PLAIN, "-n", "1500", "--ignore-eos") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hello", ENTER)
        terminal.wait_for(r"(?s)Hello\n.*?\w")
        assert not terminal.echoes
        terminal.type("/system", ENTER, "half of a line")
        answer = terminal.wait_for(REPORT)
        assert "/system" not in answer
        assert "half of" not in answer
        terminal.wait_for("there is no system prompt")
        terminal.wait_for("half of a line")
        terminal.type(CTRL_C)
        terminal.wait_for(PROMPT)
        assert said_by_user(save(terminal, tmp_path / "it.json")) == ["Hello"]
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.long
@pytest.mark.parametrize("no_color", [True, False])
def test_colours_and_reasoning(templates: Path, no_color: bool) -> None:
    options = ("-t", "1", "-n", "64", "--temp", "0", "--ignore-eos", "--reasoning-budget", "8", "--draft-max", "4")
    # An empty one is none.
    with chat(templates, *options, "--no-markdown", template="begun", NO_COLOR="1" if no_color else "") as terminal:
        beginning = terminal.wait_for(PROMPT)
        assert ("tokens accepted from: suffix" in beginning) is not no_color
        start = len(terminal.shown)
        terminal.type("1 2 3 1 2 3 1 2 3", ENTER)
        terminal.wait_for(REPORT)
        answer = terminal.shown[start:].partition("tokens;")[0]
        # Dim and slanted is reasoning, cyan is what suffix drafted.
        assert ("\x1b[2;3" in answer) is not no_color
        assert ("\x1b[36m" in answer) is not no_color
        assert re.search("\x1b\\[(?:\\d+;)*3[0-7]", answer) is None or not no_color
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.long
def test_a_narrow_terminal_and_letters_of_all_kinds(templates: Path, tmp_path: Path) -> None:
    text = "é́ 👩‍👩‍👧 שלום 日本語 " + "word " * 30 + "end"
    with chat(templates, *SHORT, columns=20) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type(text, ENTER)
        terminal.wait_for(REPORT)
        terminal.wait_for(PROMPT)
        assert said_by_user(save(terminal, tmp_path / "it.json")) == [text]
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.long
def test_history_and_completion(templates: Path) -> None:
    with chat(templates, *SHORT) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("/sys\t", ENTER)
        terminal.wait_for("there is no system prompt")
        terminal.wait_for(PROMPT)
        terminal.type("\x1b[A", " Be brief.", ENTER)
        terminal.wait_for("the conversation starts over")
        terminal.wait_for(PROMPT)
        terminal.type("/system", ENTER)
        terminal.wait_for(r"system prompt: Be brief\.")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.long
def test_an_error_ends_nothing_and_is_no_failure_to_a_person(templates: Path) -> None:
    with chat(templates, *SHORT, "-c", "64", "--no-forget") as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("x y z " * 40, ENTER)
        terminal.wait_for("the context holds 64, answer included")
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0


@pytest.mark.long
def test_a_chat_goes_on_another_day(templates: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with chat(templates, *SHORT, PACELINE_CACHE=cache) as terminal:
        terminal.wait_for(PROMPT)
        terminal.type("Hello", ENTER)
        terminal.wait_for(REPORT)
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    with chat(templates, *SHORT, "--resume", PACELINE_CACHE=cache) as terminal:
        terminal.wait_for("2 messages loaded; write the next one")
        terminal.wait_for(PROMPT)
        # The line before, of the other day.
        terminal.type("\x1b[A", " again", ENTER)
        terminal.wait_for(REPORT)
        terminal.wait_for(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    (kept,) = (tmp_path / "cache" / "chats").glob("*.json")
    assert said_by_user(json.loads(kept.read_text())["messages"]) == ["Hello", "Hello again"]
    assert (tmp_path / "cache" / "chats").stat().st_mode & 0o077 == 0
