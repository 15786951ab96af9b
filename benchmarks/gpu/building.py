"""Building llama.cpp where the card is: for that card, with the cores that are there."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import paceline
from benchmarks.gpu.steps import FailedError, ended_after
from paceline.core.clock import WallClock

LIBRARY: Final = "llama"
BENCHMARK: Final = "llama-bench"

_AMX_HEADER: Final = Path(paceline.__file__).parent / "engines" / "llama_cpp" / "amx_tile_config.h"
_TOOLKITS: Final = "/usr/local/cuda*"
_DRIVERS: Final = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/lib/wsl/lib")


def build(
    sources: Path, folder: Path, targets: Sequence[str], *, with_cuda: bool, jobs: int, most_s: float, log: Path
) -> Path:
    """Build programs and libraries of llama.cpp; return the folder they are in."""
    cmake, ninja = _program("cmake", "cmake/data/bin/cmake"), _program("ninja", "ninja/ninja")
    settings = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_OPENSSL=OFF", "-DGGML_CCACHE=OFF", f"-DGGML_CUDA={with_cuda}"]
    if compiles_amx_wrongly(os.environ.get("CXX", "c++")):
        settings.append(f'-DCMAKE_CXX_FLAGS=-include "{_AMX_HEADER}"')
    if with_cuda:
        settings += _cuda_settings()
    configure = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", str(sources), "-B", str(folder)]
    command = [cmake, "--build", str(folder), "--parallel", str(jobs), "--target", *targets]
    clock = WallClock()
    until_s = clock.now_s() + most_s
    with log.open("ab") as out:
        for what, arguments in (("configured", [*configure, *settings]), ("built", command)):
            before = out.tell()
            process = subprocess.Popen(arguments, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            with ended_after(process, until_s - clock.now_s()):
                pass
            if process.returncode:
                said = log.read_bytes()[before:].decode(errors="replace")
                raise FailedError(f"not {what}: {_first_error(said)}")
    return folder / "bin"


def compiles_amx_wrongly(compiler: str) -> bool:
    """Return whether a C++ compiler is one whose code for AMX needs paceline's header; the Makefile asks the same."""
    command = [*shlex.split(compiler), "-E", "-include", "immintrin.h", "-x", "c++", os.devnull]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return False
    return re.search(r"ldtilecfg.*const void \*\*", said) is not None


def _program(name: str, brought: str) -> str:
    """Return a program's path: of the one that the pack brings, or else the machine's own, which may be too old."""
    for place in _site_folders():
        path = place / brought
        if path.is_file():
            path.chmod(0o755)
            return str(path)
    if there := shutil.which(name):
        return there
    raise FailedError(f"there is no {name}, and the pack brings none: make it without --there {name}")


def _cuda_settings() -> Iterator[str]:
    """Yield what CMake is to be told of the toolkit, and of what may lie elsewhere."""
    compiler = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if compiler is None:
        found = sorted(Path("/").glob(f"{_TOOLKITS[1:]}/bin/nvcc"))
        if not found:
            raise FailedError("there is no nvcc on the PATH, in CUDACXX or in /usr/local/cuda*")
        compiler = str(found[-1])
    yield f"-DCMAKE_CUDA_COMPILER={compiler}"
    yield "-DCMAKE_CUDA_ARCHITECTURES=native"
    yield "-DGGML_CUDA_FA_QUANTS=f16-f16"  # the cache is of F16
    yield "-DGGML_CUDA_NCCL=OFF"
    toolkits = [Path(compiler).resolve().parents[1], *Path("/").glob(_TOOLKITS[1:])]
    if not any((root / "include" / "cublas_v2.h").is_file() for root in toolkits):
        # A toolkit of single packages, as torch brings them.
        yield from _packaged_cublas()
    if not any(any(root.glob("**/stubs/libcuda.so")) for root in toolkits if root.is_dir()):
        drivers = [path for place in _DRIVERS for path in sorted(Path(place).glob("libcuda.so*"))]
        # Without the driver's library memory is taken from another pool, which is as fast once it is warm.
        yield f"-DCUDA_cuda_driver_LIBRARY={drivers[0]}" if drivers else "-DGGML_CUDA_NO_VMM=ON"


def _packaged_cublas() -> Iterator[str]:
    for place in _site_folders():
        for header in sorted(place.glob("nvidia/*/include/cublas_v2.h")):
            libraries = {
                name: sorted((header.parents[1] / "lib").glob(f"lib{name}.so*")) for name in ("cublas", "cublasLt")
            }
            if all(libraries.values()):
                yield f"-DCMAKE_CUDA_FLAGS=-I{header.parent}"
                yield from (f"-DCUDA_{name}_LIBRARY={paths[0]}" for name, paths in libraries.items())
                return
    raise FailedError("cuBLAS is neither in the toolkit nor among Python's packages")


def _site_folders() -> Iterator[Path]:
    """Yield folders in which packages lie, those of the pack first."""
    for name in ("paceline", "nvidia", "torch"):
        spec = importlib.util.find_spec(name)
        for place in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield Path(place).parent


def _first_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["nothing was said"])[0]
