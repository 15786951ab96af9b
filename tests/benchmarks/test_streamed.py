"""A box of little memory and a slow disk, what is measured in it, and what is said of the figures."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import main
from benchmarks.streamed import box
from benchmarks.streamed.box import Limits, measure_in_box
from benchmarks.streamed.passes import Found, limits_of, streamed_passes, summary
from benchmarks.streamed.passing import MMAP, STREAMED

from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.lab.inflate import LlamaShape, inflate
from paceline.models.embedded import embedded_target
from tests.proofs import LINES
from tests.timing import WAIT_S

LAYERS = 40
"""Of 4.4 MB each: what is read at once has up to 32 MB, and there is room for two."""
MB = 1 << 20


# --- in a box ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of some tens of MB, where boxes can be made."""
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    shape = LlamaShape.from_gguf(embedded_target())
    inflate(embedded_target(), path, dataclasses.replace(shape, layers=LAYERS), file_type="F16")
    try:
        with box.groups(Limits(64 * MB), box.device_of(path)):
            pass
    except (CapabilityError, InputError) as error:
        LINES.append(f"nothing was tested in a box: {error}")
        pytest.skip(str(error))
    return path


@pytest.fixture(scope="module")
def least_mb(model: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the least memory in MB that the model can be streamed in."""
    job = {"variant": STREAMED, "memory_bytes": 1, "rows": [1], "repeats": 1, "threads": 1}
    with pytest.raises(InputError) as refused:
        measure_in_box(model, None, tmp_path_factory.mktemp("cache"), job)
    found = re.search(r"give (\d+)M", str(refused.value))
    assert found is not None
    return int(found[1])


def figures_in(path: Path) -> dict[str, Any]:
    (figures,) = (value for name, value in json.loads(path.read_text()).items() if name != "machine")
    assert isinstance(figures, dict)
    return figures


@pytest.mark.long
def test_passes_are_streamed_within_their_box(model: Path, least_mb: int, tmp_path: Path) -> None:
    memory, limit = f"{least_mb + 16}M", f"{least_mb + 40}M"
    file = tmp_path / "passes.json"
    streamed_passes(str(model), memory, limit, "1G", rows="1,8", repeats=4, laps=1, threads=1, json_file=file)
    figures = figures_in(file)
    streamed, mapped = (figures["variants"][name] for name in (STREAMED, MMAP))
    assert not streamed["killed"]
    assert 0 < figures["streamed_bytes"] < model.stat().st_size
    assert streamed["anonymous_bytes"] <= (least_mb + 16) * MB
    assert streamed["peak_bytes"] <= figures["limits"]["memory_bytes"] == (least_mb + 40) * MB
    # What the kernel counted is what the engine says, but for what was read ahead.
    slot = 32 * MB
    for rows in ("1", "8"):
        one = streamed["passes"][rows]
        assert len(one["all"]) == 4
        assert abs(one["bytes_of_group"] - one["bytes_of_engine"]) < slot
        assert abs(one["bytes_of_engine"] - figures["streamed_bytes"]) < slot
        assert 0 < one["least_s"] <= one["median_s"] <= one["most_s"]
    assert mapped["loaded"][0]["plan"] is None
    assert figures["same_logits"] == [1, 8]


def test_a_process_that_needs_more_is_ended_and_said_to_be(model: Path, tmp_path: Path) -> None:
    with box.groups(Limits(24 * MB), box.device_of(model)) as groups:
        command = [sys.executable, "-c", "held = b'x' * (64 << 20)"]
        process = subprocess.Popen(box.command_in(groups, command), text=True)
        process.wait(WAIT_S)
        assert box.was_killed(process)
        assert groups.peak_bytes <= 24 * MB
    job = {"variant": MMAP, "rows": [1], "repeats": 1, "threads": 1}
    assert measure_in_box(model, Limits(24 * MB), tmp_path, job).killed


def test_the_groups_of_a_box_are_gone_afterwards(model: Path) -> None:
    with box.groups(Limits(64 * MB, 50 * MB), box.device_of(model)) as groups:
        assert (groups.memory / "memory.limit_in_bytes").read_text().strip() == str(64 * MB)
        said = (groups.disk / "blkio.throttle.read_bps_device").read_text().split()
        assert said == [box.device_of(model), str(50 * MB)]
        assert box.Groups.from_json(groups.to_json()) == groups
        box.drop_cached(model)
        reading = ["dd", f"if={model}", "of=/dev/null", "bs=1M", "count=8", "iflag=direct", "status=none"]
        subprocess.run(box.command_in(groups, reading), check=True)
        assert groups.bytes_read >= 8 * MB
    assert not groups.memory.exists()
    assert not groups.disk.exists()


def test_a_process_that_fails_is_an_error_of_one_line(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"^tea: KeyError: 'rows'$"):
        measure_in_box(model, None, tmp_path, {"variant": "tea"})


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_where_no_box_can_be_made_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(box, "_GROUPS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "streamed-passes", "-m", "target", "--memory", "100M"])
    monkeypatch.setattr(box, "device_of", lambda path: "254:0")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"benchmarks: no control group can be made at \S+: No such file or directory; run it as root, where version 1 "
        r"of the memory controller is mounted at \S+\n",
        said,
    )


def test_a_file_on_no_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box, "_DEVICES", tmp_path)
    with pytest.raises(CapabilityError, match=r"lies on no disk whose reads could be bounded \(device \d+:\d+\)"):
        box.device_of(tmp_path)


def test_reads_of_a_partition_are_those_of_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = tmp_path.stat().st_dev
    disk = tmp_path / "disk"
    partition = disk / "disk1"
    partition.mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (partition / "partition").write_text("1\n")
    (tmp_path / f"{os.major(number)}:{os.minor(number)}").symlink_to(partition)
    monkeypatch.setattr(box, "_DEVICES", tmp_path)
    assert box.device_of(tmp_path) == "8:0"


def test_limits_that_make_no_sense_are_refused() -> None:
    assert limits_of("740M", "760M", "400M") == Limits(760 * MB, 400 * MB)
    assert limits_of("740M", None, None) == Limits(740 * MB, None)
    with pytest.raises(InputError, match="--limit 700M is less than --memory 740M"):
        limits_of("740M", "700M", None)
    with pytest.raises(InputError, match="'fast' is not a size"):
        limits_of("740M", None, "fast")


def found_of(passes: Callable[[int], float], logits: str, plan: dict[str, float] | None) -> Found:
    found = Found(peak_bytes=50 * MB)
    found.loaded.append({"loaded": "a model", "plan": plan})
    for rows in (1, 32):
        found.logits[rows] = {logits}
        found.passes[rows] = [
            {"seconds": passes(rows) * factor, "bytes_of_group": 90, "bytes_of_engine": 99, "waited_s": 0.1}
            for factor in (1.0, 0.9, 1.4)
        ]
    return found


def test_ratios_of_passes_are_of_medians() -> None:
    found = {
        MMAP: found_of(lambda rows: 4.0, "a", None),
        STREAMED: found_of(lambda rows: 2.0 + rows / 32, "a", {"pass_bytes": 100, "bytes_per_s": 25}),
    }
    found[STREAMED].logits[32] = {"b"}
    figures = summary(found, Limits(60 * MB, 50), [1, 32])
    assert figures["bytes_over_bandwidth_s"] == 2.0
    assert figures["ratios"]["mmap / streamed"][32] == pytest.approx(4 / 3)
    assert figures["ratios"]["streamed / bytes over bandwidth"][32] == pytest.approx(1.5)
    assert figures["ratios"]["bytes read / streamed bytes"] == {1: 0.99, 32: 0.99}
    assert figures["ratios"]["32 rows / 1 row"] == pytest.approx(3 / (2 + 1 / 32))
    assert figures["same_logits"] == [1]


def test_passes_of_a_process_that_was_ended_are_left_out() -> None:
    found = {
        MMAP: Found(killed=True),
        STREAMED: found_of(lambda rows: 2.0, "a", {"pass_bytes": 100, "bytes_per_s": 25}),
    }
    figures = summary(found, Limits(60 * MB, None), [1, 32])
    assert figures["ratios"]["mmap / streamed"] == {}
    assert (figures["bandwidth"], figures["bytes_over_bandwidth_s"]) == (25, 4.0)
    found = {MMAP: Found(killed=True), STREAMED: Found(killed=True)}
    assert summary(found, Limits(60 * MB, 50), [1, 32])["streamed_bytes"] == 0
