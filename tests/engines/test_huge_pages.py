"""Huge pages: which memory asks for them, when, and what becomes of a load that is interrupted there."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import pytest

from paceline.core.clock import VirtualClock
from paceline.engines import huge_pages
from paceline.engines.huge_pages import MAX_WAIT_S, MIN_BYTES, HugePages, gives_huge_pages, private_ranges, without
from paceline.engines.llama_cpp import loading
from paceline.engines.llama_cpp.loading import LlamaCppConfig, loaded_model
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
    assert gives_huge_pages(setting) is (gives and sys.platform == "linux")


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
    assert without([(10, 20), (30, 40)], known) == rest


def asks(memory: mmap.mmap) -> bool:
    """Return whether a memory that holds a mark at its beginning is one that asks for huge pages."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            flags = re.search(r"(?m)^VmFlags:(.*)$", entry)
            return flags is not None and "hg" in flags[1].split()
    raise AssertionError("the memory is not mapped")


@needs_huge_pages
def test_what_is_allocated_meanwhile_asks_for_them() -> None:
    before = mmap.mmap(-1, 2 * MIN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = HugePages()
    after = mmap.mmap(-1, 2 * MIN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.take()
    assert asks(after)
    assert not asks(before)


class SlowClock(VirtualClock):
    """A clock that moves on whenever somebody looks."""

    def now_s(self) -> float:
        now_s = super().now_s()
        self.advance(MAX_WAIT_S)
        return now_s


@needs_huge_pages
def test_where_getting_them_takes_long_the_rest_is_left_for_later() -> None:
    pages = HugePages(SlowClock())
    memory = mmap.mmap(-1, 8 * MIN_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.take()
    (left,) = pages._later
    assert 0 < left[1] - left[0] < 8 * MIN_BYTES
    pages.take_rest()
    assert asks(memory)


def test_an_interrupt_meanwhile_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(HugePages):
        def take(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(loading, "gives_huge_pages", lambda: True)
    monkeypatch.setattr(loading, "HugePages", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        loaded_model(LlamaCppConfig(embedded_draft(), context_length=64, threads=1))


@pytest.mark.parametrize(
    ("size", "free", "given", "stream", "is_read"),
    [
        (1000 * MIB, 2000 * MIB, True, None, True),
        (1000 * MIB, 1999 * MIB, True, None, False),
        (20 * MIB, 2000 * MIB, True, None, False),
        (1000 * MIB, 2000 * MIB, False, None, False),
        (1000 * MIB, None, True, None, False),
        (1000 * MIB, 2000 * MIB, True, False, False),
    ],
)
def test_weights_are_read_where_there_is_room_twice(
    monkeypatch: pytest.MonkeyPatch, size: int, free: int | None, given: bool, stream: bool | None, is_read: bool
) -> None:
    monkeypatch.setattr(loading, "gguf_bytes", lambda path: size)
    monkeypatch.setattr(loading, "available_memory", lambda: free)
    monkeypatch.setattr(loading, "gives_huge_pages", lambda: given)
    assert loading._may_be_read(LlamaCppConfig(Path("a.gguf"), stream=stream)) is is_read
