"""Files of models: files without content, JSON with errors that name the place, and folders that may be written."""

from __future__ import annotations

import json
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from paceline.atomic_output import check_parent
from paceline.core.errors import InputError, ModelFileError

_LFS_POINTER: Final = b"version https://git-lfs"
"""Bytes that a Git LFS pointer begins with."""
LONGEST_START: Final = len(_LFS_POINTER)
"""First bytes of a file that :func:`explain_no_content` needs."""

_LONGEST_REASON: Final = 200
"""Characters that are repeated of an error about an entry: it may quote all of it."""

OF_DAMAGED_ENTRIES: Final = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RecursionError,
    struct.error,
)
"""Errors that reading damaged entries of a file may raise."""

_NO_FILES: Final = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def explain_no_content(start: bytes) -> str | None:
    """Say why a file that starts like this holds nothing, and the way out; ``None`` if it may hold something."""
    if not start:
        return "it is empty; copy or download it again"
    if start.startswith(_LFS_POINTER):
        return "it is a Git LFS pointer, which stands for the file; fetch the file itself with git lfs pull"
    return None


def check_is_file(path: Path) -> None:
    """Raise ``ModelFileError`` for a pipe, a device or a socket in place of a file: opening a pipe may wait for ever.

    Raises ``OSError`` where the file is missing.
    """
    kind = _NO_FILES.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise ModelFileError(f"{path} is {kind}; give the path of a file, as models are read more than once")


def read_text(path: Path) -> str:
    """Return the text of a file, without the byte order mark that some editors put before it."""
    check_is_file(path)
    return path.read_text(encoding="utf-8-sig")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ``ModelFileError`` for anything else."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        raise ModelFileError(f"{path.parent} has no {path.name}; fetch the whole folder") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds a JSON {type(content).__name__}, not an object; fetch it again")
    return content


@contextmanager
def explain_damaged_entries(path: Path) -> Iterator[None]:
    """Turn errors of :data:`OF_DAMAGED_ENTRIES` into a ``ModelFileError`` that names the file or folder."""
    try:
        yield
    except OF_DAMAGED_ENTRIES as error:
        why = str(error).partition("\n")[0][:_LONGEST_REASON]
        raise ModelFileError(f"{path} has an invalid entry ({type(error).__name__}: {why}); fetch it again") from error


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one where there is no such file."""
    return read_json(path) if path.exists() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_new_folder(folder: Path, source: Path, *, force: bool) -> None:
    """Raise ``InputError`` unless ``folder`` may be written: it is absent, empty, or may be replaced."""
    check_parent(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the path of a folder to make")
    if not any(folder.iterdir()):
        return
    if not force:
        raise InputError(f"{folder} is not empty; give another folder, or replace it (`force=True`)")
    if source.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder} holds the source {source.name}, so it cannot be replaced; give another folder")
    if not (folder / "config.json").is_file():
        # Replacing deletes the folder: only where it looks like an earlier conversion.
        raise InputError(f"{folder} is not a model folder, so it is not replaced; give another folder")
