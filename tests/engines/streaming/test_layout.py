"""Where layers lie, and which of them stay."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import CapabilityError
from paceline.engines.streaming.layout import BLOCK, NEAR, Extent, Layer, Layout, gguf_layout, least_bytes, residency
from paceline.models.embedded import embedded_target


def test_every_tensor_lies_where_its_slot_says() -> None:
    path = embedded_target()
    layout = gguf_layout(path)
    data = path.read_bytes()
    reference = gguf.GGUFReader(path)
    of_layers = {tensor.name: tensor for tensor in reference.tensors if tensor.name.startswith("blk.")}
    seen = set()
    for number, layer in enumerate(layout.layers):
        slot = bytearray(layer.num_bytes)
        for extent in layer.extents:
            assert extent.start % BLOCK == extent.end % BLOCK == extent.offset % BLOCK == 0
            slot[extent.offset : extent.offset + extent.num_bytes] = data[extent.start : extent.end]
        for name, offset in layer.tensors.items():
            assert name.startswith(f"blk.{number}.")
            assert bytes(slot[offset : offset + of_layers[name].n_bytes]) == of_layers[name].data.tobytes()
        seen |= set(layer.tensors)
    assert seen == set(of_layers)
    rest = {tensor.name: tensor.n_bytes for tensor in reference.tensors if tensor.name not in of_layers}
    # Of the embeddings only rows are read.
    assert layout.looked_up_bytes == rest.pop("token_embd.weight")
    assert set(layout.others.tensors) == set(rest)
    assert sum(rest.values()) <= layout.others.num_bytes
    # A layer is read in one piece, and hardly more than it has.
    assert all(len(layer.extents) == 1 for layer in layout.layers)
    own = sum(tensor.n_bytes for tensor in of_layers.values())
    assert own <= sum(layer.num_bytes for layer in layout.layers) <= own + 2 * BLOCK * len(layout.layers)


def _written(path: Path, shapes: dict[str, int]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, size in shapes.items():
        writer.add_tensor(name, np.zeros(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_tensors_that_lie_apart_are_read_apart(tmp_path: Path) -> None:
    far = NEAR // 4 + 2 * BLOCK
    layout = gguf_layout(
        _written(tmp_path / "m.gguf", {"blk.0.a": 10, "blk.1.a": far, "blk.0.b": 5000, "blk.1.b": 10, "blk.0.c": 7})
    )
    first, second = layout.layers
    assert len(first.extents) == 2
    assert first.extents[1].offset == first.extents[0].num_bytes
    assert len(second.extents) == 1
    assert layout.slot_bytes == second.num_bytes


def test_a_model_of_several_files(tmp_path: Path) -> None:
    first = _written(tmp_path / "m-00001-of-00002.gguf", {"blk.0.a": 100, "token_embd.weight": 30})
    _written(tmp_path / "m-00002-of-00002.gguf", {"blk.0.b": 100, "output.weight": 30, "blk.1.a": 100})
    layout = gguf_layout(first)
    assert [extent.file for extent in layout.layers[0].extents] == [0, 1]
    # Of the embeddings only rows are read.
    assert list(layout.others.tensors) == ["output.weight"]
    assert layout.looked_up_bytes == 120
    assert [path.name for path in layout.paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


@pytest.mark.parametrize("names", [["output.weight"], ["blk.1.a"], ["blk.0.a", "blk.2.a"]])
def test_a_model_without_layers_in_a_row_is_refused(names: list[str], tmp_path: Path) -> None:
    path = _written(tmp_path / "m.gguf", dict.fromkeys(names, 10))
    with pytest.raises(CapabilityError, match=r"has no layers blk\.0, blk\.1, .* run it with --stream off"):
        gguf_layout(path)


def layout_of(sizes: list[int]) -> Layout:
    layers = tuple(Layer((Extent(0, 0, size * BLOCK, 0),), {}) for size in sizes)
    return Layout((Path("m.gguf"),), layers, Layer((), {}), 1000)


def test_what_stays_lies_between_what_is_streamed() -> None:
    layout = layout_of([10] * 8)
    assert residency(layout, 80 * BLOCK).streamed == ()
    found = residency(layout, 60 * BLOCK)
    assert found.streamed == (1, 3, 5, 7)
    assert found.resident == (0, 2, 4, 6)
    assert found.slots == 2
    assert residency(layout, 20 * BLOCK).streamed == tuple(range(8))


def test_the_least_is_what_every_pass_reads_and_the_slots() -> None:
    layout = Layout((Path("m.gguf"),), layout_of([10, 12, 10]).layers, Layer((Extent(0, 0, 5 * BLOCK, 0),), {}), 1000)
    assert least_bytes(layout) == (5 + 2 * 12) * BLOCK
    assert residency(layout, least_bytes(layout)).streamed == (0, 1, 2)
    assert least_bytes(layout_of([10])) == 10 * BLOCK


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    share=st.floats(0.0, 1.2),
    slots=st.integers(1, 4),
)
def test_what_stays_fits_and_more_would_not(sizes: list[int], share: float, slots: int) -> None:
    layout = layout_of(sizes)
    memory = max(int(share * sum(sizes) * BLOCK), min(slots, len(sizes)) * layout.slot_bytes)
    found = residency(layout, memory, slots=slots)
    assert sorted((*found.resident, *found.streamed)) == list(range(len(sizes)))
    resident_bytes = sum(layout.layers[number].num_bytes for number in found.resident)
    assert resident_bytes + found.slots * layout.slot_bytes <= memory
    assert bool(found.streamed) == (sum(sizes) * BLOCK > memory)
    # A ring that held all that is streamed would be memory for it.
    assert found.slots < len(found.streamed) or not found.streamed
