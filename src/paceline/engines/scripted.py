"""An engine whose model is a function and whose time is virtual: exact, fast, and public.

It computes in float64, so passes of any width agree to the last bit; whatever differs between plain and speculative
decoding on it is a fault of the algorithm. Its clock moves by a cost curve, so planning can be tested without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.clock import VirtualClock
from paceline.core.errors import CapabilityError, ClosedError, InputError, NoRoomError
from paceline.core.noise import uniform_from_words
from paceline.core.vocabulary import InfillTokens
from paceline.engines.base import EngineCapabilities, SavedSequence, Step
from paceline.engines.cell_count import CellCount
from paceline.engines.pending_tree import PendingTree, check_pass
from paceline.engines.state_track import StateTrack, states_for_rows
from paceline.vocabularies.length import TokenReach

LogitFunction: TypeAlias = Callable[[Sequence[int]], Float64Array]
"""A model: takes all tokens so far (at least one) and returns the logits ``[vocab]`` of the next."""

HeadRow: TypeAlias = tuple[int, FloatArray]
"""What a head reads of a token: its id, and a state ``[width]``."""

HeadFunction: TypeAlias = Callable[[Sequence[HeadRow]], Float64Array]
"""A head: takes all rows so far and returns the logits ``[vocab]`` of the next token."""

StateFunction: TypeAlias = Callable[[Sequence[Any]], FloatArray]
"""The state ``[width]`` that the last of all tokens so far leaves; of a head, the last of all rows."""

CostCurve: TypeAlias = Callable[[int, int], float]
"""Seconds of a pass, from its number of rows and the number of tokens in the cache before it."""


_SAVED_TOKEN_BYTES = 4
"""Host memory of a saved token."""


class ScriptedVocabulary:
    """Token ids that stand for given bytes; by default id ``i`` is the ``i``-th of a run of single characters.

    Args:
        pieces: bytes of each token id; an empty one is padding.
        end_ids: end-of-generation tokens; their pieces name them and add no text.
        kind: see :attr:`~paceline.core.vocabulary.Vocabulary.kind`.
    """

    def __init__(self, pieces: Sequence[bytes], end_ids: Iterable[int] = (), kind: str = "scripted") -> None:
        self.kind = kind
        self.end_ids = frozenset(end_ids)
        self._spellings = list(pieces)
        self._pieces = [b"" if i in self.end_ids else piece for i, piece in enumerate(pieces)]
        self._longest_first = sorted(
            (i for i, piece in enumerate(self._pieces) if piece), key=lambda i: -len(self._pieces[i])
        )

    @classmethod
    def of_size(cls, size: int, end_ids: Iterable[int] = ()) -> ScriptedVocabulary:
        first = ord("!")
        return cls([chr(first + i).encode() for i in range(size)], end_ids)

    @property
    def size(self) -> int:
        return len(self._pieces)

    @property
    def text_end_ids(self) -> frozenset[int]:
        """``None``: what ends an answer adds no text."""
        return frozenset()

    @property
    def control_ids(self) -> frozenset[int]:
        return self.end_ids

    @property
    def infill_tokens(self) -> InfillTokens:
        """None, unless a subclass has some."""
        return InfillTokens()

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Cut text into the longest pieces from left to right; there are no special tokens to add or to parse."""
        rest, token_ids = text.encode(), []
        while rest:
            token_id = next((i for i in self._longest_first if rest.startswith(self._pieces[i])), None)
            if token_id is None:
                raise InputError(f"no token of this vocabulary starts {rest[:8]!r}")
            token_ids.append(token_id)
            rest = rest[len(self._pieces[token_id]) :]
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def token_spelling(self, token_id: int) -> bytes | None:
        return self._spellings[token_id] or None

    def fewest_tokens(self, text: str) -> int:
        return TokenReach.of(self._spellings).fewest_tokens(text)


@dataclass(slots=True)
class _ScriptedSequence:
    """Rows are token ids, or a head's tokens with their states."""

    committed: list[Any]
    pending: PendingTree
    pending_rows: list[Any]
    track: StateTrack | None
    latest_pass: int = 0
    undoable: int = 0

    def rows_to(self, node: int) -> list[Any]:
        return self.committed + [self.pending_rows[i] for i in self.pending.path_to(node)]


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    engine: ScriptedEngine
    committed: tuple[Any, ...]
    track: StateTrack | None


class ScriptedOutput:
    """Logits of a pass, computed when they are read."""

    def __init__(self, model: LogitFunction | HeadFunction, prefixes: list[list[list[Any]]]) -> None:
        self._model = model
        self._prefixes = prefixes

    def wait(self) -> None:
        pass

    def logits(self, step: int, output: int) -> Float64Array:
        return self._model(self._prefixes[step][output])


class ScriptedEngine:
    """Runs a :data:`LogitFunction` behind the engine contract, or a :data:`HeadFunction`.

    Args:
        model: the function.
        vocabulary: its tokens; the model returns ``vocabulary.size`` logits.
        context_length: most tokens of one sequence.
        max_rows: most rows of one pass.
        max_outputs: most rows of one pass with logits; ``None`` for all.
        max_sequences: most sequences open at once.
        trees: whether pending trees may branch; not where rollback is bounded.
        max_rollback: rows that can be taken back, as of a recurrent model; ``None`` for any number.
        cells: tokens that all sequences together may hold; ``None`` for no limit.
        shares_passes: whether a pass may have rows of several sequences.
        state_of: the state that a token leaves, of ``state_width`` numbers; ``None`` where none are held.
        reads_states: whether ``model`` is a head, and reads tokens with states of that width.
        cost: seconds of a pass; by default 1.
        clock: moved by ``cost``.
    """

    description = "scripted model in float64"

    def __init__(
        self,
        model: LogitFunction | HeadFunction,
        vocabulary: ScriptedVocabulary,
        *,
        context_length: int = 4096,
        max_rows: int = 512,
        max_outputs: int | None = None,
        max_sequences: int = 64,
        trees: bool = True,
        max_rollback: int | None = None,
        cells: int | None = None,
        shares_passes: bool = True,
        state_of: StateFunction | None = None,
        state_width: int = 0,
        reads_states: bool = False,
        cost: CostCurve | None = None,
        clock: VirtualClock | None = None,
    ) -> None:
        self.vocabulary = vocabulary
        self.capabilities = EngineCapabilities(
            context_length=context_length,
            max_rows=max_rows,
            max_outputs=max_rows if max_outputs is None else max_outputs,
            max_sequences=max_sequences,
            cells=cells,
            trees=trees and max_rollback is None,
            max_rollback=max_rollback,
            logit_tolerance=0.0,
            shares_passes=shares_passes,
            state_width=state_width,
            reads_states=reads_states,
        )
        self.clock = clock or VirtualClock()
        self._model = model
        self._state_of = state_of
        self._cost = cost or (lambda rows, context: 1.0)
        self._sequences: dict[int, _ScriptedSequence] = {}
        self._cell_count = CellCount()
        self._next_handle = 0
        self._num_passes = 0
        self._closed = False

    def open(self) -> int:
        self._check_open()
        if len(self._sequences) >= self.capabilities.max_sequences:
            raise CapabilityError(
                f"{len(self._sequences)} sequences are open, which is this engine's limit: close one first"
            )
        handle = self._next_handle
        self._next_handle += 1
        track = None if self._state_of is None else StateTrack(self.capabilities.state_width)
        self._sequences[handle] = _ScriptedSequence([], PendingTree(), [], track)
        return handle

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        self._check_open()
        states = [self._sequence(step.sequence) for step in steps]
        sequences = [(state.pending, len(state.committed)) for state in states]
        rows = check_pass(steps, sequences, self.capabilities, self.vocabulary.size)
        if len(steps) > 1 and not self.capabilities.shares_passes:
            raise ValueError("a pass takes the rows of one sequence")
        rows_read = [self._rows(step) for step in steps]
        used = self._take_cells(rows)
        self._num_passes += 1
        prefixes = []
        for index, step in enumerate(steps):
            sequence = self._sequences[step.sequence]
            first = len(sequence.pending)
            sequence.pending.append(step.parents)
            sequence.pending_rows.extend(rows_read[index])
            sequence.latest_pass = self._num_passes
            most = self.capabilities.max_rollback or 0
            is_short = len(steps) == 1 or len(step.token_ids) <= most + 1
            sequence.undoable = min(most, len(step.token_ids) - 1) if is_short else 0
            if sequence.track is not None and self._state_of is not None:
                nodes = range(first, first + len(step.token_ids))
                sequence.track.append(np.stack([self._state_of(sequence.rows_to(node)) for node in nodes]))
            prefixes.append([sequence.rows_to(first + row) for row in step.outputs])
        self.clock.advance(self._cost(rows, used))
        return ScriptedOutput(self._model, prefixes)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        state = self._sequence(sequence)
        state.pending.check_path(path)
        self._check_rollback(state, len(state.pending) - len(path), len(state.committed) + len(path))
        state.committed += [state.pending_rows[node] for node in path]
        if state.track is not None:
            state.track.commit(path)
        self._drop_pending(state)

    def length(self, sequence: int) -> int:
        return len(self._sequence(sequence).committed)

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        return self._track(sequence).read(start, stop)

    def first_state(self, sequence: int) -> int:
        return self._track(sequence).start

    def fork(self, sequence: int) -> int:
        state = self._sequence(sequence)
        if len(state.pending):
            raise ValueError("a sequence with pending nodes cannot be forked: commit first")
        handle = self.open()
        state.undoable = 0
        self._cell_count.fork(sequence, handle, len(state.committed))
        self._sequences[handle].committed = list(state.committed)
        self._sequences[handle].track = None if state.track is None else state.track.copy()
        return handle

    def trim(self, sequence: int, length: int) -> None:
        state = self._sequence(sequence)
        if not 0 <= length <= len(state.committed):
            raise ValueError(f"cannot keep {length} of {len(state.committed)} committed tokens")
        self._check_rollback(state, len(state.committed) + len(state.pending) - length, length)
        self._cell_count.trim(sequence, length)
        del state.committed[length:]
        if state.track is not None:
            state.track.trim(length)
        self._drop_pending(state)

    def saved_bytes(self, sequence: int) -> int:
        return _SAVED_TOKEN_BYTES * len(self._sequence(sequence).committed)

    def save(self, sequence: int) -> SavedSequence:
        state = self._sequence(sequence)
        if len(state.pending):
            raise ValueError("a sequence with pending nodes cannot be saved: commit first")
        saved = _Saved(self, tuple(state.committed), None if state.track is None else state.track.copy())
        floor = 0 if self.capabilities.max_rollback is None else len(saved.committed)
        return SavedSequence(len(saved.committed), _SAVED_TOKEN_BYTES * len(saved.committed), floor, saved)

    def restore(self, saved: SavedSequence) -> int:
        self._check_open()
        if not isinstance(saved.state, _Saved) or saved.state.engine is not self:
            raise ValueError("another engine saved this sequence: restore it there")
        self._take_cells(saved.length)
        handle = self.open()
        self._sequences[handle].committed = list(saved.state.committed)
        self._sequences[handle].track = None if saved.state.track is None else saved.state.track.copy()
        return handle

    def close_sequence(self, sequence: int) -> None:
        self._sequence(sequence)
        self._cell_count.close(sequence)
        del self._sequences[sequence]

    def close(self) -> None:
        self._sequences.clear()
        self._closed = True

    def _rows(self, step: Step) -> list[Any]:
        if not self.capabilities.reads_states:
            return list(step.token_ids)
        state = self._sequences[step.sequence]
        read = states_for_rows(step, state.track, len(state.pending), self.capabilities.state_width)
        return list(zip(step.token_ids, np.array(read), strict=True))

    def _track(self, sequence: int) -> StateTrack:
        track = self._sequence(sequence).track
        if track is None:
            raise CapabilityError("this engine holds no states: load it for drafts from them")
        return track

    def _take_cells(self, more: int) -> int:
        used = self._cell_count.used({handle: len(state.committed) for handle, state in self._sequences.items()})
        used += sum(len(state.pending) for state in self._sequences.values())
        cells = self.capabilities.cells
        if cells is not None and used + more > cells:
            raise NoRoomError(f"{used} of {cells} cells are used and {more} more are needed")
        return used

    def _check_rollback(self, state: _ScriptedSequence, rows: int, length: int) -> None:
        if self.capabilities.max_rollback is None or rows == 0:
            return
        most = state.undoable if state.latest_pass == self._num_passes else 0
        if length > 0 and rows > most:
            raise CapabilityError(f"{rows} rows cannot be taken back, at most {most} of the latest pass: trim to 0")
        state.undoable = 0

    def _drop_pending(self, state: _ScriptedSequence) -> None:
        state.pending.clear()
        state.pending_rows.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this engine is closed")

    def _sequence(self, handle: int) -> _ScriptedSequence:
        self._check_open()
        state = self._sequences.get(handle)
        if state is None:
            raise ClosedError(f"sequence {handle} is not open")
        return state


def table_model(table: Float64Array) -> LogitFunction:
    """Return the Markov model whose logits after token ``t`` are ``table[t]``, ``[vocab, vocab]``."""
    return lambda tokens: table[tokens[-1]]


def random_model(vocab_size: int, *, seed: int, order: int = 3, spread: float = 2.0) -> LogitFunction:
    """Return a model with random but fixed logits, of deviation ``spread``, after every run of ``order`` tokens."""
    ids = np.arange(vocab_size, dtype=np.int64)
    memo: dict[tuple[int, ...], Float64Array] = {}

    def logits(tokens: Sequence[int]) -> Float64Array:
        context = tuple(tokens[-order:])
        row = memo.get(context)
        if row is None:
            state = np.random.SeedSequence((seed, *context)).generate_state(4)
            uniforms = uniform_from_words(ids, state.astype(np.int64).reshape(2, 2, 1))
            # The logistic quantile: bell-shaped, and exact in closed form. Its standard deviation is pi / sqrt(3).
            row = spread * np.log(uniforms / (1.0 - uniforms)) * (3.0**0.5 / np.pi)
            memo[context] = row
        return row

    return logits


def blended_model(first: LogitFunction, second: LogitFunction, weight: float) -> LogitFunction:
    """Return the model ``(1 - weight) * first + weight * second``: a draft at a chosen distance from its target."""
    return lambda tokens: (1.0 - weight) * first(tokens) + weight * second(tokens)
