"""What is free is what the system and every control group leave; what a model takes is known before it is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import pytest
from tests.engines.tiny_models import write_model
from tests.models.helpers import write_folder

from paceline.core.errors import InputError
from paceline.engines import memory
from paceline.engines.llama_cpp import native
from paceline.engines.loading import foresee_memory, open_engine
from paceline.engines.memory import available_memory
from paceline.engines.options import ModelOptions

MIB = 1 << 20


def system(tmp_path: Path, groups: str, available_kb: int = 8 << 20) -> tuple[Path, Path]:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kb} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    return proc, tmp_path / "cgroup"


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_this_machine_says_it() -> None:
    found = available_memory()
    assert found is None or found > 0


def test_without_groups_it_is_what_the_system_says(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "")
    assert available_memory(proc, groups) == 8 << 30
    assert available_memory(tmp_path / "nowhere", groups) is None


def test_a_group_of_version_2_and_those_around_it(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "0::/user/mine\n")
    write(groups / "user/mine", memory__max="max", memory__current=10 * MIB, memory__stat="anon 5")
    assert available_memory(proc, groups) == 8 << 30
    stat = f"anon 5\nactive_file {20 * MIB}\ninactive_file {30 * MIB}"
    write(groups / "user", memory__max=500 * MIB, memory__current=200 * MIB, memory__stat=stat)
    assert available_memory(proc, groups) == 350 * MIB
    # More is taken than there is, for a moment.
    write(groups / "user/mine", memory__max=MIB, memory__current=2 * MIB, memory__stat="anon 5")
    assert available_memory(proc, groups) == 0


def test_a_group_of_version_1(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/box\n0::/\n")
    stat = f"cache 1\ntotal_inactive_file {MIB}\ntotal_active_file {MIB}"
    write(
        groups / "memory/box",
        memory__limit_in_bytes=100 * MIB,
        memory__usage_in_bytes=40 * MIB,
        memory__stat=stat,
    )
    assert available_memory(proc, groups) == 62 * MIB


def test_a_container_sees_its_group_as_the_outermost(tmp_path: Path) -> None:
    proc, groups = system(tmp_path, "0::/far/away/on/the/host\n")
    write(groups, memory__max=300 * MIB, memory__current=100 * MIB, memory__stat="anon 5")
    assert available_memory(proc, groups) == 200 * MIB


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        ("llama", {}),
        ("llama", {"max_sequences": 3, "cache_type_k": "f32", "cache_type_v": "bf16", "flash_attention": True}),
        ("gemma3", {"max_sequences": 2, "cells": 300}),  # layers with windows and without
        ("qwen35", {"max_sequences": 2}),  # layers with states and with keys
    ],
)
def test_what_a_model_will_take_is_known_before(tmp_path: Path, architecture: str, given: dict[str, Any]) -> None:
    path = write_model(tmp_path / "m.gguf", architecture, tokenizer="bytes")
    options = ModelOptions(path, context_length=256, **given)
    need = foresee_memory(options)
    engine = open_engine(options)
    try:
        made = dict(native.log.buffers)
        capabilities = engine.capabilities
    finally:
        engine.close()
    rounding = 3 * (1 << 20) // 100
    assert need.cache_bytes == pytest.approx(made["KV"] + made.get("RS", 0), abs=rounding)
    assert need.cache_bytes > rounding
    # And what is allocated once passes need it.
    assert need.compute_bytes is not None
    assert made["compute"] <= need.compute_bytes + rounding
    assert need.compute_bytes < 3 * made["compute"]
    assert need.weights_bytes == sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
    assert (need.context_length, need.cells) == (capabilities.context_length, capabilities.cells)
    assert (need.device_bytes, need.devices) == (0, ())


def test_more_than_this_machine_has_is_still_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", "llama", tokenizer="bytes")
    options = ModelOptions(path, context_length=256, max_sequences=4, cells=4096)
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 20)
    with pytest.raises(InputError, match="a context of 4096 tokens needs"):
        open_engine(options)
    assert foresee_memory(options).cache_bytes == 4096 * 2 * 2 * 32 * 2  # keys and values of 2 layers of 32 numbers
    # But for what llama.cpp allocates in any case.
    with pytest.raises(InputError, match="a context of 32768 tokens needs"):
        foresee_memory(dataclasses.replace(options, cells=1 << 15))


def test_a_folder_is_summed_up_by_its_header(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "hf", num_hidden_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=100
    )
    need = foresee_memory(ModelOptions(tmp_path / "hf", context_length=50, max_sequences=2))
    assert (need.context_length, need.cells, need.compute_bytes) == (50, 100, None)
    assert need.weights_bytes == 4 * 28
    assert need.cache_bytes == 100 * (2 * 2 * 64 * 4 + 52)
    half = foresee_memory(ModelOptions(tmp_path / "hf", context_length=50, dtype="bfloat16"))
    assert half.weights_bytes == 2 * 28
