"""Which feed-forward units are chosen."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from paceline.core.errors import InputError, ModelFileError
from paceline.lab.prune.width import choose_blocks, read_feed_forward
from paceline.models.embedded import embedded_draft
from paceline.models.gguf_file import GGUFFile
from tests.models.helpers import edited_gguf, finish

UNITS, WIDTH = 128, 32


def write_parts(path: Path, weak: tuple[int, int]) -> GGUFFile:
    """Write two layers; of each, the units of one block are weak."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_feed_forward_length(UNITS)
    writer.add_tensor("token_embd.weight", np.ones((4, WIDTH), np.float32))
    for layer, block in enumerate(weak):
        gate = np.ones((UNITS, WIDTH), np.float32)
        gate[32 * block : 32 * block + 32] = 0.01
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(WIDTH, np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_gate.weight", gate)
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", np.ones((UNITS, WIDTH), np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", np.ones((WIDTH, UNITS), np.float32))
    return GGUFFile(finish(writer, path))


def test_the_weakest_block_of_each_layer_goes(tmp_path: Path) -> None:
    file = write_parts(tmp_path / "parts.gguf", (2, 0))
    parts = read_feed_forward(file)
    assert (parts.layers, parts.units, parts.block_units) == (2, UNITS, 32)
    found = choose_blocks(file, parts, 1)
    assert [blocks.tolist() for blocks in found.blocks] == [[0, 1, 3], [1, 2, 3]]
    assert found.worth == pytest.approx(0.01 / 3.01, rel=1e-3)


def test_shares_and_numbers_come_to_whole_blocks(tmp_path: Path) -> None:
    parts = read_feed_forward(write_parts(tmp_path / "parts.gguf", (0, 0)))
    assert [parts.blocks_to_remove(asked) for asked in (0.25, 0.3, 0.5, 32, 70)] == [1, 1, 2, 1, 2]
    for asked in (0.01, 0.99, 5, 128, 4000):
        with pytest.raises(InputError, match="32 to 96 units"):
            parts.blocks_to_remove(asked)


def test_parts_of_another_kind_are_refused(tmp_path: Path) -> None:
    experts = {"llama.expert_count": 4, "llama.expert_used_count": 2}
    with pytest.raises(ModelFileError, match="mixture of 4 experts"):
        read_feed_forward(GGUFFile(edited_gguf(tmp_path / "experts.gguf", experts)))
    with pytest.raises(ModelFileError, match="only plain gated"):
        read_feed_forward(GGUFFile(edited_gguf(tmp_path / "other.gguf", {"llama.feed_forward_length": 512})))
    assert read_feed_forward(GGUFFile(embedded_draft())).units == 384
