"""Where what is kept of a pair of models lies, for the tests that ask for it; and no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engines.options import ModelOptions


@pytest.fixture(autouse=True)
def build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say a build in the engines' place: keys hold it, and these tests run where no engine is installed."""
    monkeypatch.setattr("paceline.planning.disk_cache.describe_library", lambda name: f"{name} 1.0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def options(tmp_path: Path) -> ModelOptions:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(1000))
    return ModelOptions(path, engine="llama_cpp")
