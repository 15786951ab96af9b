"""The engine contract on llama.cpp: sequences, passes, and what is decided of them.

Of a model with attention :mod:`.lines` says which native ids hold which tokens.

A recurrent model has no lines: of each sequence there is one state, and snapshots of it, which ``native_calls.py`` is
about. Commit steps back over rejected rows and pads at once; without a commit, pads are dropped before the next call.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api
import numpy as np
import numpy.typing as npt

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ClosedError, EngineError, NoRoomError
from paceline.engines.base import COMMITTED_END, EngineCapabilities, SavedSequence, Step
from paceline.engines.cell_count import CellCount
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.lines import Lines, NativeBatch, NativeSequence, Placement
from paceline.engines.llama_cpp.loading import LoadedModel, load_model
from paceline.engines.llama_cpp.native import get_logits_address
from paceline.engines.llama_cpp.native_calls import deal_steps
from paceline.engines.llama_cpp.state_rows import StateRows
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.memory import Footprint, MemoryPlan
from paceline.engines.options import ModelOptions
from paceline.engines.pending_tree import check_pass
from paceline.engines.process_forks import native_threads
from paceline.engines.state_track import StateTrack
from paceline.engines.warming import warm_up
from paceline.models.fingerprints import fingerprint


@dataclass(frozen=True, slots=True, eq=False)
class _SavedState:
    """What llama.cpp wrote of a sequence, the context that can read it, and states where they are held."""

    context: Any
    data: npt.NDArray[np.uint8]
    track: StateTrack | None


class _Output:
    """Logits of one pass, read from llama.cpp's own buffer when asked for.

    ``generation`` is the last native call of the pass, in whose buffer the rows of each step begin at ``firsts``. Rows
    of steps that were in an earlier native call are in ``copied``.
    """

    __slots__ = ("_copied", "_counts", "_engine", "_firsts", "_generation", "_rows")

    def __init__(
        self,
        engine: LlamaCppEngine,
        generation: int,
        firsts: Sequence[int],
        counts: Sequence[int],
        copied: Mapping[int, FloatArray],
    ) -> None:
        self._engine = engine
        self._generation = generation
        self._firsts = firsts
        self._counts = counts
        self._copied = copied
        self._rows: FloatArray | None = None

    def wait(self) -> None:
        self._engine._synchronize(self._generation)

    def logits(self, step: int, output: int) -> FloatArray:
        if not 0 <= output < self._counts[step]:
            raise IndexError(f"step {step} has {self._counts[step]} outputs, not one numbered {output}")
        rows = self._rows
        if rows is None or self._generation != self._engine._generation:
            rows = self._rows = self._engine._logit_rows(self._generation)
        copied = self._copied.get(step)
        row: FloatArray = rows[self._firsts[step] + output] if copied is None else copied[output]
        return row


class LlamaCppEngine:
    """A GGUF model on llama.cpp. See :class:`~paceline.engines.base.Engine` for the contract.

    Args:
        options: what to load and how.
        batch_rows: see :func:`~paceline.engines.llama_cpp.loading.load_model`, as for the others.
        output_rows: most rows of one pass whose logits can be asked for.
    """

    def __init__(self, options: ModelOptions, *, batch_rows: int | None = None, output_rows: int = 256) -> None:
        self._start(load_model(options, batch_rows=batch_rows, output_rows=output_rows))

    def _start(self, loaded: LoadedModel) -> None:
        self._vocabulary = GgufVocabulary(loaded.model)
        self._vocabulary_size = self._vocabulary.size
        self._finalizer = weakref.finalize(self, _release, loaded, self._vocabulary)
        self._loaded = loaded
        self._path = Path(loaded.options.path)
        self._description = loaded.description
        settings = loaded.settings
        self._recurrent = settings.recurrent
        self._has_keepers = settings.keepers
        # Of a part of the rows of some heads llama.cpp gives the wrong ones, or ends its process.
        self._gives_all_rows = loaded.encodes or loaded.reads_cache

        self._next_handle = 0
        self._threads = settings.threads
        self._threads_in_use = settings.threads.most
        self._use_context()
        # Recurrent models only: cells of their layers with attention, and sequences that have pads.
        self._cells = CellCount()
        self._padded: list[NativeSequence] = []
        self._generation = 0
        self._logits_address = 0
        self._logits_view: npt.NDArray[np.float32] | None = None
        self._stream = loaded.stream
        self._memory_plan: MemoryPlan | None = None
        if settings.devices:
            self._warm_up()
        if loaded.stream is not None and loaded.room is not None:
            try:
                self._memory_plan = loaded.stream.start(self._path, loaded.room, self._try_rows)
            except BaseException:
                self.close()
                raise
            self._description += ", layers streamed"

    def _use_context(self) -> None:
        """Begin with the context that was loaded, in which no sequence is open."""
        loaded, settings = self._loaded, self._loaded.settings
        self._context: Any = loaded.context
        self._memory: Any = api.llama_get_memory(loaded.context)
        self._capabilities = loaded.capabilities
        self._state_rows = StateRows(loaded)
        # What is read of a state, which an encoder may have made narrower.
        read_width = self._state_rows.width if self._capabilities.reads_states else 0
        if loaded.block is not None:
            read_width = self._capabilities.state_width
        self._batch = NativeBatch(settings.native_rows, settings.max_ids, read_width)
        self._lines = Lines(
            self._memory,
            self._batch,
            max_ids=settings.max_ids,
            branches=settings.branches,
            # Pads may lie behind the end of the context.
            positions=self._capabilities.context_length + (self._capabilities.max_rollback or 0),
        )
        self._sequences = self._lines.sequences

    def _warm_up(self) -> None:
        warm_up(self)

    def _try_rows(self, rows: int) -> FloatArray:
        """Return the logits ``[rows, vocab]`` of a chain of some tokens."""
        sequence = self.open()
        try:
            token_ids = [(17 * row + 5) % self._vocabulary_size for row in range(rows)]
            output = self.forward([Step(sequence, token_ids, [COMMITTED_END, *range(rows - 1)], list(range(rows)))])
            return np.stack([output.logits(0, row) for row in range(rows)])
        finally:
            self.close_sequence(sequence)

    # --- what it is ---------------------------------------------------------------------------------------------------

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

    @property
    def slow_passes(self) -> LayerStream | None:
        """Passes that wait for layers; ``None`` where no layers are read while they are used."""
        self._check_open()
        return self._stream if self._stream is not None and self._stream.is_streaming else None

    @property
    def memory_plan(self) -> MemoryPlan | None:
        self._check_open()
        return self._memory_plan

    @property
    def footprint(self) -> Footprint:
        """Memory of the process that loading this model took."""
        self._check_open()
        return self._loaded.footprint

    @property
    def fused_attention(self) -> bool | None:
        """Whether attention is one fused kernel; ``None`` where that is fixed by the user or left to llama.cpp."""
        self._check_open()
        return self._loaded.fused_attention

    def fuse_attention(self, fused: bool) -> None:
        """Fuse attention or not, where :attr:`fused_attention` is not ``None`` and no sequence is open.

        Raises ``InputError`` where there is no memory for another context; the engine is closed then.
        """
        assert self.fused_attention is not None
        assert not self._sequences
        assert not self._loaded.heads  # they may read the cache, which goes with its context
        if fused == self.fused_attention:
            return
        self._context = self._memory = self._logits_view = None
        self._generation += 1
        try:
            self._loaded.fuse_attention(fused)
        except BaseException:
            self.close()
            raise
        self._use_context()
        self._threads_in_use = self._threads.most

    # --- sequences ----------------------------------------------------------------------------------------------------

    def open(self) -> int:
        return self._open(self._capabilities.max_sequences)

    def _open(self, most: int) -> int:
        self._check_open()
        if len(self._sequences) >= most:
            raise CapabilityError(
                f"{len(self._sequences)} sequences are open, which is the most; close one or raise max_sequences"
            )
        handle = self._next_handle
        self._next_handle += 1
        self._lines.open(handle, self._state_rows.new_track(), with_keeper=self._has_keepers)
        return handle

    def length(self, sequence: int) -> int:
        return self._state(sequence).committed

    def fork(self, sequence: int) -> int:
        """Share the committed tokens of a sequence.

        Beyond the contract, ``NoRoomError`` is raised where there are no cells for a recurrent sequence that was
        stepped back and had no pass since.
        """
        state = self._state(sequence)
        if state.pending.parents:
            raise ValueError(f"sequence {sequence} has {len(state.pending)} pending nodes; commit before forking")
        settings = self._loaded.settings
        if state.rewound or (settings.apart and (self._recurrent or not settings.window)):
            # llama.cpp would share the state as it was before the step back, and copies from one cache to another when
            # the next pass comes. What it writes out is the right one, and there at once.
            return self.restore(self.save(sequence))
        handle = self.open()
        copy = self._sequences[handle]
        copy.track = None if state.track is None else state.track.copy()
        # A recurrent state is shared until either has a pass; what steps one of them back would step back both.
        state.snapshots = 0
        self._lines.share(state, copy)
        if self._recurrent:
            self._cells.fork(sequence, handle, state.committed)
        return handle

    def trim(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` committed tokens.

        Recurrent models cannot step back far, and restored sequences of models with sliding windows not below their
        floor.
        """
        state = self._state(sequence)
        if not 0 <= length <= state.committed:
            raise ValueError(f"cannot keep {length} of {state.committed} committed tokens")
        if self._recurrent:
            self._step_back(state, length)
            self._cells.trim(sequence, length)
        else:
            if 0 < length < state.floor:
                raise CapabilityError(
                    f"a sequence of a model with sliding windows that was restored with {state.floor} tokens cannot be "
                    f"trimmed to {length}; trim to 0 and feed the tokens again"
                )
            self._lines.trim(state, length)
        state.settle(length)
        if state.track is not None:
            self._state_rows.copy_expected()
            state.track.trim(length)

    def saved_bytes(self, sequence: int) -> int:
        state = self._state(sequence)
        return self._native_bytes(state) + (0 if state.track is None else state.track.num_bytes)

    def _native_bytes(self, state: NativeSequence) -> int:
        return int(api.llama_state_seq_get_size(self._context, state.main))

    def save(self, sequence: int) -> SavedSequence:
        """Copy the committed tokens' state to host memory.

        Of layers with sliding windows llama.cpp writes what their next token sees and nothing older, and of recurrent
        ones the latest state: what is restored goes on from there, and cannot be trimmed. With sliding windows and an
        engine of one sequence nothing can be saved.
        """
        state = self._state(sequence)
        if state.pending.parents:
            raise ValueError(f"sequence {sequence} has {len(state.pending)} pending nodes; commit before saving")
        if self._loaded.settings.window and not (self._recurrent or self._has_keepers):
            # After a restore its old tokens would lie ahead of it in the cache and be overwritten too early.
            raise CapabilityError(
                "a model with sliding windows whose engine has one sequence cannot save it: load it for two or more"
            )
        data = self._save_bytes(sequence)
        floor = state.committed if self._recurrent or state.committed > self._loaded.settings.window > 0 else 0
        track = None if state.track is None else state.track.copy()
        num_bytes = len(data) + (0 if track is None else track.num_bytes)
        return SavedSequence(state.committed, num_bytes, floor, _SavedState(self._context, data, track))

    def _save_bytes(self, sequence: int) -> npt.NDArray[np.uint8]:
        data = np.empty(self._native_bytes(self._state(sequence)), np.uint8)
        written = api.llama_state_seq_get_data(self._context, _as_bytes(data), len(data), self._state(sequence).main)
        if written != len(data):
            raise EngineError(f"llama.cpp wrote {written} of the {len(data)} bytes of sequence {sequence}")
        return data

    def restore(self, saved: SavedSequence) -> int:
        """Start a sequence that holds the saved tokens; ``ValueError`` if attention was fused or unfused since."""
        self._check_open()
        source = saved.state
        if not isinstance(source, _SavedState) or source.context is not self._context:
            raise ValueError("this sequence was saved from another cache: feed its tokens")
        if self._recurrent:
            self._check_room(saved.length)
        handle = self.open()
        if saved.length == 0:
            return handle
        try:
            state = self._sequences[handle]
            read = api.llama_state_seq_set_data(self._context, _as_bytes(source.data), len(source.data), state.main)
            if read != len(source.data):
                # llama.cpp's other reasons are excluded: the state is of this context.
                raise NoRoomError(f"the cache has no free cells for the {saved.length} tokens of a saved sequence")
            state.committed, state.floor = saved.length, saved.floor
            if state.track is not None:
                known = source.track
                state.track = self._state_rows.new_track(saved.length) if known is None else known.copy()
            self._lines.keep(state)
        except BaseException:
            self.close_sequence(handle)
            raise
        return handle

    @property
    def made_by(self) -> dict[str, Any]:
        """What a saved state depends on, as plain data; another process can restore it where all of that is the same.

        Raises:
            ModelFileError: the model's file cannot be read any more.
        """
        self._check_open()
        settings = self._loaded.settings
        return {
            "model": fingerprint(self._path),
            "library": native.describe_library(),
            "type of keys": settings.cache_type_k,
            "type of values": settings.cache_type_v,
            # Without, values are stored by channel.
            "attention": int(settings.flash_attention),
            "windows": [settings.window, self._has_keepers],
        }

    def export_state(self, saved: SavedSequence) -> npt.NDArray[np.uint8]:
        """Return what :meth:`import_state` takes, to be read only."""
        assert isinstance(saved.state, _SavedState)
        return saved.state.data

    def import_state(self, data: npt.NDArray[np.uint8], length: int, floor: int) -> SavedSequence:
        """Return what another process saved whose :attr:`made_by` was the same."""
        self._check_open()
        return SavedSequence(length, len(data), floor, _SavedState(self._context, data, None))

    def lengthen(self, sequence: int, length: int) -> bool:
        """Give a sequence ``length`` tokens by copying the cells that it has; return whether that could be done.

        No pass is made, so that measuring can have a long context at once. Passes take as long as after a text of that
        length, and what they compute means nothing. Where it returns ``False``, some cells may have been copied. With
        no more tokens than there are it says whether copying is possible.
        """
        state = self._state(sequence)
        if (
            state.committed == 0
            or state.pending.parents
            or length > self._capabilities.context_length
            # A recurrent state is one, however many tokens; and a device reads a prompt fast enough.
            or self._recurrent
            or self._loaded.settings.devices
            or self._loaded.settings.apart
            or self._stream is not None
            or not self._lines.has_spare_id
            or not api.llama_memory_can_shift(self._memory)
        ):
            return False
        memory, window = self._memory, self._loaded.settings.window
        tokens, data = 0, np.empty(0, np.uint8)
        while state.committed < length:
            # Once there are more tokens than a window has, llama.cpp writes only those that the next token sees.
            if tokens == 0 or not 0 < window < state.committed:
                tokens, data = state.committed, self._save_bytes(sequence)
            spare = self._lines.take_id()
            state.torn = True
            read = api.llama_state_seq_set_data(self._context, _as_bytes(data), len(data), spare)
            if read == len(data):
                api.llama_memory_seq_add(memory, spare, 0, -1, state.committed)
                api.llama_memory_seq_rm(memory, spare, length, -1)
                api.llama_memory_seq_cp(memory, spare, state.main, 0, -1)
            api.llama_memory_seq_rm(memory, spare, -1, -1)
            state.settle(min(state.committed + tokens, length) if read == len(data) else state.committed)
            if state.track is not None:
                state.track = self._state_rows.new_track(state.committed)
            self._lines.keep(state)
            if read != len(data):
                return False
        return True

    def close_sequence(self, sequence: int) -> None:
        self._state(sequence, even_torn=True)
        self._lines.close(sequence)
        self._cells.close(sequence)

    def close(self) -> None:
        """Free native memory, the logits of the last pass included."""
        self._finalizer()
        self._context = self._memory = self._logits_view = None
        self._generation += 1  # outputs must not read the freed logits

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, steps: Sequence[Step]) -> _Output:
        """Append the rows of ``steps`` in one pass. For a recurrent model that failed, see :meth:`_undo`."""
        self._check_open()
        native_threads.use()
        states, rows = self._check_steps(steps)
        placements: list[Placement] = []
        copied: dict[int, FloatArray] = {}
        try:
            if self._recurrent:
                copied = self._decode_recurrent(steps, states, placements)
            else:
                self._decode(steps, states, placements)
                if self._gives_all_rows and any(len(step.outputs) < len(step.token_ids) for step in steps):
                    copied = self._copy_outputs(steps)
            for placement in placements:
                if placement.tips is not None:
                    self._batch.id_counts[:rows] = 1
            for state, step in zip(states, steps, strict=True):
                state.pending.append(step.parents)
                state.torn = False
        except BaseException:  # a keyboard interrupt arrives right after the native call
            self._state_rows.expect([], 0)
            self._undo(placements)
            for state in states:
                state.torn = False
            raise
        firsts: list[int] = []
        counts: list[int] = []
        first = 0
        for index, step in enumerate(steps):
            firsts.append(first)
            counts.append(len(step.outputs))
            if index not in copied:
                first += len(step.outputs)
        return _Output(self, self._generation, firsts, counts, copied)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        state = self._state(sequence)
        state.pending.check_path(path)
        if not state.pending.parents:
            return
        self._state_rows.copy_expected()
        length = state.committed + len(path)
        if self._recurrent:
            self._step_back(state, length)
        else:
            self._lines.commit(state, path)
        if state.track is not None:
            state.track.commit(path)
        state.settle(length)
        if state.keeper is not None:
            self._lines.keep(state)

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        return self._track(sequence).read(start, stop)

    def first_state(self, sequence: int) -> int:
        return self._track(sequence).start

    def _track(self, sequence: int) -> StateTrack:
        track = self._state(sequence).track
        if track is None:
            raise CapabilityError(f"{self._path} was loaded without its states: ask for them to draft from them")
        return track

    # --- inside: checks -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._context is None:
            raise ClosedError(f"the engine of {self._path} was closed")

    def _state(self, sequence: int, *, even_torn: bool = False) -> NativeSequence:
        self._check_open()
        try:
            state = self._sequences[sequence]
        except KeyError:
            raise ClosedError(f"sequence {sequence} is not open") from None
        if state.torn and not even_torn:
            raise EngineError(f"an interrupt cut short what was done to sequence {sequence}: close it and open another")
        return state

    def _check_steps(self, steps: Sequence[Step]) -> tuple[list[NativeSequence], int]:
        """Return the sequences of ``steps`` and the number of rows; changes nothing."""
        states = [self._state(step.sequence) for step in steps]
        sequences = [(state.pending, state.committed) for state in states]
        return states, check_pass(steps, sequences, self._capabilities, self._vocabulary_size)

    # --- inside: native calls -----------------------------------------------------------------------------------------

    def _decode(
        self, steps: Sequence[Step], states: Sequence[NativeSequence], placements: list[Placement], length: int = 0
    ) -> None:
        """Make one native call, with each step padded to ``length`` rows.

        What placing the steps changed goes to ``placements``.
        """
        row, first = 0, len(placements)
        unread: list[tuple[NativeSequence, int, int]] = []
        self._state_rows.copy_expected()
        if self._capabilities.reads_states:
            self._generation += 1  # the encoder writes where logits lie
            self._state_rows.write(self._batch, steps, states)
        for state, step in zip(states, steps, strict=True):
            state.torn = True
            if state.track is not None:
                unread.append((state, row, len(step.token_ids)))
            row = self._lines.place(state, step, row, placements)
            if len(step.token_ids) < length:
                row = self._lines.pad(state, step.token_ids[-1], row, length - len(step.token_ids))
        if self._gives_all_rows and self._batch.wanted[:row].any():
            self._batch.wanted[:row] = 1
        self._call(row, placements[first:])
        self._state_rows.expect(unread, row)

    def _call(self, rows: int, placements: Sequence[Placement]) -> None:
        """Make a native call of the first rows of the batch, in which steps were placed so."""
        self._batch.native.n_tokens = rows
        self._generation += 1
        if (threads := self._threads.look()) != self._threads_in_use:
            api.llama_set_n_threads(self._context, *threads)
            self._threads_in_use = threads
        if self._stream is not None:
            self._stream.begin()
        for placement in placements:
            placement.decoded = True
        status = api.llama_decode(self._context, self._batch.native)
        if self._stream is not None:
            self._stream.end()
        if status == 1:
            for placement in placements:
                placement.decoded = False
            raise NoRoomError(f"the cache has no free cells for {rows} more rows")
        if status != 0:
            raise EngineError(f"llama.cpp failed a pass of {rows} rows (code {status})")

    def _decode_recurrent(
        self, steps: Sequence[Step], states: Sequence[NativeSequence], placements: list[Placement]
    ) -> dict[int, FloatArray]:
        """Make the native calls of a pass of a recurrent model; return the rows of all but the last of them."""
        self._drop_pads()
        # Checked before any call, as what a call does to a recurrent state cannot be undone.
        self._check_room(sum(len(step.token_ids) for step in steps))
        calls = deal_steps([len(step.token_ids) for step in steps], self._capabilities.max_rollback or 0)
        copied: dict[int, FloatArray] = {}
        for call in calls:
            its_states = [states[index] for index in call.steps]
            try:
                self._decode([steps[index] for index in call.steps], its_states, placements, call.rows)
            except NoRoomError as error:
                if call is calls[0]:
                    raise
                raise EngineError(f"{error}, and others of the same pass had theirs") from None
            for index, state in zip(call.steps, its_states, strict=True):
                state.last_rows = len(steps[index].token_ids)
                state.pads = max(0, call.rows - state.last_rows)
                state.snapshots = self._generation if call.even else 0
                state.rewound = False
            if call is calls[-1]:
                self._padded = [state for state in its_states if state.pads]
                continue
            first = 0
            for index in call.steps:
                count = len(steps[index].outputs)
                copied[index] = self._logit_rows(self._generation)[first : first + count].copy() if count else _NO_ROWS
                first += count
        return copied

    def _check_room(self, rows: int) -> None:
        """Raise ``NoRoomError`` if a recurrent model has no cells for so many more tokens; cells for pads are extra."""
        if self._capabilities.cells is not None:
            lengths = {handle: state.committed + len(state.pending) for handle, state in self._sequences.items()}
            if rows + self._cells.used(lengths) > self._capabilities.cells:
                raise NoRoomError(f"the cache has no free cells for {rows} more rows")

    def _drop_pads(self) -> None:
        """Step back over pads of the latest native call that no commit has dropped."""
        for state in self._padded:
            if state.pads and not state.torn:
                state.torn = True
                self._step_back(state, state.committed + len(state.pending))
                state.pads = 0
                state.torn = False
        self._padded.clear()

    def _undo(self, placements: list[Placement]) -> None:
        """Put the sequences of a failed pass back to what they were before it.

        A recurrent state that may have been written to cannot be restored: such a sequence is emptied of its pending
        *and* committed tokens.
        """
        self._batch.id_counts[:] = 1
        for placement in placements:
            state = placement.state
            self._lines.undo(placement, drop_cells=placement.decoded and not self._recurrent)
            if placement.decoded and self._recurrent:
                api.llama_memory_seq_rm(self._memory, state.main, -1, -1)
                state.rewound = False
                state.settle(0)
                if state.track is not None:
                    state.track.trim(0)
                self._cells.trim(next(handle for handle, other in self._sequences.items() if other is state), 0)

    def _step_back(self, state: NativeSequence, length: int) -> None:
        """Drop the tokens of a recurrent sequence from position ``length`` on, and its pads.

        llama.cpp keeps the states after the last rows of the *latest* native call only, and takes one step back a call.
        It does not notice when an older state is asked for, nor when another sequence's call has moved the state away
        from its snapshots, so that is checked here.
        """
        rows = state.committed + len(state.pending) - length
        if rows + state.pads == 0:
            return
        if length > 0:
            has_snapshots = state.snapshots == self._generation
            most = (self._capabilities.max_rollback or 0) - state.pads
            limit = min(most, state.last_rows - 1) if has_snapshots else 0
            state.torn = rows <= limit
            if rows > limit or not api.llama_memory_seq_rm(self._memory, state.main, length, -1):
                state.torn = False
                raise CapabilityError(
                    f"this recurrent model cannot step back {rows} tokens (here at most {limit}); "
                    "propose chains in one pass, or trim to 0 and feed the tokens again"
                )
            state.snapshots = 0
            state.rewound = True
            return
        state.torn = True
        api.llama_memory_seq_rm(self._memory, state.main, -1, -1)
        state.snapshots = 0
        state.rewound = False

    # --- inside: results ----------------------------------------------------------------------------------------------

    def _synchronize(self, generation: int) -> None:
        self._check_open()
        if generation == self._generation:  # later passes waited for earlier ones
            api.llama_synchronize(self._context)

    def _copy_outputs(self, steps: Sequence[Step]) -> dict[int, FloatArray]:
        """Return the rows wanted of a pass that gave all of them, by step."""
        copied, first = {}, 0
        for index, step in enumerate(steps):
            wanted = [first + output for output in step.outputs]
            copied[index] = self._logit_rows(self._generation)[wanted] if wanted else _NO_ROWS
            first += len(step.token_ids)
        return copied

    def _logit_rows(self, generation: int) -> npt.NDArray[np.float32]:
        """Return llama.cpp's buffer of logits, ``[max_outputs, vocab]``, of which only this pass's rows are valid."""
        self._check_open()
        if generation != self._generation:
            raise EngineError("these logits are gone: the engine has run another pass since")
        address = get_logits_address(self._context)  # waits for the pass
        if not address:
            raise EngineError("llama.cpp has no logits for this pass")
        if address != self._logits_address or self._logits_view is None:
            # The buffer moves only when it grows, so one view serves nearly all passes. It may reach past the end of
            # the buffer; rows that were not asked for are never read.
            shape = (self._capabilities.max_outputs, self._vocabulary_size)
            buffer = memoryview((ctypes.c_float * (shape[0] * shape[1])).from_address(address)).cast("B")
            view = np.frombuffer(buffer, dtype=np.float32).reshape(shape)
            view.flags.writeable = False
            self._logits_address, self._logits_view = address, view
        return self._logits_view


_NO_ROWS: Final[FloatArray] = np.zeros((0, 0), np.float32)
"""Rows of a step that wants none."""


def _as_bytes(array: npt.NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _release(loaded: LoadedModel, vocabulary: GgufVocabulary) -> None:
    vocabulary.invalidate()
    loaded.free()
