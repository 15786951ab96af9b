"""The engine contract on llama.cpp: which native sequence id holds which tokens.

llama.cpp keeps one pool of cache cells. A cell holds one token at one position and a *set of sequence ids* that see it,
so a tree is drawn by giving each root-to-leaf path, here called a *line*, an id of its own::

    committed prefix                  pending tree                    ids of the cells
    t0 .. t(n-1)            ──┬── 0 ──┬── 1 ── 3                      0: {main, b, c}  1: {main}  3: {main}
    {main, b, c, d}           │       ├── 2                           2: {b}  4: {c}
                              │       └── 4                           5: {d}
                              └── 5

- Every open sequence owns its *main* id. A chain needs no other, so plain decoding and chain drafts cost nothing extra.
- *Branch* ids come from a pool that all sequences share and are taken only where a tree really branches. A node that
  continues the end (the *tip*) of a line keeps its id; any other new child starts a line with a fresh branch id, which
  is first made to see the committed prefix and the pending path down to where it leaves.
- Between rounds a branch id stays with its sequence and *follows* it: it still sees the first ``follows`` committed
  tokens, so that the next tree copies only what is new, not the whole prefix.
- Commit keeps the cells of one line up to the chosen node and makes its id the main one; ids only swap roles.

A recurrent model has no lines: of each sequence there is one state, and snapshots of it, which ``native_calls.py`` is
about. Commit steps back over rejected rows and pads at once; without a commit, pads are dropped before the next call.

What llama.cpp demands of a batch holds by construction: a line's cells are consecutive from position 0, lines that
share a token in a pass hold equal positions before it, and their id sets are nested.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from paceline.engines.llama_cpp.batch import NativeBatch
from paceline.engines.llama_cpp.heads import load_head
from paceline.engines.llama_cpp.loading import LoadedModel, load_model
from paceline.engines.llama_cpp.native import get_logits_address
from paceline.engines.llama_cpp.native_calls import deal_steps
from paceline.engines.llama_cpp.states import own_head, read_head
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.memory import Footprint, MemoryPlan
from paceline.engines.options import OUTPUT_STATE, ModelOptions
from paceline.engines.pending_tree import PendingTree, check_step
from paceline.engines.process_forks import native_threads
from paceline.engines.state_track import StateTrack, states_for_rows
from paceline.engines.warming import warm_up
from paceline.models.fingerprints import fingerprint


@dataclass(slots=True)
class _NativeSequence:
    """One open sequence, and which native ids hold which of its tokens.

    Attributes:
        main: id whose cells are exactly the committed tokens, and one line of the pending tree.
        lines: ``[pending]`` id of a line through each node.
        tips: the node (or ``COMMITTED_END``) where each line in use ends, to its id.
        following: branch ids not in use, to the number of committed tokens they see.
        keeper: with sliding windows, an id that keeps old cells from being overwritten; else ``None``.
        kept: number of committed tokens the keeper sees.
        track: states of its tokens; ``None`` where none are held.
        floor: fewest tokens, besides 0, that it can be trimmed to: what windows saw before was not saved with it.
        last_rows: recurrent models only: rows of this sequence in its latest pass.
        pads: recurrent models only: padding rows behind these.
        snapshots: recurrent models only: the native call (by generation) that left snapshots to step back to, which
            are gone once another call came; 0 for none.
        rewound: recurrent models only: the state was stepped back and not used since.
        torn: a change is under way; if set between calls, an interrupt cut it short and it can only be closed.
    """

    main: int
    keeper: int | None
    track: StateTrack | None = None
    committed: int = 0
    pending: PendingTree = field(default_factory=PendingTree)
    lines: list[int] = field(default_factory=list)
    tips: dict[int, int] = field(default_factory=dict)
    following: dict[int, int] = field(default_factory=dict)
    kept: int = 0
    floor: int = 0
    last_rows: int = 0
    pads: int = 0
    snapshots: int = 0
    rewound: bool = False
    torn: bool = False

    def __post_init__(self) -> None:
        self.tips[COMMITTED_END] = self.main

    @property
    def ids(self) -> set[int]:
        ids = {self.main, *self.lines, *self.tips.values(), *self.following}
        return ids if self.keeper is None else ids | {self.keeper}

    def settle(self, committed: int) -> None:
        """Forget the pending tree: ``main`` ends at ``committed`` tokens now, and no change is half done."""
        self.committed = committed
        self.pads = 0
        self.pending.clear()
        self.lines.clear()
        self.tips.clear()
        self.tips[COMMITTED_END] = self.main
        self.torn = False


@dataclass(slots=True)
class _Placement:
    """What placing one step in a batch changed, for undoing it.

    Attributes:
        before: the sequence's number of pending nodes before.
        decoded: whether cells may have been written.
        tips: the sequence's tips before; ``None`` when the step only extends the one line of a chain.
        fresh: branch ids that the step took.
    """

    state: _NativeSequence
    before: int
    decoded: bool = False
    tips: dict[int, int] | None = None
    fresh: list[int] = field(default_factory=list)


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

    Raises:
        ModelFileError: the file is missing, damaged, of another format, or refused by llama.cpp.
        CapabilityError: the model is of a kind that cannot be used here.
        InputError: a setting does not fit this model or this machine.
    """

    def __init__(self, options: ModelOptions, *, batch_rows: int | None = None, output_rows: int = 256) -> None:
        self._start(load_model(options, batch_rows=batch_rows, output_rows=output_rows))

    def _start(self, loaded: LoadedModel) -> None:
        self._vocabulary = GgufVocabulary(loaded.model)
        self._vocabulary_size = self._vocabulary.size
        self._finalizer = weakref.finalize(self, _release, loaded, self._vocabulary)
        self._loaded = loaded
        self._path = Path(loaded.options.path)
        self._context: Any = loaded.context
        self._memory: Any = api.llama_get_memory(loaded.context)
        self._description = loaded.description
        self._capabilities = loaded.capabilities
        settings = loaded.settings
        self._recurrent = settings.recurrent
        self._has_keepers = settings.keepers
        self._max_branches = settings.branches

        self._sequences: dict[int, _NativeSequence] = {}
        self._next_handle = 0
        self._num_ids = settings.max_ids
        self._threads = settings.threads
        self._threads_in_use = settings.threads.most
        # Layers whose states are noted of every pass; of a head its own.
        self._held_layers = loaded.options.hold_states
        self._track_width = len(self._held_layers) * int(api.llama_model_n_embd_out(loaded.model))
        self._encoder_batch: NativeBatch | None = None
        self._batch = self._new_batch()
        # Pads may lie behind the end of the context.
        self._ramp: npt.NDArray[np.int32] = np.arange(
            self._capabilities.context_length + (self._capabilities.max_rollback or 0), dtype=np.int32
        )
        # Recurrent models only: cells of their layers with attention, and sequences that have pads.
        self._cells = CellCount()
        self._padded: list[_NativeSequence] = []
        # Of the latest native call, whose states lie in llama.cpp's buffer: sequences, the first row of each, its rows.
        self._unread: list[tuple[_NativeSequence, int, int]] = []
        self._unread_rows = 0
        self._generation = 0
        self._logits_address = 0
        self._logits_view: npt.NDArray[np.float32] | None = None
        self._stream = loaded.stream
        self._memory_plan: MemoryPlan | None = None
        if settings.devices:
            warm_up(self)
        if loaded.stream is not None and loaded.room is not None:
            try:
                self._memory_plan = loaded.stream.start(self._path, loaded.room, self._try_rows)
            except BaseException:
                self.close()
                raise
            self._description += ", layers streamed"

    def open_head(self, path: Path | None = None) -> LlamaCppEngine:
        """Return an engine for a head, which reads this engine's states (``ModelOptions.hold_states``).

        Either may be closed first. The head is the MTP layer of this model's own file, which must have one, or in a
        file of its own. Raises as :func:`read_head` and :func:`load_head` do.
        """
        self._check_open()
        kind = own_head(self._path) if path is None else read_head(path)
        if kind is None or kind.layers != self._loaded.options.hold_states:
            raise CapabilityError(
                f"{path or self._path} has no head that reads the states {self._path} was loaded with"
            )
        head = LlamaCppEngine.__new__(LlamaCppEngine)
        head._start(load_head(self._loaded, kind, path))
        return head

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
        """How the memory is shared out where layers are read while they are used; else ``None``."""
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
        if fused == self.fused_attention:
            return
        self._context = self._memory = self._logits_view = None
        self._generation += 1
        try:
            self._loaded.fuse_attention(fused)
        except BaseException:
            self.close()
            raise
        self._context = self._loaded.context
        self._memory = api.llama_get_memory(self._context)
        self._capabilities = self._loaded.capabilities
        self._batch = self._new_batch()
        self._threads_in_use = self._threads.most

    # --- sequences ----------------------------------------------------------------------------------------------------

    def open(self) -> int:
        self._check_open()
        if len(self._sequences) >= self._capabilities.max_sequences:
            raise CapabilityError(
                f"{len(self._sequences)} sequences are open, which is the most; close one or raise max_sequences"
            )
        handle = self._next_handle
        self._next_handle += 1
        width = self._track_width
        state = _NativeSequence(self._take_id(), None, StateTrack(width) if width else None)
        self._sequences[handle] = state
        try:
            if self._has_keepers:
                state.keeper = self._take_id()
        except BaseException:
            del self._sequences[handle]
            raise
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
        copy.committed, copy.floor = state.committed, state.floor
        copy.track = None if state.track is None else state.track.copy()
        # A recurrent state is shared until either has a pass; what steps one of them back would step back both.
        state.snapshots = 0
        api.llama_memory_seq_cp(self._memory, state.main, copy.main, 0, -1)
        self._keep(copy)
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
            state.torn = True
            if length == 0:
                state.floor = 0
            memory = self._memory
            if state.pending.parents or length < state.committed:
                self._drop_lines(state, state.main, length)
                api.llama_memory_seq_rm(memory, state.main, length, -1)
            for branch, follows in state.following.items():
                if follows > length:
                    api.llama_memory_seq_rm(memory, branch, length, -1)
                    state.following[branch] = length
            if state.keeper is not None and state.kept > length:
                api.llama_memory_seq_rm(memory, state.keeper, length, -1)
                state.kept = length
        state.settle(length)
        if state.track is not None:
            self._read_states()
            state.track.trim(length)

    def saved_bytes(self, sequence: int) -> int:
        state = self._state(sequence)
        return self._native_bytes(state) + (0 if state.track is None else state.track.num_bytes)

    def _native_bytes(self, state: _NativeSequence) -> int:
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
        """Return what llama.cpp writes of a sequence."""
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
                state.track = StateTrack(self._track_width, saved.length) if known is None else known.copy()
            self._keep(state)
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
            or not (self._unheld_ids() or any(each.following for each in self._sequences.values()))
            or not api.llama_memory_can_shift(self._memory)
        ):
            return False
        memory, window = self._memory, self._loaded.settings.window
        tokens, data = 0, np.empty(0, np.uint8)
        while state.committed < length:
            # Once there are more tokens than a window has, llama.cpp writes only those that the next token sees.
            if tokens == 0 or not 0 < window < state.committed:
                tokens, data = state.committed, self._save_bytes(sequence)
            spare = self._take_id()
            state.torn = True
            read = api.llama_state_seq_set_data(self._context, _as_bytes(data), len(data), spare)
            if read == len(data):
                api.llama_memory_seq_add(memory, spare, 0, -1, state.committed)
                api.llama_memory_seq_rm(memory, spare, length, -1)
                api.llama_memory_seq_cp(memory, spare, state.main, 0, -1)
            api.llama_memory_seq_rm(memory, spare, -1, -1)
            state.settle(min(state.committed + tokens, length) if read == len(data) else state.committed)
            if state.track is not None:
                state.track = StateTrack(self._track_width, state.committed)
            self._keep(state)
            if read != len(data):
                return False
        return True

    def close_sequence(self, sequence: int) -> None:
        state = self._state(sequence, even_torn=True)
        ids = state.ids
        if state.torn:
            # An interrupted pass may have taken ids without noting them, and left them in the batch.
            ids = self._unheld_ids() | ids
            self._batch.id_counts[:] = 1
        for sequence_id in ids:
            api.llama_memory_seq_rm(self._memory, sequence_id, -1, -1)
        state.pads = 0
        del self._sequences[sequence]
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
        placements: list[_Placement] = []
        copied: dict[int, FloatArray] = {}
        try:
            if self._recurrent:
                copied = self._decode_recurrent(steps, states, placements)
            else:
                self._decode(steps, states, placements)
                if self._loaded.encodes:
                    copied = self._copy_outputs(steps)
            for placement in placements:
                if placement.tips is not None:
                    self._batch.id_counts[:rows] = 1
            for state, step in zip(states, steps, strict=True):
                state.pending.append(step.parents)
                state.torn = False
        except BaseException:  # a keyboard interrupt arrives right after the native call
            self._unread.clear()
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
        self._read_states()
        length = state.committed + len(path)
        if self._recurrent:
            self._step_back(state, length)
        elif len(state.tips) == 1:
            state.torn = True
            if len(path) < len(state.pending):
                api.llama_memory_seq_rm(self._memory, state.main, length, -1)
        else:
            state.torn = True
            self._commit_branch(state, path, length)
        if state.track is not None:
            state.track.commit(path)
        state.settle(length)
        if state.keeper is not None:
            self._keep(state)

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        return self._track(sequence).read(start, stop)

    def first_state(self, sequence: int) -> int:
        return self._track(sequence).start

    def _track(self, sequence: int) -> StateTrack:
        track = self._state(sequence).track
        if track is None:
            raise CapabilityError(f"{self._path} was loaded without its states: ask for them to draft from them")
        return track

    # --- counters -----------------------------------------------------------------------------------------------------

    def decode_counters(self) -> tuple[int, float]:
        """Return the rows evaluated and the seconds spent in passes since loading or :meth:`reset_decode_counters`.

        These are llama.cpp's own figures (``llama_perf_context``), for comparing with its tools: they contain neither
        this library's work nor the reading of logits.
        """
        self._check_open()
        api.llama_synchronize(self._context)
        data = api.llama_perf_context(self._context)
        # llama.cpp reports at least one token of each kind, whether there was one or not.
        rows = (data.n_p_eval if data.t_p_eval_ms > 0 else 0) + (data.n_eval if data.t_eval_ms > 0 else 0)
        return rows, (data.t_p_eval_ms + data.t_eval_ms) / 1000

    def reset_decode_counters(self) -> None:
        self._check_open()
        api.llama_synchronize(self._context)
        api.llama_perf_context_reset(self._context)

    # --- inside: checks -----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._context is None:
            raise ClosedError(f"the engine of {self._path} was closed")

    def _state(self, sequence: int, *, even_torn: bool = False) -> _NativeSequence:
        self._check_open()
        try:
            state = self._sequences[sequence]
        except KeyError:
            raise ClosedError(f"sequence {sequence} is not open") from None
        if state.torn and not even_torn:
            raise EngineError(f"an interrupt cut short what was done to sequence {sequence}: close it and open another")
        return state

    def _check_steps(self, steps: Sequence[Step]) -> tuple[list[_NativeSequence], int]:
        """Return the sequences of ``steps`` and the number of rows; changes nothing."""
        states: list[_NativeSequence] = []
        rows = outputs = 0
        for step in steps:
            state = self._state(step.sequence)
            check_step(step, state.pending, state.committed, self._capabilities)
            if min(step.token_ids) < 0 or max(step.token_ids) >= self._vocabulary_size:
                raise ValueError(
                    f"tokens {list(step.token_ids)} are not all in a vocabulary of {self._vocabulary_size}"
                )
            states.append(state)
            rows += len(step.token_ids)
            outputs += len(step.outputs)
        if rows == 0:
            raise ValueError("a pass needs at least one step")
        if len(steps) > 1 and len({step.sequence for step in steps}) < len(steps):
            raise ValueError("a pass takes at most one step a sequence")
        if rows > self._capabilities.max_rows:
            raise ValueError(f"a pass of {rows} rows is over the limit of {self._capabilities.max_rows}")
        if outputs > self._capabilities.max_outputs:
            raise ValueError(
                f"a pass with logits of {outputs} rows is over the limit of {self._capabilities.max_outputs}"
            )
        return states, rows

    # --- inside: native calls -----------------------------------------------------------------------------------------

    def _decode(
        self, steps: Sequence[Step], states: Sequence[_NativeSequence], placements: list[_Placement], length: int = 0
    ) -> None:
        """Make one native call, with each step padded to ``length`` rows.

        What placing the steps changed goes to ``placements``.
        """
        row, first = 0, len(placements)
        unread: list[tuple[_NativeSequence, int, int]] = []
        self._read_states()
        if self._capabilities.reads_states:
            self._write_states(steps, states)
        for state, step in zip(states, steps, strict=True):
            state.torn = True
            if state.track is not None:
                unread.append((state, row, len(step.token_ids)))
            row = self._place(state, step, row, placements)
            if len(step.token_ids) < length:
                row = self._pad(state, step, row, length - len(step.token_ids))
        if self._loaded.encodes and self._batch.wanted[:row].any():
            # Of a part of the rows llama.cpp gives the wrong ones.
            self._batch.wanted[:row] = 1
        self._batch.native.n_tokens = row
        self._generation += 1
        if (threads := self._threads.look()) != self._threads_in_use:
            api.llama_set_n_threads(self._context, *threads)
            self._threads_in_use = threads
        if self._stream is not None:
            self._stream.begin()
        for placement in placements[first:]:
            placement.decoded = True
        status = api.llama_decode(self._context, self._batch.native)
        if self._stream is not None:
            self._stream.end()
        if status == 1:
            for placement in placements[first:]:
                placement.decoded = False
            raise NoRoomError(f"the cache has no free cells for {row} more rows")
        if status != 0:
            raise EngineError(f"llama.cpp failed a pass of {row} rows (code {status})")
        self._unread = unread
        self._unread_rows = row

    def _decode_recurrent(
        self, steps: Sequence[Step], states: Sequence[_NativeSequence], placements: list[_Placement]
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

    def _pad(self, state: _NativeSequence, step: Step, row: int, pads: int) -> int:
        """Write pad rows behind those of ``step``; return the row after them."""
        batch = self._batch
        end = row + pads
        position = state.committed + len(state.lines)
        batch.tokens[row:end] = step.token_ids[-1]
        batch.positions[row:end] = self._ramp[position : position + pads]
        batch.ids[row:end, 0] = state.main
        batch.wanted[row:end] = 0
        return end

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

    # --- inside: placing rows -----------------------------------------------------------------------------------------

    def _place(self, state: _NativeSequence, step: Step, row: int, placements: list[_Placement]) -> int:
        """Write the rows of ``step`` into the batch from ``row`` on; return the row after them."""
        batch = self._batch
        token_ids = step.token_ids
        before = len(state.lines)
        end = row + len(token_ids)
        placement = _Placement(state, before)
        placements.append(placement)
        if len(state.tips) == 1 and _is_chain(step.parents, before - 1):
            main = state.main
            position = state.committed + before
            if end == row + 1:
                batch.tokens[row] = token_ids[0]
                batch.positions[row] = position
                batch.ids[row, 0] = main
            else:
                batch.tokens[row:end] = token_ids
                batch.positions[row:end] = self._ramp[position : position + end - row]
                batch.ids[row:end, 0] = main
            state.lines.extend([main] * (end - row))
            del state.tips[before - 1]
            state.tips[len(state.lines) - 1] = main
        else:
            batch.tokens[row:end] = token_ids
            self._place_tree(state, step.parents, row, placement)
        batch.wanted[row:end] = 0
        for output in step.outputs:
            batch.wanted[row + output] = 1
        return end

    def _place_tree(self, state: _NativeSequence, parents: Sequence[int], row: int, placement: _Placement) -> None:
        """Give each new node the ids of the lines below it, starting a line where a node is not alone."""
        batch = self._batch
        lines, tips, depths = state.lines, state.tips, state.pending.depths
        placement.tips = dict(tips)
        before = len(lines)
        new_depths: list[int] = []
        members: list[list[int]] = []
        for node, parent in enumerate(parents, before):
            if parent == COMMITTED_END:
                new_depths.append(1)
            else:
                new_depths.append(1 + (depths[parent] if parent < before else new_depths[parent - before]))
            line = tips.pop(parent, None)
            if line is None:
                # The parent has a child already. Its ancestors in this pass get the new line as a further id; those
                # that are in the cache already are copied to it.
                join = parent
                above: list[int] = []
                while join >= before:
                    above.append(join - before)
                    join = parents[join - before]
                line = self._start_line(state, join, placement)
                for index in above:
                    members[index].append(line)
            lines.append(line)
            members.append([line])
            tips[node] = line
        first = state.committed - 1
        for index, (depth, ids) in enumerate(zip(new_depths, members, strict=True), row):
            batch.positions[index] = first + depth
            batch.id_counts[index] = len(ids)
            batch.ids[index, : len(ids)] = ids

    def _start_line(self, state: _NativeSequence, join: int, placement: _Placement) -> int:
        """Return a branch id that sees the committed tokens and the pending path down to ``join``."""
        if sum(len(state.tips) - 1 for state in self._sequences.values()) == self._max_branches:
            raise NoRoomError(f"all {self._max_branches} branches are in use; draft a narrower tree")
        if state.following:
            line = max(state.following, key=state.following.__getitem__)
            follows = state.following.pop(line)
        else:
            line, follows = self._take_id(), 0
        placement.fresh.append(line)
        if join == COMMITTED_END:
            source, end = state.main, state.committed
        else:
            source, end = state.lines[join], state.committed + state.pending.depths[join]
        if follows < end:
            api.llama_memory_seq_cp(self._memory, source, line, follows, end)
        return line

    def _take_id(self) -> int:
        """Return an id without cells: one that nobody holds, else one that only follows some sequence.

        There always is one, because at most ``branches`` are in use and every sequence has its own set aside.
        """
        unheld = self._unheld_ids()
        if unheld:
            free = min(unheld)
        else:
            owner = next(state for state in self._sequences.values() if state.following)
            free, _ = owner.following.popitem()
        # Also for an id that nobody holds: an interrupt may have come before its cells were freed.
        api.llama_memory_seq_rm(self._memory, free, -1, -1)
        return free

    def _unheld_ids(self) -> set[int]:
        """Return the ids that no sequence holds: counted anew, so that nothing an interrupt cuts short loses one."""
        return set(range(self._num_ids)).difference(*(state.ids for state in self._sequences.values()))

    def _undo(self, placements: list[_Placement]) -> None:
        """Put the sequences of a failed pass back to what they were before it.

        A recurrent state that may have been written to cannot be restored: such a sequence is emptied of its pending
        *and* committed tokens.
        """
        memory = self._memory
        self._batch.id_counts[:] = 1
        for placement in placements:
            state = placement.state
            before = placement.before
            tips = placement.tips if placement.tips is not None else {before - 1: state.main}
            state.pending.truncate(before)
            if state.track is not None:
                state.track.truncate(before)
            del state.lines[before:]
            state.tips.clear()
            state.tips.update(tips)
            for line in placement.fresh:
                api.llama_memory_seq_rm(memory, line, state.committed, -1)
                state.following[line] = state.committed
            if not placement.decoded:
                continue
            if self._recurrent:
                api.llama_memory_seq_rm(memory, state.main, -1, -1)
                state.rewound = False
                state.settle(0)
                if state.track is not None:
                    state.track.trim(0)
                self._cells.trim(next(handle for handle, other in self._sequences.items() if other is state), 0)
                continue
            for tip, line in tips.items():
                depth = 0 if tip == COMMITTED_END else state.pending.depths[tip]
                api.llama_memory_seq_rm(memory, line, state.committed + depth, -1)

    # --- inside: deciding ---------------------------------------------------------------------------------------------

    def _commit_branch(self, state: _NativeSequence, path: Sequence[int], length: int) -> None:
        """Make the line through the last node of ``path``, up to there, the main one; the others follow it."""
        keep = state.main
        tip: int | None = None
        if path:
            last = path[-1]
            if last in state.tips:
                keep, tip = state.tips[last], last
            else:
                keep = state.lines[last]
        if tip is None:
            api.llama_memory_seq_rm(self._memory, keep, length, -1)
        self._drop_lines(state, keep, state.committed)
        state.main = keep

    def _drop_lines(self, state: _NativeSequence, keep: int, length: int) -> None:
        """Turn all lines in use but ``keep`` back into ids that follow ``length`` committed tokens."""
        for line in state.tips.values():
            if line != keep:
                api.llama_memory_seq_rm(self._memory, line, length, -1)
                state.following[line] = length

    def _step_back(self, state: _NativeSequence, length: int) -> None:
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

    def _keep(self, state: _NativeSequence) -> None:
        """Let the keeper see all committed tokens.

        In a model with sliding windows llama.cpp reuses the cells that a sequence's window has left, even when others
        are free, as soon as several sequences share the cache. Stepping back would then need tokens that are gone. A
        cell that two ids see is never reused.
        """
        if state.keeper is not None and state.kept < state.committed:
            api.llama_memory_seq_cp(self._memory, state.main, state.keeper, state.kept, state.committed)
            state.kept = state.committed

    # --- inside: results ----------------------------------------------------------------------------------------------

    def _synchronize(self, generation: int) -> None:
        self._check_open()
        if generation == self._generation:  # later passes waited for earlier ones
            api.llama_synchronize(self._context)

    def _read_states(self) -> None:
        """Copy the states of the latest native call, which the next one overwrites, to the sequences that they are of.

        They are copied when they are needed, so that a pass can go on while rows are sampled.
        """
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        api.llama_synchronize(self._context)
        width = self._track_width // len(self._held_layers)
        rows = np.concatenate(
            [native.state_rows(self._context, layer, self._unread_rows, width) for layer in self._held_layers], axis=1
        )
        for state, first, count in unread:
            if state.track is not None:
                state.track.append(rows[first : first + count])

    def _write_states(self, steps: Sequence[Step], states: Sequence[_NativeSequence]) -> None:
        """Write what a head reads of the states of rows into the batch: those given, or its own."""
        width = self._capabilities.state_width
        read = [
            states_for_rows(step, state.track, len(state.pending), width)
            for step, state in zip(steps, states, strict=True)
        ]
        if self._loaded.encodes and (
            given := [rows for rows, step in zip(read, steps, strict=True) if step.states is not None]
        ):
            fused, first = self._encode(np.concatenate(given)), 0
            for index, step in enumerate(steps):
                if step.states is not None:
                    read[index] = fused[first : first + len(step.token_ids)]
                    first += len(step.token_ids)
        row = 0
        for rows in read:
            self._batch.states[row : row + len(rows)] = rows
            row += len(rows)

    def _encode(self, states: FloatArray) -> FloatArray:
        """Return what a head's encoder fuses states ``[rows, state_width]`` to, ``[rows, own width]``."""
        batch = self._encoder_batch
        if batch is None:
            batch = NativeBatch(self._capabilities.max_rows, 1, states.shape[1])
            batch.native.token = None
            self._encoder_batch = batch
        rows = len(states)
        # The encoder does not use them, but they must go on from those of some sequence.
        first = api.llama_memory_seq_pos_max(self._memory, 0) + 1
        batch.positions[:rows] = np.arange(first, first + rows)
        batch.states[:rows] = states
        batch.wanted[:rows] = 1
        batch.native.n_tokens = rows
        self._generation += 1
        status = api.llama_encode(self._context, batch.native)
        if status != 0:
            raise EngineError(f"llama.cpp failed to encode {rows} states (code {status})")
        api.llama_synchronize(self._context)
        return native.state_rows(self._context, OUTPUT_STATE, rows, self._track_width).copy()

    def _copy_outputs(self, steps: Sequence[Step]) -> dict[int, FloatArray]:
        """Return the rows wanted of a pass that gave all of them, by step."""
        copied, first = {}, 0
        for index, step in enumerate(steps):
            wanted = [first + output for output in step.outputs]
            copied[index] = self._logit_rows(self._generation)[wanted] if wanted else _NO_ROWS
            first += len(step.token_ids)
        return copied

    def _new_batch(self) -> NativeBatch:
        width = self._track_width if self._capabilities.reads_states else 0
        return NativeBatch(self._loaded.settings.native_rows, self._num_ids, width)

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


def _is_chain(parents: Sequence[int], tip: int) -> bool:
    """Whether the rows continue each other from node ``tip`` on."""
    for parent in parents:
        if parent != tip:
            return False
        tip += 1
    return True


def _as_bytes(array: npt.NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


def _release(loaded: LoadedModel, vocabulary: GgufVocabulary) -> None:
    """Free an engine's native memory, when it is closed or collected."""
    vocabulary.invalidate()
    loaded.free()
