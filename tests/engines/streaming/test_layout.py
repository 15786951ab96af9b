"""Where layers lie, and which of them stay."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models.helpers import finish

from paceline.core.errors import CapabilityError
from paceline.engines.streaming import layout as layout_module
from paceline.engines.streaming.layout import (
    BLOCK,
    NEAR,
    SECTION_BYTES,
    Extent,
    Layout,
    Section,
    Span,
    choose_residency,
    least_bytes,
    read_gguf_layout,
)
from paceline.models.embedded import embedded_target


def test_every_tensor_lies_where_its_slot_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "SECTION_BYTES", 1 << 20)
    path = embedded_target()
    layout = read_gguf_layout(path)
    data = path.read_bytes()
    reference = gguf.GGUFReader(path)
    of_layers = {tensor.name: tensor for tensor in reference.tensors if tensor.name.startswith("blk.")}
    sections = layout.sections([[name] for name in of_layers])
    seen: list[str] = []
    for section in sections:
        assert section.num_bytes <= layout.most_slot_bytes
        slot = bytearray(section.num_bytes)
        for extent in section.extents:
            assert extent.start % BLOCK == extent.end % BLOCK == extent.offset % BLOCK == 0
            slot[extent.offset : extent.offset + extent.num_bytes] = data[extent.start : extent.end]
        for name, offset in section.tensors.items():
            assert bytes(slot[offset : offset + of_layers[name].n_bytes]) == of_layers[name].data.tobytes()
        seen += section.tensors
    assert sorted(seen) == sorted(of_layers)
    rest = {tensor.name: tensor.n_bytes for tensor in reference.tensors if tensor.name not in of_layers}
    # Of the embeddings only rows are read.
    assert layout.looked_up_bytes == rest.pop("token_embd.weight")
    assert set(layout.kept.tensors) == set(rest)
    assert sum(rest.values()) <= layout.kept.num_bytes
    # A section is read in one piece, and hardly more than it has.
    assert all(len(section.extents) == 1 for section in sections)
    own = sum(tensor.n_bytes for tensor in of_layers.values())
    assert own <= sum(section.num_bytes for section in sections) <= own + 2 * BLOCK * len(sections)
    assert len(sections) >= own // (1 << 20)


def test_a_section_is_as_much_as_is_read_at_once(tmp_path: Path) -> None:
    layout = read_gguf_layout(_written(tmp_path / "m.gguf", {f"blk.0.{name}": 3_000_000 for name in "abcdef"}))
    found = [set(section.tensors) for section in layout.sections([["blk.0.a"], ["blk.0.b"], ["blk.0.c", "blk.0.d"]])]
    # 12 MB each: two are less than a section, three are more, and what is in use together stays together.
    assert found == [{"blk.0.a", "blk.0.b"}, {"blk.0.c", "blk.0.d"}]
    (only,) = layout.sections([[f"blk.0.{name}" for name in "abcdef"]])
    assert only.num_bytes > SECTION_BYTES


def _written(path: Path, shapes: dict[str, int], *, experts: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if experts:
        writer.add_expert_count(experts)
    for name, size in shapes.items():
        writer.add_tensor(name, np.zeros(size, np.float32))
    return finish(writer, path)


def test_tensors_that_lie_apart_are_read_apart(tmp_path: Path) -> None:
    far = NEAR // 4 + 2 * BLOCK
    layout = read_gguf_layout(
        _written(tmp_path / "m.gguf", {"blk.0.a": 10, "blk.1.a": far, "blk.0.b": 5000, "blk.1.b": 10, "blk.0.c": 7})
    )
    (apart,) = layout.sections([["blk.0.a", "blk.0.b", "blk.0.c"]])
    assert len(apart.extents) == 2
    assert apart.extents[1].offset == apart.extents[0].num_bytes
    (near,) = layout.sections([["blk.1.a", "blk.1.b"]])
    assert len(near.extents) == 1


def test_a_model_of_several_files(tmp_path: Path) -> None:
    first = _written(tmp_path / "m-00001-of-00002.gguf", {"blk.0.a": 100, "token_embd.weight": 30})
    _written(tmp_path / "m-00002-of-00002.gguf", {"blk.0.b": 100, "output.weight": 30, "blk.1.a": 100})
    layout = read_gguf_layout(first)
    (section,) = layout.sections([["blk.0.a", "blk.0.b"]])
    assert [extent.file for extent in section.extents] == [0, 1]
    # Of the embeddings only rows are read.
    assert list(layout.kept.tensors) == ["output.weight"]
    assert layout.looked_up_bytes == 120
    assert [path.name for path in layout.paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


def test_experts_are_counted(tmp_path: Path) -> None:
    shapes = {"blk.0.ffn_up_exps.weight": 100}
    assert read_gguf_layout(_written(tmp_path / "m.gguf", shapes, experts=8)).experts == 8
    assert read_gguf_layout(_written(tmp_path / "d.gguf", shapes)).experts == 0


@pytest.mark.parametrize("names", [["output.weight"], ["blk.1.a"], ["blk.0.a", "blk.2.a"]])
def test_a_model_without_layers_in_a_row_is_refused(names: list[str], tmp_path: Path) -> None:
    path = _written(tmp_path / "m.gguf", dict.fromkeys(names, 10))
    with pytest.raises(CapabilityError, match=r"has no layers blk\.0, blk\.1, .* run it with `stream=False`"):
        read_gguf_layout(path)


def sections_of(sizes: list[int]) -> list[Section]:
    return [Section((Extent(0, 0, size * BLOCK, 0),), {}) for size in sizes]


def test_what_stays_lies_between_what_is_streamed() -> None:
    sections = sections_of([10] * 8)
    assert choose_residency(sections, 80 * BLOCK).streamed == ()
    found = choose_residency(sections, 60 * BLOCK)
    assert found.streamed == (1, 3, 5, 7)
    assert found.resident == (0, 2, 4, 6)
    assert found.slots == 2
    assert choose_residency(sections, 20 * BLOCK).streamed == tuple(range(8))


def test_the_least_is_what_every_pass_reads_and_the_slots() -> None:
    layers = {f"blk.0.{number}": Span(0, 0, 12 << 20) for number in range(6)}
    layout = Layout((Path("m.gguf"),), layers, {"output.weight": Span(0, 0, 5 * BLOCK)}, 1000)
    assert least_bytes(layout) == 5 * BLOCK + 2 * SECTION_BYTES
    large = Layout((Path("m.gguf"),), {**layers, "blk.1.0": Span(0, 0, 40 << 20)}, {}, 1000)
    assert least_bytes(large) == 2 * ((40 << 20) + 2 * BLOCK)
    small = Layout((Path("m.gguf"),), {"blk.0.0": Span(0, 0, 10 * BLOCK)}, {}, 0)
    assert least_bytes(small) == 20 * BLOCK


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    share=st.floats(0.0, 1.2),
    slots=st.integers(1, 4),
)
def test_what_stays_fits_and_more_would_not(sizes: list[int], share: float, slots: int) -> None:
    sections = sections_of(sizes)
    slot_bytes = max(sizes) * BLOCK
    memory = max(int(share * sum(sizes) * BLOCK), min(slots, len(sizes)) * slot_bytes)
    found = choose_residency(sections, memory, slots=slots)
    assert sorted((*found.resident, *found.streamed)) == list(range(len(sizes)))
    resident_bytes = sum(sections[number].num_bytes for number in found.resident)
    assert resident_bytes + found.slots * slot_bytes <= memory
    assert bool(found.streamed) == (sum(sizes) * BLOCK > memory)
    # A ring that held all that is streamed would be memory for it.
    assert found.slots < len(found.streamed) or not found.streamed
