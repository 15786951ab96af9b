"""Going on elsewhere when the workers of a model are lost.

What a sequence holds is its tokens, so any engine of the same model can take over: it reads them again, decided and
pending ones, and makes the pass that failed. Whoever decodes notes nothing but the time that takes, and a
``ModelWarning``. Drafts, seeds and sampling are the caller's, so the text is what it would have been.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from paceline.core.arrays import FloatArray
from paceline.core.errors import ClosedError, EngineError, InputError, ModelWarning
from paceline.core.vocabulary import Vocabulary
from paceline.engines.base import COMMITTED_END, Engine, EngineCapabilities, ForwardOutput, SavedSequence, Step

_T = TypeVar("_T")


class FragileEngine(Engine, Protocol):
    """An engine that may be lost whole."""

    @property
    def trouble(self) -> str | None:
        """Why nothing can be run any more, in one line; ``None`` where it can."""
        ...


@dataclass(slots=True)
class _Sequence:
    """What a sequence holds, and its handle in the engine that has it."""

    handle: int
    committed: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A saved sequence, the engine that saved it, and its tokens."""

    engine: Engine
    saved: SavedSequence
    token_ids: tuple[int, ...]


class FailoverEngine:
    """An engine, and another one of the same model for when it is lost.

    See :class:`~paceline.engines.base.Engine` for the contract.

    Args:
        first: is used until it is lost. It is closed with this one.
        open_next: opens the other engine.
    """

    def __init__(self, first: FragileEngine, open_next: Callable[[], Engine]) -> None:
        self._first = first
        self._open_next = open_next
        self._engine: Engine = first
        self._sequences: dict[int, _Sequence] = {}
        self._next_number = 0
        self._is_closed = False

    # --- what it is ---------------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        self._check_open()
        return self._engine.description

    @property
    def vocabulary(self) -> Vocabulary:
        self._check_open()
        return self._first.vocabulary  # others hold it, and it is the same

    @property
    def capabilities(self) -> EngineCapabilities:
        self._check_open()
        return self._engine.capabilities

    # --- sequences ----------------------------------------------------------------------------------------------------

    def open(self) -> int:
        return self._add(_Sequence(self._run(lambda engine: engine.open())))

    def forward(self, steps: Sequence[Step]) -> ForwardOutput:
        sequences = [self._get(step.sequence) for step in steps]

        def make_pass(engine: Engine) -> ForwardOutput:
            theirs = [
                Step(sequence.handle, step.token_ids, step.parents, step.outputs, step.states)
                for sequence, step in zip(sequences, steps, strict=True)
            ]
            return engine.forward(theirs)

        output = self._run(make_pass)
        for sequence, step in zip(sequences, steps, strict=True):
            sequence.pending.extend(step.token_ids)
            sequence.parents.extend(step.parents)
        return output

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        held = self._get(sequence)
        self._run(lambda engine: engine.commit(held.handle, path))
        held.committed.extend(held.pending[node] for node in path)
        held.pending, held.parents = [], []

    def length(self, sequence: int) -> int:
        return len(self._get(sequence).committed)

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        return self._engine.states(self._get(sequence).handle, start, stop)

    def first_state(self, sequence: int) -> int:
        return self._engine.first_state(self._get(sequence).handle)

    def fork(self, sequence: int) -> int:
        held = self._get(sequence)
        handle = self._run(lambda engine: engine.fork(held.handle))
        return self._add(_Sequence(handle, list(held.committed)))

    def trim(self, sequence: int, length: int) -> None:
        held = self._get(sequence)
        self._run(lambda engine: engine.trim(held.handle, length))
        del held.committed[length:]
        held.pending, held.parents = [], []

    def saved_bytes(self, sequence: int) -> int:
        held = self._get(sequence)
        return self._run(lambda engine: engine.saved_bytes(held.handle))

    def save(self, sequence: int) -> SavedSequence:
        held = self._get(sequence)
        saved = self._run(lambda engine: engine.save(held.handle))
        state = _Saved(self._engine, saved, tuple(held.committed))
        return SavedSequence(saved.length, saved.num_bytes, saved.floor, state)

    def restore(self, saved: SavedSequence) -> int:
        self._check_open()
        kept = saved.state
        if not isinstance(kept, _Saved):
            raise ValueError("this sequence was saved by another engine: feed its tokens")
        known: _Saved = kept

        def restore(engine: Engine) -> int:
            if known.engine is not engine:
                raise ValueError("this sequence was saved by another engine: feed its tokens")
            return engine.restore(known.saved)

        handle = self._run(restore)
        return self._add(_Sequence(handle, list(known.token_ids)))

    def close_sequence(self, sequence: int) -> None:
        held = self._get(sequence)
        self._run(lambda engine: engine.close_sequence(held.handle))
        del self._sequences[sequence]

    def close(self) -> None:
        self._is_closed = True
        self._engine.close()
        self._first.close()

    # --- going on elsewhere -------------------------------------------------------------------------------------------

    def _run(self, call: Callable[[Engine], _T]) -> _T:
        """Return what a call of the engine gives, by the other engine where this one is lost meanwhile."""
        self._check_open()
        try:
            return call(self._engine)
        except EngineError:
            if self._engine is not self._first or self._first.trouble is None:
                raise
        self._go_on()
        return call(self._engine)

    def _go_on(self) -> None:
        """Open the other engine, and have it read what sequences hold."""
        trouble = self._first.trouble
        try:
            engine = self._open_next()
        except (EngineError, InputError) as error:
            raise EngineError(f"{trouble}; and what was to go on instead cannot be opened: {error}") from error
        try:
            handles = [_read_again(engine, sequence) for sequence in self._sequences.values()]
        except BaseException:
            engine.close()
            raise
        for sequence, handle in zip(self._sequences.values(), handles, strict=True):
            sequence.handle = handle
        self._engine = engine
        warnings.warn(f"{trouble}: going on with {engine.description}", ModelWarning, stacklevel=2)

    def _add(self, sequence: _Sequence) -> int:
        number = self._next_number
        self._next_number += 1
        self._sequences[number] = sequence
        return number

    def _get(self, sequence: int) -> _Sequence:
        self._check_open()
        held = self._sequences.get(sequence)
        if held is None:
            raise ClosedError(f"sequence {sequence} is not open")
        return held

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the engine is closed")


def _read_again(engine: Engine, held: _Sequence) -> int:
    """Open a sequence that holds the same tokens, decided and pending, and return its handle."""
    most = engine.capabilities.max_rows
    sequence = engine.open()
    for start in range(0, len(held.committed), most):
        token_ids = held.committed[start : start + most]
        rows = len(token_ids)
        engine.forward([Step(sequence, token_ids, range(COMMITTED_END, rows - 1), [])])
        engine.commit(sequence, range(rows))
    for start in range(0, len(held.pending), most):
        stop = start + most
        engine.forward([Step(sequence, held.pending[start:stop], held.parents[start:stop], [])])
    return sequence
