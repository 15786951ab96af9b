"""Entries kept on disk: found again when nothing changed, never trusted otherwise, never fatal."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.engines.options import ModelOptions
from paceline.engines.scripted import ScriptedEngine
from paceline.lab.answers import _parse_answers as read_answers
from paceline.planning.auto.learned import DrafterState, Learned
from paceline.planning.costs.attention import AttentionTimes, RoundTimes
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from paceline.planning.disk_cache import EntryKind, PairKey, entry_path, load_entry, pair_key, store_entry
from tests.planning.helpers import engine_of

pytestmark = pytest.mark.usefixtures("folder")


def profile_of(ms: float) -> CostProfile:
    return CostProfile(PassCost((WidthCost.of(1, [ms / 1e3]), WidthCost.of(2, [ms / 1e3]))), sampling_row_s=1e-5)


KEY = PairKey({"model": "one", "threads": None})


def store(profile: CostProfile) -> Path | None:
    return store_entry("profiles", KEY, profile.to_json())


def load(key: PairKey = KEY) -> CostProfile | None:
    return load_entry("profiles", key, CostProfile.from_json)


def test_what_is_stored_is_found_again(folder: Path) -> None:
    assert load() is None
    path = store(profile_of(3.0))
    assert path == folder / KEY.name
    assert load() == profile_of(3.0)
    assert entry_path("profiles", KEY) == path
    assert list(folder.iterdir()) == [path]
    assert load(PairKey({"model": "two", "threads": None})) is None


def spoiled(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def spoil(path: Path) -> None:
        entry = json.loads(path.read_text())
        path.write_text(json.dumps(change(entry)))

    return spoil


def without(name: str) -> Callable[[Any], Any]:
    return lambda entry: {key: value for key, value in entry.items() if key != name}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: path.write_text(path.read_text()[:-40]),
        lambda path: path.write_text("[" * 100_000),
        lambda path: (path.unlink(), path.mkdir()),
        spoiled(lambda entry: []),
        spoiled(without("key")),
        spoiled(without("data")),
        spoiled(lambda entry: {**entry, "key": {"model": "one", "threads": 1}}),
        spoiled(lambda entry: {**entry, "data": {**entry["data"], "version": 0}}),
        spoiled(lambda entry: {**entry, "data": {**entry["data"], "target": None}}),
        spoiled(lambda entry: {**entry, "data": {**entry["data"], "sampling_row_s": float("nan")}}),
        spoiled(lambda entry: {**entry, "data": {**entry["data"], "sampling_row_s": float("inf")}}),
        spoiled(lambda entry: {**entry, "data": {**entry["data"], "target": ["x"]}}),
        lambda path: path.write_text(path.read_text().replace("1e-05", "1e999")),
        lambda path: path.write_text(path.read_text().replace("1e-05", "9" * 5000)),
        lambda path: os.truncate(path, 1 << 27),  # with nothing written it takes no room
    ],
)
def test_a_spoiled_entry_is_neither_trusted_nor_fatal(spoil: Callable[[Path], None]) -> None:
    path = store(profile_of(3.0))
    assert path is not None
    spoil(path)
    assert load() is None
    stored = store(profile_of(4.0))
    if path.is_dir():
        assert stored is None
    else:
        assert load() == profile_of(4.0)


ENTRIES: dict[EntryKind, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "profiles": (profile_of(3.0).to_json(), CostProfile.from_json),
    "learned": (Learned({"suffix": DrafterState.new("suffix", is_model=False)}).to_json(), Learned.from_json),
    "attention": (
        AttentionTimes(2048, (RoundTimes(1, 1, 32, 0.013, 0.012), RoundTimes(1, 1, 1024, 0.02, 0.03))).to_json(),
        lambda data: AttentionTimes.from_json(data).is_fusing_faster(0.25) or True,
    ),
    "answers": (
        {"0": {"max_tokens": 2, "token_ids": [1, 2], "finish_reason": None, "places": [[[1], [1.0]], [[2], [0.5]]]}},
        read_answers,
    ),
}
ODD = ("null", "true", "-1", "0", "9" * 400, "1e999", "Infinity", "-Infinity", "NaN", '"x"', "[]", "{}", "[[]]", "[{}]")


def places_in(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every entry of a tree, as what holds it and where."""
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places_in(data[key])


@pytest.mark.parametrize("kind", ENTRIES)
def test_nothing_that_is_kept_is_fatal_whatever_it_says(kind: EntryKind) -> None:
    sound, read = ENTRIES[kind]
    path = store_entry(kind, KEY, sound)
    assert path is not None
    assert load_entry(kind, KEY, read) is not None
    entry = json.loads(path.read_text())
    tried = 0
    for holder, key in places_in(entry):
        was, holder[key] = holder[key], "the odd one"
        text = json.dumps(entry)
        for odd in ODD:
            path.write_text(text.replace('"the odd one"', odd))
            load_entry(kind, KEY, read)
            tried += 1
        holder[key] = was
    assert tried >= 5 * len(ODD)
    path.write_text(json.dumps(entry))
    assert load_entry(kind, KEY, read) is not None


def test_figures_that_are_infinite_are_not_kept() -> None:
    assert store_entry("profiles", KEY, {"figure": float("inf")}) is None


def test_a_folder_that_cannot_be_written_is_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert store(profile_of(3.0)) is None
    assert load() is None


def test_an_interrupted_store_leaves_the_old_entry_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(profile_of(3.0))

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store(profile_of(4.0))
    assert load() == profile_of(3.0)
    assert [path.name for path in folder.iterdir()] == [KEY.name]


def test_stores_at_once_leave_whole_entries() -> None:
    found = []

    def work(ms: float) -> None:
        for _ in range(30):
            assert store(profile_of(ms)) is not None
            found.append(load())

    threads = [threading.Thread(target=work, args=(float(ms),)) for ms in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120
    assert all(profile in [profile_of(float(ms)) for ms in range(1, 5)] for profile in found)


def test_the_key_changes_with_all_that_changes_costs(
    tmp_path: Path, options: ModelOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()

    def name(chosen: ModelOptions = options, chosen_engine: ScriptedEngine = engine) -> str:
        return pair_key(chosen_engine, chosen).name

    one = name()
    assert name() == one
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(Path(options.path).read_bytes())
    assert name(dataclasses.replace(options, path=moved)) == one
    assert name(chosen_engine=engine_of(99.0)) == one

    others = {
        name(dataclasses.replace(options, **change))
        for change in (
            {"threads": 1},
            {"threads_batch": 1},
            {"flash_attention": True},
            {"exact": True},
            {"devices": ("none",)},
            {"gpu_layers": 3},
            {"override_tensors": (("exps", "CPU"),)},
        )
    }
    others |= {name(chosen_engine=engine_of(**{limit: 17})) for limit in ("context_length", "max_rows", "max_outputs")}
    others.add(pair_key(engine, options, engine, options).name)
    elsewhere = engine_of()
    monkeypatch.setattr(elsewhere, "description", "scripted model on CUDA0", raising=False)
    others.add(name(chosen_engine=elsewhere))
    with monkeypatch.context() as patch:
        patch.setattr("paceline.planning.disk_cache.describe_library", lambda name: f"another {name}")
        others.add(name())
    with monkeypatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 4096)
        others.add(name())
    moved.write_bytes(b"GGUF" + bytes(999) + b"x")
    others.add(name(dataclasses.replace(options, path=moved)))
    assert len(others) == 15
    assert one not in others


def test_the_file_s_name_is_no_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines describe themselves by the file's name, and by the threads and devices that they chose."""
    names = []
    for file in ("one.gguf", "other.gguf"):
        path = tmp_path / file
        path.write_bytes(bytes(100))
        engine = engine_of()
        monkeypatch.setattr(engine, "description", f"{file} (llama, 1B parameters) on CPU, 2 threads", raising=False)
        names.append(pair_key(engine, ModelOptions(path)).name)
    assert names[0] == names[1]
