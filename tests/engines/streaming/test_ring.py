"""Sections take turns in the ring: each is there when it is used, whatever the reader and the pass do when."""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
from tests.timing import WAIT_S

from paceline.core.clock import VirtualClock
from paceline.core.errors import ClosedError, EngineError
from paceline.engines.streaming.layout import BLOCK, Extent, Section
from paceline.engines.streaming.ring import Ring


class Numbers:
    """A source whose sections are full of their own number.

    Attributes:
        reads: numbers of the sections that were read.
        failing: number of a section that cannot be read.
        gate: reads wait for it.
    """

    def __init__(self) -> None:
        self._read = threading.Condition()
        self.reads: list[int] = []
        self.failing: int | None = None
        self.gate = threading.Event()
        self.gate.set()

    def read(self, extents: Sequence[Extent], slot: memoryview) -> None:
        """Fill the slot."""
        self.gate.wait()
        (extent,) = extents
        number = extent.start // BLOCK
        if number == self.failing:
            raise EngineError(f"section {number} cannot be read")
        slot[:] = bytes([number]) * len(slot)
        with self._read:
            self.reads.append(number)
            self._read.notify_all()

    def has_read(self, count: int) -> bool:
        """Wait until so many sections were read."""
        with self._read:
            return self._read.wait_for(lambda: len(self.reads) >= count, WAIT_S)


def sections(count: int) -> list[Section]:
    return [Section((Extent(0, number * BLOCK, (number + 1) * BLOCK, 0),), {}) for number in range(count)]


@pytest.fixture
def source() -> Numbers:
    return Numbers()


@pytest.fixture
def ring(source: Numbers) -> Iterator[Ring]:
    made = Ring(source, sections(7), [1, 2, 4, 5, 6], slots=2, slot_bytes=BLOCK)
    yield made
    source.gate.set()
    made.close()


def run(ring: Ring, order: Sequence[int]) -> None:
    for number in order:
        assert ring.slot_memory(ring.use(number))[0] == number
        ring.done(number)


ORDER = [1, 2, 4, 5, 6]


def test_every_section_is_there_when_it_is_used_and_is_read_once_a_pass(ring: Ring, source: Numbers) -> None:
    for _ in range(20):
        run(ring, ORDER)
    # Up to two are read for the pass that would come next.
    assert source.reads[:100] == ORDER * 20
    assert len(source.reads) <= 102


def test_the_first_sections_of_the_next_pass_are_read_before_it_begins(ring: Ring, source: Numbers) -> None:
    run(ring, ORDER)
    assert source.has_read(7)
    source.gate.clear()
    assert source.reads == [*ORDER, 1, 2]
    assert ring.slot_memory(ring.use(1))[0] == 1


def test_an_error_is_raised_where_the_section_is_used_and_the_next_pass_may_go_well(
    ring: Ring, source: Numbers
) -> None:
    source.failing = 4
    ring.restart()
    run(ring, [1, 2])
    with pytest.raises(EngineError, match="section 4 cannot be read"):
        ring.use(4)
    source.failing = None
    for _ in range(3):
        ring.restart()
        run(ring, ORDER)


def test_a_pass_that_was_cut_short_leaves_nothing_behind(ring: Ring) -> None:
    rng = random.Random(1)
    for _ in range(200):
        length = rng.randrange(len(ORDER) + 1)
        for number in ORDER[:length]:
            assert ring.slot_memory(ring.use(number))[0] == number
            if rng.random() < 0.9 or number != ORDER[length - 1]:
                ring.done(number)
        ring.restart()
    run(ring, ORDER * 2)


def test_what_a_cut_pass_had_read_of_the_first_sections_is_kept(ring: Ring, source: Numbers) -> None:
    ring.use(1)
    ring.use(2)
    ring.restart()
    run(ring, ORDER)
    assert source.reads[:5] == ORDER


def test_dry_passes_read_nothing_and_the_next_wet_one_has_its_weights(ring: Ring, source: Numbers) -> None:
    run(ring, ORDER)
    ring.set_dry(True)
    source.gate.clear()
    for number in ORDER * 3:
        assert 0 <= ring.use(number) < 2
        ring.done(number)
    before = len(source.reads)
    # A pass that found no room was cut.
    ring.use(ORDER[0])
    ring.restart()
    source.gate.set()
    for number in ORDER:
        assert not any(ring.slot_memory(ring.use(number))[:])
        ring.done(number)
    assert len(source.reads) == before
    ring.set_dry(False)
    run(ring, ORDER)


def test_waiting_is_counted(ring: Ring, source: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, begun = VirtualClock(), threading.Event()

    def now_s() -> float:
        begun.set()
        return clock.now_s()

    monkeypatch.setattr("paceline.engines.streaming.ring.time", SimpleNamespace(perf_counter=now_s))
    ring.use(1)
    ring.use(2)
    assert ring.waited_s == 0.0
    source.gate.clear()
    ring.done(1)
    begun.clear()

    def read_late() -> None:
        assert begun.wait(WAIT_S)
        clock.advance(0.25)
        source.gate.set()

    reader = threading.Thread(target=read_late)
    reader.start()
    ring.use(4)
    reader.join(WAIT_S)
    assert ring.waited_s == 0.25


def test_whoever_waits_is_told_of_the_end(source: Numbers) -> None:
    ring = Ring(source, sections(3), [0, 1, 2], slots=1, slot_bytes=BLOCK)
    ring.use(0)
    source.gate.clear()
    ring.done(0)
    told = threading.Event()

    def wait() -> None:
        with pytest.raises(ClosedError, match="the model whose weights were streamed is closed"):
            ring.use(1)
        told.set()

    threads = [threading.Thread(target=wait), threading.Thread(target=ring.close)]
    for thread in threads:
        thread.start()
    # Not even the read that runs is waited for.
    assert told.wait(WAIT_S)
    source.gate.set()
    for thread in threads:
        thread.join()
    ring.close()


@pytest.mark.skipif(not hasattr(mmap.mmap, "madvise"), reason="weights are streamed where memory can be given back")
def test_slots_are_given_back_even_where_an_error_still_refers_to_one(ring: Ring) -> None:
    slots = [ring.slot_memory(ring.use(number)) for number in (1, 2)]
    with memoryview(slots[0]) as referred:
        ring.close()
        assert not any(referred)
    assert slots[1].closed
