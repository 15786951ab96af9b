"""The servers under test: how each is started, and where llama.cpp's tests find what they need."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.timing import WAIT_S

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = Path(__file__).with_name("launcher.py")

STOP_TIMEOUT_S = 5  # as llama.cpp's tests have it


@dataclass(frozen=True)
class Server:
    """A server under test.

    Attributes:
        name: what it is called in the report; one that begins with ``paceline`` is ours.
        path: the path of a llama-server; for ours, of the Python that has it.
    """

    name: str
    path: str

    @classmethod
    def parse(cls, words: str) -> Server:
        """Read ``name=path``.

        Raises:
            ValueError: there is no such program.
        """
        name, _, path = words.partition("=")
        found = shutil.which(path)
        if found is None:
            raise ValueError(f"{words!r} is not name=path of a program")
        return cls(name, str(Path(found).absolute()))

    def environment(self, model: Path) -> dict[str, str]:
        """Return what the launcher reads, and where llama.cpp's tests find the launcher."""
        is_ours = self.name.startswith("paceline")
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        return {
            "PARITY_SERVER": "paceline" if is_ours else self.path,
            "PARITY_MODEL": str(model.absolute()),
            "PARITY_PYTHON": self.path if is_ours else sys.executable,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *(str(Path(path).absolute()) for path in paths)]),
            "LLAMA_SERVER_BIN_PATH": str(LAUNCHER),
        }

    @contextmanager
    def running(self, flags: Sequence[str], model: Path, folder: Path) -> Iterator[int]:
        """Run the server in ``folder`` with ``flags`` on a port of its own, and give the port.

        Raises:
            RuntimeError: the server was not ready in time, or ended.
        """
        port = free_port()
        words = [str(LAUNCHER), *flags]
        words[words.index("--port") + 1] = str(port)
        with (
            tempfile.TemporaryDirectory() as own,
            subprocess.Popen(
                # No server reads what another one saved.
                [own if before == "--slot-save-path" else word for before, word in pairwise(["", *words])],
                cwd=folder,
                env={**os.environ, **self.environment(model)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ) as process,
        ):
            try:
                self._wait(port, process)
                yield port
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()

    def _wait(self, port: int, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if _is_ready(port):
                return
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} ended or was not ready within {WAIT_S} s: {process.args!r}")


def free_port() -> int:
    """Return a port of the loopback that nobody has now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def copied_tests(tests: Path, model: Path) -> Iterator[Path]:
    """Copy llama.cpp's server tests into a temporary tree and give the folder of the copy.

    The tests find chat templates at ``../../../models/templates`` and their draft model at ``tmp``: the templates are
    linked, and the model is its own draft. The folder that the tests come from stays as it is.
    """
    with tempfile.TemporaryDirectory(prefix="parity-") as root:
        copy = Path(root) / "tools" / "server" / "tests"
        shutil.copytree(tests, copy, ignore=shutil.ignore_patterns("tmp", "__pycache__"))
        (Path(root) / "models").symlink_to((tests / "../../../models").resolve())
        (copy / "tmp").mkdir()
        (copy / "tmp" / "stories15M-q4_0.gguf").symlink_to(model.absolute())
        yield copy


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False  # it does not listen yet
    finally:
        connection.close()
