"""The process that has a model whose layers lie on other machines: what it is asked, it does, one call at a time."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import EngineError, PacelineError
from paceline.engines.base import EngineCapabilities, SavedSequence, Step
from paceline.engines.llama_cpp import LlamaCppEngine, rpc
from paceline.engines.options import ModelOptions
from paceline.engines.rpc.addresses import parse_address

_STDIN: Final = 0
"""File descriptor of standard input."""


@dataclass(frozen=True, slots=True)
class Hello:
    """What was loaded.

    Attributes:
        warnings: what is to be said about it.
    """

    description: str
    capabilities: EngineCapabilities
    warnings: tuple[str, ...]


def run(connection: int, memory: int) -> None:
    """Answer calls until the other end of the connection closes.

    Args:
        connection: file descriptor of the socket that calls come through.
        memory: that of the file that logits are written to.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    host = _Host(memory)
    with Connection(connection) as calls:
        while True:
            try:
                number, forgotten, name, arguments = calls.recv()
            except EOFError:
                return
            host.forget(forgotten)
            result, error = None, None
            try:
                result = getattr(host, name)(*arguments)
            except (PacelineError, ValueError) as raised:
                error = raised
            except Exception as raised:  # whatever it is, the other process is to know
                error = EngineError(f"{type(raised).__name__}: {raised}")
            calls.send((number, result, error))


class _Host:
    """The engine, the rows that its logits are copied to, and the sequences that it saved."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._saved: dict[int, SavedSequence] = {}
        self._numbers = itertools.count()
        self._rows: FloatArray

    def load(self, options: ModelOptions, batch_rows: int | None) -> Hello:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if options.rpc:
                rpc.add_workers([str(parse_address(text)) for text in options.rpc])
            self._engine = LlamaCppEngine(dataclasses.replace(options, stream=False), batch_rows=batch_rows)
        capabilities = self._engine.capabilities
        shape = capabilities.max_outputs, self._engine.vocabulary.size
        os.ftruncate(self._memory, shape[0] * shape[1] * np.dtype(np.float32).itemsize)
        self._rows = np.frombuffer(mmap.mmap(self._memory, 0), np.float32).reshape(shape)
        return Hello(self._engine.description, capabilities, tuple(str(each.message) for each in caught))

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._saved[number]

    def open(self) -> int:
        return self._engine.open()

    def forward(self, steps: Sequence[Step]) -> None:
        output = self._engine.forward(steps)
        output.wait()
        wanted = ((number, row) for number, step in enumerate(steps) for row in range(len(step.outputs)))
        for place, (number, row) in enumerate(wanted):
            self._rows[place] = output.logits(number, row)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        self._engine.commit(sequence, path)

    def length(self, sequence: int) -> int:
        return self._engine.length(sequence)

    def fork(self, sequence: int) -> int:
        return self._engine.fork(sequence)

    def trim(self, sequence: int, length: int) -> None:
        self._engine.trim(sequence, length)

    def saved_bytes(self, sequence: int) -> int:
        return self._engine.saved_bytes(sequence)

    def save(self, sequence: int) -> SavedSequence:
        """Keep a saved sequence here; what is returned has its number for its state."""
        saved, number = self._engine.save(sequence), next(self._numbers)
        self._saved[number] = saved
        return dataclasses.replace(saved, state=number)

    def restore(self, number: int) -> int:
        return self._engine.restore(self._saved[number])

    def close_sequence(self, sequence: int) -> None:
        self._engine.close_sequence(sequence)


def _end_with_parent() -> None:
    """Wait until the parent lets go of the pipe: a call that waits for a worker would not hear of it."""
    while os.read(_STDIN, 64):
        pass
    os._exit(1)
