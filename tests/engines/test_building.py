"""Building llama.cpp: what is looked for first, what CMake is told, and what is done where it fails."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.engines import building
from paceline.engines.building import AMX_HEADER, Trial, check_trial, compiles_amx_wrongly, plan_build
from paceline.engines.builds import LlamaBuild
from paceline.machine import Gpu

NVIDIA = Gpu("NVIDIA L4", "NVIDIA", interfaces=("CUDA",))
AMD = Gpu("AMD Radeon RX 7900", "AMD", 20 << 30, "gfx1100", ("ROCm", "Vulkan"))

Program = Callable[..., Path]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Make the only programs that are on the path, by name and by what the shell runs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, runs: str = "exit 0") -> Path:
        (folder / name).write_text(f"#!/bin/sh\n{runs}\n")
        (folder / name).chmod(0o755)
        return folder / name

    return make


@pytest.mark.parametrize(("said", "is_wrong"), [("const void **", True), ("const char(*)[64]", False)])
def test_a_compiler_is_asked_how_it_configures_amx_tiles(tmp_path: Path, said: str, is_wrong: bool) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ncat <<'END'\nldtilecfg %0 (*(({said} ) config))\nEND\n", encoding="utf-8")
    compiler.chmod(0o755)
    assert compiles_amx_wrongly(str(compiler)) == is_wrong
    assert not compiles_amx_wrongly(str(tmp_path / "none"))


INCLUDE = f"-include {shlex.quote(str(AMX_HEADER))}"


@pytest.mark.parametrize(
    ("given", "flags", "settings"),
    [
        ({}, INCLUDE, []),
        ({"CXXFLAGS": "-g -O2"}, f"-g -O2 {INCLUDE}", []),
        ({"CMAKE_ARGS": "-DGGML_CUDA=on"}, INCLUDE, ["-DGGML_CUDA=on"]),
        ({"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_RELEASE=-O2"}, INCLUDE, ["-DCMAKE_CXX_FLAGS_RELEASE=-O2"]),
        (
            {"CMAKE_ARGS": "-D CMAKE_CXX_FLAGS:STRING='-g -O2'"},
            None,
            ["-D", f"CMAKE_CXX_FLAGS:STRING=-g -O2 {INCLUDE}"],
        ),
        (
            {"CMAKE_ARGS": "-DCMAKE_CXX_FLAGS=-g -DCMAKE_CXX_FLAGS=-O2", "CXXFLAGS": "-Wall"},
            None,
            ["-DCMAKE_CXX_FLAGS=-g", f"-DCMAKE_CXX_FLAGS=-O2 {INCLUDE}"],
        ),
    ],
)
def test_the_header_for_amx_goes_beside_flags_of_the_users_own(
    given: dict[str, str], flags: str | None, settings: list[str], program: Program
) -> None:
    compiler = program("c++", "echo 'ldtilecfg const void **'")
    plan = plan_build("cpu", [], {**given, "CXX": str(compiler)})
    assert plan.missing == ()
    assert list(plan.cmake_args[4:]) == settings
    assert plan.variables.get("CXXFLAGS") == flags
    assert plan_build("cpu", [], {**given, "CXX": str(program("g++"))}).variables == {}


def test_what_is_missing_is_named_with_how_to_get_it(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_CUDA_PLACES", ())
    program("apt-get")
    monkeypatch.setattr(building, "_pip", lambda: None)
    assert [line.partition(":")[0] for line in plan_build("cuda", [], {}).missing] == [
        "a C++ compiler",
        "pip",
        "an NVIDIA GPU with its driver (no NVIDIA GPU was found; nvidia-smi lists them)",
        "the CUDA toolkit (no nvcc on the PATH, in CUDACXX or in /usr/local/cuda*)",
    ]
    assert "a C++ compiler: sudo apt-get install build-essential" in plan_build("cpu", [], {}).missing
    assert any("CXX=none" in line for line in plan_build("cpu", [], {"CXX": "none"}).missing)
    with pytest.raises(InputError, match="--build magic is unknown: choose from cpu, blas, cuda, rocm, vulkan, metal"):
        plan_build("magic", [], {})


def test_headers_are_asked_of_the_compiler(program: Program) -> None:
    program("apt-get")
    program("glslc")
    program("c++", 'read -r line; case "$line" in *vulkan*) exit 0;; esac; exit 1')
    assert plan_build("vulkan", [AMD], {}).missing == ("SPIR-V's headers: sudo apt-get install spirv-headers",)
    program("pkg-config", "test $2 = openblas64")
    assert plan_build("blas", [], {}).missing == ()
    program("pkg-config", "exit 1")
    assert plan_build("blas", [], {}).missing == ("OpenBLAS with its headers: sudo apt-get install libopenblas-dev",)


def test_a_toolkit_is_found_and_named_to_cmake(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("c++")
    monkeypatch.setattr(building, "_CUDA_PLACES", ())
    compiler = tmp_path / "cuda/bin/nvcc"
    for path in (
        compiler,
        tmp_path / "cuda/targets/x86_64-linux/include/cublas_v2.h",
        tmp_path / "cuda/lib64/stubs/libcuda.so",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    plan = plan_build("cuda", [NVIDIA], {"CUDACXX": str(compiler)})
    assert plan.missing == ()
    assert {"-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={compiler}", "-DCMAKE_CUDA_ARCHITECTURES=native"} <= {
        *plan.cmake_args
    }
    assert not any("NO_VMM" in setting for setting in plan.cmake_args)

    header = tmp_path / "rocm/include/hipblas/hipblas.h"
    header.parent.mkdir(parents=True)
    header.touch()
    program("hipconfig", f"test $1 = -R && echo {tmp_path / 'rocm'} || echo {tmp_path / 'rocm/llvm/bin'}")
    plan = plan_build("rocm", [AMD], {})
    assert plan.missing == ()
    assert {"-DGGML_HIP=ON", "-DGPU_TARGETS=gfx1100"} <= {*plan.cmake_args}
    assert plan.variables == {"HIPCXX": f"{tmp_path}/rocm/llvm/bin/clang", "HIP_PATH": f"{tmp_path}/rocm"}


def test_compiling_tells_how_far_it_is_and_a_failure_where_its_log_is(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = program("c++")
    plan = plan_build("cpu", [], {"CXX": str(compiler), "CMAKE_ARGS": "-DA='b c'"})
    pip = program("pip", f'echo "$CMAKE_ARGS"; echo "[1/2] one"; echo "[2/2] two"; : > {tmp_path}/made.whl')
    monkeypatch.setattr(building, "_pip", lambda: [str(pip)])
    log, told = tmp_path / "log", list[float | None]()
    assert building.build_wheel(plan, tmp_path, log, told.append) == tmp_path / "made.whl"
    assert told == [None, 0.5, 1.0]
    assert shlex.split(log.read_text().splitlines()[1])[-1] == "-DA=b c"
    program("pip", "echo line; echo 'error: no such thing'; exit 3")
    with pytest.raises(EngineError, match=f"--build cpu failed with status 3; its log is {log}"):
        building.build_wheel(plan, tmp_path, log, told.append)
    assert building.last_lines(log)[-1] == "error: no such thing"


def test_of_a_log_the_first_error_is_shown_and_nothing_that_pip_says_of_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = [f"[{number}/99] c++ {'x' * 500}" for number in range(30)]
    after = ["  error: subprocess-exited-with-error", *(f"pip says {number}" for number in range(30))]
    log.write_text("\n".join([*before, "one.cpp:3: error: no such thing", *before, *after]))
    shown = building.last_lines(log)
    assert shown[0] == "one.cpp:3: error: no such thing"
    assert len(shown) == 15
    assert max(map(len, shown)) == 200
    log.write_text("\n".join([*before, "FAILED: two.o", *after]))
    assert building.last_lines(log)[-1] == "FAILED: two.o"


def test_an_interrupt_ends_the_compiler_too(tmp_path: Path) -> None:
    """The pipe of a process that runs for ever ends with it."""

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    endless = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: print(1, flush=True)']).wait()"
    )
    with pytest.raises(KeyboardInterrupt):
        building._run([sys.executable, "-c", endless], tmp_path / "log", heard=interrupt, what="it")


ROWS = np.random.default_rng(1).normal(size=(4, 50)) * 3
CPU = LlamaBuild("0.3.36", None, "/new/llama_cpp", (), ("CPU", "RPC"), {}, ())


def trial(rows: np.ndarray = ROWS, **facts: object) -> Trial:
    return Trial(replace(CPU, **facts), rows)  # type: ignore[arg-type]


def test_a_build_that_rounds_otherwise_is_taken(program: Program) -> None:
    plan = plan_build("cpu", [], {"CXX": str(program("c++"))})
    differs = check_trial(plan, trial(), trial(ROWS + 0.01 * np.sin(ROWS * 1e6)), Path("/new"))
    assert differs is not None
    assert 0 < differs < 1e-3
    assert check_trial(plan, None, trial(), Path("/new")) is None


@pytest.mark.parametrize(
    ("name", "after", "why"),
    [
        ("cpu", trial(ROWS[:, ::-1]), "computes something else"),
        ("cpu", trial(ROWS * np.nan), "computes no numbers"),
        ("cpu", trial(folder="/old/llama_cpp"), "another llama.cpp was tried"),
        ("cuda", trial(), "has no CUDA, but CPU, RPC"),
        ("cuda", trial(backends=("CUDA", "CPU")), "has CUDA, but finds no device"),
    ],
)
def test_a_build_that_is_wrong_is_refused(name: str, after: Trial, why: str, program: Program) -> None:
    plan = replace(plan_build("cpu", [], {"CXX": str(program("c++"))}), backend=building.RECIPES[name][0])
    with pytest.raises(CapabilityError, match=why):
        check_trial(plan, trial(), after, Path("/new"))


def test_a_build_that_does_not_load_says_why(tmp_path: Path) -> None:
    package = tmp_path / "llama_cpp/__init__.py"
    package.parent.mkdir()
    package.write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    with pytest.raises(CapabilityError, match=r"ended with status 1: .*libcuda\.so\.1"):
        building.try_build(tmp_path)
    package.write_text("import os; os.abort()")
    with pytest.raises(CapabilityError, match="ended by signal 6: it said nothing"):
        building.try_build(tmp_path)
