"""The reader of GGUF files with their weights: values of the right type, rows as they are stored, one line of error."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.core.errors import ModelFileError
from paceline.models.gguf_file import GGUFFile
from tests.models.helpers import write_gguf


def test_values_have_the_type_that_is_asked_for(tmp_path: Path) -> None:
    file = GGUFFile(
        write_gguf(tmp_path / "a.gguf", a__text="é", a__count=3, a__epsilon=1e-5, a__each=[2, 2], a__other=[2, 3])
    )
    assert (file.text("a.text"), file.integer("a.count"), file.integer("a.each")) == ("é", 3, 2)
    assert file.number("a.epsilon") == 1e-5, "not what the nearest float32 is in full"
    assert (file.get("a.none"), file.integer("a.none", 7), file.number("a.none", 0.5)) == (None, 7, 0.5)
    assert file.get("tokenizer.ggml.tokens") == ["a", "b", "c"]
    for ask, words in (
        (lambda: file.text("a.count"), "a.count = 3, and a text is needed"),
        (lambda: file.integer("a.other"), "a.other differs between layers"),
        (lambda: file.integer("a.epsilon"), "a.epsilon is 9.99"),
        (lambda: file.number("a.text"), "a.text = 'é', and a number is needed"),
        (lambda: file.integer("a.none"), "lacks a.none"),
    ):
        with pytest.raises(ModelFileError, match=words):
            ask()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0"])
def test_rows_are_those_of_the_whole_tensor(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[name]
    stored = gguf.quants.quantize(np.random.default_rng(0).standard_normal((6, 64), np.float32), kind)
    values = gguf.quants.dequantize(stored, kind)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("matrix", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(tmp_path / "a.gguf").tensors["matrix"]
    assert (tensor.shape, tensor.kind) == ((6, 64), kind)
    np.testing.assert_array_equal(tensor.floats(), values)
    np.testing.assert_array_equal(tensor.rows(2, 5), values[2:5])
    np.testing.assert_array_equal(tensor.floats(np.array([5, 0, 5])), values[[5, 0, 5]])
    np.testing.assert_array_equal(tensor.stored_rows(), stored.view(np.uint8).reshape(6, -1))
    assert tensor.floats().dtype == np.float32


def test_bytes_flipped_at_random_give_a_file_or_one_error(tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "whole.gguf", general__name="x").read_bytes())
    rng = np.random.default_rng(1)
    num_read, refusals = 0, []
    for _ in range(300):
        damaged = bytearray(whole)
        for place in rng.integers(0, 330, size=2):
            damaged[place] = int(rng.integers(0, 256))
        (tmp_path / "flipped.gguf").write_bytes(damaged)
        try:
            file = GGUFFile(tmp_path / "flipped.gguf")
            for key in file.fields:
                file.get(key)
            num_read += 1
        except ModelFileError as error:
            refusals.append(str(error))
    assert num_read > 0
    assert refusals
    assert not any("\n" in refusal for refusal in refusals)
