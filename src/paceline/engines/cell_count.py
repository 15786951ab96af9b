"""How many cells sequences take together, where forks share some of them.

A fork shares the tokens that were committed before it. Either side may go on, be trimmed or be closed; what it took
alone is then free, and what both held stays until both let go::

    parent   |------ shared part ------|--- its own tokens ---|
    fork     |------ shared --|  trimmed to here, and then --- its own tokens ---|
             cells: the longest hold on the shared part, and what each holds beyond
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class _Part:
    """Cells that several sequences hold a beginning of.

    Attributes:
        start: tokens before the first of them.
        ends: for each sequence that holds some, the tokens up to its last of them.
    """

    start: int
    ends: dict[int, int] = field(default_factory=dict)

    @property
    def saved(self) -> int:
        held = [end - self.start for end in self.ends.values()]
        return sum(held) - max(held)


class CellCount:
    """Counts the cells of sequences by their lengths and by what was forked from what.

    A sequence that never took part in a fork need not be made known. One that was cut and has grown again between two
    calls passes for one that was not, so whoever cuts a sequence says so (:meth:`trim`). A call that an interrupt cuts
    short leaves a count that may be off until the sequence is closed, and no more.
    """

    def __init__(self) -> None:
        # The shared parts of each sequence, first to last. Its tokens behind them are in cells of its own.
        self._parts: dict[int, list[_Part]] = {}

    def fork(self, parent: int, fork: int, length: int) -> None:
        self.trim(parent, length)
        if length == 0:
            return
        parts = self._parts.setdefault(parent, [])
        start = parts[-1].ends[parent] if parts else 0
        if start < length:
            parts.append(_Part(start, {parent: length}))
        # Known before any part counts it: what an interrupt leaves undone is corrected when it is trimmed or closed.
        self._parts[fork] = list(parts)
        for part in parts:
            part.ends[fork] = part.ends[parent]

    def trim(self, sequence: int, length: int) -> None:
        parts = self._parts.get(sequence, [])
        # Parts that do not know the sequence were left so by an interrupt.
        while parts and (parts[-1].start >= length or sequence not in parts[-1].ends):
            parts[-1].ends.pop(sequence, None)
            parts.pop()
        if parts:
            ends = parts[-1].ends
            ends[sequence] = min(ends[sequence], length)
        else:
            self._parts.pop(sequence, None)

    def close(self, sequence: int) -> None:
        self.trim(sequence, 0)

    def used(self, lengths: Mapping[int, int]) -> int:
        """Return the cells that sequences take together, by the tokens of every sequence there is."""
        for sequence in list(self._parts):
            self.trim(sequence, lengths.get(sequence, 0))
        shared = {part for parts in self._parts.values() for part in parts if len(part.ends) > 1}
        if not shared:
            self._parts.clear()
        return sum(lengths.values()) - sum(part.saved for part in shared)
