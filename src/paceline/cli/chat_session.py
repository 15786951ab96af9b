"""A chat in a terminal: turns, commands, and what each answer gained."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.api import GenerateOptions, Model
from paceline.chat.messages import Message, read_messages
from paceline.chat.params import ChatParams
from paceline.chat.replies import Reply
from paceline.cli.chat_options import begun_conversation
from paceline.cli.display import AnswerWriter, error_console, print_json
from paceline.cli.interrupts import interrupts_held, keys_unseen
from paceline.cli.report import generation_json, one_line_report, time_spent
from paceline.core.errors import InputError, PacelineError
from paceline.models.files import read_json
from paceline.output import check_parent
from paceline.terminal_text import printable_line

_INDENT: Final = 18


@dataclass(frozen=True, slots=True)
class _Command:
    """A command of the chat.

    Attributes:
        name: what is typed, without the slash.
        takes: what the help shows for what follows; empty where nothing may.
        help: one line.
    """

    name: str
    takes: str
    help: str


COMMANDS: Final = (
    _Command("reset", "", "forget the conversation; what the system says stays"),
    _Command("retry", "", "answer the last message again, with other choices"),
    _Command("system", "[TEXT]", "set what the system says, and begin anew; without a text, show it"),
    _Command("save", "FILE", "write the conversation as JSON"),
    _Command("load", "FILE", "go on with a conversation that was saved"),
    _Command("help", "", "list the commands"),
    _Command("exit", "", "end the chat, as Ctrl-D does"),
)


class ChatSession:
    """One conversation, and what its user may do with it.

    Args:
        model: answers.
        options: of every answer.
        params: how conversations are written.
        system: what the system says; empty for nothing.
        as_json: print an object for every answer, and no text.
    """

    def __init__(
        self, model: Model, options: GenerateOptions, params: ChatParams, *, system: str = "", as_json: bool = False
    ) -> None:
        self._model = model
        self._options = options
        self._params = params
        self._as_json = as_json
        self._console = error_console()
        self._system = system
        self._messages: list[Message] = []
        self._choice = options.get("choice") or 0
        self._was_told_of_forgetting = False
        self._writer: AnswerWriter | None = None
        self._forget()

    def begin(self) -> None:
        """Say who answers, and what the colours of tokens mean.

        Raises:
            PacelineError: the model has no chat template, or one that cannot be used.
        """
        self._model.chat_prompt("Hello", chat=self._params)
        if not self._as_json and sys.stdout.isatty():
            self._tell(f"{self._model.target.description}; /help lists commands, Ctrl-D ends the chat")
        self._writer = AnswerWriter("", [drafter.name for drafter in self._model.drafters], silent=self._as_json)

    def take(self, line: str) -> bool:
        """Do what a line asks for, a command or a message; return whether the chat goes on.

        What cannot be done is said in one line, and the conversation stays as it was.
        """
        try:
            if line.startswith("/") and not line.startswith("//"):
                return self._obey(line[1:])
            self._say(line[1:] if line.startswith("//") else line)
        except (PacelineError, OSError) as error:
            self._tell(str(error), style="red")
        return True

    def _forget(self) -> None:
        self._messages = [*begun_conversation(self._system)]

    def _say(self, text: str) -> None:
        if not text.strip():
            return
        self._choice = self._options.get("choice") or 0
        self._answer([*self._messages, {"role": "user", "content": text}])

    def _answer(self, messages: Sequence[Message]) -> None:
        """Answer a conversation, which becomes this one with the answer at its end."""
        writer = self._writer
        assert writer is not None, "a session is begun before it takes a line"
        options = self._options.copy()
        options["choice"] = self._choice
        before = time_spent(self._model)
        with (
            keys_unseen(),
            interrupts_held() as interrupted,
            self._model.chat_stream(messages, chat=self._params, **options) as stream,
        ):
            self._tell_of_forgetting(stream.prompt.num_left_out)
            for parts in stream.rounds():
                writer.write_parts(parts)
                if interrupted.is_set():
                    break
            writer.write_parts(stream.close())
            writer.finish(line=True)
            reply = stream.so_far()
        self._messages = [*stream.prompt.messages, reply.message]
        self._report(reply, before)

    def _report(self, reply: Reply, before: tuple[float, float] | None) -> None:
        if self._as_json:
            print_json({"message": reply.message, **generation_json(self._model, reply.generation)})
            return
        self._tell(one_line_report(self._model, reply.generation, before, time_spent(self._model)))
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
        name, _, rest = line.strip().partition(" ")
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
        if name == "exit":
            return False
        if rest and not command.takes:
            raise InputError(f"/{name} takes nothing after it: leave out {rest!r}")
        if not rest and command.takes.isupper():
            raise InputError(f"/{name} needs a {command.takes.lower()}: /{name} {command.takes}")
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
        if self._options.get("temperature") == 0.0:
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
        file = _path_of(path, "/save")
        check_parent(file)
        text = json.dumps({"messages": self._messages}, indent=2, ensure_ascii=False) + "\n"
        # Beside it first: an earlier one is not lost to a full disk.
        beside = file.with_name(f".{file.name}.new")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise InputError(f"{file} cannot be written: {error.strerror or error}; give another to /save") from None
        self._tell(f"{len(self._messages)} messages are in {file}")

    def _load(self, path: str) -> None:
        file = _path_of(path, "/load")
        if not file.exists():
            raise InputError(f"there is no file {file}: give one that /save wrote")
        said: Any = read_json(file).get("messages")
        if not isinstance(said, list):
            raise InputError(f"{file} has no messages: give one that /save wrote")
        messages = read_messages(said) if said else []
        self._messages = list(messages)
        first = messages[0] if messages else {}
        self._system = str(first["content"]) if first.get("role") == "system" else ""
        self._tell(f"{len(messages)} messages are there; write the next")

    def _list_commands(self) -> None:
        for command in COMMANDS:
            self._tell(f"{f'/{command.name} {command.takes}':{_INDENT}}{command.help}")
        self._tell("Alt-Enter, or a backslash at the end, begins another line. Ctrl-C ends an answer.")

    def _tell(self, line: str, *, style: str = "dim") -> None:
        self._console.print(printable_line(line), style=style, markup=False)


def _path_of(text: str, command: str) -> Path:
    """Return the path that follows a command; with spaces in it, it may be quoted."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"{command} {text}: {error}") from None
    return Path(text if len(words) != 1 else words[0]).expanduser()
