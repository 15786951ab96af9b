"""Fetching one file of the hub into the cache as a blob; an interrupted download goes on where it ended.

``huggingface_hub`` gives every try a partial file of its own and deletes that when the try fails, so an interrupted
download would start anew. The partial file here is called by its content, ``DIGEST.incomplete``, and stays until it is
whole. A file is a blob only after its content was found to be what the hub says.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import WeakFileLock, hf_raise_for_status

from paceline.core.errors import ModelFileError
from paceline.models.hub.errors import HTTP_ERROR
from paceline.models.hub.reference import without_credentials

_READ_BYTES: Final = 1 << 20

RETRY_WAITS_S: tuple[float, ...] = (0.0, 1.0, 4.0)
"""Seconds before each further try after one that brought nothing. After one that brought something there is no wait."""

_SOON_S: Final = 0.1
_SHA256_LENGTH: Final = 64


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at the hub.

    Attributes:
        url: where it can be had, of one revision.
        digest: of its content: SHA-256 of a large file, git's SHA-1 of a small one; the name of its blob.
    """

    path: str
    url: str
    num_bytes: int
    digest: str


def partial_path(blobs: Path, file: RemoteFile) -> Path:
    return blobs / f"{file.digest}.incomplete"


def count_fetched(blobs: Path, file: RemoteFile) -> int:
    if (blobs / file.digest).is_file():
        return file.num_bytes
    partial = partial_path(blobs, file)
    return min(partial.stat().st_size, file.num_bytes) if partial.is_file() else 0


def has_content(path: Path, file: RemoteFile) -> bool:
    """Return whether a file here has the content of one at the hub; it is read where the sizes are equal."""
    if path.stat().st_size != file.num_bytes:
        return False
    digest = _digest(file)
    with path.open("rb") as there:
        while chunk := there.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == file.digest


def fetch_blob(
    blobs: Path, lock: Path, file: RemoteFile, headers: dict[str, str], *, report: Callable[[str, int], None]
) -> None:
    """Fetch a file into a folder of blobs.

    ``report`` hears what is being done, and how many bytes of the file are there. ``lock`` is a file that keeps other
    processes from fetching the same one meanwhile. Errors of the HTTP client are those where the hub refuses or the
    connection was lost for good.
    """
    blobs.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    blob, partial = blobs / file.digest, partial_path(blobs, file)
    with _hold_lock(
        lock, lambda: report(f"waiting for another process to fetch {file.path}", count_fetched(blobs, file))
    ):
        if blob.is_file():
            return
        try:
            with partial.open("ab") as out:
                content = _Content(partial, out, file)
                while content.num_bytes < file.num_bytes:
                    _receive_with_retries(content, file, headers, lambda: report(file.path, content.num_bytes))
                os.fsync(out.fileno())
        except BaseException:
            if not count_fetched(blobs, file):
                partial.unlink(missing_ok=True)
            raise
        if content.digest() != file.digest:
            partial.unlink()
            where = without_credentials(file.url)
            raise ModelFileError(f"{file.path} arrived damaged from {where}: start again to fetch it anew")
        partial.replace(blob)


class _Content:
    """The part of a file that was fetched, which grows at its end."""

    def __init__(self, path: Path, out: BinaryIO, file: RemoteFile) -> None:
        self._out, self._file = out, file
        there = path.stat().st_size
        if there > file.num_bytes:
            self.restart()
            return
        self._begin()
        with path.open("rb") as earlier:
            while self.num_bytes < there and (chunk := earlier.read(min(_READ_BYTES, there - self.num_bytes))):
                self._take(chunk)

    def append(self, chunk: bytes) -> None:
        self._out.write(chunk)
        self._out.flush()
        self._take(chunk)

    def restart(self) -> None:
        self._out.truncate(0)
        self._begin()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _begin(self) -> None:
        self.num_bytes = 0
        self._hash = _digest(self._file)

    def _take(self, chunk: bytes) -> None:
        self._hash.update(chunk)
        self.num_bytes += len(chunk)


def _digest(file: RemoteFile) -> hashlib._Hash:
    if len(file.digest) == _SHA256_LENGTH:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)


def _receive_with_retries(
    content: _Content, file: RemoteFile, headers: dict[str, str], report: Callable[[], None]
) -> None:
    """Receive the rest of a file; where the connection is lost, go on from there."""
    had = content.num_bytes
    for wait_s in (*RETRY_WAITS_S, None):
        lost: Exception = ModelFileError(
            f"{file.path} ended early at {without_credentials(file.url)}: start again later"
        )
        try:
            _receive(content, file, headers, report)
        except HTTP_ERROR as error:
            if isinstance(error, HfHubHTTPError) and not _is_passing(error.response.status_code):
                raise
            lost = error
        if content.num_bytes > had:
            return
        if wait_s is None:
            raise lost
        time.sleep(wait_s)


def _is_passing(status: int) -> bool:
    return status >= 500 or status in (408, 429)


def _receive(content: _Content, file: RemoteFile, headers: dict[str, str], report: Callable[[], None]) -> None:
    # Of a compressed transfer, a part would not be a part of the file.
    headers = {**headers, "Accept-Encoding": "identity"}
    if content.num_bytes:
        headers["Range"] = f"bytes={content.num_bytes}-"
    with get_session().stream(
        "GET", file.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        if content.num_bytes and response.status_code != 206:
            content.restart()
        report()
        # Written as it arrives: bytes held back until a piece is full would be lost where the connection breaks.
        for chunk in response.iter_bytes():
            content.append(chunk[: file.num_bytes - content.num_bytes])
            report()


@contextmanager
def _hold_lock(lock: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(WeakFileLock(lock, timeout=_SOON_S))
        except TimeoutError:
            on_wait()
            stack.enter_context(WeakFileLock(lock))
        yield
