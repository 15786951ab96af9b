"""Builds llama.cpp anew, in a place of its own, and installs it once it computes what the installed one does.

::

    plan_build     what CMake is to be told, and what is missing on this machine
    build_wheel    pip compiles llama-cpp-python; each line goes to a log
    unpack         the wheel, in a folder of its own
    try_build      another process computes rows of logits with what is in that folder, or with what is installed
    install        pip puts the wheel in the place of the installed one

Nothing here loads llama.cpp into this process: the installed one may be what crashes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.engines.builds import LlamaBuild
from paceline.machine import Gpu

_PACKAGE: Final = "llama-cpp-python"

_OLDEST: Final = "0.3.36"
"""Version that is built where none is installed."""

RECIPES: Final = {
    "cpu": ("CPU", "the processor alone, with all that it can do"),
    "blas": ("BLAS", "OpenBLAS for wide passes, such as prompts"),
    "cuda": ("CUDA", "NVIDIA GPUs"),
    "rocm": ("ROCm", "AMD GPUs"),
    "vulkan": ("Vulkan", "GPUs of any maker"),
    "metal": ("Metal", "Apple GPUs"),
}
"""Builds: the backend that each has beside the processor's, and what it is for."""

_OF_LLAMA_CPP: Final = Path(__file__).with_name("llama_cpp")

AMX_HEADER: Final = _OF_LLAMA_CPP / "amx_tile_config.h"
"""The header for compilers whose own is wrong."""

_SETS_FLAGS: Final = re.compile(r"(-D)?CMAKE_CXX_FLAGS(:[A-Z]+)?=")

_PACKAGES: Final = {
    "compiler": {"apt-get": "build-essential", "dnf": "gcc-c++", "pacman": "base-devel", "zypper": "gcc-c++"},
    "glslc": {"apt-get": "glslc", "dnf": "glslc", "pacman": "shaderc", "zypper": "shaderc", "brew": "shaderc"},
    "vulkan": {
        "apt-get": "libvulkan-dev",
        "dnf": "vulkan-loader-devel",
        "pacman": "vulkan-headers vulkan-icd-loader",
        "zypper": "vulkan-devel",
        "brew": "vulkan-loader vulkan-headers",
    },
    "spirv": {
        "apt-get": "spirv-headers",
        "dnf": "spirv-headers-devel",
        "pacman": "spirv-headers",
        "zypper": "spirv-headers",
        "brew": "spirv-headers",
    },
    "pkg-config": {
        "apt-get": "pkg-config",
        "dnf": "pkgconf",
        "pacman": "pkgconf",
        "zypper": "pkgconf",
        "brew": "pkgconf",
    },
    "blas": {
        "apt-get": "libopenblas-dev",
        "dnf": "openblas-devel",
        "pacman": "openblas",
        "zypper": "openblas-devel",
        "brew": "openblas",
    },
}
"""What systems' package managers call what is missing."""

_CUDA_PLACES: Final = ("usr/local/cuda*", "opt/cuda")
_DRIVERS: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib")

_ERROR: Final = re.compile(r"CMake Error|FAILED:|\berror:", re.IGNORECASE)
_LONGEST_LINE: Final = 200

MAX_DIFFERENCE: Final = 0.02
"""Mean Kullback-Leibler divergence between two builds' distributions, in nats, that their rounding explains.

A build that computes wrongly differs by several. [Found between ways of one build: fused attention 6e-5, a cache in
Q8_0 1.6e-4, in Q4_0 5e-3.]
"""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """How a build is made.

    Attributes:
        name: of its recipe.
        backend: what has to be there afterwards, such as ``CUDA``.
        requirement: what pip is to build, such as ``llama-cpp-python==0.3.36``.
        cmake_args: what CMake is told, the user's own last.
        variables: of the environment, that are set beside.
        missing: what has to be installed first, a line for each.
    """

    name: str
    backend: str
    requirement: str
    cmake_args: tuple[str, ...]
    variables: Mapping[str, str]
    missing: tuple[str, ...]


def plan_build(name: str, gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> BuildPlan:
    """Return how a build is made on this machine, and what is missing for it."""
    if name not in RECIPES:
        raise InputError(f"--build {name} is unknown: choose from {', '.join(RECIPES)}")
    backend, _ = RECIPES[name]
    settings = [
        "-DLLAVA_BUILD=OFF",  # as in the Makefile, which says why
        f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={_OF_LLAMA_CPP / 'llama_cpp.cmake'}",
        "-DGGML_RPC=ON",
        "-DGGML_NATIVE=ON",
    ]
    variables: dict[str, str] = {}
    missing = list(_missing_tools(environment))
    try:
        if name in _SETTINGS:
            settings += _SETTINGS[name](gpus, variables, missing, environment)
    except InputError as error:
        missing.append(str(error))
    settings += shlex.split(environment.get("CMAKE_ARGS", ""))
    if compiles_amx_wrongly(environment.get("CXX", "c++")):
        settings, flags = _with_amx_header(settings, environment)
        variables |= flags
    try:
        requirement = f"{_PACKAGE}=={version(_PACKAGE)}"
    except PackageNotFoundError:
        requirement = f"{_PACKAGE}>={_OLDEST}"
    return BuildPlan(name, backend, requirement, tuple(settings), variables, tuple(missing))


def compiles_amx_wrongly(compiler: str) -> bool:
    """Return whether a C++ compiler is one whose code for AMX needs paceline's header; the Makefile asks the same."""
    command = [*shlex.split(compiler), "-E", "-include", "immintrin.h", "-x", "c++", os.devnull]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    return re.search(r"ldtilecfg.*const void \*\*", told) is not None


def _with_amx_header(settings: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Have all be compiled with the header, beside flags that are given; return settings and variables."""
    include = f"-include {shlex.quote(str(AMX_HEADER))}"
    settings = list(settings)
    if places := [place for place, setting in enumerate(settings) if _SETS_FLAGS.match(setting)]:
        settings[places[-1]] += f" {include}"  # the last one counts, and replaces CXXFLAGS
        return settings, {}
    return settings, {"CXXFLAGS": f"{environment.get('CXXFLAGS', '')} {include}".lstrip()}


# --- what each build needs --------------------------------------------------------------------------------------------


def _missing_tools(environment: Mapping[str, str]) -> Iterator[str]:
    compiler = environment.get("CXX")
    if os.name == "posix" and not any(
        map(shutil.which, shlex.split(compiler)[:1] if compiler else ("c++", "g++", "clang++"))
    ):
        way_out = "xcode-select --install" if platform.system() == "Darwin" else _install("compiler")
        yield f"a C++ compiler{f' (CXX={compiler} is not there)' if compiler else ''}: {way_out}"
    if _pip() is None:
        yield f"pip: {sys.executable} -m ensurepip, or uv"
    site = Path(sysconfig.get_path("purelib"))
    if not os.access(site, os.W_OK):
        yield f"permission to write into {site}: install paceline in an environment of your own (python3 -m venv)"
    elif sys.prefix == sys.base_prefix and Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists():
        yield "an environment of your own, as the system manages this Python's packages: python3 -m venv, pipx or uv"


def _install(what: str) -> str:
    """Return the command that installs a package here, or the names that it has elsewhere."""
    names = _PACKAGES[what]
    for manager, package in names.items():
        if shutil.which(manager):
            verb = "-S" if manager == "pacman" else "install"
            return f"{'' if manager == 'brew' else 'sudo '}{manager} {verb} {package}"
    return " or ".join(dict.fromkeys(names.values()))


def _blas(
    gpus: Sequence[Gpu], variables: dict[str, str], missing: list[str], environment: Mapping[str, str]
) -> list[str]:
    if platform.system() == "Darwin":  # Accelerate is there
        return ["-DGGML_BLAS=ON"]
    if shutil.which("pkg-config") is None:
        missing.append(f"pkg-config: {_install('pkg-config')}")
    elif all(
        subprocess.run(["pkg-config", "--exists", name], check=False).returncode for name in ("openblas", "openblas64")
    ):
        missing.append(f"OpenBLAS with its headers: {_install('blas')}")
    return ["-DGGML_BLAS=ON", "-DGGML_BLAS_VENDOR=OpenBLAS"]


def _cuda(
    gpus: Sequence[Gpu], variables: dict[str, str], missing: list[str], environment: Mapping[str, str]
) -> list[str]:
    if not any("CUDA" in gpu.interfaces for gpu in gpus):
        there = next((gpu.name for gpu in gpus if gpu.maker == "NVIDIA"), None)
        found = "no NVIDIA GPU was found" if there is None else f"{there} has no driver"
        missing.append(
            f"an NVIDIA GPU with its driver ({found}; nvidia-smi lists them): https://www.nvidia.com/drivers"
        )
    return ["-DGGML_CUDA=ON", *cuda_settings(environment)]


def cuda_settings(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return what CMake is to be told of the CUDA toolkit, and of what may lie elsewhere.

    Raises ``InputError`` where there is no compiler or no cuBLAS.
    """
    compiler = environment.get("CUDACXX") or shutil.which("nvcc")
    if compiler is None:
        found = [path for place in _CUDA_PLACES for path in sorted(Path("/").glob(f"{place}/bin/nvcc"))]
        if not found:
            raise InputError(
                "the CUDA toolkit (no nvcc on the PATH, in CUDACXX or in /usr/local/cuda*): "
                "https://developer.nvidia.com/cuda-downloads"
            )
        compiler = str(found[-1])
    settings = [f"-DCMAKE_CUDA_COMPILER={compiler}", "-DCMAKE_CUDA_ARCHITECTURES=native", "-DGGML_CUDA_NCCL=OFF"]
    toolkits = [
        Path(compiler).resolve().parents[1],
        *(path for place in _CUDA_PLACES for path in Path("/").glob(place)),
    ]
    if not any(any(root.glob(f"{folder}include/cublas_v2.h")) for root in toolkits for folder in ("", "targets/*/")):
        settings += _packaged_cublas()  # a toolkit of single packages, as torch brings them
    if not any(any(root.glob("**/stubs/libcuda.so")) for root in toolkits if root.is_dir()):
        drivers = [path for place in _DRIVERS for path in sorted(Path(place).glob("libcuda.so*"))]
        # Without the driver's library memory is taken from another pool, which is as fast once it is warm.
        settings.append(f"-DCUDA_cuda_driver_LIBRARY={drivers[0]}" if drivers else "-DGGML_CUDA_NO_VMM=ON")
    return settings


def _packaged_cublas() -> list[str]:
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        for header in sorted(Path(place).glob("*/include/cublas_v2.h")):
            folder = header.parents[1] / "lib"
            libraries = {name: sorted(folder.glob(f"lib{name}.so*")) for name in ("cublas", "cublasLt")}
            if all(libraries.values()):
                found = [f"-DCUDA_{name}_LIBRARY={paths[0]}" for name, paths in libraries.items()]
                return [f"-DCMAKE_CUDA_FLAGS=-I{header.parent}", *found]
    raise InputError(
        "cuBLAS, which is neither in the CUDA toolkit nor among Python's packages: pip install nvidia-cublas"
    )


def _rocm(
    gpus: Sequence[Gpu], variables: dict[str, str], missing: list[str], environment: Mapping[str, str]
) -> list[str]:
    targets = sorted({gpu.architecture for gpu in gpus if "ROCm" in gpu.interfaces and gpu.architecture})
    if not targets:
        missing.append("an AMD GPU that ROCm knows (rocminfo lists them): https://rocm.docs.amd.com")
    config = shutil.which("hipconfig") or shutil.which("hipconfig", path="/opt/rocm/bin")
    if config is None:
        raise InputError("ROCm with HIP (no hipconfig on the PATH or in /opt/rocm/bin): https://rocm.docs.amd.com")
    clang, root = (
        subprocess.run([config, flag], capture_output=True, text=True, check=False).stdout.strip()
        for flag in ("-l", "-R")
    )
    variables |= {"HIPCXX": f"{clang}/clang", "HIP_PATH": root}
    if not Path(root, "include/hipblas/hipblas.h").is_file():
        missing.append(f"hipBLAS with its headers, in {root}: the packages hipblas-dev and rocblas-dev of ROCm")
    return ["-DGGML_HIP=ON", f"-DGPU_TARGETS={';'.join(targets)}"]


def _vulkan(
    gpus: Sequence[Gpu], variables: dict[str, str], missing: list[str], environment: Mapping[str, str]
) -> list[str]:
    if not any("Vulkan" in gpu.interfaces for gpu in gpus):
        missing.append(
            "a GPU with a Vulkan driver (vulkaninfo --summary lists them): the driver of its maker, or Mesa's"
        )
    sdk = environment.get("VULKAN_SDK")
    if shutil.which("glslc") is None and not (sdk and shutil.which("glslc", path=str(Path(sdk, "bin")))):
        missing.append(f"glslc, which compiles shaders: {_install('glslc')}")
    for header, what, package in (
        ("vulkan/vulkan.h", "Vulkan's headers and loader", "vulkan"),
        ("spirv/unified1/spirv.hpp", "SPIR-V's headers", "spirv"),
    ):
        if not _includes(header, environment, sdk):
            missing.append(f"{what}: {_install(package)}")
    return ["-DGGML_VULKAN=ON"]


def _includes(header: str, environment: Mapping[str, str], sdk: str | None) -> bool:
    """Return whether the C++ compiler finds a header."""
    places = [f"-I{sdk}/include"] if sdk else []
    command = [*shlex.split(environment.get("CXX", "c++")), *places, "-fsyntax-only", "-x", "c++", "-"]
    try:
        return (
            subprocess.run(
                command, input=f"#include <{header}>\n".encode(), capture_output=True, check=False
            ).returncode
            == 0
        )
    except OSError:
        return True  # that there is no compiler is told already


def _metal(
    gpus: Sequence[Gpu], variables: dict[str, str], missing: list[str], environment: Mapping[str, str]
) -> list[str]:
    if platform.system() != "Darwin":
        raise InputError("macOS: Metal is Apple's")
    return ["-DGGML_METAL=ON"]


_SETTINGS: Final = {"blas": _blas, "cuda": _cuda, "rocm": _rocm, "vulkan": _vulkan, "metal": _metal}


# --- making it --------------------------------------------------------------------------------------------------------


def _pip() -> list[str] | None:
    """Return the command that is pip for this environment; ``None`` where there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if (uv := shutil.which("uv")) is not None:  # which makes environments without pip, and brings it for once
        return [uv, "tool", "run", "pip", "--python", sys.executable]
    return None


def build_wheel(plan: BuildPlan, folder: Path, log: Path, tell: Callable[[float | None], None]) -> Path:
    """Compile llama-cpp-python into a wheel in a folder, and return it.

    ``tell`` is told the share of all files that is compiled, ``None`` before that is known. Raises ``EngineError``
    where that fails, with the end of the log.
    """
    pip = _pip()
    assert pip is not None, "a plan says what is missing"
    command = [*pip, "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--no-binary", _PACKAGE]
    # Joined as scikit-build-core parts them.
    variables = {**plan.variables, "CMAKE_ARGS": shlex.join(plan.cmake_args)}

    def heard(line: str) -> None:
        if found := re.search(r"\[(\d+)/(\d+)\]", line):
            tell(int(found[1]) / max(int(found[2]), 1))

    tell(None)
    _run([*command, "--wheel-dir", str(folder), plan.requirement], log, variables, heard, what=f"--build {plan.name}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path, log: Path) -> None:
    """Install a wheel into a folder of its own."""
    command = [*(_pip() or ()), "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    _run(command, log, what="unpacking the new build")


def install(wheel: Path, log: Path) -> None:
    """Put a wheel in the place of what is installed, which pip keeps until that is done."""
    command = [*(_pip() or ()), "install", "--force-reinstall", "--no-deps", "--no-index", str(wheel)]
    _run(command, log, what="installing the new build")


def _run(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str] | None = None,
    heard: Callable[[str], None] = lambda line: None,
    *,
    what: str,
) -> None:
    """Run a command whose lines go to a log; an interrupt ends it, with all that it started."""
    variables = dict(variables or {})
    with log.open("a", encoding="utf-8", errors="replace") as out:
        out.write(" ".join(["$", *(f"{name}={shlex.quote(value)}" for name, value in variables.items())]))
        out.write(f" {shlex.join(command)}\n")
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    out.write(line)
                    heard(line)
                status = process.wait()
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL) if os.name == "posix" else process.kill()
                raise
    if status:
        raise EngineError(f"{what} failed with status {status}; its log is {log}")


def last_lines(log: Path, count: int = 15) -> list[str]:
    """Return the end of a log, or what stands there from the first error on: pip says a lot after that."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    whole = next((place for place, line in enumerate(lines) if "subprocess-exited-with-error" in line), len(lines))
    first = next((place for place, line in enumerate(lines) if _ERROR.search(line)), whole)
    return [line[:_LONGEST_LINE] for line in lines[min(first, max(whole - count, 0)) : whole][:count]]


# --- trying it --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """What a build computes.

    Attributes:
        rows: logits ``[num_tokens, vocab]`` of a text, first in a wide pass and then in passes of one row.
    """

    build: LlamaBuild
    rows: FloatArray


def try_build(folder: Path | None) -> Trial:
    """Load the embedded model in another process, with the build in a folder or the installed one, and compute rows.

    Raises ``CapabilityError`` where the build does not load or crashes, with what it said last.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-") as made:
        rows = Path(made, "rows.npy")
        program = Path(__file__).with_name("build_trial.py")
        # Before all else that is on the path, as what is in the site's packages is not.
        paths = [] if folder is None else [str(folder)]
        paths += [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        ended = subprocess.run(
            [sys.executable, "-P", str(program), str(rows)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            check=False,
        )
        if ended.returncode:
            said = ended.stderr.decode("utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
            how = f"by signal {-ended.returncode}" if ended.returncode < 0 else f"with status {ended.returncode}"
            raise CapabilityError(f"a pass of the embedded model ended {how}: {said[-1]}")
        return Trial(LlamaBuild.from_json(json.loads(ended.stdout)), np.load(rows))


def difference(before: Trial, after: Trial) -> float:
    """Return the mean Kullback-Leibler divergence of the new build's distributions from the old one's, in nats."""
    old, new = (_log_probs(trial.rows) for trial in (before, after))
    return float((np.exp(old) * (old - new)).sum(axis=1).mean())


def _log_probs(rows: FloatArray) -> FloatArray:
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    result: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def check_trial(plan: BuildPlan, before: Trial | None, after: Trial, folder: Path) -> float | None:
    """Return by how much a new build differs from the old one, where that runs.

    Raises ``CapabilityError`` where it is another build than was asked for, or computes something else.
    """
    if not Path(after.build.folder).is_relative_to(folder):
        raise CapabilityError(
            f"another llama.cpp was tried than the new one, in {after.build.folder}: unset PYTHONPATH"
        )
    if plan.backend not in after.build.backends:
        raise CapabilityError(f"the new build has no {plan.backend}, but {', '.join(after.build.backends)}")
    if plan.backend not in ("CPU", "BLAS") and not after.build.devices:
        raise CapabilityError(f"the new build has {plan.backend}, but finds no device: check the driver")
    if not np.isfinite(after.rows).all():
        raise CapabilityError("the new build computes no numbers")
    if before is None:
        return None
    differs = difference(before, after)
    if differs > MAX_DIFFERENCE:
        raise CapabilityError(
            f"the new build computes something else: its distributions differ by {differs:.3g} nats from the installed "
            f"one's, where rounding explains {MAX_DIFFERENCE}"
        )
    return differs
