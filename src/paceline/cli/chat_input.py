"""Lines that a chat's user types, or that another program writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from paceline.cli.chat_session import COMMANDS
from paceline.core.errors import InputError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

_PROMPT = "> "
_CONTINUED = "\\"


def is_typed() -> bool:
    """Whether a person types the lines, and sees what is printed."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def iter_lines() -> Iterator[str]:
    """Yield messages and commands until there are no more: from a terminal, or line by line from a pipe.

    On a terminal, Ctrl-C empties the line; on an empty one it says how to end, and twice in a row it ends.
    """
    if sys.stdin is None:
        raise InputError("standard input is closed: there is nobody to chat with")
    if not is_typed():
        yield from _iter_piped()
        return
    session = _make_session()
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


def _make_session() -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
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
        key_bindings=keys,
        prompt_continuation=lambda width, number, is_soft: " " * width,
        completer=WordCompleter([f"/{command.name}" for command in COMMANDS], sentence=True),
        complete_while_typing=False,
        enable_suspend=True,
    )
