"""Where the layers of a model lie in its files, the sections they are read in, and which sections stay in memory."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
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

SECTION_BYTES: Final = 32 << 20
"""Most bytes of a section, unless a single tensor has more.

What is read meanwhile takes memory from what stays, and less at once keeps no disk busy.
"""

MIN_SLOTS: Final = 2
"""One is read while the other is used."""

_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS, _OUTPUT = "token_embd.weight", "output.weight"


class UnstreamableError(CapabilityError):
    """The layers of a model cannot be streamed, though it can be run."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that are read at once, and where they go in a slot. All are multiples of :data:`BLOCK`.

    Attributes:
        end: the one after its last; more than the file has, where that does not end with a block.
        offset: where it begins in the slot.
    """

    file: int
    start: int
    end: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies: bytes ``start`` to ``end``, exclusive, of the file of that number."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Section:
    """Weights that are read at once, and used one after the other: some tensors of a layer, or of several.

    Attributes:
        tensors: by name, where each tensor begins in its slot.
    """

    extents: tuple[Extent, ...]
    tensors: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot that it takes, which are those that are read for it."""
        return sum(extent.num_bytes for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a model's weights lie.

    Attributes:
        layers: tensors of its layers, by name.
        others: tensors of no layer that every pass reads in full, such as the output's weights; they stay.
        looked_up_bytes: of embeddings, of which a pass reads a row for each token.
        experts: of each layer, where it is a mixture; else 0.
    """

    paths: tuple[Path, ...]
    layers: Mapping[str, Span]
    others: Mapping[str, Span]
    looked_up_bytes: int
    experts: int = 0

    @property
    def num_bytes(self) -> int:
        tensors = (*self.layers.values(), *self.others.values())
        return sum(span.end - span.start for span in tensors) + self.looked_up_bytes

    @property
    def kept(self) -> Section:
        return self._section(self.others)

    @property
    def most_slot_bytes(self) -> int:
        """The most that a section takes, where its tensors can be read one after the other."""
        largest = max(span.end - span.start for span in self.layers.values())
        return min(max(SECTION_BYTES, largest + 2 * BLOCK), self.num_bytes)

    def sections(self, order: Sequence[Collection[str]]) -> tuple[Section, ...]:
        """Return the layers cut into sections.

        ``order`` has the names of their tensors in the order in which a pass is done with them; those that it is done
        with only together are together.
        """
        sections: list[Section] = []
        names: list[str] = []
        for further in order:
            section = self._section([*names, *further])
            if names and section.num_bytes > SECTION_BYTES:
                sections.append(self._section(names))
                names = []
            names += further
        return (*sections, self._section(names))

    def _section(self, names: Iterable[str]) -> Section:
        return _section([(self.layers[name] if name in self.layers else self.others[name], name) for name in names])


@dataclass(frozen=True, slots=True)
class Residency:
    """Which sections stay in memory, and which are read for every pass, by number; none of the latter where all fit."""

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    slots: int


def read_gguf_layout(path: Path) -> Layout:
    """Return where the weights of a GGUF model lie, of whose parts ``path`` is the first.

    Raises ``UnstreamableError`` where no tensors are named as layers.
    """
    paths = part_paths(path)
    layers: dict[str, Span] = {}
    numbers: set[int] = set()
    others: dict[str, Span] = {}
    experts = 0
    for file, part in enumerate(paths):
        header = read_gguf_header(part)
        told = header.metadata.get(f"{header.metadata.get('general.architecture')}.expert_count")
        experts = max(experts, told if isinstance(told, int) else 0)
        for name, (start, end) in header.spans.items():
            found = _OF_LAYER.match(name)
            if found is None:
                others[name] = Span(file, start, end)
            else:
                numbers.add(int(found[1]))
                layers[name] = Span(file, start, end)
    looked_up_bytes = 0
    if _OUTPUT in others and _EMBEDDINGS in others:
        # Without it the embeddings are the output projection as well.
        embeddings = others.pop(_EMBEDDINGS)
        looked_up_bytes = embeddings.end - embeddings.start
    if not numbers or sorted(numbers) != list(range(len(numbers))):
        raise UnstreamableError(
            f"{path} has no layers blk.0, blk.1, ... that could be streamed: run it with `stream=False`"
        )
    return Layout(paths, layers, others, looked_up_bytes, experts)


def _section(tensors: Iterable[tuple[Span, str]]) -> Section:
    """Put tensors, in their order in the files, into as few extents as are worth it."""
    extents: list[Extent] = []
    places: dict[str, int] = {}
    for span, name in sorted(tensors, key=lambda tensor: (tensor[0].file, tensor[0].start)):
        first, last = span.start // BLOCK * BLOCK, -(-span.end // BLOCK) * BLOCK
        before = extents[-1] if extents else None
        if before is not None and before.file == span.file and first - before.end <= NEAR:
            extents[-1] = Extent(span.file, before.start, max(before.end, last), before.offset)
        else:
            offset = before.offset + before.num_bytes if before is not None else 0
            extents.append(Extent(span.file, first, last, offset))
        places[name] = extents[-1].offset + span.start - extents[-1].start
    return Section(tuple(extents), places)


def least_bytes(layout: Layout) -> int:
    """Return the least memory that a model can be used in: for what every pass reads, and the slots."""
    return layout.kept.num_bytes + MIN_SLOTS * layout.most_slot_bytes


def choose_residency(sections: Sequence[Section], memory_bytes: int, *, slots: int = MIN_SLOTS) -> Residency:
    """Return which sections stay in so much memory: as many as fit beside the slots, which it must hold.

    The streamed sections are spread out: a pass that takes long over what stays gives the disk time for the section
    behind.
    """
    sizes = [section.num_bytes for section in sections]
    if sum(sizes) <= memory_bytes:
        return Residency(tuple(range(len(sizes))), (), 0)
    slots = min(slots, len(sizes))
    left_bytes = memory_bytes - slots * max(sizes)
    assert left_bytes >= 0
    count = len(sizes)
    for num_streamed in range(1, count + 1):
        streamed = sorted({(2 * index + 1) * count // (2 * num_streamed) for index in range(num_streamed)})
        resident = [number for number in range(count) if number not in streamed]
        if sum(sizes[number] for number in resident) <= left_bytes:
            break
    return Residency(tuple(resident), tuple(streamed), slots)
