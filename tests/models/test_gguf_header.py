"""The reader of GGUF headers against the ``gguf`` package's, and against every way a file can be cut."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest

from paceline.core.errors import ModelFileError
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.gguf_header import read_gguf_header
from tests.models.helpers import write_gguf
from tests.timing import processor_s


@pytest.mark.parametrize("path", [embedded_target(), embedded_draft()], ids=["target", "draft"])
def test_it_reads_what_the_gguf_package_reads(path: Path) -> None:
    header = read_gguf_header(path)
    reference = gguf.GGUFReader(path)
    lengths = {}
    for name, entry in reference.fields.items():
        if name.startswith("GGUF."):  # not keys, but the counts before them
            continue
        if entry.types[0] == gguf.GGUFValueType.ARRAY:
            lengths[name] = len(entry.data)
        else:
            assert header.metadata[name] == entry.contents(), name
    assert header.array_lengths == lengths
    assert len(header.metadata) + len(lengths) == len(reference.fields) - 3
    assert header.num_parameters == sum(tensor.n_elements for tensor in reference.tensors)
    assert header.spans == {
        tensor.name: (tensor.data_offset, tensor.data_offset + tensor.n_bytes) for tensor in reference.tensors
    }


def test_every_kind_of_value_comes_through(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "kinds.gguf", "llama")
    writer.add_uint8("uint8", 255)
    writer.add_int8("int8", -128)
    writer.add_uint16("uint16", 65535)
    writer.add_int16("int16", -32768)
    writer.add_uint32("uint32", 2**32 - 1)
    writer.add_int32("int32", -(2**31))
    writer.add_float32("float32", 0.5)
    writer.add_bool("bool", True)
    writer.add_string("string", "é\n")
    writer.add_uint64("uint64", 2**64 - 1)
    writer.add_int64("int64", -(2**63))
    writer.add_float64("float64", 0.1)
    writer.add_array("few", [1, 2, 3])
    writer.add_array("many", list(range(2000)))
    writer.add_array("texts", ["a", "", "ccc"])
    writer.add_string("last", "still in step")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = read_gguf_header(tmp_path / "kinds.gguf")
    assert header.metadata == {
        "general.architecture": "llama",
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "float32": 0.5,
        "bool": True,
        "string": "é\n",
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float64": 0.1,
        "few": [1, 2, 3],
        "last": "still in step",
    }
    assert header.array_lengths == {"many": 2000, "texts": 3}
    assert (header.num_parameters, header.tensor_type) == (0, None)


def test_weights_are_counted_and_the_commonest_type_named(tmp_path: Path) -> None:
    header = read_gguf_header(write_gguf(tmp_path / "a.gguf"))
    assert (header.num_parameters, header.tensor_type) == (104, "F16")


def test_a_file_cut_anywhere_is_damaged(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", general__name="x").read_bytes()
    # The writer pads after the last tensor; a file may end where its last weight does.
    for length in [*range(4, len(whole) - 32, 7), len(whole) - 32]:
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf is truncated or damaged: .*(it ends|its tensors end)"):
            read_gguf_header(tmp_path / "cut.gguf")


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)

DAMAGED = {
    "no model": (b"hello, world", "is not a GGUF file: it begins with 'hell'; convert the model to GGUF first"),
    "empty": (b"", "it is empty; copy or download it again"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer, which stands for the file"),
    "from before GGUF": (b"tjgg\3\0\0\0", "from before GGUF; convert the original model again"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is a big-endian GGUF file, and little-endian ones can"),
    "big-endian and old": (b"GGUF" + struct.pack(">IQQ", 1, 0, 0), "is a big-endian GGUF file"),
    "version 1": (
        b"GGUF" + struct.pack("<III", 1, 0, 0),
        "of GGUF version 1, which llama.cpp no longer reads;",
    ),
    "version 99": (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "of GGUF version 99, and up to 3 can be read; upgrade"),
    "version 0": (b"GGUF" + struct.pack("<IQQ", 0, 0, 0), "truncated or damaged: there is no version 0"),
    "countless keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "keys"),
    "countless tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
    "endless name": (HEADER + struct.pack("<Q", 1 << 63), "ends within its header"),
    "unknown type": (HEADER + struct.pack("<Q1sI", 1, b"k", 99), "unknown type 99"),
    "countless items": (HEADER + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 62), "items of k"),
    "list of lists": (HEADER + struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1), "unknown type 9"),
    "five dimensions": (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 5), "5 dimensions"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    data, words = DAMAGED[name]
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(ModelFileError, match=r"bad\.gguf") as caught:
        read_gguf_header(tmp_path / "bad.gguf")
    assert words in str(caught.value)
    assert ";" in str(caught.value), "a way out"
    assert "\n" not in str(caught.value)


def test_weights_of_a_hugging_face_model_point_to_their_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    with pytest.raises(ModelFileError, match="weights of a Hugging Face model; give the folder it lies in"):
        read_gguf_header(tmp_path / "model.safetensors")


def test_a_large_vocabulary_takes_little_time(tmp_path: Path) -> None:
    """The gguf package takes 60 times as long as this reader."""
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token {i}" for i in range(20_000)])
    writer.add_token_merges([f"t {i}" for i in range(20_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_gguf_header(path).array_lengths == {
        "tokenizer.ggml.tokens": 20_000,
        "tokenizer.ggml.merges": 20_000,
    }
    took_s = min(processor_s(lambda: read_gguf_header(path)) for _ in range(3))
    assert 10 * took_s < processor_s(lambda: gguf.GGUFReader(path))
