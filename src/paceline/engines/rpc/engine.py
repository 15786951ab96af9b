"""A GGUF model whose layers lie on other machines, run by a process of its own.

llama.cpp ends the process that calls it where a worker is lost, at whatever call, so that process is not this one::

    this process                          the one that has the model                     workers
    RpcEngine ── call, as plain data ──►  LlamaCppEngine ── tensors, one round trip ──►  layers
              ◄─ answer, or an error ───                 ◄───────── logits ───────────
    shared rows ◄──────── logits ────────
    Watch ────────────────────────── heartbeats ──────────────────────────────────────►

Calls go through a socket, logits through memory that both share. When the process or a worker is gone, whatever is
asked raises ``EngineError`` with the reason, and :class:`~paceline.engines.rpc.failover.FailoverEngine` goes on
elsewhere. The vocabulary is here, as it takes no layers.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import IO, Any, Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ClosedError, EngineError, ModelWarning
from paceline.engines.base import EngineCapabilities, SavedSequence, Step
from paceline.engines.llama_cpp.loading import open_vocabulary
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.options import ModelOptions
from paceline.engines.rpc.process import Hello
from paceline.engines.rpc.workers import Watch, check_workers

_PROGRAM: Final = """
import sys
sys.path[:] = sys.argv[3:]
from paceline.engines.rpc.process import run
run(int(sys.argv[1]), int(sys.argv[2]))
"""

_SILENCE_S: Final = 1.5
"""Seconds without a heartbeat after which a worker is given up."""
_LOADING_SILENCE_S: Final = 30.0
"""Seconds of silence that are allowed while weights are sent, which heartbeats queue up behind."""


class RpcEngine:
    """A GGUF model run by another process. See :class:`~paceline.engines.base.Engine` for the contract.

    Args:
        options: what to load and how; without ``rpc`` all layers lie in the other process.
        batch_rows: most rows of one pass; ``None`` as :class:`~paceline.engines.llama_cpp.LlamaCppEngine` has it.

    Raises:
        InputError: a worker cannot be used, or the model cannot be loaded.
        EngineError: a worker was lost meanwhile.
    """

    def __init__(self, options: ModelOptions, *, batch_rows: int | None = None) -> None:
        if os.name != "posix":
            raise CapabilityError("layers on other machines (`rpc`) take Linux or macOS: leave `rpc` out")
        if options.rpc:
            check_workers(options.rpc)
        with ExitStack() as stack:
            self._vocabulary: GgufVocabulary = stack.enter_context(open_vocabulary(Path(options.path)))
            self._process = stack.enter_context(contextlib.closing(ModelProcess(options)))
            hello = self._process.load(options, batch_rows)
            self._description, self._capabilities = hello.description, hello.capabilities
            self._rows = self._process.rows((self._capabilities.max_outputs, self._vocabulary.size))
            resources = stack.pop_all()
        self._finalizer = weakref.finalize(self, resources.close)
        self._generation = 0

    @property
    def trouble(self) -> str | None:
        """Why nothing can be run any more, in one line; ``None`` where it can."""
        return self._process.trouble

    @property
    def description(self) -> str:
        self._check_open()
        return self._description

    @property
    def vocabulary(self) -> GgufVocabulary:
        self._check_open()
        return self._vocabulary

    @property
    def capabilities(self) -> EngineCapabilities:
        self._check_open()
        return self._capabilities

    def open(self) -> int:
        return int(self._call("open"))

    def forward(self, steps: Sequence[Step]) -> _Output:
        # Ranges and arrays become lists of Python's numbers, whatever the caller has.
        plain = [
            Step(
                step.sequence,
                [int(token) for token in step.token_ids],
                [int(parent) for parent in step.parents],
                [int(row) for row in step.outputs],
                step.states,
            )
            for step in steps
        ]
        self._generation += 1
        self._call("forward", plain)
        return _Output(self, self._rows, [len(step.outputs) for step in plain])

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        self._call("commit", sequence, list(path))

    def length(self, sequence: int) -> int:
        return int(self._call("length", sequence))

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        raise self._no_states()

    def first_state(self, sequence: int) -> int:
        raise self._no_states()

    def fork(self, sequence: int) -> int:
        return int(self._call("fork", sequence))

    def trim(self, sequence: int, length: int) -> None:
        self._call("trim", sequence, length)

    def saved_bytes(self, sequence: int) -> int:
        return int(self._call("saved_bytes", sequence))

    def save(self, sequence: int) -> SavedSequence:
        """Copy the committed tokens' state to memory of the other process, where it stays."""
        saved: SavedSequence = self._call("save", sequence)
        return SavedSequence(saved.length, saved.num_bytes, saved.floor, _Saved(self._process, int(str(saved.state))))

    def restore(self, saved: SavedSequence) -> int:
        self._check_open()
        if not isinstance(saved.state, _Saved) or saved.state.process is not self._process:
            raise ValueError("this sequence was saved by another engine: feed its tokens")
        return int(self._call("restore", saved.state.number))

    def close_sequence(self, sequence: int) -> None:
        self._call("close_sequence", sequence)

    def close(self) -> None:
        self._finalizer()

    def _call(self, name: str, *arguments: object) -> Any:
        self._check_open()
        return self._process.call(name, *arguments)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("the engine is closed")

    def _no_states(self) -> CapabilityError:
        self._check_open()
        return CapabilityError("states stay where a model's layers are: load it without `rpc` to draft by a head")


class _Output:
    """Logits of one pass, which is over: rows of the shared memory, in the order of steps and their outputs."""

    __slots__ = ("_counts", "_engine", "_generation", "_rows")

    def __init__(self, engine: RpcEngine, rows: FloatArray, counts: Sequence[int]) -> None:
        self._engine = engine
        self._generation = engine._generation
        self._rows = rows
        self._counts = counts

    def wait(self) -> None:
        self._check_valid()

    def logits(self, step: int, output: int) -> FloatArray:
        self._check_valid()
        if not 0 <= output < self._counts[step]:
            raise IndexError(f"step {step} has {self._counts[step]} outputs, not one numbered {output}")
        row: FloatArray = self._rows[sum(self._counts[:step]) + output]
        return row

    def _check_valid(self) -> None:
        self._engine._check_open()
        if self._generation != self._engine._generation:
            raise EngineError("the engine has run another pass since; read logits before the next one")


class _Saved:
    """A saved sequence that the other process keeps until this is forgotten."""

    __slots__ = ("__weakref__", "number", "process")

    def __init__(self, process: ModelProcess, number: int) -> None:
        self.process = process
        self.number = number
        weakref.finalize(self, process.forgotten.append, number)


class ModelProcess:
    """The process that has the model, from its start to its end.

    Attributes:
        trouble: why it cannot be asked any more, in one line; ``None`` where it can.
        forgotten: numbers of saved sequences that it may drop, told with the next call.
    """

    def __init__(self, options: ModelOptions) -> None:
        self.trouble: str | None = None
        self.forgotten: deque[int] = deque()
        self._pid = os.getpid()
        self._name = Path(options.path).name
        self._lost_worker = threading.Event()
        self._calls = 0
        self._watch: Watch | None = None
        ours, theirs = socketpair()
        with theirs, ExitStack() as stack:
            self._memory = stack.enter_context(tempfile.TemporaryFile(dir=_shared_memory()))
            self._stderr: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._connection = stack.enter_context(Connection(ours.detach()))
            # Isolated (-I), as a file in the current folder may have the name of a module; and in a session of its own,
            # as Ctrl-C in the terminal would reach both processes.
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-c", _PROGRAM),
                    *(str(theirs.fileno()), str(self._memory.fileno())),
                    *sys.path,
                ],
                stdin=subprocess.PIPE,  # its end tells the process that this one ended
                stdout=subprocess.DEVNULL,
                stderr=None if options.verbose else self._stderr,
                env={**os.environ, "GGML_NO_BACKTRACE": "1"},
                pass_fds=(theirs.fileno(), self._memory.fileno()),
                start_new_session=True,
            )
            self._resources = stack.pop_all()

    def load(self, options: ModelOptions, batch_rows: int | None) -> Hello:
        """Have the model loaded, and say what was loaded."""
        if options.rpc:
            self._watch = Watch(options.rpc, self._lose_worker, silence_s=_LOADING_SILENCE_S)
        hello: Hello = self.call("load", options, batch_rows)
        if self._watch is not None:
            self._watch.silence_s = _SILENCE_S
        for message in hello.warnings:
            warnings.warn(message, ModelWarning, stacklevel=5)
        return hello

    def rows(self, shape: tuple[int, int]) -> FloatArray:
        """Return the memory ``[outputs, vocab]`` that the process writes logits to, to be read only."""
        rows = np.frombuffer(mmap.mmap(self._memory.fileno(), 0, prot=mmap.PROT_READ), np.float32)
        return rows.reshape(shape)

    def call(self, name: str, *arguments: object) -> Any:
        """Have the process do something, and return or raise what came of it.

        Raises:
            EngineError: the process or a worker is gone.
            CapabilityError: this process is a fork of the one that opened the engine.
        """
        if os.getpid() != self._pid:
            raise CapabilityError(
                "this process was forked after a model was loaded over `rpc`: start processes with "
                "multiprocessing.get_context('spawn'), or load models after the fork only"
            )
        if self.trouble is not None:
            raise EngineError(self.trouble)
        self._calls += 1
        forgotten = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
        try:
            self._connection.send((self._calls, forgotten, name, arguments))
            number, result, error = 0, None, None
            while number != self._calls:  # answers to calls that an interrupt ended are passed over
                number, result, error = self._connection.recv()
        except (OSError, EOFError):
            self.trouble = self._why_it_ended()
            raise EngineError(self.trouble) from None
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self.trouble = self.trouble or "the engine is closed"
        if self._watch is not None:
            self._watch.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._resources.close()

    def _lose_worker(self, why: str) -> None:
        """End the process, which waits for a worker that is gone. Called by the thread that watches."""
        self.trouble = self.trouble or why
        self._lost_worker.set()
        self._process.kill()

    def _why_it_ended(self) -> str:
        # llama.cpp may have noticed before the heartbeats did, and says nothing of use.
        if self._watch is not None and self._lost_worker.wait(_SILENCE_S):
            assert self.trouble is not None
            return self.trouble
        self._process.kill()
        status = self._process.wait()
        why = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        self._stderr.seek(0)
        *_, last = self._stderr.read().decode("utf-8", errors="replace").strip().splitlines() or [""]
        return f"the process that ran {self._name} ended {why}{f': {last}' if last else ''}"


def _shared_memory() -> str | None:
    """Return a folder of files that lie in memory; ``None`` for the usual one of files that do not last."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
