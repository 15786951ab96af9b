"""Who owns which cell of the key-value pool, and what a row may see. Plain numpy: no model, no device.

A *cell* is one column of every layer's key and value pool and holds one token. A token keeps its cell for life, so
rolling back is forgetting cells and nothing ever moves; sequences that share a prefix share its cells::

    pool      [ a0 | a1 | a2 | b0 | a3 | ·· | b1 | ·· ]          ·· free
    sequence A   committed 0 1 2, pending 4
    sequence B   committed 3, pending 6
    fork of A    committed 0 1 2                                 cells 0 to 2 have two uses each
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.core.arrays import BoolArray, Int64Array
from paceline.core.errors import NoRoomError
from paceline.engines.pending_tree import PendingTree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.engines.torch_hf.states import DeviceTrack


class CellPool:
    """Use counts and token positions of a fixed number of cells.

    Attributes:
        positions: ``[cells]`` position of the token in each cell; stale where a cell is free.
    """

    def __init__(self, size: int) -> None:
        self.positions: Int64Array = np.zeros(size, dtype=np.int64)
        self._uses: npt.NDArray[np.int32] = np.zeros(size, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def used(self) -> int:
        return int(np.count_nonzero(self._uses))

    def find(self, count: int) -> Int64Array:
        """Return the ``count`` lowest free cells, which stay free: low, because attention runs to the highest used.

        Raises ``NoRoomError`` where fewer are free.
        """
        free: Int64Array = np.flatnonzero(self._uses == 0)
        if len(free) < count:
            raise NoRoomError(
                f"{count} rows need as many free cells and {len(free)} of {len(self)} are free; "
                "send fewer rows, close sequences or raise `cells`"
            )
        return free[:count]

    def share(self, cells: Int64Array) -> None:
        """Count one more use of each of ``cells``, which are distinct."""
        self._uses[cells] += 1

    def release(self, cells: Int64Array) -> None:
        """Count one use less of each of ``cells``, which are distinct; those with none left are free."""
        self._uses[cells] -= 1

    def recount(self, holders: Iterable[Int64Array]) -> None:
        """Count the uses anew: one for every sequence in ``holders``, the cells that each holds."""
        uses = np.zeros_like(self._uses)
        for cells in holders:
            uses[cells] += 1
        self._uses = uses

    def width_with(self, cells: Int64Array) -> int:
        """Return how many columns reach every used cell and all of ``cells``."""
        used = np.flatnonzero(self._uses)
        highest_used = int(used[-1]) if len(used) else -1
        return 1 + max(highest_used, int(cells.max()))


class SequenceCells:
    """The cells of one sequence: committed tokens in order, then pending nodes by number."""

    def __init__(self, capacity: int, track: DeviceTrack | None = None) -> None:
        self.track = track
        self.pending = PendingTree()
        self.pending_cells: list[int] = []
        self._cells: Int64Array = np.empty(capacity, dtype=np.int64)
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def committed(self) -> Int64Array:
        """``[length]`` cells of the committed tokens: a view, valid until the next change."""
        return self._cells[: self._length]

    @property
    def held(self) -> Int64Array:
        """All cells it holds: those of the committed tokens, then those of the pending nodes."""
        return np.concatenate((self.committed, np.array(self.pending_cells, dtype=np.int64)))

    def drop_unpaired(self) -> None:
        """Forget pending nodes without a cell, and cells without a node: what an interrupt can leave half done."""
        size = min(len(self.pending), len(self.pending_cells))
        self.pending.truncate(size)
        del self.pending_cells[size:]
        if self.track is not None:
            self.track.truncate(size)

    def append_committed(self, cells: Int64Array | list[int]) -> None:
        """Put ``cells`` behind the committed ones."""
        self._cells[self._length : self._length + len(cells)] = cells
        self._length += len(cells)

    def keep(self, path: Sequence[int]) -> Int64Array:
        """Commit the pending nodes of ``path``, forget the others and return the cells of those others."""
        kept = set(path)
        dropped = [cell for node, cell in enumerate(self.pending_cells) if node not in kept]
        committed = [self.pending_cells[node] for node in path]
        # In this order no cell is held twice, wherever an interrupt comes.
        self.pending.clear()
        self.pending_cells.clear()
        self.append_committed(committed)
        if self.track is not None:
            self.track.commit(path)
        return np.array(dropped, dtype=np.int64)

    def truncate(self, length: int) -> Int64Array:
        """Forget the committed tokens after the first ``length`` and return their cells."""
        dropped: Int64Array = self._cells[length : self._length].copy()
        self._length = length
        if self.track is not None:
            self.track.trim(length)
        return dropped

    def mark_visible(self, visible: BoolArray, parents: Sequence[int], cells: Int64Array) -> None:
        """Set ``visible`` ``[rows, width]`` for new rows: committed tokens, pending ancestors, the rows themselves."""
        before = len(self.pending_cells)
        committed = np.zeros(visible.shape[1], dtype=np.bool_)
        committed[self.committed] = True
        visible[:] = committed
        for row, (parent, cell) in enumerate(zip(parents, cells, strict=True)):
            if parent >= before:  # a row of this pass: what it sees, which is complete as parents come first
                visible[row] = visible[parent - before]
            else:
                visible[row, [self.pending_cells[node] for node in self.pending.path_to(parent)]] = True
            visible[row, cell] = True
