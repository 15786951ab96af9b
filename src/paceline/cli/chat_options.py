"""Options of commands that write a prompt by the model's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from paceline.chat.params import ChatParams
from paceline.cli.prompt import read_text_file, typed_text
from paceline.core.errors import InputError
from paceline.core.fields import fields_of

CHAT_PANEL: Final = "Chat"

SystemPrompt: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "-sys",
        "--system-prompt",
        help="What the system says at the beginning.",
        metavar="TEXT",
        rich_help_panel=CHAT_PANEL,
    ),
]
SystemPromptFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "-sysf",
        "--system-prompt-file",
        help="A file with what the system says.",
        metavar="FILE",
        rich_help_panel=CHAT_PANEL,
    ),
]

OF_CHATS: Final = ("system", "system_file", *(field.name for field in fields_of(ChatParams)))
"""Parameters that mean nothing where a prompt is taken as it is."""


def system_prompt(text: str | None, file: Path | None) -> str:
    """Return what the system says; empty for nothing.

    Args:
        text: as it was typed.
        file: with it.

    Raises:
        InputError: both are given, or the file cannot be read.
    """
    if text is not None and file is not None:
        raise InputError("-sys and -sysf both give what the system says: leave out one of them")
    if file is not None:
        return read_text_file(file, "-sysf")
    return "" if text is None else typed_text(text, "-sys", escape=True)


def begun_conversation(system: str) -> list[dict[str, Any]]:
    """Return a conversation in which nobody but the system has said anything, if that has."""
    return [{"role": "system", "content": system}] if system else []
