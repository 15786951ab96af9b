"""The ring: slots that sections of layers take turns in, filled by a thread just ahead of the pass that uses them.

::

    pass      ── use(3) ── compute ── done(3) ── use(4) ── ...        waits where it is not there yet
                  ^                      │          ^
    slots         │ ready                v free     │ ready
    reader    ── reads 3 ── reads 4 ── reads 6 ────────── ...         waits where no slot is free

The reader reads only what was asked for: by a pass that is about to use it, or by one that is done with a slot and will
need another section. So a pass that fails leaves nothing that goes on: :meth:`Ring.restart` says what comes next, and
what the reader brings for the pass before is left aside.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from paceline.core.errors import ClosedError
from paceline.engines.streaming.disk import give_back, own_memory
from paceline.engines.streaming.layout import Extent, Section
from paceline.engines.waited_for import be_waited_for

_CLOSING_S: Final = 60.0
"""Seconds after which a read is taken to be one of a disk that is gone."""


class Source(Protocol):
    """Where weights come from; :class:`~paceline.engines.streaming.disk.WeightFiles` is one."""

    def read(self, extents: Sequence[Extent], slot: memoryview) -> None:
        """Read extents to their places in a slot."""
        ...


@dataclass(slots=True)
class _Slot:
    """Memory for one section.

    Attributes:
        section: number of the section that is in it, or being read; ``None`` if it is free.
        is_ready: the section has been read.
    """

    memory: mmap.mmap
    section: int | None = None
    is_ready: bool = False


class Ring:
    """Slots for the sections of a model that do not stay in memory.

    :meth:`use` and :meth:`done` are for the thread of the pass, one section after the other in the order of ``order``,
    round and round.

    Attributes:
        waited_s: seconds that passes have waited for sections by now.
    """

    def __init__(
        self, source: Source, sections: Sequence[Section], order: Sequence[int], *, slots: int, slot_bytes: int
    ) -> None:
        assert 1 <= slots <= len(order)
        self._source = source
        self._sections = sections
        self._order = list(order)
        self._next_of = {number: order[(index + 1) % len(order)] for index, number in enumerate(order)}
        self._slots = [_Slot(own_memory(slot_bytes)) for _ in range(slots)]
        self._views = [memoryview(slot.memory) for slot in self._slots]
        self._changed = threading.Condition()
        # What is to be read, in this order; the last of it is what the next section to ask for follows.
        self._wanted: deque[int] = deque()
        self._last_wanted = self._order[-1]
        self._generation = 0
        self._error: BaseException | None = None
        self._is_dry = self._is_closed = self._is_reading = False
        self.waited_s = 0.0
        self._reader = threading.Thread(target=self._read_on, name="paceline-ring", daemon=True)
        self._reader.start()
        self.restart()

    def restart(self) -> None:
        """Forget what a pass had before it was cut short, errors included; the next begins with the first section."""
        with self._changed:
            self._check_open()
            self._generation += 1
            self._error = None
            self._wanted.clear()
            if self._is_dry:
                # A dry pass reads zeros.
                for slot in self._slots:
                    slot.section, slot.is_ready = None, False
                return
            kept = self._order[: len(self._slots)]
            for slot in self._slots:
                # Sections that are in their slots already are not read again.
                if slot.section not in kept or not slot.is_ready:
                    slot.section, slot.is_ready = None, False
            there = {slot.section for slot in self._slots}
            self._wanted.extend(number for number in kept if number not in there)
            self._last_wanted = kept[-1]
            self._changed.notify_all()

    @property
    def has_failed(self) -> bool:
        """Whether a section could not be read since the last restart."""
        with self._changed:
            return self._error is not None

    def use(self, number: int) -> int:
        """Wait until a section is there; return its slot's number. Raises ``EngineError`` where it cannot be read."""
        started_s = time.perf_counter()
        with self._changed:
            while True:
                self._check_open()
                for index, slot in enumerate(self._slots):
                    if slot.section == number and (slot.is_ready or self._is_dry):
                        self.waited_s += time.perf_counter() - started_s
                        return index
                if self._error is not None:
                    raise self._error
                if self._is_dry:
                    # A dry pass takes a slot with anything in it.
                    free = next(slot for slot in self._slots if slot.section is None)
                    free.section = number
                    continue
                self._changed.wait()

    def done(self, number: int) -> None:
        """Give back the slot of a section that was used; the next section that has no slot is read into it."""
        with self._changed:
            for slot in self._slots:
                if slot.section == number:
                    slot.section, slot.is_ready = None, False
                    break
            if not self._is_dry:
                self._last_wanted = self._next_of[self._last_wanted]
                self._wanted.append(self._last_wanted)
                self._changed.notify_all()

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def slot_memory(self, index: int) -> mmap.mmap:
        """Return the memory of a slot; its address stays the same."""
        return self._slots[index].memory

    def set_dry(self, is_dry: bool) -> None:
        """Make dry passes, which have zeros for their weights and do not wait, or others again. Only between passes.

        Dry passes are timed apart from the disk. What else lies in a slot may be no numbers by another layout, and
        these would stay in the cache: nothing times NaN is NaN.
        """
        with self._changed:
            self._wanted.clear()
            self._generation += 1
            if is_dry:
                while self._is_reading and not self._is_closed:
                    self._changed.wait()
            # After the wait, which an interrupt may end.
            self._is_dry = is_dry
            for slot in self._slots:
                slot.section, slot.is_ready = None, False
            if is_dry:
                for slot in self._slots:
                    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(slot.memory)), 0, len(slot.memory))
        if not is_dry:
            self.restart()

    def close(self) -> None:
        """End the reader, and give the slots back; a waiting thread gets an error."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._reader.join(_CLOSING_S)
        if not self._reader.is_alive():
            for view, slot in zip(self._views, self._slots, strict=True):
                view.release()
                give_back(slot.memory)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the model whose weights were streamed is closed")

    def _read_on(self) -> None:
        be_waited_for()
        while True:
            with self._changed:
                while not self._is_closed and (not self._wanted or not self._has_free()):
                    self._changed.wait()
                if self._is_closed:
                    return
                generation, number = self._generation, self._wanted.popleft()
                index = next(index for index, slot in enumerate(self._slots) if slot.section is None)
                slot = self._slots[index]
                slot.section = number
                self._is_reading = True
            error: BaseException | None = None
            try:
                self._source.read(self._sections[number].extents, self._views[index])
            except BaseException as caught:
                error = caught
            with self._changed:
                self._is_reading = False
                if generation == self._generation:
                    if error is None:
                        slot.is_ready = True
                    else:
                        slot.section, self._error = None, error
                        self._wanted.clear()
                self._changed.notify_all()

    def _has_free(self) -> bool:
        return any(slot.section is None for slot in self._slots)
