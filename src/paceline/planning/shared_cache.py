"""A folder that several machines share, for what each would else find out for itself; it may be in an object store.

It may be away, slow, or no folder at all. That is told once, and nothing is then shared: whoever asks goes on without.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import threading
from collections.abc import Callable
from typing import Any, Final

SHARED_VARIABLE: Final = "PACELINE_CACHE_SHARED"
"""Environment variable with the folder's address as fsspec has it, such as ``s3://bucket/folder``."""

_MOST_S: Final = 10.0
"""Seconds that the folder may take over one entry. Models are loaded and closed meanwhile, and answer nothing."""

_log = logging.getLogger(__name__)

_failed: set[str] = set()
"""Addresses that are not asked any more."""


def fetch(name: str, max_bytes: int) -> bytes | None:
    """Return an entry, cut off after so many bytes; ``None`` where there is none, or no folder that is shared."""

    def read(files: Any, path: str) -> bytes | None:
        try:
            return bytes(files.cat_file(path, start=0, end=max_bytes))
        except FileNotFoundError:
            return None

    return _ask(name, read)


def put(name: str, text: str) -> None:
    """Keep an entry, in place of any that is there, where a folder is shared."""

    def write(files: Any, path: str) -> None:
        try:
            with files.transaction:
                files.pipe_file(path, text.encode())
        except FileNotFoundError:
            # Object stores have no folders that would have to be made.
            files.makedirs(posixpath.dirname(path), exist_ok=True)
            with files.transaction:
                files.pipe_file(path, text.encode())

    _ask(name, write)


def _ask(name: str, what: Callable[[Any, str], bytes | None]) -> bytes | None:
    """Return what the folder answers; ``None`` where it fails, and afterwards."""
    address = os.environ.get(SHARED_VARIABLE)
    if not address or address in _failed:
        return None
    answers: list[bytes | None] = []
    errors: list[str] = []

    def ask() -> None:
        try:
            # It takes 0.2 s to import, and few share anything.
            import fsspec

            # An instance of its own, as a transaction is of a whole one.
            files, folder = fsspec.url_to_fs(address, skip_instance_cache=True)
            answers.append(what(files, f"{folder.rstrip('/')}/{name}"))
        except Exception as error:  # of whatever store it is
            errors.append(f"{error}" or type(error).__name__)

    try:
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(_MOST_S)
    except RuntimeError as error:
        # Of an interpreter that ends.
        errors.append(f"{error}")
    if answers:
        return answers[0]
    _failed.add(address)
    shown = re.sub(r"//[^/@]*@", "//", address)
    why = " ".join(errors[0].split()) if errors else f"no answer in {_MOST_S:g} s"
    _log.warning("%s is %s: %s; going on with what is kept on this machine alone", SHARED_VARIABLE, shown, why)
    return None
