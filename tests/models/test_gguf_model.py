"""Whole models in GGUF: parts that belong together, and files that hold something else."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from paceline.core.errors import ModelFileError
from paceline.models.embedded import embedded_draft
from paceline.models.gguf_model import is_later_part, part_paths, read_gguf_model
from tests.models.helpers import finish, split_gguf, write_gguf


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_gguf_model(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_split_model_counts_as_a_whole(tmp_path: Path) -> None:
    whole = read_gguf_model(embedded_draft())
    parts = split_gguf(embedded_draft(), tmp_path)
    model = read_gguf_model(parts[0])
    assert model.paths == tuple(parts)
    assert model.weights_by_type == whole.weights_by_type
    assert (model.num_parameters, model.tensor_type) == (whole.num_parameters, "Q8_0")
    assert model.num_bytes == sum(part.stat().st_size for part in parts) > whole.num_bytes
    assert whole.paths == (embedded_draft(),)


def test_later_parts_point_to_the_first(tmp_path: Path) -> None:
    parts = split_gguf(embedded_draft(), tmp_path)
    assert f"is part 2 of a split model; give the first part, {parts[0].name}" in refusal(parts[1])
    assert f"is part 3 of a split model; give the first part, {parts[0].name}" in refusal(parts[2])
    stray = parts[1].rename(tmp_path / "stray.gguf")
    assert refusal(stray).endswith("is part 2 of a split model; give the first part")


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first, second, third = split_gguf(embedded_draft(), tmp_path)
    third.unlink()
    assert f"is the first of 3 parts, and beside it {third.name} is missing; copy or download" in refusal(first)
    second.unlink()
    assert f"{second.name} and 1 more is missing" in refusal(first)


def test_parts_that_do_not_belong_together(tmp_path: Path) -> None:
    first, second, third = split_gguf(embedded_draft(), tmp_path)
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelFileError, match=rf"{second.name} does not say that it is part 2 of 3"):
        read_gguf_model(first)
    second.write_bytes(third.read_bytes()[:100])
    with pytest.raises(ModelFileError, match=rf"{second.name} is truncated or damaged"):
        read_gguf_model(first)
    renamed = first.rename(tmp_path / "first.gguf")
    assert "named" not in refusal(renamed)
    assert "the others are found by its name; name them as they were, NAME-00001-of-00003.gguf" in refusal(renamed)


def test_names_say_which_files_belong_together(tmp_path: Path) -> None:
    names = [f"big-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for name in names:
        assert part_paths(tmp_path / name) == tuple(tmp_path / part for part in names)
    for name in ("big.gguf", "big-1-of-3.gguf", "big-00004-of-00003.gguf", "big-00000-of-00003.gguf"):
        assert part_paths(tmp_path / name) == (tmp_path / name,)
    assert not is_later_part(tmp_path / names[1]), "the first part is not there"
    (tmp_path / names[0]).write_bytes(b"")
    assert [is_later_part(tmp_path / name) for name in names] == [False, True, True]


def add_on(path: Path, kind: str | None, architecture: str | None) -> Path:
    writer = gguf.GGUFWriter(path, architecture or "")
    if architecture is None:
        writer.kv_data[0].pop("general.architecture", None)
    if kind is not None:
        writer.add_type(kind)
    return finish(writer, path)


@pytest.mark.parametrize(
    ("kind", "architecture", "words"),
    [
        ("adapter", "llama", "is not a model but a LoRA adapter"),
        ("mmproj", "clip", "is not a model but a projector of images"),
        (None, "clip", "is not a model but a projector of images"),
        ("imatrix", None, "is not a model but an importance matrix"),
        (None, "controlvector", "is not a model but a control vector"),
        (None, None, "names no architecture, so it holds no model; give"),
    ],
)
def test_what_belongs_to_a_model_is_named(
    kind: str | None, architecture: str | None, words: str, tmp_path: Path
) -> None:
    message = refusal(add_on(tmp_path / "file.gguf", kind, architecture))
    assert words in message
    assert "give the" in message or "and give" in message


def test_a_model_may_say_that_it_is_one(tmp_path: Path) -> None:
    assert read_gguf_model(write_gguf(tmp_path / "a.gguf", general__type="model")).num_parameters == 104
