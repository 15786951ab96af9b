"""What makes a Hugging Face folder a model, in the same words to every reader of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.conversion.convert import folder_to_gguf
from paceline.core.errors import ModelFileError
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.models.description import describe
from paceline.models.weight_files import check_model_folder, weight_files
from tests.models.helpers import split_gguf, write_folder, write_gguf

READERS: list[Callable[[Path], object]] = [
    describe,
    lambda folder: open_engine(ModelOptions(folder)),
    lambda folder: folder_to_gguf(folder, folder.parent / "made.gguf"),
]


def refusal(folder: Path) -> str:
    """Return what all readers say of a folder."""
    said = set()
    for read in READERS:
        with pytest.raises(ModelFileError) as caught:
            read(folder)
        said.add(str(caught.value))
    assert len(said) == 1, said
    assert "\n" not in str(caught.value)
    return said.pop()


def test_a_folder_that_is_something_else(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "folder"
    folder.mkdir()
    assert refusal(folder).endswith("has no config.json; give a GGUF file or a Hugging Face model folder")
    write_gguf(folder / "second.gguf")
    assert refusal(folder).endswith(f"give a GGUF file in it, such as {folder / 'second.gguf'}")
    first, *_ = split_gguf(write_gguf(tmp_path / "first.gguf"), folder, 2)
    assert refusal(folder).endswith(f"give a GGUF file in it, such as {first}")
    (folder / "adapter_config.json").write_text("{}")
    assert "it is a LoRA adapter, which changes a model: merge it" in refusal(folder)
    (folder / "config.json").write_text("{}")
    check_model_folder(folder)


def test_the_files_that_count(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    single = folder / "model.safetensors"
    (folder / "consolidated.safetensors").write_bytes(b"x")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors", "c": "a.safetensors"}}')
    assert weight_files(folder) == [single], "as in transformers, the single file wins"
    parts = [single.rename(folder / "a.safetensors"), folder / "b.safetensors"]
    with pytest.raises(ModelFileError, match=r"lacks 1 of its 2 weight files, such as b\.safetensors"):
        weight_files(folder)
    parts[1].write_bytes(parts[0].read_bytes())
    assert weight_files(folder) == parts
    (folder / "model.safetensors.index.json").unlink()
    for part in parts:
        part.unlink()
    (folder / "consolidated.safetensors").unlink()
    (folder / "pytorch_model-00001-of-00002.bin").write_bytes(b"x")
    assert weight_files(folder) == []
