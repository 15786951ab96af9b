"""llama-server as a contestant: the same GGUF files on a server of its own, asked over HTTP.

A setting is fixed when llama-server starts, so every setting has a process of its own, which loads the model when it
is first asked and stays until the bench is over. Processes listen on the loopback interface and answer one request at
a time; one that waits for its turn takes no processor time.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from paceline.bench.sessions import Answer, Stop, Stopped
from paceline.bench.variants import SERVER_NGRAM_SETTINGS, Variant
from paceline.bench.workloads import Task
from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.engines.llama_cpp import native
from paceline.engines.loading import ModelOptions, engine_for

_HOST: Final = "127.0.0.1"
_START_S = 300.0
"""Longest that loading a model may take."""
_ANSWER_S = 600.0
"""Longest wait for the next piece of an answer: a long prompt is read before the first."""
_POLL_S = 0.05
_SAMPLING = ("temperature", "seed", "top_k", "top_p", "min_p")


class LlamaServers:
    """Runs llama-server, one process for each setting; closing it ends them all.

    Args:
        executable: llama-server.
        target: as paceline loads it; its context, threads and layers are llama-server's too.
        draft: likewise, if there is one.
        context_length: of the target as it was loaded.

    Raises:
        InputError: there is no such program, it does not run, or the target is not a GGUF file.
    """

    def __init__(self, executable: Path, target: ModelOptions, draft: ModelOptions | None, context_length: int) -> None:
        if engine_for(Path(target.path)) != "llama_cpp":
            raise InputError(f"--against runs GGUF files only, and {target.path} is none: leave it out")
        self.version = program_version(executable)
        threads = target.threads or native.usable_cores()
        self._command = [
            str(executable),
            *("-m", str(target.path), "-c", str(context_length), "-np", "1"),
            *("-t", str(threads), "-tb", str(target.threads_batch or threads)),
            *("-ngl", str(target.gpu_layers) if target.gpu_layers >= 0 else "all"),
            *(("-dev", ",".join(target.devices)) if target.devices else ()),
            *("--host", _HOST),
        ]
        self._draft: list[str] = []
        if draft is not None:
            self._draft = [
                *("-md", str(draft.path)),
                *("-ngld", str(draft.gpu_layers) if draft.gpu_layers >= 0 else "all"),
                *(("-devd", ",".join(draft.devices)) if draft.devices else ()),
            ]
        self._running: dict[str, LlamaServer] = {}
        self._logs = tempfile.TemporaryDirectory(prefix="paceline-bench-")

    def __enter__(self) -> LlamaServers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def contestant(self, variant: Variant) -> LlamaServer:
        """Return the server of a variant; variants of the same setting share one."""
        if variant.name not in self._running:
            log = Path(self._logs.name) / f"{len(self._running)}.log"
            self._running[variant.name] = LlamaServer(variant.name, self.command(variant), log)
        return self._running[variant.name]

    def command(self, variant: Variant) -> list[str]:
        """Return the program and its arguments for a variant, but for the port."""
        return self._command + self._arguments(variant)

    def close(self) -> None:
        """End all processes."""
        for process in self._running.values():
            process.close()
        self._running.clear()
        self._logs.cleanup()

    def _arguments(self, variant: Variant) -> list[str]:
        types, arguments = [], []
        for name in variant.drafters:
            if name == "draft":
                assert variant.fixed is not None
                types.append("draft-simple")
                arguments += self._draft
                arguments += ["--spec-draft-n-max", str(variant.fixed.draft_max)]
                arguments += ["--spec-draft-p-min", f"{variant.fixed.p_min:g}"]
            else:
                setting = SERVER_NGRAM_SETTINGS[name]
                types.append(setting[0])
                arguments += setting[1:]
        return ["--spec-type", ",".join(types), *arguments] if types else []


class LlamaServer:
    """A llama-server with one setting, started when it is first asked.

    Args:
        name: in messages.
        command: program and arguments, but for the port.
        log: file for what it prints.
    """

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self._name = name
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    @property
    def process_id(self) -> int | None:
        """Of the running program; ``None`` before it is first asked."""
        return None if self._process is None else self._process.pid

    def answer(self, task: Task, temperature: float, stopped: Stop) -> Answer:
        """Return the answer to a task, timed as llama-server times it.

        Raises:
            EngineError: the server could not be started, or failed.
            Stopped: the user wants no more; leaving the connection ends the answer.
        """
        if self._process is None:
            self._start(stopped)
        options = task.options(temperature)
        body: dict[str, Any] = {name: value for name, value in options.items() if name in _SAMPLING}
        body |= {
            "prompt": list(task.prompt_ids),
            "n_predict": options["max_tokens"],
            "ignore_eos": options["ignore_end"],
            "cache_prompt": False,
            "stream": True,
            "return_tokens": True,
        }
        token_ids: list[int] = []
        timings: dict[str, Any] = {}
        try:
            for event in self._events(body):
                if stopped():
                    raise Stopped
                if "error" in event:
                    raise EngineError(f"{self._name}: {event['error'].get('message', event['error'])}")
                token_ids += event.get("tokens", ())
                timings = event.get("timings", timings)
        except (OSError, http.client.HTTPException, ValueError) as error:  # gone, or not JSON
            raise EngineError(f"{self._name} failed: {self._reason(error)}") from error
        if not timings or len(token_ids) < 1:
            raise EngineError(f"{self._name} gave no timings: this needs a llama-server that sends them")
        num_accepted = int(timings.get("draft_n_accepted", 0))
        return Answer(
            token_ids,
            # What it counts from the first token on, which comes with the prompt.
            timings["predicted_ms"] / 1e3,
            # Every round ends with a token of the target's own.
            max(len(token_ids) - 1 - num_accepted, 0),
            int(timings.get("draft_n", 0)),
            num_accepted,
        )

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what the server sends for a request, event by event."""
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            response = urllib.request.urlopen(request, timeout=_ANSWER_S)
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode("utf-8", errors="replace").strip() or str(error)) from error
        with response:
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[len(b"data: ") :])

    def _start(self, stopped: Stop) -> None:
        """Start the program and wait until it has loaded the model."""
        with socket.socket() as free:
            free.bind((_HOST, 0))
            port = free.getsockname()[1]
        self._url = f"http://{_HOST}:{port}"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # An interrupt on the terminal is for the bench, which then ends this.
                start_new_session=True,
            )
        give_up_s = time.monotonic() + _START_S
        while not self._ready():
            if stopped():
                raise Stopped
            if self._process.poll() is not None:
                raise EngineError(f"{self._name} ended with status {self._process.returncode}: {self._last_words()}")
            if time.monotonic() > give_up_s:
                raise EngineError(f"{self._name} did not load the model in {_START_S:.0f} s")
            time.sleep(_POLL_S)

    def _ready(self) -> bool:
        """Whether the model is loaded: until then the server refuses, or says that it is busy."""
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=_ANSWER_S) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _reason(self, error: Exception) -> str:
        if self._process is not None and self._process.poll() is not None:
            return f"it ended with status {self._process.returncode}: {self._last_words()}"
        return str(error) or type(error).__name__

    def _last_words(self) -> str:
        """Return the last line of its log that says something."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def program_version(executable: Path) -> str:
    """Return what llama-server says of its version.

    Raises:
        InputError: there is no such program.
        CapabilityError: it does not run, or is something else.
    """
    if not executable.is_file():
        raise InputError(f"{executable} does not exist: give the path of llama-server")
    try:
        outcome = subprocess.run([str(executable), "--version"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapabilityError(f"{executable} does not run ({error}): give the path of llama-server") from None
    said = (outcome.stdout + outcome.stderr).decode("utf-8", errors="replace")
    version = next((line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("version:")), "")
    if not version:
        raise CapabilityError(f"{executable} --version names no version: give the path of llama-server")
    return version
