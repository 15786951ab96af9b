"""``paceline engine`` as its users call it, with a pip that compiles nothing and GPUs that are not there."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

from paceline.cli import engine as command
from paceline.engines import building, libraries
from paceline.engines.builds import LlamaBuild
from paceline.machine import Gpu
from tests.cli.invoking import Invoke, invoke

__all__ = ["invoke"]

NVIDIA = Gpu("NVIDIA L4", "NVIDIA", 24 << 30, "8.9", ("CUDA", "Vulkan"))

PIP = """
import os, pathlib, sys
import llama_cpp
verb, rest = sys.argv[1], sys.argv[2:]
print(verb, *rest)
if verb == "wheel":
    folder = pathlib.Path(rest[rest.index("--wheel-dir") + 1])
    folder.mkdir()
    print("[1/2] one")
    if "-DFAILS=ON" in os.environ["CMAKE_ARGS"]:
        sys.exit("two.cpp: error: no such thing")
    print("[2/2] two")
    (folder / "llama_cpp_python.whl").touch()
elif "--target" in rest:
    folder = pathlib.Path(rest[rest.index("--target") + 1])
    folder.mkdir()
    (folder / "llama_cpp").symlink_to(pathlib.Path(llama_cpp.__file__).parent)
"""
"""The installed llama.cpp is what it builds."""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have another pip build; return where the log of the build for processors will be."""
    script = tmp_path / "pip.py"
    script.write_text(PIP)
    monkeypatch.setattr(building, "_pip", lambda: [sys.executable, str(script)])
    monkeypatch.setattr(command, "find_gpus", list)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.setenv("CXX", sys.executable)  # any program that is there
    return tmp_path / "cache/builds/cpu.log"


def test_what_is_installed_what_there_is_and_what_that_is_worth(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = LlamaBuild("0.3.36", "0c1e570", "/there", ("12.2",), ("RPC", "CPU"), {"CPU": {"AVX2": "1"}}, ())
    monkeypatch.setattr(command, "describe_build", lambda: built)
    monkeypatch.setattr(command, "find_gpus", lambda: [NVIDIA, Gpu("AMD GPU at PCI 0000:02:00.0", "AMD")])
    monkeypatch.setattr(command, "processor_features", lambda: frozenset({"AVX2", "AMX_INT8"}))
    outcome = invoke("engine")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("llama-cpp-python 0.3.36 (llama.cpp 0c1e570), compiled by GCC 12.2\nin /there\n")
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in outcome.out.splitlines() if line.strip()}
    assert rows["CUDA"].startswith("no NVIDIA L4, 24.0G plain decoding at 320")
    assert rows["AMX"].startswith("no yes plain decoding 2.1 times")
    assert rows["Vulkan"] == "no NVIDIA L4, 24.0G not measured"
    assert "GPU at PCI 0000:02:00.0, without a driver" in " ".join(outcome.out.split())
    assert "NVIDIA L4 is idle: llama.cpp was built without CUDA. To use it: paceline engine --build cuda" in outcome.out
    assert "which this processor has" not in outcome.out
    monkeypatch.setattr(command, "processor_features", lambda: frozenset({"AVX2", "SME"}))
    last = invoke("engine").out.splitlines()[-1]
    assert last == "llama.cpp was built without SME, which this processor has. To use that: paceline engine --build cpu"
    facts = json.loads(invoke("engine", "--json").out)
    assert facts["machine"]["gpus"][0]["interfaces"] == ["CUDA", "Vulkan"]
    assert facts["installed"]["features"] == {"CPU": ["AVX2"]}
    assert facts["idle"][0]["way_out"] == "paceline engine --build cuda"


def test_nothing_is_built_where_something_is_missing(
    invoke: Invoke, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_CUDA_PLACES", ())
    monkeypatch.setenv("PATH", "")
    outcome = invoke("engine", "--build", "cuda")
    assert outcome.status == 2
    gpu, toolkit, last = outcome.err.splitlines()
    assert gpu.startswith("missing: an NVIDIA GPU with its driver")
    assert toolkit.startswith("missing: the CUDA toolkit")
    assert last == "paceline: --build cuda needs 2 more to be installed first, each named above"


def test_a_build_takes_the_place_of_the_installed_one_once_it_computes_the_same(
    invoke: Invoke, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "try_build", functools.cache(building.try_build))
    outcome = invoke("engine", "--build", "cpu", "--json")
    assert outcome.status == 0, outcome.err
    facts = json.loads(outcome.out)
    assert facts["difference"] == 0.0
    assert facts["before"] == facts["after"]
    said = log.read_text()
    # Compiled, unpacked where it is tried, and only then installed.
    assert [line.split()[0] for line in said.splitlines() if line.startswith(("wheel", "install"))] == [
        "wheel",
        "install",
        "install",
    ]
    assert "--force-reinstall" in said.splitlines()[-1]
    assert "compiling: 100%" in outcome.err


def test_where_it_fails_the_installed_one_stays(invoke: Invoke, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_ARGS", "-DFAILS=ON")
    outcome = invoke("engine", "--build", "cpu")
    assert outcome.status == 1
    *_, cause, last = outcome.err.splitlines()
    assert cause.strip() == "two.cpp: error: no such thing"
    assert last == (
        f"paceline: --build cpu failed with status 1; its log is {log}; the installed llama.cpp is as it was"
    )
    assert "--force-reinstall" not in log.read_text()


def test_an_interrupt_leaves_the_installed_one(invoke: Invoke, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(folder: Path | None) -> building.Trial:
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "try_build", interrupted)
    outcome = invoke("engine", "--build", "cpu")
    assert outcome.status == 130
    assert outcome.err.endswith("interrupted: the installed llama.cpp is as it was\n")


def test_a_run_says_once_that_a_gpu_is_idle(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "driver_gpus", lambda: [NVIDIA])
    monkeypatch.setattr(libraries, "processor_features", lambda: frozenset())
    short = ("run", "-p", "def f(x):", "-n", "2", "-t", "1", "--no-speculation")
    outcome = invoke(*short)
    assert outcome.status == 0, outcome.err
    assert outcome.err.count("NVIDIA L4 is idle: ") == 1
    assert "idle" not in outcome.out
    assert "idle" not in invoke(*short, "-ngl", "0").err
    assert "idle" not in invoke(*short, "--json").err
