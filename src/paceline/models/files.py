"""Files around a model that is made: JSON that says what is wrong with it, room, output that is whole or absent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import InputError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Iterator


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelFileError: it is missing, unreadable, or not one JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{path.parent} has no {path.name}; fetch the whole folder") from None
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} holds a JSON {type(content).__name__}, not an object; fetch it again")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one where there is no such file."""
    return read_json(path) if path.exists() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as readable JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_parent(path: Path) -> None:
    """Check that there is a directory to write ``path`` into.

    Raises:
        ModelFileError: there is none.
    """
    if not path.parent.is_dir():
        raise ModelFileError(f"{path} cannot be written: there is no directory {path.parent}; make it first")


def check_room(path: Path, needed_bytes: int) -> None:
    """Check that there is room for ``path`` on the disk it is to lie on.

    Raises:
        ModelFileError: there is too little.
    """
    free_bytes = shutil.disk_usage(path.parent).free
    if needed_bytes > free_bytes:
        raise ModelFileError(
            f"{path} needs {needed_bytes:,} bytes, and {free_bytes:,} are free there: free some, or choose a smaller "
            "type or shape, or another place"
        )


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


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder beside ``folder`` to write into; it takes that name, replacing what has it, when all went well.

    Raises:
        ModelFileError: the disk or its permissions do not let it be written.
    """
    folder = folder.absolute()  # "." has no name to put others beside
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    former = folder.with_name(f".{folder.name}.{os.getpid()}.former")
    with _write_errors(folder):
        try:
            partial.mkdir()
            yield partial
            if folder.exists():
                folder.replace(former)
            partial.replace(folder)
        finally:
            if former.exists() and not folder.exists():
                former.replace(folder)
            shutil.rmtree(former, ignore_errors=True)
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; it takes that name, replacing what has it, when all went well.

    Whoever writes at once, in this process or another, does not disturb: the last file stays, and each is whole.

    Raises:
        ModelFileError: the disk or its permissions do not let it be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with _write_errors(path):
        try:
            yield partial
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()


@contextlib.contextmanager
def temporary_folder(beside: Path) -> Iterator[Path]:
    """Yield a hidden folder on the same disk as ``beside``; it is gone afterwards, with all that is in it.

    Raises:
        ModelFileError: the disk or its permissions do not let it be written.
    """
    with (
        _write_errors(beside.parent),
        tempfile.TemporaryDirectory(prefix=f".{beside.name}.", dir=beside.parent) as folder,
    ):
        yield Path(folder)


@contextlib.contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelFileError(f"{path} cannot be written: {error.strerror or error}") from None
