"""Profiles kept on disk: found again when nothing changed, never trusted otherwise, never fatal."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ModelFileError
from paceline.engines.loading import ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.planning.costs import profile_cache
from paceline.planning.costs.profile import CostProfile, PassCost, WidthCost
from paceline.planning.costs.profile_cache import (
    ProfileKey,
    find_or_measure,
    fingerprint,
    load_profile,
    profile_key,
    profiles_folder,
    store_profile,
)

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def options(tmp_path: Path) -> ModelOptions:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return ModelOptions(path, engine="llama_cpp")


def engine_of(ms: float = 1.0, **options: Any) -> ScriptedEngine:
    model = random_model(8, seed=0)
    cost = lambda rows, context: (ms + rows) / 1e3  # noqa: E731
    return ScriptedEngine(model, ScriptedVocabulary.of_size(8), cost=cost, **options)


def profile_of(ms: float) -> CostProfile:
    return CostProfile(PassCost((WidthCost.of(1, [ms / 1e3]), WidthCost.of(2, [ms / 1e3]))), sampling_row_s=1e-5)


KEY = ProfileKey({"model": "one", "threads": None})


def test_what_is_stored_is_found_again(folder: Path) -> None:
    assert load_profile(KEY) is None
    path = store_profile(KEY, profile_of(3.0))
    assert path == folder / KEY.name
    assert load_profile(KEY) == profile_of(3.0)
    assert profiles_folder() == folder
    assert list(folder.iterdir()) == [path]
    assert load_profile(ProfileKey({"model": "two", "threads": None})) is None


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
        spoiled(without("profile")),
        spoiled(lambda entry: {**entry, "key": {"model": "one", "threads": 1}}),
        spoiled(lambda entry: {**entry, "profile": {**entry["profile"], "version": 0}}),
        spoiled(lambda entry: {**entry, "profile": {**entry["profile"], "target": None}}),
        spoiled(lambda entry: {**entry, "profile": {**entry["profile"], "sampling_row_s": float("nan")}}),
    ],
)
def test_a_spoiled_entry_is_neither_trusted_nor_fatal(spoil: Callable[[Path], None]) -> None:
    path = store_profile(KEY, profile_of(3.0))
    assert path is not None
    spoil(path)
    assert load_profile(KEY) is None
    stored = store_profile(KEY, profile_of(4.0))
    if path.is_dir():
        assert stored is None
    else:
        assert load_profile(KEY) == profile_of(4.0)


def test_a_folder_that_cannot_be_written_is_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    assert store_profile(KEY, profile_of(3.0)) is None
    assert load_profile(KEY) is None


def test_an_interrupted_store_leaves_the_old_entry_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_profile(KEY, profile_of(3.0))

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store_profile(KEY, profile_of(4.0))
    assert load_profile(KEY) == profile_of(3.0)
    assert [path.name for path in folder.iterdir()] == [KEY.name]


def test_stores_at_once_leave_whole_entries() -> None:
    found = []

    def work(ms: float) -> None:
        for _ in range(30):
            assert store_profile(KEY, profile_of(ms)) is not None
            found.append(load_profile(KEY))

    threads = [threading.Thread(target=work, args=(float(ms),)) for ms in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 120
    assert all(profile in [profile_of(float(ms)) for ms in range(1, 5)] for profile in found)


def write(path: Path, size: int, changes: dict[int, int] | None = None) -> Path:
    data = bytearray(size)
    for place, value in (changes or {}).items():
        data[place] = value
    path.write_bytes(data)
    return path


def test_fingerprints_do_not_depend_on_place_or_time(tmp_path: Path) -> None:
    one = write(tmp_path / "one.gguf", 3 * MEBIBYTE)
    (tmp_path / "other").mkdir()
    assert fingerprint(one) == fingerprint(write(tmp_path / "other" / "two.gguf", 3 * MEBIBYTE))


@pytest.mark.parametrize("size", [10, MEBIBYTE, MEBIBYTE + 10, 3 * MEBIBYTE, 9 * MEBIBYTE])
def test_fingerprints_tell_heads_tails_and_sizes_apart(tmp_path: Path, size: int) -> None:
    one = fingerprint(write(tmp_path / "a", size))
    for changes in ({0: 1}, {min(size, MEBIBYTE) - 1: 1}, {size - 1: 1}):
        assert fingerprint(write(tmp_path / "a", size, changes)) != one
    assert fingerprint(write(tmp_path / "a", size + 1)) != one


def test_fingerprints_of_folders_and_split_files_cover_all_parts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = write(tmp_path / "model.safetensors", 100)
    (tmp_path / "README.md").write_text("one")
    one = fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("other")
    assert fingerprint(tmp_path) == one
    write(weights, 100, {50: 1})
    assert fingerprint(tmp_path) != one

    first = write(tmp_path / "big-00001-of-00002.gguf", 100)
    second = write(tmp_path / "big-00002-of-00002.gguf", 100)
    write(tmp_path / "bigger-00002-of-00002.gguf", 100)
    whole = fingerprint(first)
    write(tmp_path / "bigger-00002-of-00002.gguf", 101)
    assert fingerprint(first) == whole
    write(second, 100, {7: 1})
    assert fingerprint(first) != whole


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be read"):
        fingerprint(tmp_path / "none.gguf")


def test_a_fingerprint_of_a_large_file_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "large", 64 * MEBIBYTE)
    num_read = []

    class Counting(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(-1 if size is None else size)
            num_read.append(len(data))
            return data

    monkeypatch.setattr(Path, "open", lambda self, mode: Counting(self, mode))
    fingerprint(path)
    assert 1 * MEBIBYTE < sum(num_read) < 6 * MEBIBYTE


def test_the_key_changes_with_all_that_changes_costs(
    tmp_path: Path, options: ModelOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of()

    def name(chosen: ModelOptions = options, chosen_engine: ScriptedEngine = engine) -> str:
        return profile_key(chosen_engine, chosen).name

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
            {"devices": ("none",)},
            {"gpu_layers": 3},
            {"override_tensors": (("exps", "CPU"),)},
        )
    }
    others |= {name(chosen_engine=engine_of(**{limit: 17})) for limit in ("context_length", "max_rows", "max_outputs")}
    others.add(profile_key(engine, options, engine, options).name)
    elsewhere = engine_of()
    monkeypatch.setattr(elsewhere, "description", "scripted model on CUDA0", raising=False)
    others.add(name(chosen_engine=elsewhere))
    with monkeypatch.context() as patch:
        patch.setattr(profile_cache, "PROFILE_VERSION", 0)
        others.add(name())
    with monkeypatch.context() as patch:
        patch.setattr("llama_cpp.__version__", "0.0.1")
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
        path = write(tmp_path / file, 100)
        engine = engine_of()
        monkeypatch.setattr(engine, "description", f"{file} (llama, 1B parameters) on CPU, 2 threads", raising=False)
        names.append(profile_key(engine, ModelOptions(path)).name)
    assert names[0] == names[1]


def test_a_model_is_measured_once(options: ModelOptions) -> None:
    engine = engine_of(2.0)
    first = find_or_measure(engine, options, clock=engine.clock)
    passed_s = engine.clock.now_s()
    second = find_or_measure(engine, options, clock=engine.clock)
    assert (first.measured, second.measured) == (True, False)
    # But for a few passes, which say that it still holds.
    assert engine.clock.now_s() - passed_s < 0.15
    assert first.profile == second.profile
    assert first.path == second.path
    assert first.path is not None
    assert first.path.is_file()


def test_a_machine_that_changed_a_little_can_be_measured_again(options: ModelOptions) -> None:
    engine, slower = engine_of(5.0), engine_of(6.0)
    find_or_measure(engine, options, clock=engine.clock)
    assert not find_or_measure(slower, options, clock=slower.clock).measured
    again = find_or_measure(slower, options, clock=slower.clock, force=True)
    assert again.measured
    assert again.profile.round_s(1) == pytest.approx(0.007)
    assert find_or_measure(engine, options, clock=engine.clock).profile.round_s(1) == pytest.approx(0.007)


@pytest.mark.parametrize("ms", [1.0, 9.0])
def test_a_profile_of_a_machine_that_changed_much_is_replaced(options: ModelOptions, ms: float) -> None:
    engine, changed = engine_of(4.0), engine_of(ms)
    find_or_measure(engine, options, clock=engine.clock)
    again = find_or_measure(changed, options, clock=changed.clock)
    assert again.measured
    assert again.profile.round_s(1) == pytest.approx((ms + 1) / 1e3)
    assert not find_or_measure(changed, options, clock=changed.clock).measured


def test_a_profile_whose_wide_passes_changed_is_replaced(options: ModelOptions) -> None:
    engine = engine_of(10.0)
    find_or_measure(engine, options, clock=engine.clock)
    engine._cost = lambda rows, context: 0.011
    assert find_or_measure(engine, options, clock=engine.clock).measured


def test_passes_that_something_disturbed_are_no_reason_to_measure_again(options: ModelOptions) -> None:
    engine = engine_of(10.0)
    find_or_measure(engine, options, clock=engine.clock)
    undisturbed, passes = engine._cost, itertools.count()
    engine._cost = lambda rows, context: undisturbed(rows, context) * (5.0 if next(passes) < 5 else 1.0)
    assert not find_or_measure(engine, options, clock=engine.clock).measured


def test_a_check_of_slow_passes_is_short(options: ModelOptions) -> None:
    engine = engine_of(800.0)
    find_or_measure(engine, options, clock=engine.clock)
    before_s = engine.clock.now_s()
    assert not find_or_measure(engine, options, clock=engine.clock).measured
    # The first reads the model from the disk, and then one of each width.
    assert engine.clock.now_s() - before_s <= 3 * 0.81


def test_widths_that_are_not_kept_are_measured(options: ModelOptions) -> None:
    engine = engine_of(max_rows=100)
    find_or_measure(engine, options, clock=engine.clock, widths=(1, 2, 4))
    assert not find_or_measure(engine, options, clock=engine.clock, widths=(4, 101)).measured
    again = find_or_measure(engine, options, clock=engine.clock, widths=(4, 19))
    assert again.measured
    assert again.profile.target.is_measured(19)


def test_a_cache_that_cannot_be_written_keeps_nothing_but_works(tmp_path: Path, options: ModelOptions) -> None:
    (tmp_path / "cache").write_text("in the way")
    engine = engine_of()
    kept = find_or_measure(engine, options, clock=engine.clock)
    assert (kept.measured, kept.path) == (True, None)


def test_a_model_whose_file_is_gone_is_measured_and_not_kept(options: ModelOptions, folder: Path) -> None:
    Path(options.path).unlink()
    engine = engine_of()
    kept = find_or_measure(engine, options, clock=engine.clock)
    assert (kept.measured, kept.path) == (True, None)
    assert kept.profile.round_s(1) == pytest.approx(0.002)
    assert not folder.exists()
