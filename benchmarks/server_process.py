"""A server as a process that measurements ask over HTTP, with no flag but those that a measurement is about."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import CapabilityError

_HOST: Final = "127.0.0.1"
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_START_S: Final = 600.0
"""Longest that loading may take, with what is measured when a model is first loaded."""
_POLL_S: Final = 0.05
_ANSWER_S: Final = 3600.0


class ServerProcess:
    """A running llama-server, or a server that takes the same flags.

    Args:
        stack: ends it.
        program: llama-server, or the words that start another one.
        model: a GGUF file.
        flags: further ones.

    Attributes:
        port: where it listens, on this machine alone.

    Raises:
        CapabilityError: it does not run, or does not serve the model.
    """

    def __init__(self, stack: ExitStack, program: Path | Sequence[str], model: Path, flags: Sequence[str] = ()) -> None:
        with socket.socket() as free:
            free.bind((_HOST, 0))
            port = self.port = int(free.getsockname()[1])
        self._url = f"http://{_HOST}:{port}"
        words = [str(program.absolute())] if isinstance(program, Path) else list(program)
        log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        command = [*words, "-m", str(model), "--host", _HOST, "--port", str(port), *flags]
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        except OSError as error:
            raise CapabilityError(f"{words[0]} does not run ({error}): give the path of llama-server") from None
        stack.callback(process.wait)
        stack.callback(process.terminate)
        give_up_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                _OPENER.open(f"{self._url}/health", timeout=5).close()
                return
            if process.poll() is not None or time.monotonic() > give_up_s:
                log.seek(0)
                said = log.read().decode(errors="replace").strip().splitlines()[-1:]
                raise CapabilityError(f"{' '.join(words)} does not serve {model}: {''.join(said) or 'it says nothing'}")
            time.sleep(_POLL_S)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return what it answers to a request."""
        request = urllib.request.Request(
            f"{self._url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with _OPENER.open(request, timeout=_ANSWER_S) as response:
            return json.load(response)
