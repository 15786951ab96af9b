"""llama-server as a contestant: the same GGUF files in a server of its own, asked over HTTP.

Every answer has a process of its own, started before and ended after it: a setting is fixed when llama-server starts,
its n-gram drafters remember what they said to earlier prompts, and several processes of a large model would not fit.
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.engines.options import ModelOptions, engine_for
from paceline.engines.threads import usable_cores
from paceline.lab.comparison import Stop, Stopped
from paceline.lab.sessions import Answer
from paceline.lab.task import Task
from paceline.lab.variants import SERVER_NGRAM_SETTINGS, Variant

_HOST: Final = "127.0.0.1"
"""Servers listen for this machine alone."""
_START_S = 300.0
"""Seconds that loading a model may take."""
_ANSWER_S = 3600.0
_HEALTH_S = 5.0
_POLL_S = 0.05
_END_S = 10.0
_SAMPLING = ("temperature", "seed", "top_k", "top_p", "min_p")

# Not through a proxy that the environment names: the server is on this machine.
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_Result = TypeVar("_Result")


def check_llama_server(executable: Path, target: ModelOptions, draft: ModelOptions | None) -> str:
    """Return the version of a llama-server that can run these models.

    Raises ``CapabilityError`` for a program that does not run, is something else, or does not know the options used
    here.
    """
    for options in (target, draft):
        if options is not None and engine_for(Path(options.path)) != "llama_cpp":
            raise InputError(f"--against runs GGUF files only, and {options.path} is not one: leave it out")
    if not executable.is_file():
        problem = "is a folder" if executable.is_dir() else "does not exist"
        raise InputError(f"{executable} {problem}: give the path of llama-server")
    said = _run_with_option(executable, "--version")
    version = next((line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("version:")), "")
    if not version:
        raise CapabilityError(f"{executable} --version names no version: give the path of llama-server")
    if "--spec-type" not in _run_with_option(executable, "--help"):
        raise CapabilityError(f"llama-server {version} does not know --spec-type: give a newer one")
    return version


def _run_with_option(executable: Path, option: str) -> str:
    try:
        outcome = subprocess.run([str(executable), option], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapabilityError(f"{executable} does not run ({error}): give the path of llama-server") from None
    return (outcome.stdout + outcome.stderr).decode("utf-8", errors="replace")


class LlamaServers:
    """Runs llama-server under one setting after another, with the target's threads, attention, layers and devices.

    Attributes:
        threads: of passes of one token, in words, and of wider ones where they differ.
    """

    def __init__(self, executable: Path, target: ModelOptions, draft: ModelOptions | None, context_length: int) -> None:
        threads = target.threads or usable_cores()
        wide = target.threads_batch or threads
        self.threads = f"{threads} threads" + (f", {wide} in wide passes" if wide != threads else "")
        self._command = [
            str(executable),
            *("-m", str(target.path), "-c", str(context_length), "-np", "1"),
            *("-t", str(threads), "-tb", str(wide)),
            *(() if target.flash_attention is None else ("-fa", "on" if target.flash_attention else "off")),
            *(("-fa", "on") if target.exact else ()),
            *(("-ctk", target.cache_type_k) if target.cache_type_k else ()),
            *(("-ctv", values) if (values := target.cache_type_v or ("bf16" if target.exact else None)) else ()),
            *("-ngl", str(target.gpu_layers) if target.gpu_layers >= 0 else "all"),
            *(("-dev", ",".join(target.devices)) if target.devices else ()),
            # Prompts are read anew each time: llama-server's prompt cache is off.
            *("--cache-ram", "0", "--host", _HOST),
        ]
        self._draft: list[str] = []
        if draft is not None:
            self._draft = [
                *("-md", str(draft.path)),
                *("-ngld", str(draft.gpu_layers) if draft.gpu_layers >= 0 else "all"),
                *(("-devd", ",".join(draft.devices)) if draft.devices else ()),
                *(("-ctkd", draft.cache_type_k) if draft.cache_type_k else ()),
                *(("-ctvd", draft.cache_type_v) if draft.cache_type_v else ()),
                *(("-td", str(draft.threads)) if draft.threads else ()),
                # llama-server's help says that the default is -td; it is the target's -tb.
                *(("-tbd", str(draft_batch)) if (draft_batch := draft.threads_batch or draft.threads) else ()),
            ]

    def contestant(self, variant: Variant) -> LlamaServer:
        """Return a contestant with a variant's setting."""
        return LlamaServer(variant.name, self.command(variant), drafts=bool(variant.drafters))

    def command(self, variant: Variant) -> list[str]:
        """Return the program and its arguments for a variant, but for the port."""
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
        return self._command + (["--spec-type", ",".join(types), *arguments] if types else [])


class LlamaServer:
    """llama-server with one setting; its command lacks the port."""

    def __init__(self, name: str, command: list[str], *, drafts: bool) -> None:
        self._name = name
        self._command = command
        self._drafts = drafts

    def answer(self, task: Task, temperature: float, stopped: Stop) -> Answer:
        """Return the answer to a task, timed as llama-server times it.

        Raises ``EngineError`` where the server could not be started, failed, or does not draft though it should.
        """
        options = task.options(temperature)
        body: dict[str, Any] = {name: value for name, value in options.items() if name in _SAMPLING}
        body |= {
            "prompt": list(task.prompt_ids),
            "n_predict": options["max_tokens"],
            "ignore_eos": options["ignore_end"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        with self._start_server(stopped) as ask:
            if self._drafts and not all(slot.get("speculative", True) for slot in ask("/slots", None)):
                raise EngineError(f"{self._name} serves without drafting: see its own messages for why")
            said = ask("/completion", body)
        try:
            token_ids, timings = said["tokens"], said["timings"]
            # llama-server counts from the first token on, which comes with the prompt.
            seconds = timings["predicted_ms"] / 1e3
        except (LookupError, TypeError):
            raise EngineError(f"{self._name} gave no tokens and timings: give a newer llama-server") from None
        num_accepted = int(timings.get("draft_n_accepted", 0))
        # Every round ends with a token of the target's own.
        rounds = max(len(token_ids) - 1 - num_accepted, 0)
        return Answer(token_ids, seconds, rounds, int(timings.get("draft_n", 0)), num_accepted)

    @contextmanager
    def _start_server(self, stopped: Stop) -> Iterator[_Client]:
        """Start the program, wait until it has loaded the model, yield a client for it, and end it."""
        with socket.socket() as free:
            free.bind((_HOST, 0))
            port = free.getsockname()[1]
        with tempfile.TemporaryFile() as log, ThreadPoolExecutor(max_workers=1) as pool:
            try:
                process = subprocess.Popen(
                    [*self._command, "--port", str(port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                raise EngineError(f"{self._name} does not start: {error}") from error
            ask = _Client(self._name, f"http://{_HOST}:{port}", process, pool, stopped)
            try:
                give_up_s = time.monotonic() + _START_S
                while not ask.is_healthy():
                    if time.monotonic() > give_up_s:
                        raise EngineError(f"{self._name} did not load the model in {_START_S:.0f} s")
                    time.sleep(_POLL_S)
                yield ask
            except (OSError, http.client.HTTPException, ValueError) as error:
                if stopped():
                    # An interrupt on the terminal is for the server, too.
                    raise Stopped from None
                why = str(error) or type(error).__name__
                if not isinstance(error, ValueError) and (status := _exit_status(process)) is not None:
                    log.seek(0)
                    words = log.read().decode("utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
                    why = f"it ended with status {status}: {words[-1].strip()}"
                raise EngineError(f"{self._name} failed: {why}") from error
            finally:
                # A thread that still waits for an answer gets an error, so the pool can end.
                process.terminate()
                try:
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


class _Client:
    """Asks a running server; a request waits in a thread, so that an interrupt is heard meanwhile."""

    def __init__(
        self, name: str, url: str, process: subprocess.Popen[bytes], pool: ThreadPoolExecutor, stopped: Stop
    ) -> None:
        self._name = name
        self._url = url
        self._process = process
        self._pool = pool
        self._stopped = stopped

    def __call__(self, path: str, body: dict[str, Any] | None) -> Any:
        """Return what a path answers, read as JSON.

        Raises ``ConnectionError`` where the program is gone, and ``ValueError`` where it refuses or answers something
        else.
        """
        return json.loads(self._wait(self._pool.submit(_send_request, self._url + path, body, _ANSWER_S)))

    def is_healthy(self) -> bool:
        """Whether the model is loaded: until then the server refuses, or says that it is busy."""
        try:
            self._wait(self._pool.submit(_send_request, f"{self._url}/health", None, _HEALTH_S))
        except (OSError, http.client.HTTPException, ValueError):
            if self._process.poll() is not None:
                raise ConnectionError(f"{self._name} is gone") from None
            return False
        return True

    def _wait(self, future: Future[_Result]) -> _Result:
        while not future.done():
            if self._stopped():
                raise Stopped
            wait([future], _POLL_S)
        return future.result()


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    """Return the status of a process whose connection broke: it may take a moment to end."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


def _send_request(url: str, body: dict[str, Any] | None, timeout_s: float) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            found: bytes = response.read()
            return found
    except urllib.error.HTTPError as error:
        raise ValueError(error.read().decode("utf-8", errors="replace").strip() or str(error)) from error
