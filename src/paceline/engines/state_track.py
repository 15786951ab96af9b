"""States of a model's tokens, which follow a sequence as its cache does: what heads draft from.

A *state* is the row of numbers that a token leaves behind the last layer. An engine adds the rows of each pass; this
decides what stays when nodes are committed, dropped, forked and trimmed::

    committed   [ window of the latest tokens        ]    a text's beginning is let go
    pending     [ node 0 | node 1 | node 2 | ...     ]    in the order of the pending tree
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.engines.base import COMMITTED_END, Step

MAX_STATES: Final = 2048
"""States of committed tokens that are held at least. A head that has read none of a text begins with so many: what lies
before is of little use to it, and takes memory and time.
"""


class StateTrack:
    """The states of one sequence, ``[tokens, width]``.

    Args:
        width: numbers of a state.
        start: number of committed tokens, whose states are not known.
        most: states that are held at least.
    """

    __slots__ = ("_committed", "_most", "_num", "_pending", "_start")

    def __init__(self, width: int, start: int = 0, most: int = MAX_STATES) -> None:
        self._most = most
        self._start = start
        self._num = 0
        self._committed = self._new(0, width)
        self._pending = self._new(0, width)

    @property
    def width(self) -> int:
        """Numbers of a state."""
        return int(self._committed.shape[1])

    @property
    def start(self) -> int:
        """The first committed token whose state, with all behind it, is held."""
        return self._start

    @property
    def end(self) -> int:
        """Number of committed tokens."""
        return self._start + self._num

    @property
    def num_bytes(self) -> int:
        return int(self._num * self._committed.shape[1] * self._committed.itemsize)

    def append(self, rows: FloatArray) -> None:
        """Add the states of new pending nodes; they are copied."""
        self._pending = np.concatenate((self._pending, rows)) if len(self._pending) else np.array(rows, np.float32)

    def pending(self, node: int) -> FloatArray:
        """Return the state of a pending node."""
        row: FloatArray = self._pending[node]
        return row

    def truncate(self, size: int) -> None:
        """Forget pending nodes after the first ``size``: the undo of :meth:`append`."""
        self._pending = self._pending[:size]

    def commit(self, path: Sequence[int]) -> None:
        """Make a path of the pending nodes committed tokens, and forget the others."""
        end = self.end + len(path)
        if path and max(path) >= len(self._pending):
            # An interrupt came before all of them were noted.
            self._start, self._num, self._pending = end, 0, self._pending[:0]
            return
        rows = self._pending[np.asarray(path, np.intp)]
        self._pending = self._pending[:0]
        if len(rows) > self._most:
            rows = rows[-self._most :]
            self._start, self._num = end - len(rows), 0
        if self._num + len(rows) > len(self._committed):
            self._make_room(len(rows))
        self._committed[self._num : self._num + len(rows)] = rows
        self._num += len(rows)

    def trim(self, length: int) -> None:
        """Keep the first ``length`` committed tokens, and no pending nodes."""
        self._pending = self._pending[:0]
        self._num = max(0, min(self._num, length - self._start))
        self._start = min(self._start, length)

    def read(self, start: int, stop: int) -> FloatArray:
        """Return the states of committed tokens ``[stop - start, width]``: read-only, until the next change."""
        self.check_held(start, stop)
        rows: FloatArray = self._committed[start - self._start : stop - self._start]
        rows.flags.writeable = False
        return rows

    def check_held(self, start: int, stop: int) -> None:
        """Raise ``ValueError`` unless states of committed tokens ``start`` to ``stop`` are held."""
        if not self._start <= start <= stop <= self.end:
            raise ValueError(
                f"states of tokens {start} to {stop} are not held: those from {self._start} to {self.end} are"
            )

    def copy(self) -> StateTrack:
        """Return the same of the committed tokens, for a fork or for one that is saved."""
        copy = StateTrack(self._committed.shape[1], self._start, self._most)
        copy._committed = self._committed[: self._num].copy()
        copy._num = self._num
        return copy

    def _new(self, rows: int, width: int) -> Any:
        """Return memory for so many states: an array, or what can be joined and indexed as one."""
        return np.empty((rows, width), np.float32)

    def _make_room(self, rows: int) -> None:
        """Let go of the oldest states, and double the memory as long as fewer than the most are held."""
        keep = min(self._num, max(self._most - rows, 0)) if self._num + rows > 2 * self._most else self._num
        size = min(max(2 * (keep + rows), 64), 2 * self._most)
        grown = self._new(max(size, keep + rows), self.width)
        grown[:keep] = self._committed[self._num - keep : self._num]
        self._start += self._num - keep
        self._num = keep
        self._committed = grown


def states_for_rows(step: Step, own: StateTrack | None, num_pending: int, width: int) -> FloatArray:
    """Return the states that a head reads the rows of a step with: those given ``[rows, width]``, or its own.

    Raises:
        ValueError: the states given are not so many of that width, or a row without one follows one that has none yet.
    """
    rows = len(step.token_ids)
    if step.states is not None:
        if step.states.shape != (rows, width):
            raise ValueError(f"a step of {rows} rows has states {step.states.shape}, not ({rows}, {width})")
        return step.states
    read = np.empty((rows, 0 if own is None else own.width), np.float32)
    for row, parent in enumerate(step.parents):
        if own is None or parent >= num_pending or (parent == COMMITTED_END and own.start == own.end):
            raise ValueError(f"row {row} has no state to be read with, and none of its own to follow")
        read[row] = own.read(own.end - 1, own.end)[0] if parent == COMMITTED_END else own.pending(parent)
    return read
