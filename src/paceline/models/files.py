"""Files of models: those without content, JSON that says what is wrong with it, and folders that may be written."""

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
"""Bytes that :func:`explain_no_content` judges a file by."""

_LONGEST_REASON: Final = 200
"""Characters that are repeated of what is wrong with an entry: it may quote all of it."""

OF_DAMAGED_ENTRIES: Final = (
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
    ArithmeticError,
    RecursionError,
    struct.error,
)
"""What comes of entries of a file that are not as they should be."""

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
    """Refuse what is no file but stands in a folder like one: whoever opened a pipe would wait, maybe for ever.

    Raises:
        ModelFileError: it is a pipe, a device or a socket.
        OSError: nothing can be said of it; it may be missing.
    """
    kind = _NO_FILES.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise ModelFileError(f"{path} is {kind}; give the path of a file, as models are read more than once")


def read_text(path: Path) -> str:
    """Return the text of a file, without the byte order mark that some editors put before it.

    Raises:
        ModelFileError: it is a pipe, a device or a socket.
        OSError: it cannot be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    check_is_file(path)
    return path.read_text(encoding="utf-8-sig")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelFileError: it is missing, unreadable, or not one JSON object.
    """
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
    """Turn what comes of entries that are not as they should be, of whatever kind, into one line.

    Args:
        path: of the file or folder that has them, for the message.

    Raises:
        ModelFileError: inside the ``with`` block something came of them.
    """
    try:
        yield
    except OF_DAMAGED_ENTRIES as error:
        why = str(error).partition("\n")[0][:_LONGEST_REASON]
        raise ModelFileError(
            f"{path} has an entry that is not what it should be ({type(error).__name__}: {why}); fetch it again"
        ) from error


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one where there is no such file."""
    return read_json(path) if path.exists() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as readable JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_new_folder(folder: Path, source: Path, *, force: bool) -> None:
    """Check that ``folder`` may be written: it is absent, empty, or may be replaced.

    Raises:
        InputError: the message says why not, and the way out.
    """
    check_parent(folder)
    if not folder.exists():
        return
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; give the path of a folder to make")
    if not any(folder.iterdir()):
        return
    if not force:
        raise InputError(f"{folder} is not empty; give another folder, or replace it with --force (force=True)")
    if source.resolve().is_relative_to(folder.resolve()):
        raise InputError(f"{folder} holds the source {source.name}, so it cannot be replaced; give another folder")
    if not (folder / "config.json").is_file():
        # Replacing deletes what is there: only what looks like an earlier conversion.
        raise InputError(f"{folder} is not a model folder, so it is not replaced; give another folder")
