"""llama.cpp's own configuration of AMX tiles, compiled with the header that mends GCC's."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from paceline.engines.building import AMX_HEADER
from tests.engines.tiles import CONFIGURATION, loaded_configuration, to_assembly

PROGRAM = """
#include <immintrin.h>
#include <stdint.h>
{}
int main() {{ ggml_tile_config_init(); }}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_whole_configuration_is_loaded(models: Path, tmp_path: Path) -> None:
    source = (models.parent / "ggml/src/ggml-cpu/amx/mmq.cpp").read_text()
    _, struct, rest = source.partition("struct tile_config_t{")
    configuring, loading, _ = rest.partition("_tile_loadconfig(&tc);")
    assert loading
    program = PROGRAM.format(f"{struct}{configuring}{loading} done = true; }}")
    flags = f"-include {shlex.quote(str(AMX_HEADER))} -O3"
    assert loaded_configuration(tmp_path, "g++", to_assembly(tmp_path, "g++", program, flags)) == CONFIGURATION
