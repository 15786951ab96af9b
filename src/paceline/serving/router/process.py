"""A model's process, from its start to its end, as the router sees it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import httpx
import psutil

from paceline.serving.logs import LOGGER

_log = logging.getLogger("paceline.serving.router")

_MAX_LINE: Final = 1 << 20
"""Bytes of a line of a process. What is longer is dropped."""

_OWN: Final = re.compile(r"paceline: (?!warning: )(.*)")
"""The line by which the command ends in an error."""

_CONNECT_S: Final = 10.0

_LAST_READ_S: Final = 5.0
"""Seconds in which clients have to take what a process said before it ended."""
_KEPT_S: Final = 60.0
"""Seconds for which a connection to a process is kept: less than the process keeps it for."""


class ModelProcess:
    """A process that has a model.

    Attributes:
        key: opens it, and is known to nobody else.
        web: asks it, once it listens.
        reason: in one line why it ended, or why it will.
        ended: done once it ended, with its exit status.
    """

    def __init__(self, name: str, on_news: Callable[[Mapping[str, Any]], object]) -> None:
        self.key = secrets.token_urlsafe(32)
        self.web: httpx.AsyncClient | None = None
        self.reason = ""
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._name = name
        self._on_news = on_news
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._last_line = ""
        self._num_readers = 0
        self._is_unread = asyncio.Event()
        self._is_unread.set()

    async def run(self, words: Sequence[str], environment: Mapping[str, str], tags: Sequence[str]) -> None:
        """Start the process and follow it to its end."""
        status = -1
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *words,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                limit=_MAX_LINE,
                # Ctrl-C at a terminal is the router's, which lets answers come to their end.
                start_new_session=True,
            )
            assert process.stdin is not None
            if self._is_stopping:
                process.kill()
            else:
                process.stdin.write(json.dumps({"key": self.key, "name": self._name, "tags": tags}).encode() + b"\n")
            await asyncio.gather(self._read_news(process), self._read_log(process))
            status = await process.wait()
        except OSError as error:
            self.reason = f"its process cannot be started: {error.strerror or error}"
        finally:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
            if not self.reason:
                said = f": {self._last_line}" if self._last_line and self.web is None else ""
                self.reason = f"its process ended with status {status}{said}"
            self.ended.set_result(status)
            if self.web is not None:
                if not self._is_stopping:
                    # Answers are read to where they broke off: what the process said before is not lost.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._is_unread.wait(), _LAST_READ_S)
                await self.web.aclose()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Keep connections while the block runs, even if the process has ended."""
        self._num_readers += 1
        self._is_unread.clear()
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self._is_unread.set()

    def rss_bytes(self) -> int:
        """Return the memory that the process has now, pages of its files among them."""
        with contextlib.suppress(psutil.Error):
            if self._process is not None:
                return int(psutil.Process(self._process.pid).memory_info().rss)
        return 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def stop(self, timeout_s: float) -> None:
        """Tell the process to end, and see to it that it does: at once where it gets no seconds for it."""
        self._is_stopping = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait([self.ended], timeout=timeout_s)
        if not self.ended.done() and self._process is not None:
            if timeout_s:
                _log.warning("%s did not end within %g s, and was killed", self._name, timeout_s)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.shield(self.ended)

    async def _read_news(self, process: asyncio.subprocess.Process) -> None:
        async for line in _lines(process.stdout):
            try:
                news = json.loads(line)
            except ValueError:
                continue
            if news["state"] == "listening":
                self.web = httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{news['port']}",
                    # An answer takes as long as it takes; the process bounds what is to be bounded.
                    timeout=httpx.Timeout(None, connect=_CONNECT_S),
                    limits=httpx.Limits(keepalive_expiry=_KEPT_S),
                    trust_env=False,
                )
            self._on_news(news)

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        async for line in _lines(process.stderr):
            text = line.decode("utf-8", "replace").rstrip()
            if not text:
                continue
            self._last_line = text
            if (own := _OWN.fullmatch(text)) is not None and not self.reason:
                self.reason = own[1]
            # Its own log leaves out what repeats.
            LOGGER.info("[%s] %s", self._name, text)


async def _lines(stream: asyncio.StreamReader | None) -> Any:
    assert stream is not None
    while True:
        try:
            line = await stream.readline()
        except ValueError:
            # Longer than any line that matters.
            continue
        if not line:
            return
        yield line
