"""``paceline chat``: a conversation in the terminal."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.chat.params import ChatParams
from paceline.cli import exits
from paceline.cli.chat_session import COMMANDS, ChatSession
from paceline.cli.conversations import Autosave, history_file, last_conversation
from paceline.cli.interrupts import allow_interrupts
from paceline.cli.options import GivenOptions, ModelFlags, is_given, with_options
from paceline.cli.outputs import OPTIONAL_VALUE, STANDARD_OUTPUT
from paceline.cli.prompt import (
    GrammarFile,
    GrammarText,
    JsonSchemaFile,
    JsonSchemaText,
    Strict,
    SystemPrompt,
    SystemPromptFile,
    check_can_chat,
    check_names_chat_model,
    read_source,
    read_typed_text,
    system_prompt,
)
from paceline.cli.setup import PolicyName, Remember, choose_setup, open_model, request_options
from paceline.core.errors import InputError
from paceline.core.params import MAX_TOKENS, SamplingParams, SpeculationParams, StopRules
from paceline.environment import ModelChoice
from paceline.planning.policies.fixed import FixedPolicy

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_output = functools.partial(typer.Option, rich_help_panel="Prompt and output")
_PROMPT = "> "
_CONTINUED = "\\"
_TARGET_HELP = "Chat model: a GGUF file, a Hugging Face folder, or a name from paceline models."

EPILOG = """[bold]Examples[/bold]

paceline chat -hf ggml-org/gemma-3-1b-it-GGUF  [dim]# fetched once, from the Hugging Face hub[/dim]

paceline chat -m instruct.gguf -md small-instruct.gguf -sys "You answer in French."

paceline chat -m instruct.gguf --resume  [dim]# continues the last conversation[/dim]

paceline chat -m instruct.gguf --temp 0 < questions.txt > answers.txt  [dim]# one message a line[/dim]

[dim]In the chat, /help lists its commands. Ctrl-C stops an answer, Ctrl-D ends the chat.[/dim]
"""
"""Examples below the command's help."""


@with_options(
    together=(("order", "model_defaults", "seed"), ("markdown", "autosave", "resume", "as_json", "verbose")),
    helps={"max_tokens": "Most tokens of an answer; -1 fills the context. [dim]\\[-1][/dim]"},
)
def chat(
    context: typer.Context,
    *,
    models: Annotated[
        ModelChoice, ModelFlags(also=("override_tensors", "model_defaults", "verbose"), target_help=_TARGET_HELP)
    ],
    system: SystemPrompt = None,
    system_file: SystemPromptFile = None,
    conversation: ChatParams,
    json_schema: JsonSchemaText = None,
    json_schema_file: JsonSchemaFile = None,
    strict: Strict = True,
    grammar: GrammarText = None,
    grammar_file: GrammarFile = None,
    first: Annotated[
        str | None, _output("-p", "--prompt", help="The first message; the chat goes on after it.")
    ] = None,
    rules: StopRules,
    params: SamplingParams,
    speculation: SpeculationParams,
    given: GivenOptions,
    policy: PolicyName = None,
    fixed: FixedPolicy,
    remember: Remember = True,
    markdown: Annotated[
        bool | None,
        _output(
            "--markdown/--no-markdown",
            help="Show answers as markdown, or as they are, in the colours of their drafters. "
            "[dim]\\[markdown on a terminal][/dim]",
        ),
    ] = None,
    autosave: Annotated[
        bool | None,
        _output(
            "--autosave/--no-autosave",
            help="Save the conversation after each answer, and what you type, in a folder of yours. "
            "[dim]\\[autosave on a terminal][/dim]",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        _output(
            "--resume", help="Continue the last saved conversation, or with =FILE that one.", metavar=OPTIONAL_VALUE
        ),
    ] = None,
    as_json: Annotated[bool, _output("--json", help="Print one JSON object for each answer instead.")] = False,
) -> None:
    """Chat with a model in the terminal: the same answers as without speculation, sooner.

    Type messages, or pipe them in, one per line. Answers go to standard output. After each answer, a line on standard
    error says how fast it was and what speculation gained. A terminal shows answers as markdown; --no-markdown shows
    each token in the colour of the drafter that proposed it.
    """
    check_names_chat_model(models, None)
    if markdown is not None and is_given(context, "markdown") and (as_json or not is_typed()):
        flag = "--markdown" if markdown else "--no-markdown"
        raise InputError(f"{flag} has no effect without a terminal, or with --json: leave it out")
    autosave = is_typed() if autosave is None else autosave
    resumed = None if resume is None else last_conversation() if resume == STANDARD_OUTPUT else Path(resume)
    setup = choose_setup(context, models, speculation, fixed, policy=policy, remember=remember)
    source = read_source(json_schema, json_schema_file, grammar, grammar_file, strict=strict)
    says = system_prompt(system, system_file)
    rules = replace(rules, stop=tuple(read_typed_text(text, "--stop", escape=True) for text in rules.stop))
    if "max_tokens" not in given.values:
        # A model ends its answers by itself.
        rules = replace(rules, max_tokens=MAX_TOKENS)
    found = setup.find()
    check_can_chat(Path(found.target.path), conversation.replaced_by)
    # A person ends a chat in other ways, and loses none to an interrupt that came as the answer ended.
    with open_model(setup, found, silent=as_json) as (model, _), nullcontext() if is_typed() else allow_interrupts():
        options = request_options(context, model, given, params, rules, speculation)
        if source is not None:
            options["constraint"] = model.compile(source)
        session = ChatSession(
            model,
            options,
            conversation,
            system=says,
            as_json=as_json,
            markdown=markdown is not False and os.environ.get("TERM") != "dumb",
            autosave=Autosave() if autosave else None,
            confirm=confirm if is_typed() else None,
        )
        session.begin()
        if resumed is not None:
            session.resume(resumed)
        if first is not None:
            session.say(read_typed_text(first, "-p", escape=True))
        for line in iter_lines(history_file() if autosave else None):
            if not session.take(line):
                break
        session.end()
    if session.has_failed and not is_typed():
        # A person has read it; a script reads this.
        raise typer.Exit(exits.FAILURE)


def is_typed() -> bool:
    """Whether a person types the lines, and sees what is printed."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def confirm(question: str) -> bool:
    """Ask a question; whoever interrupts it says no."""
    try:
        return typer.confirm(question, err=True)
    except typer.Abort:
        return False


def iter_lines(history: Path | None = None) -> Iterator[str]:
    """Yield messages and commands until there are no more: from a terminal, or line by line from a pipe.

    A terminal recalls lines of earlier chats, which are in the file ``history``.
    On a terminal, Ctrl-C empties the line; on an empty one it says how to end, and twice in a row it ends.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed: there are no messages to read")
    if not is_typed():
        yield from _iter_piped()
        return
    session = _make_session(history)
    is_leaving = False
    while True:
        try:
            yield session.prompt(_PROMPT)
        except EOFError:
            return
        except KeyboardInterrupt:
            if is_leaving:
                return
            is_leaving = not session.default_buffer.text
            if is_leaving:
                print("Ctrl-D or /exit ends the chat, and so does Ctrl-C now")
            continue
        is_leaving = False


def _iter_piped() -> Iterator[str]:
    """Yield the lines of standard input; one that ends in a backslash goes on in the next."""
    begun = ""
    number = 0
    # By bytes: a line that is no text does not keep those before it from being answered.
    while data := sys.stdin.buffer.readline():
        number += 1
        try:
            text = begun + data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"line {number} of standard input is not UTF-8: byte {error.start} is {data[error.start]:#04x}; "
                "write it as UTF-8"
            ) from None
        if text.endswith(_CONTINUED):
            begun = text.removesuffix(_CONTINUED) + "\n"
            continue
        begun = ""
        yield text
    if begun:
        yield begun.rstrip("\n")


def _make_session(history: Path | None) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.keys import Keys

    keys = KeyBindings()

    @keys.add(Keys.Vt100MouseEvent)
    def _no_mouse(event: Any) -> None:
        """Take colours in text that is pasted, which look alike, for nothing, instead of failing on them."""

    @keys.add("enter")
    def _enter(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith(_CONTINUED) and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor(len(_CONTINUED))
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _alt_enter(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        multiline=True,
        history=InMemoryHistory() if history is None else FileHistory(history),
        key_bindings=keys,
        prompt_continuation=lambda width, number, is_soft: " " * width,
        completer=WordCompleter([f"/{command.name}" for command in COMMANDS], sentence=True),
        complete_while_typing=False,
        enable_suspend=True,
    )
