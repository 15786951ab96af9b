"""Making the pack: llama.cpp's sources cut to what the library needs, every package, and what starts it all."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.gpu.kernels import cut_kernels
from paceline.atomic_output import atomic_file
from paceline.core.errors import EngineError, InputError

CHECKOUT: Final = Path(__file__).parents[2]
MANIFEST: Final = "manifest.json"
PAYLOAD: Final = "payload.tar.xz"
LIMIT_BYTES: Final = 60_000_000
"""Most bytes of a pack: what a machine without a network is given travels in small parcels."""

BINDINGS: Final = "llama-cpp-python"
# What the torch engine, building and llama-cpp-python's Python need beside paceline's own dependencies.
_BESIDES: Final = ("transformers>=5.24", "diskcache", "typing-extensions", "cmake>=3.24", "ninja")
# pip takes no later one for an earlier one.
_PLATFORMS: Final = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)),
    *(f"manylinux{year}_x86_64" for year in (2014, 2010, 1)),
)

_KEPT_SOURCES: Final = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake/*",
    "common/*",
    "ggml/CMakeLists.txt",
    "ggml/cmake/*",
    "ggml/include/*",
    "ggml/src/*.*",
    "ggml/src/ggml-cpu/*",
    "ggml/src/ggml-cuda/*",
    "include/*",
    "licenses/*",
    "src/*",
    "tools/llama-bench/*",
    "vendor/*",
)
"""Of llama.cpp: the library with the processor's and the card's kernels, and llama-bench with what it needs."""

_LEFT_OUT: Final = (
    "bin/*",  # programs of packages; cmake's and ninja's are taken before
    "cmake/data/bin/c[cpt]*",
    "cmake/data/doc/*",
    "cmake/data/man/*",
    "cmake/data/share/cmake-*/Help/*",
    "hf_xet/*",
    "numpy/*/tests/*",
    "numpy/f2py/*",
)
"""Of the packages: what nothing here uses."""

_CMAKE: Final = """\
# llama.cpp as llama-cpp-python builds it, and llama-bench beside it.
cmake_minimum_required(VERSION 3.21)
project(pack C CXX)
set(BUILD_SHARED_LIBS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(LLAMA_BUILD_COMMON ON CACHE BOOL "" FORCE)
add_subdirectory(llama.cpp)
add_subdirectory(llama.cpp/tools/llama-bench)
"""


class Pack(NamedTuple):
    size: int
    planner: str


def make_pack(destination: Path, *, python: str, there: Sequence[str] = (), all_kernels: bool = False) -> Pack:
    """Write a pack, with the planner compiled where that Python is here, too, with its headers."""
    if re.fullmatch(r"3\.\d+", python) is None:
        raise InputError(f"--python {python}: give a version such as 3.12, the one that torch is installed for there")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        site = folder / "site"
        _install(site, python, there)
        planner = _add_paceline(site, folder, python)
        archive = _bindings_archive(folder)
        sources = folder / "sources"
        _unpack_bindings(archive, site, sources / "llama.cpp")
        (sources / "CMakeLists.txt").write_text(_CMAKE, encoding="utf-8")
        left_out = [] if all_kernels else cut_kernels(sources / "llama.cpp")
        manifest = {"python": python, "bindings": archive.name.removesuffix(".tar.gz"), "kernels_left_out": left_out}
        (folder / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        with atomic_file(destination) as partial:
            _write(partial, folder)
            size = partial.stat().st_size
            if size > LIMIT_BYTES:
                raise InputError(
                    f"the pack would have {size / 1e6:.1f} MB, and {LIMIT_BYTES / 1e6:.0f} are the limit: leave out "
                    "what is there already with --there, such as cmake,numpy,transformers"
                )
    return Pack(size, planner)


def _install(site: Path, python: str, there: Sequence[str]) -> None:
    """Put all packages into a folder, as they are after an installation."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *_BESIDES]
    names = {_name(requirement) for requirement in wanted}
    if unknown := [name for name in there if name not in names]:
        raise InputError(f"--there {','.join(unknown)}: choose from {', '.join(sorted(names - {BINDINGS}))}")
    wanted = [requirement for requirement in wanted if _name(requirement) not in {BINDINGS, *there}]
    command = ["install", "--target", str(site), "--only-binary=:all:", "--no-compile", "--python-version", python]
    command += ["--implementation", "cp", *(f"--platform={platform}" for platform in _PLATFORMS)]
    _pip(*command, *wanted)
    for name in there:
        # What others need, too, came along.
        for path in (*site.glob(name.replace("-", "_")), *site.glob(f"{name.replace('-', '_')}-*.dist-info")):
            shutil.rmtree(path)
    ninja = site / "bin" / "ninja"
    if ninja.exists():
        ninja.replace(site / "ninja" / "ninja")
    for pattern in _LEFT_OUT:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _add_paceline(site: Path, folder: Path, python: str) -> str:
    """Add this paceline and its benchmarks; return whether its planner is compiled."""
    _copy(CHECKOUT / "benchmarks", site / "benchmarks", ("*.py", "gpu/*.py"))
    compiler = _find_python(python)
    if compiler is None:
        _copy(CHECKOUT / "src" / "paceline", site / "paceline", ("*",))
        return "interpreted"
    wheels = folder / "wheels"
    _pip(f"--python={compiler}", "wheel", "--no-deps", f"--wheel-dir={wheels}", str(CHECKOUT), PACELINE_COMPILE="auto")
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    return "interpreted" if wheel.name.endswith("-any.whl") else "compiled"


def _find_python(version: str) -> str | None:
    """Return an interpreter of that version that is here, of the kind that packs are for."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return None
    for name in (sys.executable, f"python{version}"):
        asked = [name, "-c", "import sys; print(sys.executable, '%d.%d' % sys.version_info[:2], sep='\\n')"]
        try:
            said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()
        except OSError:
            continue
        if said[1:] == [version]:
            return said[0]
    return None


def _bindings_archive(folder: Path) -> Path:
    """Return the source archive of the llama-cpp-python that is installed here."""
    version = importlib.metadata.version(BINDINGS)
    name = f"llama_cpp_python-{version}.tar.gz"
    kept = CHECKOUT / "build" / "real" / name
    if kept.exists():
        return kept
    _pip("download", "--no-deps", "--no-binary", BINDINGS, "--dest", str(folder), f"{BINDINGS}=={version}")
    return folder / name


def _unpack_bindings(archive: Path, site: Path, sources: Path) -> None:
    """Unpack the Python of the bindings with their metadata, and llama.cpp's sources, cut."""
    title = archive.name.removesuffix(".tar.gz")
    with tempfile.TemporaryDirectory() as temporary:
        with tarfile.open(archive) as packed:
            packed.extractall(temporary, filter="data")
        root = Path(temporary) / title
        _copy(root / "llama_cpp", site / "llama_cpp", ("*.py",))
        metadata = site / f"{title}.dist-info"
        metadata.mkdir()
        shutil.copyfile(root / "PKG-INFO", metadata / "METADATA")
        _copy(root / "vendor" / "llama.cpp", sources, _KEPT_SOURCES)


def _copy(source: Path, destination: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in sorted(source.glob(pattern)):
            copy = destination / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                if path.name != "__pycache__":
                    ignore = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(path, copy, ignore=ignore, dirs_exist_ok=True)
            else:
                shutil.copyfile(path, copy)


def _write(path: Path, folder: Path) -> None:
    """Write a zip file that Python runs; all but what unpacks it is one archive, which is a third smaller so."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=6) as payload:
        for name in (MANIFEST, "site", "sources"):
            payload.add(folder / name, name, filter=_plain)
    with zipfile.ZipFile(path, "w") as pack:
        pack.write(Path(__file__).with_name("start.py"), "__main__.py")
        pack.writestr(PAYLOAD, packed.getvalue())


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an entry without whoever made it."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0].lower()


def _pip(*arguments: str, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EngineError(f"packages cannot be had: {list(_said(ended.stderr))[-1]}")


def _said(text: str) -> Iterator[str]:
    yield "pip says nothing"
    for line in text.splitlines():
        if line.startswith("ERROR: "):
            yield line.removeprefix("ERROR: ")
