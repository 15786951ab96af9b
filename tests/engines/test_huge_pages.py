"""Huge pages: which memory asks for them, when, and what becomes of a load that is interrupted there."""

from __future__ import annotations

import ctypes
import mmap
import re
import signal
import sys
from pathlib import Path

import pytest

from paceline.core.clock import VirtualClock
from paceline.engines import huge_pages
from paceline.engines.huge_pages import (
    MAX_WAIT_S,
    MIN_BYTES,
    HugePages,
    gives_huge_pages,
    private_ranges,
    subtract_ranges,
)
from paceline.engines.llama_cpp import weights
from paceline.engines.llama_cpp.loading import load_model
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_draft

MIB = 1 << 20

needs_huge_pages = pytest.mark.skipif(
    not (sys.platform == "linux" and huge_pages._SETTING.exists()), reason="this system has no transparent huge pages"
)


@pytest.mark.parametrize(
    ("said", "gives"),
    [("always [madvise] never\n", True), ("[always] madvise never\n", True), ("always madvise [never]\n", False)],
)
def test_the_system_says_whether_it_gives_them(tmp_path: Path, said: str, gives: bool) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(said)
    # Linux before 5.14 cannot say when it has given them.
    assert gives_huge_pages(setting) is (gives and huge_pages._advise((0, 0), huge_pages._POPULATE))


def test_a_system_that_says_nothing_gives_none(tmp_path: Path) -> None:
    assert not gives_huge_pages(tmp_path / "enabled")


def test_only_much_private_memory_without_a_file_counts(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "maps").write_text(
        "10000000-18000000 rw-p 00000000 00:00 0 \n"
        "20000000-28000000 r--p 00000000 00:00 0 \n"
        "30000000-38000000 rw-s 00000000 00:00 0 \n"
        "40000000-48000000 rw-p 00000000 fe:00 12                        /a model.gguf\n"
        "50000000-50800000 rw-p 00000000 00:00 0 \n"
        "60000000-68000000 rw-p 00000000 00:00 0                          [heap]\n"
    )
    assert private_ranges(tmp_path) == [(0x10000000, 0x18000000)]


@pytest.mark.parametrize(
    ("known", "rest"),
    [
        ([], [(10, 20), (30, 40)]),
        ([(10, 20)], [(30, 40)]),
        ([(12, 14)], [(10, 12), (14, 20), (30, 40)]),
        ([(0, 12), (18, 35)], [(12, 18), (35, 40)]),
        ([(0, 50)], []),
    ],
)
def test_what_was_there_before_is_left_alone(known: list[tuple[int, int]], rest: list[tuple[int, int]]) -> None:
    assert subtract_ranges([(10, 20), (30, 40)], known) == rest


def asks(address: int) -> bool:
    """Return whether the memory at an address asks for huge pages."""
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            flags = re.search(r"(?m)^VmFlags:(.*)$", entry)
            return flags is not None and "hg" in flags[1].split()
    raise AssertionError("the memory is not mapped")


def address_of(memory: mmap.mmap) -> int:
    """Return where a memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@needs_huge_pages
def test_what_is_allocated_meanwhile_asks_for_them() -> None:
    before = mmap.mmap(-1, 2 * MIN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = HugePages()
    after = mmap.mmap(-1, 2 * MIN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.take()
    assert asks(address_of(after))
    assert not asks(address_of(before))


def test_where_nobody_says_what_memory_there_is_none_asks(tmp_path: Path) -> None:
    assert private_ranges(tmp_path) == []


class SlowClock(VirtualClock):
    """A clock that moves on whenever somebody looks."""

    def now_s(self) -> float:
        now_s = super().now_s()
        self.advance(MAX_WAIT_S + 1.0)
        return now_s


@needs_huge_pages
def test_where_getting_them_takes_long_the_rest_is_left_for_later() -> None:
    pages = HugePages(SlowClock())
    memory = mmap.mmap(-1, 8 * MIN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.take()
    (left,) = pages._later
    assert asks(address_of(memory))
    assert not asks(left[0])
    pages.take_rest()
    assert asks(left[0])


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_or_an_interrupt_meanwhile_ends_the_load(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(HugePages):
        def take(self) -> None:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            else:
                raise error

    monkeypatch.setattr(weights, "gives_huge_pages", lambda: True)
    monkeypatch.setattr(weights, "HugePages", Failing)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        load_model(ModelOptions(embedded_draft(), context_length=64, threads=1))
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("size", "free", "given", "is_read"),
    [
        (1000 * MIB, 3000 * MIB, True, True),
        (1000 * MIB, 2999 * MIB, True, False),
        (20 * MIB, 3000 * MIB, True, False),
        (1000 * MIB, 3000 * MIB, False, False),
        (1000 * MIB, None, True, False),
    ],
)
def test_weights_are_read_where_there_is_room_for_thrice(
    monkeypatch: pytest.MonkeyPatch, size: int, free: int | None, given: bool, is_read: bool
) -> None:
    monkeypatch.setattr(weights, "gguf_bytes", lambda path: size)
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: free)
    monkeypatch.setattr(weights, "gives_huge_pages", lambda: given)
    assert weights._may_be_read(ModelOptions(Path("a.gguf"))) is is_read
