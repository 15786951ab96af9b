"""The header that mends a compiler's for AMX: what is compiled with it, and which compilers `make` gives it to."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.engines.tiles import CONFIGURATION, ROWS, WIDTHS, loaded_configuration, to_assembly

from paceline.engines.building import AMX_HEADER
from paceline.engines.llama_cpp import native

CHECKOUT = Path(__file__).parents[2]

BROKEN = '__asm__ volatile ("ldtilecfg\\t%X0" :: "m" (*((const void **)__config)));'
"""Of GCC 12.2."""
RIGHT = "__builtin_ia32_ldtilecfg (__config);"
"""Of GCC 14."""

PROGRAM = f"""
#include <immintrin.h>
#include <stdint.h>
struct configuration {{
    uint8_t palette = 0, start = 0, reserved[14] = {{0}};
    uint16_t widths[16] = {{0}};
    uint8_t rows[16] = {{0}};
}};
int main() {{
    alignas(64) configuration tiles = {{}};
    tiles.palette = 1;
    {" ".join(f"tiles.widths[{tile}] = {width};" for tile, width in enumerate(WIDTHS))}
    {" ".join(f"tiles.rows[{tile}] = {rows};" for tile, rows in enumerate(ROWS))}
    _tile_loadconfig(&tiles);
}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose name has a blank, with what `make` reads of the sources."""
    folder = tmp_path / "with a blank"
    header = folder / "src/paceline/engines/llama_cpp/amx_tile_config.h"
    header.parent.mkdir(parents=True)
    shutil.copyfile(CHECKOUT / "Makefile", folder / "Makefile")
    shutil.copyfile(AMX_HEADER, header)
    return folder


def flags_by_make(folder: Path, compiler: str, *said: str, **own: str) -> str:
    """Return what `make` has everything compiled with, by an environment variable that CMake reads."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if name not in ("CXXFLAGS", "MAKEFLAGS")} | own
    told = subprocess.run(
        ["make", "--silent", "--eval", 'told: ; @printf "%s" "$$CXXFLAGS"', "told", f"CXX={compiler}", *said],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return told.stdout


@pytest.mark.parametrize(("header", "is_broken"), [(BROKEN, True), (RIGHT, False), ("", False)])
def test_make_gives_the_header_to_compilers_whose_own_is_broken(header: str, is_broken: bool, folder: Path) -> None:
    compiler = folder.parent / "compiler"
    compiler.write_text(f"#!/bin/sh\nprintf '%s\\n' '{header}'\n")
    compiler.chmod(0o755)
    given = f'-include "{folder}/src/paceline/engines/llama_cpp/amx_tile_config.h"'
    assert flags_by_make(folder, str(compiler)) == (given if is_broken else "")
    # What the user has is kept.
    own = f"-g {given}" if is_broken else "-g"
    assert flags_by_make(folder, str(compiler), CXXFLAGS="-g") == own
    assert flags_by_make(folder, str(compiler), "CXXFLAGS=-g") == own


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_with_it_the_whole_configuration_is_loaded(compiler: str, folder: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (folder / "empty.cpp").write_text("")
    able = [compiler, "-mamx-tile", "-mamx-int8", "-mavx512f", "-c", "empty.cpp"]
    if subprocess.run(able, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler} knows no AMX")
    # The program has the instructions of a processor with AMX, but for those on tiles.
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    flags = flags_by_make(folder, compiler)
    for level in ("-O2", "-O3"):
        assembly = to_assembly(folder, compiler, PROGRAM, f"{flags} {level}")
        assert (native._MENDED.decode() in assembly) == bool(flags)
        assert loaded_configuration(folder, compiler, assembly) == CONFIGURATION
        if flags:
            assembly = to_assembly(folder, compiler, PROGRAM, level)
            assert loaded_configuration(folder, compiler, assembly)[48:56] != bytes(ROWS)


def test_where_the_processor_has_no_amx_it_changes_nothing(folder: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    flags = f'-include "{folder}/src/paceline/engines/llama_cpp/amx_tile_config.h"'
    (folder / "program.cpp").write_text("#include <cmath>\nfloat root(float of) { return std::sqrt(of); }\n")
    with_it, without = (
        subprocess.run(f"g++ {each} -O2 -S -o - program.cpp", shell=True, cwd=folder, capture_output=True, check=True)
        for each in (flags, "")
    )
    assert b"root" in with_it.stdout
    assert with_it.stdout == without.stdout
