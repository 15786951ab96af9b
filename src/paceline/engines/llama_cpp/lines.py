"""Which native sequence id holds which tokens.

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

What llama.cpp demands of a batch holds by construction: a line's cells are consecutive from position 0, lines that
share a token in a pass hold equal positions before it, and their id sets are nested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np
import numpy.typing as npt

from paceline.core.errors import NoRoomError
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.pending_tree import PendingTree
from paceline.engines.state_track import StateTrack


class NativeBatch:
    """A ``llama_batch``: numpy arrays that llama.cpp reads in place.

    ``id_counts`` is 1 everywhere between passes, so that rows of one sequence need not write it. ``states`` are those
    that a head reads; of width 0 for a model that is none.
    """

    def __init__(self, rows: int, max_ids: int, state_width: int = 0) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.positions: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.id_counts: npt.NDArray[np.int32] = np.ones(rows, np.int32)
        self.ids: npt.NDArray[np.int32] = np.zeros((rows, max_ids), np.int32)
        self.wanted: npt.NDArray[np.int8] = np.zeros(rows, np.int8)
        self.states: npt.NDArray[np.float32] = np.zeros((rows, state_width), np.float32)
        self._id_rows: npt.NDArray[np.uintp] = (
            self.ids.ctypes.data + np.arange(rows, dtype=np.uintp) * self.ids.strides[0]
        ).astype(np.uintp)
        int32_pointer = ctypes.POINTER(ctypes.c_int32)
        self.native: Any = api.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(int32_pointer),
            pos=self.positions.ctypes.data_as(int32_pointer),
            n_seq_id=self.id_counts.ctypes.data_as(int32_pointer),
            seq_id=self._id_rows.ctypes.data_as(ctypes.POINTER(int32_pointer)),
            logits=self.wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        if state_width:
            self.native.embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


@dataclass(slots=True)
class NativeSequence:
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
class Placement:
    """What placing one step in a batch changed, for undoing it.

    Attributes:
        before: the sequence's number of pending nodes before.
        decoded: whether cells may have been written.
        tips: the sequence's tips before; ``None`` when the step only extends the one line of a chain.
        fresh: branch ids that the step took.
    """

    state: NativeSequence
    before: int
    decoded: bool = False
    tips: dict[int, int] | None = None
    fresh: list[int] = field(default_factory=list)


class Lines:
    """The open sequences of an engine, and the native ids that none of them holds.

    Args:
        memory: llama.cpp's cache.
        batch: the rows of the next native call.
        max_ids: native ids that there are.
        branches: most lines of all pending trees together beside the main ones.
        positions: most that a sequence may have, pads included.

    Attributes:
        sequences: by their handles.
    """

    def __init__(self, memory: Any, batch: NativeBatch, *, max_ids: int, branches: int, positions: int) -> None:
        self.sequences: dict[int, NativeSequence] = {}
        self._memory = memory
        self._batch = batch
        self._max_ids = max_ids
        self._max_branches = branches
        self._ramp: npt.NDArray[np.int32] = np.arange(positions, dtype=np.int32)

    def open(self, handle: int, track: StateTrack | None, *, with_keeper: bool) -> NativeSequence:
        """Start an empty sequence."""
        state = NativeSequence(self.take_id(), None, track)
        self.sequences[handle] = state
        try:
            if with_keeper:
                state.keeper = self.take_id()
        except BaseException:
            del self.sequences[handle]
            raise
        return state

    def share(self, state: NativeSequence, copy: NativeSequence) -> None:
        """Let an empty sequence see the committed tokens of another."""
        copy.committed, copy.floor = state.committed, state.floor
        api.llama_memory_seq_cp(self._memory, state.main, copy.main, 0, -1)
        self.keep(copy)

    def trim(self, state: NativeSequence, length: int) -> None:
        """Drop pending nodes, and committed tokens after the first ``length``."""
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

    def close(self, handle: int) -> None:
        """Free the ids of a sequence, and their cells."""
        state = self.sequences[handle]
        ids = state.ids
        if state.torn:
            # An interrupted pass may have taken ids without noting them, and left them in the batch.
            ids = self.unheld_ids() | ids
            self._batch.id_counts[:] = 1
        for sequence_id in ids:
            api.llama_memory_seq_rm(self._memory, sequence_id, -1, -1)
        state.pads = 0
        del self.sequences[handle]

    def keep(self, state: NativeSequence) -> None:
        """Let the keeper see all committed tokens.

        In a model with sliding windows llama.cpp reuses the cells that a sequence's window has left, even when others
        are free, as soon as several sequences share the cache. Stepping back would then need tokens that are gone. A
        cell that two ids see is never reused.
        """
        if state.keeper is not None and state.kept < state.committed:
            api.llama_memory_seq_cp(self._memory, state.main, state.keeper, state.kept, state.committed)
            state.kept = state.committed

    # --- rows --------------------------------------------------------------------------------------------------------

    def place(self, state: NativeSequence, step: Step, row: int, placements: list[Placement]) -> int:
        """Write the rows of ``step`` into the batch from ``row`` on; return the row after them."""
        batch = self._batch
        token_ids = step.token_ids
        before = len(state.lines)
        end = row + len(token_ids)
        placement = Placement(state, before)
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

    def pad(self, state: NativeSequence, token_id: int, row: int, pads: int) -> int:
        """Write pad rows behind those of a step; return the row after them."""
        batch = self._batch
        end = row + pads
        position = state.committed + len(state.lines)
        batch.tokens[row:end] = token_id
        batch.positions[row:end] = self._ramp[position : position + pads]
        batch.ids[row:end, 0] = state.main
        batch.wanted[row:end] = 0
        return end

    def undo(self, placement: Placement, *, drop_cells: bool) -> None:
        """Forget the rows of a step, and the cells that may have been written for them."""
        state, before = placement.state, placement.before
        tips = placement.tips if placement.tips is not None else {before - 1: state.main}
        state.pending.truncate(before)
        if state.track is not None:
            state.track.truncate(before)
        del state.lines[before:]
        state.tips.clear()
        state.tips.update(tips)
        for line in placement.fresh:
            api.llama_memory_seq_rm(self._memory, line, state.committed, -1)
            state.following[line] = state.committed
        if drop_cells:
            for tip, line in tips.items():
                depth = 0 if tip == COMMITTED_END else state.pending.depths[tip]
                api.llama_memory_seq_rm(self._memory, line, state.committed + depth, -1)

    def commit(self, state: NativeSequence, path: Sequence[int]) -> None:
        """Make the line through the last node of ``path``, up to there, the main one; the others follow it."""
        state.torn = True
        length = state.committed + len(path)
        if len(state.tips) == 1:
            if len(path) < len(state.pending):
                api.llama_memory_seq_rm(self._memory, state.main, length, -1)
            return
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

    def _drop_lines(self, state: NativeSequence, keep: int, length: int) -> None:
        """Turn all lines in use but ``keep`` back into ids that follow ``length`` committed tokens."""
        for line in state.tips.values():
            if line != keep:
                api.llama_memory_seq_rm(self._memory, line, length, -1)
                state.following[line] = length

    def _place_tree(self, state: NativeSequence, parents: Sequence[int], row: int, placement: Placement) -> None:
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

    def _start_line(self, state: NativeSequence, join: int, placement: Placement) -> int:
        """Return a branch id that sees the committed tokens and the pending path down to ``join``."""
        if sum(len(state.tips) - 1 for state in self.sequences.values()) == self._max_branches:
            raise NoRoomError(f"all {self._max_branches} branches are in use; draft a narrower tree")
        if state.following:
            line = max(state.following, key=state.following.__getitem__)
            follows = state.following.pop(line)
        else:
            line, follows = self.take_id(), 0
        placement.fresh.append(line)
        if join == COMMITTED_END:
            source, end = state.main, state.committed
        else:
            source, end = state.lines[join], state.committed + state.pending.depths[join]
        if follows < end:
            api.llama_memory_seq_cp(self._memory, source, line, follows, end)
        return line

    # --- ids ---------------------------------------------------------------------------------------------------------

    def take_id(self) -> int:
        """Return an id without cells: one that nobody holds, else one that only follows some sequence.

        There always is one, because at most ``branches`` are in use and every sequence has its own set aside.
        """
        unheld = self.unheld_ids()
        if unheld:
            free = min(unheld)
        else:
            owner = next(state for state in self.sequences.values() if state.following)
            free, _ = owner.following.popitem()
        # Also for an id that nobody holds: an interrupt may have come before its cells were freed.
        api.llama_memory_seq_rm(self._memory, free, -1, -1)
        return free

    def unheld_ids(self) -> set[int]:
        """Return the ids that no sequence holds: counted anew, so that nothing an interrupt cuts short loses one."""
        return set(range(self._max_ids)).difference(*(state.ids for state in self.sequences.values()))

    @property
    def has_spare_id(self) -> bool:
        """Whether some id has no tokens of its own: nobody holds it, or it only follows a sequence."""
        return bool(self.unheld_ids()) or any(state.following for state in self.sequences.values())


def _is_chain(parents: Sequence[int], tip: int) -> bool:
    for parent in parents:
        if parent != tip:
            return False
        tip += 1
    return True
