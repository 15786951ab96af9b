"""Options of commands that write a prompt by the model's chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import typer

from paceline.chat.params import ChatParams
from paceline.cli.prompt import read_text_file, read_typed_text
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.environment import ModelChoice

CHAT_PANEL: Final = "Chat"
"""Heading of the options of conversations in ``--help``."""

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


def system_prompt(text: str | None, file: Path | None, *, escape: bool = True) -> str:
    if text is not None and file is not None:
        raise InputError("-sys and -sysf both give what the system says: leave out one of them")
    if file is not None and str(file) == "-":
        raise InputError("-sysf - is standard input, which is for messages: give a file, or the text itself with -sys")
    if file is not None:
        return read_text_file(file, "-sysf")
    return "" if text is None else read_typed_text(text, "-sys", escape=escape)


def check_names_chat_model(models: ModelChoice, replaced_by: str | Path | None) -> None:
    """Refuse to chat where no model is named, unless a template makes one of the built-in one."""
    if models.target is None and replaced_by is None:
        raise InputError(
            "no model is named (-m FILE), and the small built-in one cannot chat: name one with -m, or have one "
            "fetched with -hf, such as -hf ggml-org/gemma-3-1b-it-GGUF"
        )


def check_can_chat(path: Path, replaced_by: str | Path | None) -> None:
    """Refuse a model without a chat template before it is loaded; ``replaced_by`` is a text, or the path of a file."""
    from paceline.chat.template_sources import check_is_chat_model  # jinja2 takes a while to import

    if isinstance(replaced_by, Path) and not replaced_by.is_file():
        raise InputError(f"there is no file {replaced_by} (--chat-template-file): give the path of a chat template")
    check_is_chat_model(path, replaced_by)


def start_conversation(system: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}] if system else []
