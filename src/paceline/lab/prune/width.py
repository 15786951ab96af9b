"""Which units of the feed-forward parts are worth least.

A unit of a gated feed-forward is a row of ``ffn_gate``, one of ``ffn_up`` and a column of ``ffn_down``. Its worth is
taken to be the product of the three norms, those of the rows behind the weights of the norm before them. That goes by
the weights alone: how far a unit is driven by a text is not to be had from llama.cpp, so what a cut costs is measured
afterwards. Units go by blocks, of as many as the type of ``ffn_down`` packs together, as many of each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.core.errors import InputError, ModelFileError
from paceline.lab.prune.writer import FEED_FORWARD, LAYER, Indices, num_layers

if TYPE_CHECKING:
    from paceline.models.gguf_file import GGUFFile

_LEAST_BLOCK: Final = 32
"""Fewest units that go together: matrix kernels take rows in groups."""
_ROWS: Final = 512
"""Rows that are looked at together."""


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward parts of a model, which are all alike.

    Attributes:
        units: of a layer.
        block_units: units that are removed together.
    """

    layers: int
    units: int
    block_units: int

    def blocks_to_remove(self, asked: float) -> int:
        """Return how many blocks of a layer a share of its units, or a number of them, comes to.

        Raises:
            InputError: it is less than half a block, or would leave none.
        """
        units = asked * self.units if asked < 1 else asked
        blocks = round(units / self.block_units)
        total = self.units // self.block_units
        if not 0 < blocks < total:
            limit = f"{self.block_units} to {self.units - self.block_units} units"
            raise InputError(
                f"--width {asked:g} is {units:.0f} of {self.units} units of a layer: {limit} can be removed, in blocks "
                f"of {self.block_units}"
            )
        return blocks


@dataclass(frozen=True, slots=True)
class ChosenBlocks:
    """The blocks that are kept, of each layer.

    Attributes:
        blocks: ascending.
        block_units: units of a block.
        removed: blocks that are removed of each layer.
        worth: share of the worth of all units that is removed, by the weights alone.
    """

    blocks: tuple[Indices, ...]
    block_units: int
    removed: int
    worth: float


def read_feed_forward(file: GGUFFile) -> FeedForward:
    """Read the feed-forward parts; raise ``ModelFileError``, which says why, unless they are plain, gated and alike."""
    from gguf import GGML_QUANT_SIZES

    name, architecture = file.path.name, file.text("general.architecture")
    if file.get(f"{architecture}.expert_count"):
        raise ModelFileError(
            f"{name} is a mixture of {file.get(f'{architecture}.expert_count')} experts, each narrow already, and "
            "which are used depends on the text: its layers are not made narrower (--width)"
        )
    layers = num_layers(file)
    units = file.integer(f"{architecture}.feed_forward_length", 0)
    sizes = {_LEAST_BLOCK}
    for layer in range(layers):
        for inner in FEED_FORWARD:
            tensor = file.tensors.get(f"blk.{layer}.{inner}")
            wanted = 0 if inner != FEED_FORWARD[2] else 1
            if tensor is None or len(tensor.shape) != 2 or tensor.shape[wanted] != units:
                raise ModelFileError(
                    f"{name} has no {inner} with {units} units in layer {layer}: only plain gated feed-forward parts, "
                    "which are the same in all layers, can be made narrower (--width)"
                )
        sizes.add(int(GGML_QUANT_SIZES[file.tensors[f"blk.{layer}.{FEED_FORWARD[2]}"].kind][0]))
    for tensor_name, tensor in file.tensors.items():
        found = LAYER.fullmatch(tensor_name)
        if found and found[2].startswith("ffn") and found[2] not in FEED_FORWARD and units in tensor.shape:
            raise ModelFileError(
                f"{name} has {tensor_name}, with something for every unit that is not known here: leave out --width"
            )
    return FeedForward(layers, units, math.lcm(*sizes))


def choose_blocks(
    file: GGUFFile,
    parts: FeedForward,
    remove: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ChosenBlocks:
    """Return the blocks that are left when ``remove`` of each layer are gone; ``report`` is called with layers."""
    kept: list[Indices] = []
    gone = total = 0.0
    for layer in range(parts.layers):
        worth = _unit_worths(file, layer).reshape(-1, parts.block_units).sum(axis=1)
        order = np.argsort(worth, kind="stable")
        kept.append(np.sort(order[remove:]))
        gone += float(worth[order[:remove]].sum())
        total += float(worth.sum())
        report(layer + 1, parts.layers)
    return ChosenBlocks(tuple(kept), parts.block_units, remove, gone / total if total else 0.0)


def _unit_worths(file: GGUFFile, layer: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    gate, up, down = (file.tensors[f"blk.{layer}.{inner}"] for inner in FEED_FORWARD)
    norm = file.tensors.get(f"blk.{layer}.ffn_norm.weight")
    before = norm.floats() if norm is not None else np.float32(1.0)
    units = gate.shape[0]
    worth = np.ones(units)
    for start in range(0, units, _ROWS):
        stop = min(start + _ROWS, units)
        for tensor in (gate, up):
            worth[start:stop] *= np.linalg.norm(tensor.rows(start, stop) * before, axis=1)
    squares = np.zeros(units)
    for start in range(0, down.shape[0], _ROWS):
        squares += np.square(down.rows(start, min(start + _ROWS, down.shape[0])), dtype=np.float64).sum(axis=0)
    return worth * np.sqrt(squares)
