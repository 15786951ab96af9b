"""A chat in a terminal: turns, commands, and what each answer gained."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.api import Model
from paceline.atomic_output import atomic_file, check_parent
from paceline.chat.messages import Message, count_leading, read_messages
from paceline.chat.params import ChatParams
from paceline.chat.replies import Reply
from paceline.cli.display import AnswerWriter, error_console, print_json
from paceline.cli.interrupts import hide_keys, hold_interrupts
from paceline.cli.options import in_flags
from paceline.cli.progress import show_prompt_progress
from paceline.cli.prompt import start_conversation
from paceline.cli.report import generation_json, one_line_report
from paceline.core.errors import InputError, PacelineError
from paceline.options import GenerateOptions
from paceline.terminal_text import json_text, printable_line

_INDENT: Final = 18


@dataclass(frozen=True, slots=True)
class _Command:
    """A command of the chat; the help shows ``takes`` for what follows it, in brackets where nothing need to."""

    name: str
    takes: str
    help: str

    @property
    def needs(self) -> bool:
        return bool(self.takes) and not self.takes.startswith("[")


COMMANDS: Final = (
    _Command("reset", "", "forget the conversation; what the system says stays"),
    _Command("retry", "", "answer the last message again, with other choices"),
    _Command("system", "[TEXT]", "set what the system says, and begin anew; alone, show it"),
    _Command("save", "FILE", "write the conversation as JSON"),
    _Command("load", "FILE", "go on with a conversation that was saved"),
    _Command("help", "", "list the commands"),
    _Command("exit", "", "end the chat, as Ctrl-D does"),
)
"""Commands of a chat, in the order in which ``/help`` lists them."""


class ChatSession:
    """One conversation, and what its user may do with it.

    Attributes:
        has_failed: whether anything that was asked for could not be done.
    """

    def __init__(
        self, model: Model, options: GenerateOptions, params: ChatParams, *, system: str = "", as_json: bool = False
    ) -> None:
        self._model = model
        self._options = options
        self._params = params
        self._as_json = as_json
        self.has_failed = False
        self._console = error_console()
        self._system = system
        self._messages: list[Message] = []
        self._left_out: list[Message] = []
        self._choice = options.get("choice") or 0
        self._was_told_of_forgetting = False
        self._writer: AnswerWriter | None = None
        self._forget()

    def begin(self) -> None:
        """Say who answers, and what the colours of tokens mean."""
        self._model.chat_prompt("Hello", chat=self._params)
        if not self._as_json and sys.stdout.isatty():
            self._tell(f"{self._model.target.description}; /help lists commands, Ctrl-D ends the chat")
        self._writer = AnswerWriter("", [drafter.name for drafter in self._model.drafters], silent=self._as_json)

    def take(self, line: str) -> bool:
        """Do what a line asks for, a command or a message; return whether the chat goes on.

        What cannot be done is said in one line, and the conversation stays as it was.
        """
        if not line.startswith("/") or line.startswith("//"):
            self.say(line[1:] if line.startswith("//") else line)
            return True
        try:
            return self._obey(line[1:])
        except PacelineError as error:
            self._tell_error(error)
        return True

    def say(self, text: str) -> None:
        """Answer a message. What cannot be done is said in one line, and the conversation stays as it was."""
        if not text.strip():
            return
        try:
            self._choice = self._options.get("choice") or 0
            self._answer([*self._messages, {"role": "user", "content": text}])
        except PacelineError as error:
            self._tell_error(error)

    def _forget(self) -> None:
        self._messages = [*start_conversation(self._system)]
        self._left_out = []

    def _answer(self, messages: Sequence[Message]) -> None:
        """Answer a conversation, and go on from it and the answer."""
        writer = self._writer
        assert writer is not None, "a session is begun before it takes a line"
        options = self._options.copy()
        options["choice"] = self._choice
        with (
            hide_keys(),
            hold_interrupts() as interrupted,
            self._model.chat_stream(messages, chat=self._params, **options) as stream,
        ):
            self._tell_of_forgetting(stream.prompt.num_left_out)
            try:
                for parts in show_prompt_progress(stream.rounds(), self._model.target, silent=self._as_json):
                    writer.write_parts(parts)
                    if interrupted.is_set():
                        break
                writer.write_parts(stream.close())
            except PacelineError:
                writer.finish(line=True)
                raise
            writer.finish(line=True)
            reply = stream.so_far()
        self._report(reply)
        if reply.generation.finish_reason == "cancelled" and not reply.text and not reply.reasoning:
            self._tell("nothing was answered yet: the message is left out")
            return
        first = count_leading(messages)
        last = first + stream.prompt.num_left_out
        self._left_out += messages[first:last]
        self._messages = [*messages[:first], *messages[last:], reply.message]

    def _report(self, reply: Reply) -> None:
        if self._as_json:
            print_json({"message": reply.message, **generation_json(self._model, reply.generation)})
            return
        self._tell(one_line_report(self._model, reply.generation))
        if sys.stdout.isatty():
            print()

    def _tell_of_forgetting(self, num_messages: int) -> None:
        if num_messages and not self._was_told_of_forgetting:
            self._was_told_of_forgetting = True
            self._tell(
                f"the conversation is longer than the context: its {num_messages} oldest messages are forgotten, and "
                "others as it goes on (more context: -c; to be refused instead: --no-forget)",
                style="yellow",
            )

    def _obey(self, line: str) -> bool:
        name, rest = [*line.split(maxsplit=1), "", ""][:2]
        rest = rest.strip()
        handlers: dict[str, Callable[[str], None]] = {
            "reset": lambda _: self._reset(),
            "retry": lambda _: self._retry(),
            "system": self._set_system,
            "save": self._save,
            "load": self._load,
            "help": lambda _: self._list_commands(),
        }
        begun = [command for command in COMMANDS if command.name.startswith(name)]
        command = next((command for command in begun if command.name == name), begun[0] if len(begun) == 1 else None)
        if command is None:
            which = " or ".join(f"/{command.name}" for command in begun) if name and begun else "/help lists them"
            raise InputError(f"there is no command /{name}: {which}; begin a message with // for one slash")
        name = command.name
        if rest and not command.takes:
            raise InputError(f"/{name} takes nothing after it: leave out {rest!r}")
        if not rest and command.needs:
            raise InputError(f"/{name} needs a {command.takes.lower()}: /{name} {command.takes}")
        if name == "exit":
            return False
        handlers[name](rest)
        return True

    def _reset(self) -> None:
        self._forget()
        self._was_told_of_forgetting = False
        self._tell("the conversation is forgotten")

    def _retry(self) -> None:
        last = next((n for n in range(len(self._messages) - 1, -1, -1) if self._messages[n]["role"] == "user"), None)
        if last is None:
            raise InputError("there is no message to answer again: write one first")
        if {**self._options, **self._model.defaults.left_open(self._options)}.get("temperature") == 0.0:
            raise InputError("at temperature 0 an answer is always the same: start the chat with --temp above it")
        self._choice += 1
        self._answer(self._messages[: last + 1])

    def _set_system(self, text: str) -> None:
        if not text:
            self._tell(f"the system says: {self._system}" if self._system else "the system says nothing")
            return
        self._system = text
        self._forget()
        self._tell("the conversation begins anew")

    def _save(self, path: str) -> None:
        file = _parse_path(path)
        check_parent(file)
        if file.is_dir():
            raise InputError(f"{file} is a folder: give /save the path of a file")
        first = count_leading(self._messages)
        messages = [*self._messages[:first], *self._left_out, *self._messages[first:]]
        # Half a surrogate pair, which no encoding has, is escaped in JSON.
        text = json_text({"messages": messages}, indent=2) + "\n"
        with atomic_file(file) as beside:
            beside.write_text(text, encoding="utf-8")
        self._tell(f"{_count_messages(messages)} in {file}")

    def _load(self, path: str) -> None:
        file = _parse_path(path)
        if not file.is_file():
            raise InputError(f"there is no file {file}: give one that /save wrote")
        said = _read_saved(file)
        if said:
            read_messages(said)
        self._messages, self._left_out = list(said), []
        self._system = _message_text(said[0]) if count_leading(said) else ""
        self._was_told_of_forgetting = False
        self._tell(f"{_count_messages(said)} there; write the next")

    def _list_commands(self) -> None:
        for command in COMMANDS:
            self._tell(f"{f'/{command.name} {command.takes}':{_INDENT}}{command.help}")
        self._tell("Alt-Enter, or a backslash at the end, begins another line.")
        self._tell("Ctrl-C ends an answer. A message that begins with a slash is typed with two.")

    def _tell_error(self, error: PacelineError) -> None:
        self.has_failed = True
        self._tell(in_flags(str(error)), style="red")

    def _tell(self, line: str, *, style: str = "dim") -> None:
        self._console.print(printable_line(line), style=style, markup=False)


def _parse_path(text: str) -> Path:
    """Return the path that follows a command, in quotes or not."""
    if len(text) > 2 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    if "\0" in text:
        raise InputError(f"{text!r} is no path: leave out the character \\x00")
    try:
        path = Path(text).expanduser()
        path.exists()
    except RuntimeError:
        raise InputError(f"there is no user of the folder {text.partition('/')[0]}: give the path in full") from None
    except OSError as error:
        raise InputError(f"{text} cannot be used: {error.strerror or error}; give another path") from None
    return path


def _read_saved(file: Path) -> list[Message]:
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}): give one that /save wrote") from None
    messages = content.get("messages") if isinstance(content, dict) else content
    if not isinstance(messages, list):
        raise InputError(f"{file} has no messages: give one that /save wrote")
    return messages


def _message_text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _count_messages(messages: Sequence[Message]) -> str:
    return "1 message is" if len(messages) == 1 else f"{len(messages)} messages are"
