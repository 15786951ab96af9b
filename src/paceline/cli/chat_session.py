"""A chat in a terminal: turns, commands, and what each answer gained."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from paceline.api import Model
from paceline.atomic_output import check_parent
from paceline.chat.messages import Message, count_leading, read_messages
from paceline.chat.params import ChatParams
from paceline.chat.replies import Reply
from paceline.cli.conversations import Autosave, write_conversation
from paceline.cli.display import AnswerWriter, error_console, print_json
from paceline.cli.interrupts import hide_keys, hold_interrupts
from paceline.cli.options import in_flags
from paceline.cli.progress import show_prompt_progress
from paceline.cli.prompt import start_conversation
from paceline.cli.report import generation_json, generation_report, one_line_report
from paceline.core.did_you_mean import nearest
from paceline.core.errors import InputError, PacelineError
from paceline.core.fields import Field, fields_of, read_text
from paceline.core.params import MAX_TOKENS, SamplingParams, StopRules
from paceline.options import GenerateOptions, read_options
from paceline.streams import Generation
from paceline.terminal_text import printable_line

_INDENT: Final = 22

_MAX_SHOWN: Final = 60
"""Characters of a message that are shown of it."""

_DEFAULT: Final = "default"


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
    _Command("retry", "", "answer the last message again, sampled differently"),
    _Command("undo", "", "take back the last message and its answer"),
    _Command("reset", "", "clear the conversation; the system prompt stays"),
    _Command("system", "[TEXT]", "set the system prompt and start over; alone, show it"),
    _Command("set", "[NAME VALUE]", "change a sampling option (/set temp 0.2), or list them"),
    _Command("stats", "", "show the figures of the last answer and of the chat"),
    _Command("save", "FILE", "write the conversation as JSON"),
    _Command("load", "FILE", "continue a saved conversation"),
    _Command("help", "", "list the commands"),
    _Command("exit", "", "end the chat, as /quit and Ctrl-D do"),
)
"""Commands of a chat, in the order in which ``/help`` lists them."""

_OTHER_NAMES: Final = dict.fromkeys(("quit", "q", "bye"), "exit")
"""What other programs call a command."""


class ChatSession:
    """One conversation, and what its user may do with it.

    Args:
        model: which answers.
        options: of each answer.
        params: how the conversation is written for the model.
        system: the system prompt.
        as_json: whether an object is printed for each answer, and nothing else.
        markdown: whether a terminal shows answers as markdown.
        autosave: where the conversation is kept after each answer; ``None`` for nowhere.
        confirm: asks a question that is answered by yes or no; ``None`` where there is nobody to ask.

    Attributes:
        has_failed: whether anything that was asked for could not be done.
    """

    def __init__(
        self,
        model: Model,
        options: GenerateOptions,
        params: ChatParams,
        *,
        system: str = "",
        as_json: bool = False,
        markdown: bool = False,
        autosave: Autosave | None = None,
        confirm: Callable[[str], bool] | None = None,
    ) -> None:
        self._model = model
        self._options = options
        self._given = options.copy()
        self._params = params
        self._as_json = as_json
        self._markdown = markdown
        self._autosave = autosave
        self._confirm = confirm
        self._written: set[Path] = set()
        self._answers: list[Generation] = []
        self.has_failed = False
        # A person's terminal breaks lines between words, where a script's lines stay whole.
        self._console = error_console(soft_wrap=not sys.stderr.isatty())
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
            self._tell(self._model.target.description)
            self._tell("/help lists commands, Ctrl-D ends the chat")
        self._writer = AnswerWriter(
            drafters=[drafter.name for drafter in self._model.drafters], silent=self._as_json, markdown=self._markdown
        )

    def end(self) -> None:
        """Say how the conversation can be continued, where it is kept."""
        if self._autosave is not None and self._autosave.file is not None:
            self._tell("the conversation is saved: paceline chat --resume continues it")

    def resume(self, file: Path) -> None:
        """Continue a conversation that was saved, in the file that it is kept in."""
        self._load(str(file))
        if self._autosave is not None:
            self._autosave.continue_in(file)

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
        if self._autosave is not None:
            self._autosave.begin()

    @property
    def _conversation(self) -> list[Message]:
        """All messages, with those that are no longer in the context."""
        first = count_leading(self._messages)
        return [*self._messages[:first], *self._left_out, *self._messages[first:]]

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
            finally:
                writer.finish(line=True)
            reply = stream.so_far()
        self._report(reply)
        if reply.generation.finish_reason == "cancelled" and not reply.text and not reply.reasoning:
            self._tell("stopped before the first word: the message is withdrawn")
            return
        first = count_leading(messages)
        last = first + stream.prompt.num_left_out
        self._left_out += messages[first:last]
        self._messages = [*messages[:first], *messages[last:], reply.message]
        self._answers.append(reply.generation)
        self._keep()

    def _keep(self) -> None:
        """Save the conversation by itself. Where that fails, it says so once."""
        if self._autosave is None:
            return
        try:
            self._autosave.save({"messages": self._conversation})
        except InputError as error:
            self._autosave = None
            self._tell(f"the conversation is no longer saved: {error}", style="yellow")

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
                f"the conversation is longer than the context: the {num_messages} oldest messages are dropped, and "
                "more as it goes on (-c gives more context; --no-forget refuses instead)",
                style="yellow",
            )

    def _obey(self, line: str) -> bool:
        name, rest = [*line.split(maxsplit=1), "", ""][:2]
        name, rest = _OTHER_NAMES.get(name, name), rest.strip()
        handlers: dict[str, Callable[[str], None]] = {
            "retry": lambda _: self._retry(),
            "undo": lambda _: self._undo(),
            "reset": lambda _: self._reset(),
            "system": self._set_system,
            "set": self._set,
            "stats": lambda _: self._show_stats(),
            "save": self._save,
            "load": self._load,
            "help": lambda _: self._list_commands(),
        }
        begun = [command for command in COMMANDS if command.name.startswith(name)]
        command = next((command for command in begun if command.name == name), begun[0] if len(begun) == 1 else None)
        if command is None:
            which = " or ".join(f"/{command.name}" for command in begun) if name and begun else "/help lists them"
            raise InputError(f"there is no command /{name}: {which}; type // to send a message that begins with /")
        name = command.name
        if rest and not command.takes:
            raise InputError(f"/{name} takes no argument: leave out {rest!r}")
        if not rest and command.needs:
            raise InputError(f"/{name} needs a {command.takes.lower()}: /{name} {command.takes}")
        if name == "exit":
            return False
        handlers[name](rest)
        return True

    def _reset(self) -> None:
        self._forget()
        self._was_told_of_forgetting = False
        self._tell("the conversation is cleared")

    def _retry(self) -> None:
        last = next((n for n in range(len(self._messages) - 1, -1, -1) if self._messages[n]["role"] == "user"), None)
        if last is None:
            raise InputError("there is no message to answer again: write one first")
        if {**self._options, **self._model.defaults.left_open(self._options)}.get("temperature") == 0.0:
            raise InputError("at temperature 0 an answer is always the same: /set temp 0.8, or another value above 0")
        self._choice += 1
        self._answer(self._messages[: last + 1])

    def _undo(self) -> None:
        last = next((n for n in range(len(self._messages) - 1, -1, -1) if self._messages[n]["role"] == "user"), None)
        if last is None:
            raise InputError("there is no message to take back")
        text = _message_text(self._messages[last])
        self._messages = self._messages[:last]
        self._keep()
        self._tell(f"taken back: {text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + '...'}")

    def _set_system(self, text: str) -> None:
        if not text:
            self._tell(f"system prompt: {self._system}" if self._system else "there is no system prompt")
            return
        self._system = text
        self._forget()
        self._tell("the conversation starts over")

    def _set(self, text: str) -> None:
        """Change an option of the answers that follow, go back to its default, or list all."""
        fields = _settable()
        if not text:
            listed = {each.name: (known, each) for known, each in reversed(fields.items())}
            for known, each in reversed(listed.values()):
                self._tell(f"{known:{_INDENT}}{self._value(each)}")
            self._tell(f"/set NAME VALUE changes one, /set NAME {_DEFAULT} resets it.")
            return
        name, _, value = text.partition(" ")
        field = fields.get(name.lstrip("-").replace("_", "-"))
        if field is None:
            near = nearest(name, fields, cutoff=0.6)
            raise InputError(f"there is no option {name}: {f'did you mean {near}?' if near else '/set lists them'}")
        value = value.strip().removeprefix("=").strip()
        options: dict[str, Any] = {**self._options}
        if value == _DEFAULT:
            options.pop(field.name, None)
            if field.name in self._given:
                options[field.name] = self._given[field.name]  # type: ignore[literal-required]
        elif value:
            try:
                options[field.name] = read_text(field, value)
                if options[field.name] == MAX_TOKENS:
                    options[field.name] = self._model.target.capabilities.context_length
                read_options({field.name: options[field.name]})
            except InputError as error:
                raise InputError(f"{name} {value}: {error}") from None
        self._options = cast("GenerateOptions", options)
        self._tell(f"{name} is {self._value(field)}")

    def _value(self, field: Field) -> str:
        """Return what an option is for the answers that follow, as one writes it."""
        options = {**self._options, **self._model.defaults.left_open(self._options)}
        value = options.get(field.name, field.default)
        if isinstance(value, Mapping):
            return ", ".join(f"{key}={bias}" for key, bias in value.items()) or "none"
        return ";".join(map(str, value)) if isinstance(value, tuple) else str(value)

    def _show_stats(self) -> None:
        if not self._answers:
            raise InputError("there is no answer yet: write a message first")
        *_, last = self._answers
        generation_report(self._console, self._model, last)
        stats = [answer.stats for answer in self._answers]
        tokens = sum(each.predicted_tokens for each in stats)
        seconds = sum(each.prompt_s + each.decode_s for each in stats)
        used = last.stats.cached_tokens + last.stats.prompt_tokens + last.stats.predicted_tokens
        answers = "1 answer" if len(stats) == 1 else f"{len(stats)} answers"
        self._tell(
            f"{answers} in this chat: {tokens} tokens in {seconds:.1f} s, "
            f"{sum(each.num_accepted for each in stats)} of {sum(each.num_drafted for each in stats)} drafts accepted; "
            f"{used} of {self._model.target.capabilities.context_length} tokens of context used"
        )

    def _save(self, path: str) -> None:
        file = _parse_path(path)
        check_parent(file)
        if file.is_dir():
            raise InputError(f"{file} is a folder: give /save the path of a file")
        is_other = file.exists() and file.absolute() not in self._written
        if is_other and self._confirm is not None and not self._confirm(f"{file} exists. Write over it?"):
            self._tell("not saved")
            return
        messages = self._conversation
        write_conversation(file, {"messages": messages})
        self._written.add(file.absolute())
        self._tell(f"{_count_messages(messages)} saved in {file}")

    def _load(self, path: str) -> None:
        file = _parse_path(path)
        if not file.is_file():
            raise InputError(f"there is no file {file}: give one that /save wrote")
        said = _read_saved(file)
        if said:
            read_messages(said)
        if self._autosave is not None:
            self._autosave.begin()
        self._messages, self._left_out = list(said), []
        self._system = _message_text(said[0]) if count_leading(said) else ""
        self._was_told_of_forgetting = False
        self._tell(f"{_count_messages(said)} loaded; write the next one")

    def _list_commands(self) -> None:
        for command in COMMANDS:
            self._tell(f"{f'/{command.name} {command.takes}':{_INDENT}}{command.help}")
        self._tell("Alt-Enter, or a backslash at the end of a line, starts a new line.")
        self._tell("Ctrl-C stops an answer. A message that begins with a slash is typed with two.")

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
    return "1 message" if len(messages) == 1 else f"{len(messages)} messages"


@functools.cache
def _settable() -> dict[str, Field]:
    """Return the options that may be changed in a chat, by each name that one may write."""
    fields = [*fields_of(SamplingParams), *(field for field in fields_of(StopRules) if field.name == "max_tokens")]
    return {
        name: field
        for field in fields
        if field.flags
        for name in (*(flag.lstrip("-") for flag in field.flags), field.name.replace("_", "-"))
    }
