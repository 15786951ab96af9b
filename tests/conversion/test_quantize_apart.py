"""Quantising in another process: the same file as in this one, and every way in which it may end otherwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from paceline.conversion import quantize_apart
from paceline.conversion.quantize import file_types, quantize_gguf, quantized_bytes
from paceline.core.errors import InputError, ModelFileError
from paceline.models.embedded import embedded_draft, embedded_target

DRAFT, TARGET = embedded_draft(), embedded_target()


def ignore(*_: int) -> None:
    pass


def test_it_writes_what_this_process_would(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    begun: list[int] = []
    quantize_apart.quantize_apart(
        TARGET,
        tmp_path / "apart.gguf",
        "q4_k_m",
        begin=begun.append,
        report=lambda done, total: told.append((done, total)),
    )
    quantize_gguf(TARGET, tmp_path / "here.gguf", "Q4_K_M")
    assert (tmp_path / "apart.gguf").read_bytes() == (tmp_path / "here.gguf").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"apart.gguf", "here.gguf"}
    (num_bytes,) = begun
    assert told[-1] == (num_bytes, num_bytes)
    assert told == sorted(told)


@pytest.mark.parametrize("file_type", ["Q4_0", "Q2_K", "Q5_K_M", "Q8_0", "F16", "F32"])
@pytest.mark.parametrize("source", [DRAFT, TARGET], ids=["draft", "target"])
def test_the_size_is_known_before(source: Path, file_type: str, tmp_path: Path) -> None:
    quantize_gguf(source, tmp_path / "made.gguf", file_type)
    assert quantized_bytes(source, file_type) == pytest.approx(
        (tmp_path / "made.gguf").stat().st_size, rel=0.01, abs=1e4
    )


@pytest.mark.parametrize("file_type", ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "Q2_K_S", "NVFP4"])
def test_types_that_cannot_be_written_are_known_before(file_type: str) -> None:
    assert file_type in file_types()
    with pytest.raises(InputError, match=f"cannot be written as {file_type}: .*; choose another, such as Q2_K or Q4_0"):
        quantized_bytes(TARGET, file_type)


def test_errors_of_the_other_process_are_told_as_here(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(DRAFT.read_bytes()[:9000])
    for source, file_type, kind, why in (
        (bad, "Q4_0", ModelFileError, "truncated or damaged"),
        (DRAFT, "Q9", InputError, r"'Q9' is unknown; choose from .*Q8_0"),
    ):
        with pytest.raises(kind, match=why):
            quantize_apart.quantize_apart(source, tmp_path / "out.gguf", file_type, begin=ignore, report=ignore)
    with pytest.raises(InputError, match="there is no directory"):
        quantize_apart.quantize_apart(DRAFT, tmp_path / "no" / "out.gguf", "Q4_0", begin=ignore, report=ignore)
    assert list(tmp_path.iterdir()) == [bad]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_process_that_the_system_ends_is_one_clear_error(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    with pytest.raises(ModelFileError, match="ended by SIGKILL, as the system does where memory is short"):
        quantize_apart.quantize_apart(
            TARGET, tmp_path / "out.gguf", "Q2_K", begin=lambda num_bytes: processes[0].kill(), report=ignore
        )
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_apart, "_PROGRAM", "raise SystemError('no good')")
    with pytest.raises(ModelFileError, match="ended with status 1: SystemError: no good"):
        quantize_apart.quantize_apart(DRAFT, tmp_path / "out.gguf", "Q4_0", begin=ignore, report=ignore)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="limits of files' sizes")
def test_a_disk_that_is_full_in_the_middle_is_one_clear_error(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    try:
        with pytest.raises(InputError, match="could not be written as F32: the disk is full, or does not take it"):
            quantize_apart.quantize_apart(TARGET, tmp_path / "out.gguf", "F32", begin=ignore, report=ignore)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
