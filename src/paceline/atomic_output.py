"""Output that is whole or absent, and whether there is room for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import InputError
from paceline.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no directory {path.parent}; make it first")


def check_room(
    path: Path, needed_bytes: int, *, way_out: str = "choose a smaller type or shape, or another place"
) -> None:
    """Raise ``InputError`` unless there is room for ``path`` on its disk.

    ``way_out`` names another way than making room.
    """
    free_bytes = shutil.disk_usage(path.parent).free
    if needed_bytes > free_bytes:
        raise InputError(
            f"{path} needs {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} are free there: free some, or "
            f"{way_out}"
        )


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder beside ``folder`` to write into; it takes that name, replacing what has it, when all went well.

    Raises:
        InputError: the disk or its permissions do not let it be written.
    """
    folder = folder.absolute()  # "." has no name that temporary ones could begin with
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
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; it takes that name, replacing what has it, when all went well.

    Whoever writes at once, in this process or another, does not disturb: the last file stays, and each is whole.

    Raises:
        InputError: the disk or its permissions do not let it be written.
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
        InputError: the disk or its permissions do not let it be written.
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
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None
