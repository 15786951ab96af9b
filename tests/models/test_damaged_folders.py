"""Folders with damage by seed: whatever is in them, they are used, or refused in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("llama_cpp")

import paceline
from paceline.conversion.convert import exact_dtype, folder_to_gguf, gguf_to_folder
from paceline.core.errors import PacelineError
from paceline.engines.loading import open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft
from paceline.models.sampling_defaults import read_sampling_defaults
from tests.models.damaged_folder import copy, damage


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "folder"
    gguf_to_folder(embedded_draft(), folder)
    return folder


def _convert(folder: Path) -> None:
    folder_to_gguf(folder, folder.with_suffix(".gguf"), dtype=exact_dtype(folder))


def _describe(folder: Path) -> None:
    describe(folder)
    read_sampling_defaults(folder)


def _read(folder: Path) -> None:
    with open_vocabulary(ModelOptions(folder)) as vocabulary:
        vocabulary.tokenize("Hello")
        for token_id in range(30):
            vocabulary.token_spelling(token_id)


def _load(folder: Path) -> None:
    model = paceline.load(folder, policy=paceline.NO_SPECULATION, context_length=64)
    try:
        model.generate("Hi", max_tokens=2)
        model.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
    finally:
        model.close()


@pytest.mark.long
@pytest.mark.parametrize(("use", "seeds"), [(_convert, 40), (_describe, 40), (_read, 10), (_load, 5)])
def test_a_damaged_folder_is_used_or_refused_in_a_line(
    use: Callable[[Path], Any], seeds: int, sound: Path, tmp_path: Path
) -> None:
    for seed in range(seeds):
        folder = copy(sound, tmp_path / "folder")
        what = damage(folder, seed)
        said = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                use(folder)
            except PacelineError as error:
                said = str(error)
            except Exception as error:
                raise AssertionError(f"{seed}: {what}") from error
        assert "\n" not in said, f"{seed}: {what}"
        assert len(said) < 1500, f"{seed}: {what}"
