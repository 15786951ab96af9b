"""Building llama.cpp where the card is: for that card, with the cores that are there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.gpu.steps import FailedError, ended_after
from paceline.core.clock import WallClock
from paceline.core.errors import InputError
from paceline.engines.building import AMX_HEADER, compiles_amx_wrongly, cuda_settings

LIBRARY: Final = "llama"
BENCHMARK: Final = "llama-bench"


def build(
    sources: Path, folder: Path, targets: Sequence[str], *, with_cuda: bool, jobs: int, most_s: float, log: Path
) -> Path:
    """Build programs and libraries of llama.cpp; return the folder they are in."""
    cmake, ninja = _program("cmake", "cmake/data/bin/cmake"), _program("ninja", "ninja/ninja")
    settings = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_OPENSSL=OFF", "-DGGML_CCACHE=OFF", f"-DGGML_CUDA={with_cuda}"]
    if compiles_amx_wrongly(os.environ.get("CXX", "c++")):
        settings.append(f'-DCMAKE_CXX_FLAGS=-include "{AMX_HEADER}"')
    if with_cuda:
        try:
            settings += cuda_settings()
        except InputError as error:
            raise FailedError(f"this machine lacks {error}") from None
        settings.append("-DGGML_CUDA_FA_QUANTS=f16-f16")  # the cache is of F16
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
