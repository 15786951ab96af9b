"""What one machine found out, another one need not; and a folder that fails keeps nobody from going on."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from paceline.engines.options import ModelOptions
from paceline.planning import shared_cache
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.disk_cache import EntryKind, PairKey, entry_path, load_entry, store_entry
from paceline.planning.shared_cache import SHARED_VARIABLE
from tests.planning.helpers import engine_of

KEY = PairKey({"model": "one"})
FIGURES = {"figure": 1.5}


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    shared_cache._failed.clear()


@pytest.fixture(params=["memory://bucket/deep/folder", "file://{}/not/there/yet"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    named = str(request.param).format(tmp_path)
    monkeypatch.setenv(SHARED_VARIABLE, named)
    return named


class Machines:
    """Has each name be a machine: a cache of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._monkeypatch = monkeypatch

    def be(self, name: str) -> None:
        self._monkeypatch.setenv("PACELINE_CACHE", str(self._folder / name))


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    found = Machines(tmp_path / "machines", monkeypatch)
    found.be("first")
    return found


def load(kind: EntryKind = "profiles", key: PairKey = KEY) -> Any:
    return load_entry(kind, key, dict)


def files_of(address: str) -> tuple[Any, list[str]]:
    files, folder = fsspec.url_to_fs(address)
    return files, sorted(path.removeprefix(folder) for path in files.find(folder))


@pytest.mark.parametrize("kind", ["profiles", "learned", "attention"])
def test_another_machine_finds_it_and_keeps_it(
    kind: EntryKind, address: str, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store_entry(kind, KEY, FIGURES) == entry_path(kind, KEY)
    assert files_of(address)[1] == [f"/{kind}/{KEY.name}"]
    machines.be("second")
    assert load(kind, PairKey({"model": "two"})) is None
    assert load(kind) == FIGURES
    monkeypatch.delenv(SHARED_VARIABLE)
    assert load(kind) == FIGURES


def test_what_is_kept_here_goes_before_what_others_share(address: str, machines: Machines) -> None:
    store_entry("learned", KEY, FIGURES)
    machines.be("second")
    store_entry("learned", KEY, {"figure": 2.5})
    machines.be("first")
    assert load("learned") == FIGURES
    machines.be("third")
    assert load("learned") == {"figure": 2.5}


def test_texts_are_not_shared(address: str, machines: Machines) -> None:
    store_entry("answers", KEY, {"0": "a text"})
    files, there = files_of(address)
    assert there == []
    store_entry("profiles", KEY, FIGURES)
    _, folder = fsspec.url_to_fs(address)
    files.pipe_file(f"{folder}/other", b"")
    machines.be("second")
    assert load("answers") is None


@pytest.mark.parametrize("spoiled", [b"", b"\xff", b"[]", b'{"key": {}, "data": {}}', b'{"key": {"model": "two"}}'])
def test_what_is_not_what_it_should_be_is_neither_trusted_nor_kept(
    spoiled: bytes, address: str, machines: Machines
) -> None:
    store_entry("profiles", KEY, FIGURES)
    files, _ = files_of(address)
    _, folder = fsspec.url_to_fs(address)
    files.pipe_file(f"{folder}/profiles/{KEY.name}", spoiled)
    machines.be("second")
    assert load() is None
    assert not entry_path("profiles", KEY).exists()
    store_entry("profiles", KEY, FIGURES)
    machines.be("third")
    assert load() == FIGURES


def test_a_profile_is_measured_by_the_first_machine_alone(
    address: str, machines: Machines, options: ModelOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether it holds here is looked at as ever; by a clock that stands still for no other process.
    monkeypatch.setattr("paceline.planning.costs.profile_cache._still_holds", lambda *_: True)
    first = find_or_measure(engine_of(), options)
    machines.be("second")
    second = find_or_measure(engine_of(), options)
    assert (first.measured, second.measured) == (True, False)
    assert second.profile == first.profile


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nonsense://folder", "Protocol not known: nonsense"),
        ("store://folder", "Install store to reach it"),
        ("file:///dev/null/folder", "Not a directory"),
        ("webhdfs://user:secret@127.0.0.1:1/folder", ""),
    ],
)
def test_a_folder_that_fails_is_told_once_and_keeps_nobody(
    address: str,
    why: str,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fsspec.register_implementation("store", "nowhere.Files", errtxt="Install store to reach it", clobber=True)
    monkeypatch.setenv(SHARED_VARIABLE, address)
    with caplog.at_level(logging.WARNING):
        assert load() is None
        assert store_entry("profiles", KEY, FIGURES) is not None
        machines.be("second")
        assert load() is None
        store_entry("profiles", KEY, FIGURES)
        assert load() == FIGURES
    (told,) = caplog.messages
    assert told.startswith(f"{SHARED_VARIABLE} is {address.replace('user:secret@', '')}: ")
    assert why in told
    assert told.endswith("; going on with what is kept on this machine alone")
    assert "\n" not in told
    assert "secret" not in told


def test_a_folder_that_does_not_answer_is_waited_for_once(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []
    over = threading.Event()

    def wait(self: Any, path: str, **options: Any) -> bytes:
        asked.append(path)
        over.wait()
        return json.dumps({"key": KEY.facts, "data": FIGURES}).encode()

    monkeypatch.setattr(MemoryFileSystem, "cat_file", wait)
    monkeypatch.setattr(shared_cache, "_MOST_S", 0.05)
    monkeypatch.setenv(SHARED_VARIABLE, "memory://bucket")
    with caplog.at_level(logging.WARNING):
        assert load() is None
        assert load() is None
    over.set()
    assert len(asked) == 1
    (told,) = caplog.messages
    assert "no answer in 0.05 s" in told
