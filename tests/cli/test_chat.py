"""``paceline chat`` and ``run --chat`` as scripts use them: lines in, answers out, and one line for what cannot be."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.chat.params import ChatParams
from paceline.chat.replies import Reply, ReplyStream
from paceline.cli.chat_session import COMMANDS, ChatSession
from tests.chat.conversing import CHATML, CONTROLS, THINKING, chat_gguf
from tests.cli.invoking import PLAIN, SHORT, Invoke, Outcome, by_template, spawn, without_stream
from tests.models.helpers import with_last_tokens
from tests.planning.helpers import allow_drafts
from tests.timing import WAIT_S

Chat = Callable[..., Outcome]


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a template of its own, which reasons."""
    folder = tmp_path_factory.mktemp("instruct")
    return str(chat_gguf(folder / "instruct.gguf", THINKING, with_last_tokens(folder / "tokens.gguf", CONTROLS)))


@pytest.fixture
def chat(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, templates: Path) -> Chat:
    """Chat with the embedded target by a template, ChatML's by default; lines may be texts or bytes."""

    def run(*lines: str | bytes, options: Sequence[str] = SHORT, template: str = "chatml") -> Outcome:
        data = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        return invoke("chat", *by_template(templates, template), *options)

    return run


def messages_of(chat: Chat, tmp_path: Path, *lines: str, **more: Any) -> list[dict[str, Any]]:
    """Return the conversation that lines come to."""
    file = tmp_path / "conversation.json"
    file.unlink(missing_ok=True)
    outcome = chat(*lines, f"/save {file}", **more)
    assert outcome.status == 0, outcome.err
    messages = json.loads(file.read_text())["messages"]
    assert isinstance(messages, list)
    return messages


def replies(outcome: Outcome) -> list[dict[str, Any]]:
    """Return what ``--json`` printed, which is an object a line."""
    return [json.loads(line) for line in outcome.out.splitlines()]


def test_lines_are_messages_and_answers_go_to_stdout_alone(chat: Chat, tmp_path: Path) -> None:
    outcome = chat("Hello", "", "  ", "And now?")
    assert outcome.status == 0
    assert "\x1b" not in outcome.out + outcome.err
    reports = outcome.err.splitlines()
    assert len(reports) == 2
    assert all(re.match(r"8 tokens; [\d.]+ t/s; first after [\d.]+ s", report) for report in reports)
    assert re.search(r"\d+ of \d+ prompt tokens reused; cut off at -n$", reports[1])
    messages = messages_of(chat, tmp_path, "Hello", "", "  ", "And now?")
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert [messages[0]["content"], messages[2]["content"]] == ["Hello", "And now?"]
    answers = [messages[1]["content"], messages[3]["content"]]
    assert outcome.out == "".join(answer if answer.endswith("\n") else answer + "\n" for answer in answers)


def test_every_answer_is_an_object_with_json(chat: Chat) -> None:
    outcome = chat("Hello", "/reset", "Hello", "/nonsense", options=(*SHORT, "--json"))
    assert outcome.status == 1
    answers = replies(outcome)
    assert len(answers) == 2
    for answer in answers:
        assert answer["message"] == {"role": "assistant", "content": answer["text"]}
        assert len(answer["token_ids"]) == answer["stats"]["predicted_n"] == 8
    assert outcome.err == (
        "the conversation is cleared\n"
        "there is no command /nonsense: /help lists them; type // to send a message that begins with /\n"
    )


def test_speculation_changes_no_word(chat: Chat) -> None:
    lines = ("def f(x):", "def g(x):", "def f(x):")
    for temperature in ("0", "0.8"):
        options = ("-t", "1", "--seed", "1", "-n", "24", "--temp", temperature, "--exact")
        plain = chat(*lines, options=(*options, "--no-speculation"))
        drafted = chat(*lines, options=(*options, "--draft-max", "4"))
        assert (drafted.status, drafted.out) == (0, plain.out)
        assert re.search(r"\d+ of \d+ drafts accepted", drafted.err)
        assert "times plain" not in drafted.err, "a fixed policy knows no costs"


def test_the_line_after_an_answer_says_what_was_gained(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    allow_drafts(monkeypatch)
    outcome = chat("def f(x):", options=("-t", "1", "--seed", "1", "-n", "64"))
    assert re.search(r"64 tokens; .* of \d+ drafts accepted; about \d+\.\d\d times plain; first after", outcome.err)


def test_the_line_after_an_answer_says_why_nothing_was_drafted(chat: Chat) -> None:
    outcome = chat("def f(x):", options=("-t", "1", "--seed", "1", "-n", "8", "--draft-max", "4", "--draft-p-min", "1"))
    assert "; nothing was drafted: the drafters had no proposal; first after" in outcome.err


def test_a_backslash_goes_on_in_the_next_line(chat: Chat, tmp_path: Path) -> None:
    messages = messages_of(chat, tmp_path, "one\\", "two\\", "", "three")
    assert [message["content"] for message in messages if message["role"] == "user"] == ["one\ntwo\n", "three"]
    # At the end of the input as well.
    outcome = chat("one\\", options=(*SHORT, "--json"))
    assert replies(outcome)[0]["text"] == replies(chat("one", options=(*SHORT, "--json")))[0]["text"]


def test_lines_of_other_systems(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    assert chat(b"\xef\xbb\xbfone\\\r", "two é\r", f"/save {file}\r").status == 0
    assert json.loads(file.read_text())["messages"][0]["content"] == "one\ntwo é"


def test_what_is_no_text_ends_the_chat_behind_what_was_answered(chat: Chat) -> None:
    outcome = chat("Hello", b"x\xff", "never read")
    assert outcome.status == 2
    assert outcome.out == chat("Hello").out
    assert outcome.err.endswith("paceline: line 2 of standard input is not UTF-8: byte 1 is 0xff; write it as UTF-8\n")


def test_a_slash_may_be_typed_twice(chat: Chat, tmp_path: Path) -> None:
    messages = messages_of(chat, tmp_path, "//etc/passwd?", "//", " /help")
    assert [message["content"] for message in messages if message["role"] == "user"] == ["/etc/passwd?", "/", " /help"]


def test_reset_forgets_all_but_the_system(chat: Chat, tmp_path: Path) -> None:
    options = (*SHORT, "-sys", "Be brief.")
    system = {"role": "system", "content": "Be brief."}
    assert messages_of(chat, tmp_path, "Hello", "/reset", options=options) == [system]
    outcome = chat("Hello", "/reset", "Hello", options=(*options, "--json"))
    first, second = replies(outcome)
    assert first["token_ids"] == second["token_ids"]
    assert second["stats"]["prompt_n"] <= first["stats"]["prompt_n"]


def test_retry_answers_the_last_message_again(chat: Chat, tmp_path: Path) -> None:
    messages = messages_of(chat, tmp_path, "Hello", "And?", "/retry", "/retry")
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    answers = replies(chat("Hello", "/retry", "/retry", "/reset", "Hello", options=(*SHORT, "--json")))
    texts = [answer["text"] for answer in answers]
    assert len(set(texts[:3])) == 3
    # The next message is answered as if nobody had tried again.
    assert texts[3] == texts[0]


def test_retry_where_there_is_nothing_to_gain(chat: Chat, tmp_path: Path, invoke: Invoke) -> None:
    assert chat("/retry").err == "there is no message to answer again: write one first\n"
    words = "at temperature 0 an answer is always the same: /set temp 0.8, or another value above 0\n"
    assert chat("Hello", "/retry", options=(*SHORT, "--temp", "0")).err.endswith(words)


def test_retry_of_a_model_that_is_greedy_by_itself(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = chat_gguf(tmp_path / "model.gguf", CHATML, edits={"general.sampling.temp": 0.0})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n/retry\n")))
    assert "at temperature 0 an answer is always the same" in invoke("chat", "-m", str(model), *SHORT).err


def test_the_system_can_be_set(chat: Chat, tmp_path: Path) -> None:
    messages = messages_of(chat, tmp_path, "Hello", "/system Be brief.\\", "Be kind.", "Hi")
    assert messages[0] == {"role": "system", "content": "Be brief.\nBe kind."}
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    outcome = chat("/system", "/system Be brief.", "/system")
    assert outcome.status == 0
    assert outcome.err == "there is no system prompt\nthe conversation starts over\nsystem prompt: Be brief.\n"


def test_a_conversation_goes_on_where_it_was_saved(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "it is.json"
    whole = chat("Hello", "And now?", options=(*SHORT, "--json"))
    outcome = chat("Hello", f"/save '{file}'", options=(*SHORT, "-sys", "Be brief."))
    assert outcome.err.endswith(f"3 messages saved in {file}\n")
    loaded = messages_of(chat, tmp_path, f'/load "{file}"')
    assert loaded == json.loads(file.read_text())["messages"]
    # What the system said there is what it says from then on.
    assert chat(f"/load {file}", "/system").err == "3 messages loaded; write the next one\nsystem prompt: Be brief.\n"
    assert messages_of(chat, tmp_path, f"/load {file}", "/reset") == loaded[:1]
    # As other programs keep one, a list alone.
    file.write_text(json.dumps(loaded))
    assert messages_of(chat, tmp_path, f"/load {file}") == loaded
    chat("Hello", f"/save {file}")
    again = chat(f"/load {file}", "And now?", options=(*SHORT, "--json"))
    assert replies(again)[0]["text"] == replies(whole)[1]["text"]


def test_files_of_others(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    file.write_text(json.dumps({"messages": [{"role": "system", "content": parts}], "model": "any"}))
    outcome = chat(f"/load {file}", "/system", "Hello")
    assert outcome.status == 0
    assert outcome.err.startswith("1 message loaded; write the next one\nsystem prompt: Be brief.\\nBe kind.\n8 tokens")
    file.write_text('{"messages": []}')
    assert messages_of(chat, tmp_path, "Hello", f"/load {file}") == []


def test_files_that_hold_no_conversation(chat: Chat, tmp_path: Path) -> None:
    bad: list[tuple[bytes | None, str]] = [
        (None, "there is no file {}: give one that /save wrote"),
        (b"", "{} is not JSON (Expecting value"),
        (b"\xff", "{} is not JSON ('utf-8' codec"),
        (b"5", "{} has no messages: give one that /save wrote"),
        (b'{"messages": {}}', "{} has no messages"),
        (b'{"messages": ["Hello"]}', "message 1 is 'Hello'; give a mapping"),
        (b'{"messages": [{"role": "user"}]}', "message 1, of role 'user', has no content"),
        (b"[" * 100_000, "{} is not JSON (maximum recursion"),
    ]
    files = [tmp_path / f"{number}.json" for number in range(len(bad))]
    for file, (content, _) in zip(files, bad, strict=True):
        if content is not None:
            file.write_bytes(content)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    outcome = chat("Hello", f"/save {before}", *(f"/load {file}" for file in files), f"/save {after}")
    assert outcome.status == 1
    said = outcome.err.splitlines()[2:-1]
    for line, file, (_, words) in zip(said, files, bad, strict=True):
        assert line.startswith(words.format(file))
    assert after.read_text() == before.read_text()


def test_places_that_cannot_be_written(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = {
        f"/save {tmp_path}": f"{tmp_path} is a folder: give /save the path of a file",
        f"/save {tmp_path / 'no' / 'it'}": "there is no directory",
        f"/save {tmp_path / 'file' / 'it'}": "there is no directory",
        f"/save {tmp_path / ('x' * 300)}": "File name too long",
        "/save ~nobody-of-that-name/it": "there is no user of the folder ~nobody-of-that-name",
        "/save it\0": "is no path: leave out the character",
    }
    outcome = chat(*bad)
    assert outcome.status == 1
    for line, words in zip(outcome.err.splitlines(), bad.values(), strict=True):
        assert words in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_an_earlier_file_is_not_lost_to_a_full_disk(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "it.json"
    file.write_text("an earlier one")

    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    outcome = chat("Hello", f"/save {file}")
    assert f"{file} cannot be written: No space left on device" in outcome.err
    assert file.read_text() == "an earlier one"
    assert [path.name for path in tmp_path.iterdir()] == ["it.json"]


def test_undo_takes_the_last_exchange_back(chat: Chat, tmp_path: Path) -> None:
    messages = messages_of(
        chat, tmp_path, "Hello", "And?", "/undo", "Or?", "/undo", options=(*SHORT, "-sys", "Be brief.")
    )
    assert [message["content"] for message in messages if message["role"] != "assistant"] == ["Be brief.", "Hello"]
    outcome = chat("Hello" * 20, "/undo", "/undo")
    assert outcome.err.endswith(f"taken back: {'Hello' * 12}...\nthere is no message to take back\n")


def test_options_can_be_set(chat: Chat) -> None:
    hot, cold, again = replies(
        chat(
            "Hello",
            "/set temp 0",
            "/reset",
            "Hello",
            "/set temperature default",
            "/reset",
            "Hello",
            options=(*SHORT, "--json"),
        )
    )
    assert hot["token_ids"] == again["token_ids"]
    assert cold["token_ids"] == replies(chat("Hello", options=(*SHORT, "--temp", "0", "--json")))[0]["token_ids"]
    lines = ("/set top_k=5", "/set top-k", "/set -n 3", "/set logit-bias 5=-inf", "/set colour 1")
    assert chat(*lines).err.splitlines() == [
        "there is no option top_k=5: did you mean top-k?",
        "top-k is 40",
        "-n is 3",
        "logit-bias is 5=-inf",
        "there is no option colour: /set lists them",
    ]
    listed = dict(line.split(maxsplit=1) for line in chat("/set").err.splitlines()[:-1])
    assert listed["temp"] == "0.8"
    assert listed["n"] == "8"
    assert listed["xtc-probability"] == "0.0"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/set tmep 1", "there is no option tmep: did you mean temp?"),
        ("/set temp hot", "temp hot: give a number"),
        ("/set temp -1", "temp -1: temperature -1.0 is out of range: give a value from 0.0 to 100.0 (--temp, 0"),
        ("/stats", "there is no answer yet: write a message first"),
        ("/stats x", "/stats takes no argument: leave out 'x'"),
    ],
)
def test_what_cannot_be_set_or_shown(chat: Chat, line: str, says: str) -> None:
    outcome = chat(line)
    assert (outcome.status, outcome.err.count("\n")) == (1, 1)
    assert outcome.err.startswith(says)


def test_stats_are_those_of_the_last_answer_and_of_the_chat(chat: Chat) -> None:
    shown = chat("Hello", "And?", "/stats").err
    assert "n_predict = 8" in shown
    assert re.search(r"2 answers in this chat: 16 tokens in .* s, 0 of 0 drafts accepted; \d+ of 4096 tokens", shown)


def test_a_conversation_is_saved_after_each_answer_where_that_is_asked(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert "no conversation to resume" in chat(options=(*SHORT, "--resume")).err
    assert chat("Hello").status == 0
    assert not (tmp_path / "chats").exists()
    outcome = chat("Hello", "/reset", "Hi", "/undo", "Ho", options=(*SHORT, "--autosave"))
    assert outcome.err.endswith("\nthe conversation is saved: paceline chat --resume continues it\n")
    kept = [json.loads(path.read_text())["messages"] for path in (tmp_path / "chats").glob("*.json")]
    assert sorted(messages[0]["content"] for messages in kept) == ["Hello", "Ho"]


def test_a_saved_conversation_can_be_resumed(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    chat("Hello", f"/save {file}")
    whole = replies(chat("Hello", "And?", options=(*SHORT, "--json")))
    resumed = replies(chat("And?", options=(*SHORT, "--json", f"--resume={file}")))
    assert resumed[0]["text"] == whole[1]["text"]
    assert "there is no file nowhere" in chat(options=(*SHORT, "--resume=nowhere")).err


def test_markdown_is_for_terminals(chat: Chat) -> None:
    for flag in ("--markdown", "--no-markdown"):
        assert chat(options=(*SHORT, flag)).err == (
            f"paceline: {flag} has no effect without a terminal, or with --json: leave it out\n"
        )


def test_help_lists_every_command(chat: Chat) -> None:
    outcome = chat("/help")
    assert outcome.status == 0
    listed = re.findall(r"^/(\w+)", outcome.err, re.MULTILINE)
    assert listed == [command.name for command in COMMANDS]
    assert all(len(line) < 80 for line in outcome.err.splitlines())


def test_exit_ends_the_chat(chat: Chat) -> None:
    for command in ("/exit", "/e", "/ exit", "/exit ", "/quit", "/q", "/bye"):
        outcome = chat(command, "never read")
        assert (outcome.status, outcome.out, outcome.err) == (0, "", "")


def test_commands_that_cannot_be_obeyed(chat: Chat) -> None:
    bad = {
        "/": "there is no command /: /help lists them; type // to send a message that begins with /",
        "/foo": "there is no command /foo: /help lists them",
        "/re": "there is no command /re: /retry or /reset; type",
        "/s": "there is no command /s: /system or /set or /stats or /save",
        "/resets": "there is no command /resets: /help lists them",
        "/etc/passwd": "there is no command /etc/passwd",
        "/reset now": "/reset takes no argument: leave out 'now'",
        "/retry x": "/retry takes no argument",
        "/help x": "/help takes no argument",
        "/exit x": "/exit takes no argument: leave out 'x'",
        "/save": "/save needs a file: /save FILE",
        "/load  ": "/load needs a file: /load FILE",
        "/l": "/load needs a file",
    }
    outcome = chat(*bad)
    assert (outcome.status, outcome.out) == (1, "")
    for line, words in zip(outcome.err.splitlines(), bad.values(), strict=True):
        assert line.startswith(words)


def test_the_beginning_of_a_command_is_enough(chat: Chat) -> None:
    assert chat("/h", "/sy", "/res") == chat("/help", "/system", "/reset")


def test_a_command_may_stand_in_several_lines_or_behind_a_tab(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    assert chat("/system\\", "Be brief.", f"/save\t{file}").status == 0
    assert json.loads(file.read_text())["messages"] == [{"role": "system", "content": "Be brief."}]


def test_an_error_leaves_the_conversation_as_it_was(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    options = (*SHORT, "-c", "128", "--no-forget")
    before = messages_of(chat, tmp_path, "Hello", options=options)
    outcome = chat("Hello", "x y z " * 100, f"/save {file}", "Hi", options=options)
    assert outcome.status == 1
    words = r"the conversation has \d+ tokens and the context holds 128, .*--no-forget\), .*\(-c\)\n"
    assert re.search(words, outcome.err)
    assert json.loads(file.read_text())["messages"] == before
    assert outcome.err.count("8 tokens; ") == 2


def test_a_message_that_the_template_refuses_leaves_it_too(chat: Chat, templates: Path, tmp_path: Path) -> None:
    (templates / "picky.jinja").write_text(
        "{% if 'bad' in messages[-1].content %}{{ raise_exception('no\nsuch\x1b[31m words') }}{% endif %}" + CHATML
    )
    file = tmp_path / "it.json"
    outcome = chat("Hello", "bad", f"/save {file}", template="picky")
    assert outcome.status == 1
    assert "refuses these messages: no such\\x1b[31m words; change them, or use another" in outcome.err
    assert len(json.loads(file.read_text())["messages"]) == 2


def test_what_is_forgotten_is_said_once_and_saved(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    lines = [f"{number} " + "x y z " * 8 for number in range(12)]
    options = (*SHORT, "-c", "160", "-sys", "Be brief.")
    outcome = chat(*lines, f"/save {file}", options=options)
    assert outcome.status == 0
    assert outcome.err.count("the conversation is longer than the context: the ") == 1
    messages = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 12]
    assert [message["content"] for message in messages[1::2]] == lines
    # After a new beginning there is something new to be said.
    again = chat(*lines, "/reset", *lines, options=options)
    assert again.err.count("the conversation is longer than the context: the ") == 2
    # It goes on as it did before, without what was forgotten.
    json_options = (*options, "--json")
    assert replies(chat(f"/load {file}", "last", options=json_options))[0]["stats"]["prompt_n"] < 160


def test_the_first_message_may_stand_on_the_command_line(chat: Chat, tmp_path: Path) -> None:
    messages = messages_of(chat, tmp_path, "And now?", options=(*SHORT, "-p", r"/help\nme"))
    assert [message["content"] for message in messages if message["role"] == "user"] == ["/help\nme", "And now?"]


def test_what_the_system_says_is_an_option_or_a_file(chat: Chat, tmp_path: Path, templates: Path) -> None:
    said = tmp_path / "says.txt"
    said.write_text("Be brief.\nBe kind.\n")
    for options in (("-sys", r"Be brief.\nBe kind."), ("-sysf", str(said))):
        messages = messages_of(chat, tmp_path, options=(*SHORT, *options))
        assert messages == [{"role": "system", "content": "Be brief.\nBe kind."}]
    assert messages_of(chat, tmp_path, options=(*SHORT, "-sys", "")) == []


def test_stop_texts_are_read_as_prompts_are(chat: Chat) -> None:
    free = replies(chat("Hello", options=(*PLAIN, "-n", "32", "--json")))[0]["text"]
    assert "\n" in free.strip("\n")
    stopped = replies(chat("Hello", options=(*PLAIN, "-n", "32", "--json", "--stop", r"\n")))[0]
    assert (stopped["text"], stopped["finish_reason"]) == (free[: free.index("\n")], "stop")


def test_what_the_template_knows_nothing_of_ends_the_chat_at_its_beginning(chat: Chat) -> None:
    for options in (("--reasoning", "off"), ("--reasoning-effort", "high"), ("--reasoning-budget", "3")):
        outcome = chat("Hello", options=(*SHORT, *options))
        assert (outcome.status, outcome.out) == (2, "")
        assert "chatml.jinja does not support " in outcome.err
        assert outcome.err.count("\n") == 1


def test_reasoning_is_in_the_message_and_not_in_a_pipe(chat: Chat) -> None:
    """The prompt has opened it, and a budget ends it: this model would never."""
    options = (*PLAIN, "-n", "24", "--ignore-eos", "--reasoning-budget", "4")
    told = replies(chat("Hello", options=(*options, "--json"), template="begun"))[0]
    assert told["message"]["reasoning_content"]
    assert told["text"].startswith(told["message"]["reasoning_content"])
    content = told["message"]["content"]
    assert "</think>" not in content
    assert chat("Hello", options=options, template="begun").out.removesuffix("\n") == content.removesuffix("\n")
    # Within the content, it is all there; what the prompt began, too.
    within = chat("Hello", options=(*options, "--reasoning-format", "none"), template="begun").out
    assert within.removesuffix("\n") == f"<think>{told['text']}".removesuffix("\n")


def test_variables_of_the_template(chat: Chat, templates: Path) -> None:
    (templates / "named.jinja").write_text("{{ raise_exception('called ' + name) if name else '' }}" + CHATML)
    outcome = chat("Hello", options=(*SHORT, "--chat-template-kwargs", '{"name": "Ada"}'), template="named")
    assert outcome.status == 2
    assert "refuses these messages: called Ada" in outcome.err


def test_the_environment_sets_defaults_of_chats(chat: Chat, monkeypatch: pytest.MonkeyPatch, templates: Path) -> None:
    monkeypatch.setenv("PACELINE_REASONING", "off")
    assert "does not support reasoning" in chat("Hello").err
    monkeypatch.setenv("PACELINE_REASONING", "auto")
    monkeypatch.setenv("PACELINE_FORGET", "false")
    assert "--no-forget" in chat("x y z " * 100, options=(*SHORT, "-c", "64")).err


def test_a_closed_input_or_no_message_at_all(chat: Chat, templates: Path) -> None:
    assert chat() == Outcome(0, "", "")
    command = without_stream(0, "chat", *by_template(templates), *SHORT)
    ended = subprocess.run(command, capture_output=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 2
    assert ended.stderr == b"paceline: standard input is closed: there are no messages to read\n"


def spawn_chat(templates: Path, *options: str, **more: Any) -> subprocess.Popen[bytes]:
    return spawn("chat", *by_template(templates), *options, stdin=subprocess.PIPE, **more)


def test_ctrl_c_ends_an_answer_and_then_the_wait_for_a_line(templates: Path) -> None:
    process = spawn_chat(templates, *PLAIN, "-n", "3000", "--ignore-eos")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().endswith(b"; stopped\n")
    # The chat goes on, and waits.
    process.stdin.write(b"/help\n")
    process.stdin.flush()
    while not process.stderr.readline().startswith(b"Ctrl-C stops"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert err == b""


def test_a_message_is_taken_back_where_nothing_was_answered_yet(
    templates: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The interrupt came while the prompt was read."""
    with paceline.load(policy=paceline.NO_SPECULATION, context_length=256) as model:
        params = ChatParams(template_file=templates / "chatml.jinja")
        session = ChatSession(model, {"max_tokens": 4, "seed": 1}, params, system="Be brief.")
        session.begin()
        session.take("Hello")
        session.take(f"/save {tmp_path / 'before.json'}")
        so_far = ReplyStream.so_far

        def nothing(stream: ReplyStream) -> Reply:
            reply = so_far(stream)
            generation = dataclasses.replace(reply.generation, text="", finish_reason="cancelled")
            return dataclasses.replace(reply, message={"role": "assistant", "content": ""}, generation=generation)

        with monkeypatch.context() as patch:
            patch.setattr(ReplyStream, "so_far", nothing)
            session.take("And now?")
        assert capsys.readouterr().err.endswith("; stopped\nstopped before the first word: the message is withdrawn\n")
        session.take(f"/save {tmp_path / 'after.json'}")
    assert (tmp_path / "after.json").read_text() == (tmp_path / "before.json").read_text()
    assert not session.has_failed


def test_the_loss_of_the_reader_ends_the_chat(templates: Path) -> None:
    process = spawn_chat(templates, *SHORT)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(b"Hello\n" * 50, timeout=WAIT_S)
    assert process.returncode == 1
    assert err == b""
    with Path("/dev/full").open("wb") as full:
        process = spawn_chat(templates, *SHORT, stdout=full)
        _, err = process.communicate(b"Hello\n" * 50, timeout=WAIT_S)
    assert process.returncode == 1
    assert err == b"paceline: [Errno 28] No space left on device\n"


def test_neither_no_color_nor_a_colour_terminal_changes_a_pipe(templates: Path) -> None:
    said = []
    for extra in ({"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}):
        process = spawn_chat(templates, *SHORT, env={**os.environ, **extra})
        out, _ = process.communicate(b"Hello\nHello\n", timeout=WAIT_S)
        said.append(out)
    assert said[0] == said[1]
    assert b"\x1b" not in said[0]


def test_run_answers_one_message(invoke: Invoke, templates: Path, chat: Chat) -> None:
    outcome = invoke("run", "--chat", *by_template(templates), *SHORT, "-p", "Hello")
    assert outcome.status == 0
    assert "n_predict = 8" in outcome.err
    assert "add --chat" not in outcome.err
    answer = replies(chat("Hello", options=(*SHORT, "--json")))[0]
    assert outcome.out == answer["text"]
    told = json.loads(invoke("run", "--chat", *by_template(templates), *SHORT, "-p", "Hello", "--json").out)
    assert told["message"] == {"role": "assistant", "content": answer["text"]} == answer["message"]
    assert told["token_ids"] == answer["token_ids"]


def test_run_takes_what_the_system_says(invoke: Invoke, templates: Path, chat: Chat, tmp_path: Path) -> None:
    said = tmp_path / "says.txt"
    said.write_text("Be brief.\nBe kind.\n")
    common = ("run", "--chat", *by_template(templates, "first_system"), *SHORT, "-p", "Hello", "--json")
    sizes = [
        json.loads(invoke(*common, *options).out)["stats"]["prompt_n"]
        for options in (
            ("-sys", r"Be brief.\nBe kind."),
            ("-sysf", str(said)),
            (),
            ("-sys", r"Be brief.\nBe kind.", "--no-escape"),
        )
    ]
    assert sizes[0] == sizes[1] > sizes[2]
    assert sizes[3] != sizes[0]


def test_run_ends_an_answer_where_the_model_does(invoke: Invoke, templates: Path) -> None:
    told = json.loads(
        invoke("run", "--chat", *by_template(templates), *PLAIN, "-c", "512", "-p", "a", "--json", "--ignore-eos").out
    )
    assert told["finish_reason"] == "context"
    assert told["stats"]["predicted_n"] > 256, "which is what run has where nothing else is said"


def test_run_compares_by_the_template(invoke: Invoke, templates: Path) -> None:
    common = ("run", "--chat", *by_template(templates), "-t", "1")
    options = ("-n", "16", "--seed", "1", "-p", "def f(x):", "--draft-max", "3", "--exact")
    told = json.loads(invoke(*common, *options, "--compare", "--repeats", "1", "--json").out)
    alone = json.loads(invoke(*common, *options, "--json").out)
    assert told["equal"] is True
    assert told["plain"]["text"] == told["speculative"]["text"] == alone["text"]


def test_run_hints_once_at_a_template_that_is_not_used(invoke: Invoke, instruct: str) -> None:
    hint = "this model answers messages: add --chat, or use paceline chat (--no-chat: continue the text, as here)\n"
    common = ("run", "-m", instruct, *SHORT, "-p", "Hello")
    plain = invoke(*common)
    assert plain.err.count(hint) == 1
    silent = invoke(*common, "--no-chat")
    assert (silent.out, silent.err.count("--chat")) == (plain.out, 0)
    assert invoke(*common, "--json").err == ""
    assert "--chat" not in invoke(*common, "--chat").err
    assert "--chat" not in invoke("run", "-m", "target", *SHORT, "-p", "Hello").err


def test_a_chat_with_a_models_own_template(invoke: Invoke, instruct: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello <|im_end|>\n")))
    outcome = invoke("chat", "-m", instruct, *SHORT, "--json", "--reasoning", "off")
    assert outcome.status == 0
    assert replies(outcome)[0]["stats"]["predicted_n"] > 0


def test_lines_are_edited_on_a_terminal_alone(templates: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "paceline", "chat", *by_template(templates), *SHORT]
    shown = subprocess.run(command, input=b"Hello\n", capture_output=True, check=True, timeout=WAIT_S)
    assert b"prompt_toolkit" not in shown.stderr
    assert b"jinja2" in shown.stderr
