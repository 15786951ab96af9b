"""Sequences that outlive their requests, so that nobody reads twice what an engine has read before.

A sequence is *open* while a request uses it, *idle* when its request is over and it is still in the cells, and *saved*
when its state lies in host memory and its cells are free::

                   open(prompt)                                     release
    nothing fits ─────────────► open ◄───────────────────────┐  ┌──────────────► idle
    idle      take over, trim ──►│                           │  │                 │ others are open, or the next
    open      fork, trim ───────►│                           open                 ▼ request does not use it
    saved     restore, trim ────►┘                                              saved ──► evicted: oldest first

A new request starts from what shares the longest beginning with its tokens. Attention runs to the highest cell in use,
whoever uses it, so a sequence that nobody uses makes every pass of the others dearer [2,000 idle tokens beside a pass
of one row without fused attention: 3.9 ms in place of 0.65 for the embedded target, 97 in place of 64 for a 1b in
Q4_0]. A copy to host memory and back costs next to nothing [the 1b: 20 ms and 7 ms, and 80 s to read them again]. So
idle sequences stay in the cells only while nothing is open at all:

- One user, one chat: the sequence is idle between the turns, and the next turn takes it over. Nothing is copied.
- Chats by turns: each turn restores its own chat and saves the other one.
- One system prompt, many questions: each takes over what the one before left. What would be lost of that is saved
  before, if it is more than a little; so these chats can go on, too.
- Several users at once: what ends while others run is saved at once. Whoever comes forks the longest beginning that is
  being used, and shares its cells, or restores a saved one that holds much more.
- ``n`` answers to one prompt each fork the one that has read it.

No sequence id is set aside: none is idle while another is open, but for the moment in which one is moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.errors import CapabilityError, ClosedError, EngineError, NoRoomError, PacelineError
from paceline.engines.base import Engine, SavedSequence
from paceline.engines.cell_count import CellCount

_Tokens: TypeAlias = npt.NDArray[np.int32]

_COMPARED: Final = 256
"""Tokens that are compared first."""

_LITTLE: Final = 8
"""Losing this part of a sequence is losing little of it."""

_RESTORE_COST: Final = 32
"""Restoring this many tokens is taken to cost as much as reading one."""

_CELL_COST: Final = 8
"""Taking this many cells that a fork would share is taken to cost as much as reading one."""


_OPENING: Final[Sequence[int]] = range(0)
"""The tokens of a sequence whose owner does not have the handle yet."""

_NO_HANDLE: Final = -1
"""The handle of a sequence that its engine has not opened yet.

Its entry is made first: making one is a call, behind which Python looks for interrupts. One that came between opening
and the entry would lose the sequence.
"""

_NO_TOKENS: Final = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Opened:
    """A sequence for a request, which holds ``cached`` of the first tokens asked for and no others."""

    sequence: int
    cached: int


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence in the cells.

    Attributes:
        sequence: the engine's handle of the sequence.
        namespace: whose it is.
        tokens: its first tokens, as they were when they were last looked at.
        owners: all its tokens, as its owner's list has them: the first ones are ``tokens``. ``None`` when it is idle.
        floor: fewest tokens it can be trimmed to; see :class:`~paceline.engines.base.SavedSequence`.
    """

    sequence: int
    namespace: str
    tokens: _Tokens
    owners: Sequence[int] | None
    floor: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """A sequence in host memory."""

    namespace: str
    tokens: _Tokens
    state: SavedSequence


@dataclass(frozen=True, slots=True)
class _Match:
    """Something to start from; ``worth`` is the tokens that need not be read, less what starting from it costs."""

    source: _Entry | _Saved
    shared: int
    worth: float


class SequencePool:
    """Gives out an engine's sequences and keeps them when they come back.

    All sequences of an engine should come from one pool. Whoever opens another one at the engine itself has
    :meth:`make_room` called before: an idle sequence may hold the last id. Owners commit to their sequences as they
    like, and trim, close and fork them by the pool.

    Args:
        engine: whose sequences they are.
        max_idle: most sequences kept, idle or saved; with 0 nothing is kept, and no request shares with another.
        max_saved_bytes: most host memory for saved ones; with 0 nothing is saved, and what would be is closed.
        least_reuse: fewer shared tokens than these are read anew, and sequences of fewer are not kept.

    Attributes:
        least_reuse: as given, at least 1.
    """

    def __init__(
        self, engine: Engine, *, max_idle: int = 16, max_saved_bytes: int = 512 << 20, least_reuse: int = 32
    ) -> None:
        self._engine = engine
        self._max_idle = max_idle
        self._max_saved_bytes = max_saved_bytes
        self.least_reuse = max(1, least_reuse)
        self._entries: dict[int, _Entry] = {}
        # Oldest first.
        self._saved: list[_Saved] = []
        self._cells = CellCount()
        self._rolls_back = engine.capabilities.max_rollback is None

    @property
    def keeps(self) -> bool:
        return self._max_idle > 0

    @property
    def used_cells(self) -> int:
        """Cells of committed tokens, of open sequences and idle ones; shared cells count once."""
        lengths = {}
        for sequence, entry in self._entries.items():
            try:
                lengths[sequence] = self._engine.length(sequence)
            except PacelineError:
                lengths[sequence] = len(entry.owners or entry.tokens)  # torn: it still takes them, at most
        return self._cells.used(lengths)

    # --- for owners ---------------------------------------------------------------------------------------------------

    def open(self, token_ids: Sequence[int], *, most: int | None = None, namespace: str = "") -> Opened:
        """Open a sequence that holds as many of the first tokens as are at hand, at most ``most``.

        ``token_ids`` is the list of its owner, which is looked at again later (:meth:`hold`). Nothing of one namespace
        is used for another.
        """
        try:
            entry, cached = self._open(self._matches(token_ids, most, namespace), namespace)
            opened = Opened(entry.sequence, cached)
            self.hold(entry.sequence, token_ids)
        except BaseException:
            # A sequence that is half open when an interrupt comes has no owner.
            self._close_half_open()
            raise
        return opened

    def match_length(self, token_ids: Sequence[int], *, most: int | None = None, namespace: str = "") -> int:
        """Return how many tokens :meth:`open` would find at hand now, unless the cache turns out to be full."""
        return next((match.shared for match in self._matches(token_ids, most, namespace)), 0)

    def shared_cells(self, token_ids: Sequence[int], *, most: int | None = None, namespace: str = "") -> int:
        """Return how many cells :meth:`open` would share with an open sequence now, rather than take for itself."""
        best = next(iter(self._matches(token_ids, most, namespace)), None)
        return best.shared if best is not None and _is_open(best.source) else 0

    def hold(self, sequence: int, token_ids: Sequence[int], *, namespace: str = "") -> None:
        """Say what an open sequence holds: the first tokens of ``token_ids``, as many as it has committed.

        ``token_ids`` is the list of its owner. What is appended to it may be taken back; where other tokens change,
        this is to be called again. It is empty where the sequence holds something else. A sequence that was released
        and is still idle is open again, and stays in its namespace; one that is not of this pool is from now on.

        Raises ``ClosedError`` where the sequence was closed: what it held has to be read again.
        """
        tokens = _array(token_ids if self._max_idle else ())
        entry = self._entries.get(sequence)
        try:
            self._engine.length(sequence)
        except ClosedError:
            if entry is not None:
                self._close(entry)  # an interrupt came before all of it was
            raise
        except EngineError:
            pass  # torn: its owner still has to close it
        if entry is None:
            entry = self._entries[sequence] = _Entry(sequence, namespace, tokens, token_ids)
        entry.tokens, entry.owners = tokens, token_ids

    def trim(self, sequence: int, length: int) -> None:
        self._engine.trim(sequence, length)
        self._cells.trim(sequence, length)
        if length == 0 and sequence in self._entries:
            self._entries[sequence].floor = 0

    def release(self, sequence: int) -> None:
        """Take back a sequence that its owner is done with; keep it if it may be of use, and close it otherwise.

        A sequence that is no longer open is left alone. Where an interrupt or an error cuts this short, the sequence
        may be open, idle or closed: an owner that wants to go on calls :meth:`hold`.
        """
        entry = self._entries.get(sequence)
        if entry is None or entry.owners is None:
            return
        tokens = self._held_tokens(entry)
        if self._max_idle == 0 or len(tokens) < self.least_reuse:
            self._close(entry)
            return
        try:
            self.trim(sequence, len(tokens))
        except PacelineError:
            # Torn, or a recurrent state that has gone past its tokens.
            self._close(entry)
            return
        entry.tokens, entry.owners = tokens, None
        while self._saved and len(self._saved) + len(self._idle) > self._max_idle:
            self._saved.pop(0)
        if any(other.owners is not None for other in self._entries.values()):
            self.make_room()

    def discard(self, sequence: int) -> None:
        """Close an open sequence and keep nothing of it."""
        entry = self._entries.get(sequence)
        if entry is not None and entry.owners is not None:
            self._close(entry)

    def discard_owned(self, token_ids: Sequence[int]) -> None:
        """Close the open sequence of an owner who has not learned its handle, as an interrupt came before.

        ``token_ids`` is the very list that was given to :meth:`open`.
        """
        self._close_half_open()
        for entry in list(self._entries.values()):
            if entry.owners is token_ids:
                self._close(entry)

    def make_room(self) -> bool:
        """Free the cells and ids of idle sequences, saving them where there is room; return whether there were any."""
        idle = self._idle
        for entry in idle:
            self._save(entry)
            self._close(entry)
        return bool(idle)

    def drop_all(self) -> None:
        self._saved.clear()
        for entry in self._idle:
            self._close(entry)

    # --- for files ----------------------------------------------------------------------------------------------------

    def copy_of(self, token_ids: Sequence[int], *, namespace: str = "") -> tuple[_Tokens, SavedSequence] | None:
        """Return the longest beginning of a text that is kept, with its tokens; ``None`` where none is.

        Raises:
            CapabilityError: this model's state cannot be copied.
        """
        for match in self._matches(token_ids, None, namespace):
            source = match.source
            if isinstance(source, _Saved) and match.shared == len(source.tokens):
                return source.tokens, source.state
            if isinstance(source, _Entry) and source.owners is None and match.shared == len(source.tokens):
                return source.tokens, self._engine.save(source.sequence)
        return None

    def adopt(self, token_ids: Sequence[int], state: SavedSequence, *, namespace: str = "") -> bool:
        """Keep what another process has saved; return whether there is room for it."""
        if not self.keeps or not self._make_room_for(state.num_bytes):
            return False
        self._saved.append(_Saved(namespace, _array(token_ids), state))
        return True

    def forget(self, token_ids: Sequence[int], *, namespace: str = "") -> int:
        """Forget what is kept of a text: what begins with it, and its beginnings. What is in use stays.

        Returns how many of its tokens were kept.
        """
        tokens, most = _array(token_ids), 0

        def is_of_it(kept: _Entry | _Saved) -> bool:
            nonlocal most
            shared = _count_shared(kept.tokens, tokens)
            # An empty text would be the beginning of them all.
            if kept.namespace != namespace or not 0 < shared == min(len(kept.tokens), len(tokens)):
                return False
            most = max(most, shared)
            return True

        self._saved = [each for each in self._saved if not is_of_it(each)]
        for entry in self._idle:
            if is_of_it(entry):
                self._close(entry)
        return most

    # --- finding ------------------------------------------------------------------------------------------------------

    def _matches(self, token_ids: Sequence[int], most: int | None, namespace: str) -> list[_Match]:
        """Return what a sequence with these tokens may start from, best first."""
        most = len(token_ids) if most is None else min(most, len(token_ids))
        if self._max_idle == 0 or most < self.least_reuse:
            return []
        entries = [entry for entry in self._entries.values() if entry.namespace == namespace]
        saved = [entry for entry in self._saved if entry.namespace == namespace]
        if not entries and not saved:
            return []
        wanted = _array(token_ids[:most])
        matches = []
        in_cells = 0
        for entry in entries:
            held = self._held_tokens(entry)
            shared = _count_shared(held, wanted)
            if self._is_usable(shared, len(held), entry.floor):
                matches.append(_Match(entry, shared, shared))
                if entry.owners is not None:
                    in_cells = max(in_cells, shared)
        for other in saved:
            shared = _count_shared(other.tokens, wanted)
            if self._is_usable(shared, len(other.tokens), other.state.floor):
                worth = shared - len(other.tokens) / _RESTORE_COST - in_cells / _CELL_COST
                if worth >= self.least_reuse:
                    matches.append(_Match(other, shared, worth))
        # Among equals those in the cells come first, and of these the idle ones, which share no cells.
        matches.sort(key=lambda match: (-match.worth, isinstance(match.source, _Saved), _is_open(match.source)))
        return matches

    def _is_usable(self, shared: int, length: int, floor: int) -> bool:
        if shared < max(self.least_reuse, floor):
            return False
        return self._rolls_back or shared == length

    def _held_tokens(self, entry: _Entry) -> _Tokens:
        """Return the tokens that a sequence holds and that its owner's list has: none for a torn one."""
        try:
            length = self._engine.length(entry.sequence)
        except PacelineError:
            return _NO_TOKENS
        known = entry.tokens
        if length > len(known) and entry.owners is not None:
            # Tokens since the last look are few, and not kept: an owner may take the last of them back.
            return np.concatenate((known, _array(entry.owners[len(known) : length])))
        return known[:length]

    # --- moving -------------------------------------------------------------------------------------------------------

    def _open(self, matches: Sequence[_Match], namespace: str) -> tuple[_Entry, int]:
        """Return a sequence that starts from the first of ``matches`` that can be had, and how much it holds."""
        for match in matches:
            entry = self._start_from(match)
            if entry is not None:
                return entry, match.shared
        self.make_room()
        entry = _Entry(_NO_HANDLE, namespace, _NO_TOKENS, _OPENING)
        entry.sequence = self._engine.open()
        self._entries[entry.sequence] = entry
        return entry, 0

    def _start_from(self, match: _Match) -> _Entry | None:
        """Return a sequence that holds what is shared; ``None`` if it cannot be had."""
        source = match.source
        if isinstance(source, _Saved):
            return self._restore(source, match.shared)
        if source.owners is None:
            return self._take_over(source, match.shared)
        self.make_room()
        try:
            fork = self._fork(source)
        except (CapabilityError, EngineError, ValueError):
            # A recurrent state that was just stepped back; a torn sequence; one with pending nodes.
            return None
        return self._trim_or_close(fork, match.shared)

    def _take_over(self, entry: _Entry, shared: int) -> _Entry | None:
        if self._loses_much(len(entry.tokens), shared):
            self._save(entry)
        try:
            self.trim(entry.sequence, shared)
        except (CapabilityError, EngineError):
            return None
        entry.owners = _OPENING
        self.make_room()
        return entry

    def _restore(self, saved: _Saved, shared: int) -> _Entry | None:
        # Taken out first, so that what is saved to make room for it finds room in its place.
        self._saved.remove(saved)
        self.make_room()
        entry = _Entry(_NO_HANDLE, saved.namespace, saved.tokens, _OPENING, saved.state.floor)
        try:
            entry.sequence = self._engine.restore(saved.state)
        except (NoRoomError, CapabilityError):
            self._keep(saved)
            return None
        self._entries[entry.sequence] = entry
        if self._loses_much(len(saved.tokens), shared):
            self._keep(saved)
        return self._trim_or_close(entry, shared)

    def _fork(self, parent: _Entry) -> _Entry:
        length = self._engine.length(parent.sequence)
        entry = _Entry(_NO_HANDLE, parent.namespace, _NO_TOKENS, _OPENING, parent.floor)
        entry.sequence = self._engine.fork(parent.sequence)
        self._entries[entry.sequence] = entry
        self._cells.fork(parent.sequence, entry.sequence, length)
        return entry

    def _trim_or_close(self, entry: _Entry, length: int) -> _Entry | None:
        try:
            self.trim(entry.sequence, length)
        except CapabilityError:
            self._close(entry)
            return None
        return entry

    def _loses_much(self, length: int, kept: int) -> bool:
        return length - kept >= max(self.least_reuse, length // _LITTLE)

    def _save(self, entry: _Entry) -> None:
        """Copy an idle sequence to host memory, unless there is no room for it, or nearly all of it is at hand."""
        for other in self._entries.values():
            if other.namespace == entry.namespace and other.owners is not None:
                held = self._held_tokens(other)
                if self._covers(held, other.floor, entry.tokens):
                    return
        for saved in self._saved:
            if saved.namespace == entry.namespace and self._covers(saved.tokens, saved.state.floor, entry.tokens):
                self._saved.remove(saved)
                self._saved.append(saved)
                return
        try:
            num_bytes = self._engine.saved_bytes(entry.sequence)
            if not self._make_room_for(num_bytes):
                return
            state = self._engine.save(entry.sequence)
        except (CapabilityError, EngineError, ClosedError, MemoryError):
            return
        self._saved = [
            saved
            for saved in self._saved
            if saved.namespace != entry.namespace or not _contains(entry.tokens, state.floor, saved.tokens)
        ]
        self._keep(_Saved(entry.namespace, entry.tokens, state))

    def _covers(self, tokens: _Tokens, floor: int, wanted: _Tokens) -> bool:
        """Whether too little of ``wanted`` to be worth keeping would have to be read again after ``tokens``."""
        shared = _count_shared(tokens, wanted)
        return self._is_usable(shared, len(tokens), floor) and len(wanted) - shared < self.least_reuse

    def _keep(self, saved: _Saved) -> None:
        if self._make_room_for(saved.state.num_bytes):
            self._saved.append(saved)

    def _make_room_for(self, num_bytes: int) -> bool:
        """Give up the oldest saved ones until another fits; return whether it ever can."""
        if num_bytes > self._max_saved_bytes:
            return False
        while self._saved and (
            self._held_bytes + num_bytes > self._max_saved_bytes or len(self._saved) >= self._max_idle
        ):
            self._saved.pop(0)
        return True

    def _close_half_open(self) -> None:
        """Close what an interrupt kept from reaching an owner."""
        for entry in list(self._entries.values()):
            if entry.owners is _OPENING:
                self._close(entry)

    def _close(self, entry: _Entry) -> None:
        with contextlib.suppress(ClosedError):  # an interrupt may have come between the two
            self._engine.close_sequence(entry.sequence)
        self._entries.pop(entry.sequence, None)
        self._cells.close(entry.sequence)

    @property
    def _idle(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.owners is None]

    @property
    def _held_bytes(self) -> int:
        return sum(saved.state.num_bytes for saved in self._saved)


def _array(token_ids: Sequence[int]) -> _Tokens:
    return np.array(token_ids, dtype=np.int32)


def _is_open(source: _Entry | _Saved) -> bool:
    return isinstance(source, _Entry) and source.owners is not None


def _count_shared(first: _Tokens, second: _Tokens) -> int:
    """Return how many tokens two texts have in common before they part."""
    length = min(len(first), len(second))
    start, count = 0, _COMPARED
    while start < length:
        end = min(start + count, length)
        differs = first[start:end] != second[start:end]
        if differs.any():
            return start + int(differs.argmax())
        # Most texts part soon or go on together for long.
        start, count = end, 16 * count
    return length


def _contains(longer: _Tokens, floor: int, shorter: _Tokens) -> bool:
    """Whether a text begins with another, and can be trimmed to it."""
    return floor <= len(shorter) <= len(longer) and bool(np.array_equal(longer[: len(shorter)], shorter))
