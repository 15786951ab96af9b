"""Servers of others, between a client and ours."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.serving.processes import poll


@contextmanager
def served(
    command: list[str], variables: Mapping[str, str], url: str, health: str, folder: Path, host: str | None = None
) -> Iterator[None]:
    """Run a server that stands between clients and ours, in a folder that gets its log."""
    log = folder / "log"
    headers = {} if host is None else {"Host": host}
    with (
        log.open("w") as said,
        subprocess.Popen(command, env=variables, cwd=folder, stdout=said, stderr=said) as server,
    ):
        try:

            def is_ready() -> bool:
                assert server.poll() is None, log.read_text()[-2000:]
                try:
                    return httpx.get(url + health, headers=headers).status_code == 200
                except httpx.TransportError:
                    return False

            poll(is_ready)
            yield
        finally:
            server.terminate()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
