"""Programs that configure AMX tiles: compiled, and run up to where the configuration is loaded.

No processor that has AMX is needed: there the program writes out what it would load.
"""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

ROWS = (8, 8, 16, 16, 16, 16, 16, 16)
WIDTHS = (64, 64, 32, 32, 64, 64, 64, 64)
CONFIGURATION = struct.pack("<B15x16H16B", 1, *WIDTHS, *[0] * 8, *ROWS, *[0] * 8)
"""That of llama.cpp: palette, bytes of a row of each tile, and rows."""

_LOADED = """
#include <unistd.h>
extern "C" __attribute__((used)) void loaded(const void *bytes) { _exit(write(1, bytes, 64) != 64); }
"""


def to_assembly(folder: Path, compiler: str, program: str, flags: str) -> str:
    """Return a program in C++ as assembly; the flags stand in the command line as CMake has them there."""
    (folder / "program.cpp").write_text(program + _LOADED)
    command = f"{compiler} {flags} -mamx-tile -mamx-int8 -mavx512f -S -o - program.cpp"
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout


def loaded_configuration(folder: Path, compiler: str, assembly: str) -> bytes:
    """Return the 64 bytes that the program would load."""
    instead = r"leaq \1, %rdi\n leaq -256(%rsp), %rsp\n andq $-16, %rsp\n call loaded"
    assembly, count = re.subn(r"\bldtilecfg\s+(\S+)", instead, assembly)
    assert count == 1
    (folder / "program.s").write_text(assembly)
    subprocess.run([compiler, "program.s", "-o", "program"], cwd=folder, check=True)
    return subprocess.run([folder / "program"], capture_output=True, check=True).stdout
