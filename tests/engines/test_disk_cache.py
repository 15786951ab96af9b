"""The build of an engine is part of what its costs are kept under."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.planning.helpers import engine_of

from paceline.engines.options import EngineName, ModelOptions
from paceline.planning.disk_cache import model_key, pair_key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return path


@pytest.mark.parametrize(("name", "package"), [("llama_cpp", "llama_cpp"), ("torch_hf", "torch")])
def test_the_key_changes_with_the_version_of_the_engines_package(
    name: EngineName, package: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    options = ModelOptions(path, engine=name)
    one = pair_key(engine_of(), options)
    assert pair_key(engine_of(), options) == one
    monkeypatch.setattr(f"{package}.__version__", "0.0.1")
    other = pair_key(engine_of(), options)
    assert other.name != one.name
    assert "0.0.1" in other.facts["target"]["build"]


def test_a_third_engine_says_its_own_build(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ModelOptions(path, engine="llama_cpp")
    object.__setattr__(options, "engine", "third")  # as if it were in the table of engines
    with pytest.raises(ModuleNotFoundError, match="third"):
        model_key(options)
    monkeypatch.setitem(sys.modules, "paceline.engines.third", SimpleNamespace(describe_library=lambda: "third 3.0"))
    assert model_key(options).facts["model"]["build"] == "third 3.0"


def test_what_was_kept_without_amx_is_not_taken_with_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    options = ModelOptions(path, engine="llama_cpp")
    names = []
    for features in (b"CPU : AVX512 = 1 | REPACK = 1 | ", b"CPU : AVX512 = 1 | AMX_INT8 = 1 | REPACK = 1 | "):
        monkeypatch.setattr("llama_cpp.llama_print_system_info", lambda features=features: features)
        names += [model_key(options).name, pair_key(engine_of(), options).name]
    assert len(set(names)) == 4


def test_what_was_measured_with_a_cache_of_other_types_is_another_entry(path: Path) -> None:
    pytest.importorskip("llama_cpp")
    usual = ModelOptions(path, engine="llama_cpp")
    others = [
        ModelOptions(path, engine="llama_cpp", cache_type_k="f16", cache_type_v="f16"),
        ModelOptions(path, engine="llama_cpp", cache_type_k="q8_0"),
        ModelOptions(path, engine="llama_cpp", cache_type_k="q8_0", cache_type_v="q8_0"),
        ModelOptions(path, engine="llama_cpp", cache_type_k="q8_0", cache_type_v="q4_0"),
    ]
    assert model_key(others[0]) == model_key(usual)
    names = [key.name for options in others for key in (model_key(options), pair_key(engine_of(), options))]
    assert len(set(names)) == len(names)
