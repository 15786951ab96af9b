"""Which bytes of a model's files each of its layers is, and which of the layers stay in memory."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.core.errors import CapabilityError
from paceline.models.gguf_header import read_gguf_header
from paceline.models.gguf_model import part_paths

BLOCK: Final = 4096
"""Bytes that reads past the page cache begin and end at, in the file and in memory."""

NEAR: Final = 1 << 18
"""Tensors with no more bytes than this between them are read at once."""

LEAST_SLOTS: Final = 2
"""So that one is read while the other is used."""

_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


class UnstreamableError(CapabilityError):
    """The layers of a model cannot be streamed, though it can be run."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that are read at once, and where they go in a slot. All are multiples of :data:`BLOCK`.

    Attributes:
        file: the file's number, among the parts of the model.
        start: its first byte in the file.
        end: the one after its last; more than the file has, where that does not end with a block.
        offset: where it begins in the slot.
    """

    file: int
    start: int
    end: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Return its size."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Layer:
    """One of the layers that a pass goes through.

    Attributes:
        extents: what is read for it.
        tensors: by name, where each of its tensors begins in its slot.
    """

    extents: tuple[Extent, ...]
    tensors: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of a slot that it takes, which are those that are read for it."""
        return sum(extent.num_bytes for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a model's weights lie.

    Attributes:
        paths: its files.
        layers: in the order in which a pass goes through them.
        others: tensors of no layer that every pass reads in full, such as the output's weights.
        looked_up_bytes: of embeddings, of which a pass reads a row for each token.
    """

    paths: tuple[Path, ...]
    layers: tuple[Layer, ...]
    others: Layer
    looked_up_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights."""
        layers = sum(layer.num_bytes for layer in self.layers)
        return layers + self.others.num_bytes + self.looked_up_bytes

    @property
    def slot_bytes(self) -> int:
        """Return what the largest layer takes."""
        return max(layer.num_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Residency:
    """Which layers stay in memory.

    Attributes:
        resident: numbers of those that do.
        streamed: of those that are read for every pass; none where all fit.
        slots: of the ring.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    slots: int


def gguf_layout(path: Path) -> Layout:
    """Return where the weights of a GGUF model lie, of whose parts ``path`` is the first.

    Raises:
        ModelFileError: a file cannot be read, or is damaged.
        UnstreamableError: it has no layers that are called as such.
    """
    paths = part_paths(path)
    of_layers: dict[int, list[tuple[int, int, int, str]]] = defaultdict(list)
    others: list[tuple[int, int, int, str]] = []
    for number, part in enumerate(paths):
        for name, (start, end) in read_gguf_header(part).spans.items():
            found = _OF_LAYER.match(name)
            place = others if found is None else of_layers[int(found[1])]
            place.append((number, start, end, name))
    looked_up_bytes = 0
    if any(name == _OUTPUT for *_, name in others):
        # Else the output's weights are those of the embeddings.
        looked_up_bytes = sum(end - start for _, start, end, name in others if name == _EMBEDDINGS)
        others = [tensor for tensor in others if tensor[-1] != _EMBEDDINGS]
    if not of_layers or sorted(of_layers) != list(range(len(of_layers))):
        raise CapabilityError(
            f"{path} has no layers blk.0, blk.1, ... that could be streamed: run it with --stream off"
        )
    layers = tuple(_layer(sorted(of_layers[number])) for number in range(len(of_layers)))
    return Layout(paths, layers, _layer(sorted(others)), looked_up_bytes)


def gguf_bytes(path: Path) -> int:
    """Return the bytes of all files of a GGUF model, of whose parts ``path`` is the first."""
    return sum(part.stat().st_size for part in part_paths(path))


def _layer(tensors: Sequence[tuple[int, int, int, str]]) -> Layer:
    """Put the tensors of a layer, in their order in the files, into as few extents as are worth it."""
    extents: list[Extent] = []
    places: dict[str, int] = {}
    for file, start, end, name in tensors:
        first, last = start // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK
        before = extents[-1] if extents else None
        if before is not None and before.file == file and first - before.end <= NEAR:
            extents[-1] = Extent(file, before.start, max(before.end, last), before.offset)
        else:
            offset = before.offset + before.num_bytes if before is not None else 0
            extents.append(Extent(file, first, last, offset))
        places[name] = extents[-1].offset + start - extents[-1].start
    return Layer(tuple(extents), places)


def least_bytes(layout: Layout) -> int:
    """Return the least memory in which a model can be used: for what every pass reads, and the slots."""
    return layout.others.num_bytes + min(LEAST_SLOTS, len(layout.layers)) * layout.slot_bytes


def residency(layout: Layout, memory_bytes: int, *, slots: int = LEAST_SLOTS) -> Residency:
    """Return which layers stay in so much memory; as many as fit beside the slots, and those that do not, spread out.

    A pass that takes long over the layers that stay gives the disk time for the others, if they lie between them.

    Args:
        layout: the model's.
        memory_bytes: for weights and slots; not less than the slots and what is of no layer take.
        slots: of the ring.
    """
    sizes = [layer.num_bytes for layer in layout.layers]
    left_bytes = memory_bytes - layout.others.num_bytes
    if sum(sizes) <= left_bytes:
        return Residency(tuple(range(len(sizes))), (), 0)
    slots = min(slots, len(sizes))
    left_bytes -= slots * layout.slot_bytes
    assert left_bytes >= 0
    count = len(sizes)
    for num_streamed in range(1, count + 1):
        streamed = sorted({(2 * index + 1) * count // (2 * num_streamed) for index in range(num_streamed)})
        resident = [number for number in range(count) if number not in streamed]
        if sum(sizes[number] for number in resident) <= left_bytes:
            break
    return Residency(tuple(resident), tuple(streamed), slots)
