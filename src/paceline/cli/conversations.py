"""Conversations that ``paceline chat`` keeps on this machine, and what was typed there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from platformdirs import user_state_path

from paceline.atomic_output import atomic_file
from paceline.core.errors import InputError
from paceline.models.registry import CACHE_VARIABLE
from paceline.terminal_text import json_text

_PRIVATE: Final = 0o700


def chats_folder() -> Path:
    """Return the folder of conversations; it may not exist.

    It is ``chats`` in the folder for a user's state, or in the folder that ``PACELINE_CACHE`` names.
    """
    override = os.environ.get(CACHE_VARIABLE)
    return (Path(override).expanduser() if override else user_state_path("paceline", appauthor=False)) / "chats"


def history_file() -> Path:
    """Return the file of what was typed in chats, in a folder that only its user may read."""
    return _make_folder() / "history"


def last_conversation() -> Path:
    """Return the conversation that was kept last."""
    kept = sorted(chats_folder().glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not kept:
        raise InputError(f"there is no conversation to resume in {chats_folder()}: chat first, or give --resume=FILE")
    return kept[-1]


def write_conversation(file: Path, content: Any) -> None:
    # Half a surrogate pair, which no encoding has, is escaped in JSON.
    text = json_text(content, indent=2) + "\n"
    with atomic_file(file) as beside:
        beside.write_text(text, encoding="utf-8")


class Autosave:
    """Keeps a conversation in a file of its own, which begins with its first answer.

    Attributes:
        file: where the conversation is; ``None`` before.
    """

    def __init__(self) -> None:
        self.file: Path | None = None

    def begin(self) -> None:
        """Keep what comes in another file."""
        self.file = None

    def continue_in(self, file: Path) -> None:
        """Keep what comes in this file, if it is one of those that are kept."""
        self.file = file if file.parent == chats_folder() else None

    def save(self, content: Any) -> None:
        """Write a conversation.

        Raises:
            InputError: the disk or its permissions do not let it be written.
        """
        folder = _make_folder()
        if self.file is None:
            self.file = folder / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{time.time_ns() % 10**9:09}.json"
        write_conversation(self.file, content)


def _make_folder() -> Path:
    folder = chats_folder()
    try:
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made: {error.strerror or error}") from None
    return folder
