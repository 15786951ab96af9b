"""Streaming layers under llama.cpp: weights point into slots, and a callback says when a section is done with.

llama.cpp asks ``cb_eval`` of every node of a pass, before it is computed, whether the caller wants to see it; it then
computes up to such a node and calls again. So a pass stops after the last node that reads a weight of a section::

    nodes      ... mul_mat(blk.3.ffn_down) ]  add  mul(blk.4.attn_norm) ... mul_mat(blk.4.attn_output) ]  ...
                                           ^ give one section back, wait for the next, point its tensors into its slot

A pass of a recurrent model may go through the layers more than once. The first section is waited for again then, when
llama.cpp asks of the node that ends it: nothing before that node has been computed by then.

A weight's ``ggml_tensor`` stays where it is as long as the model does, and its ``data`` is read when a node that needs
it is computed. Where tensors and their names lie is no promise of llama.cpp's, so all of it is checked against the
library and the file before anything is pointed anywhere: offsets in the struct, addresses in the mapping, the order in
which weights are read; and rows must come out the same, bit for bit.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import llama_cpp.llama_cpp as api
import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import ModelWarning
from paceline.engines.llama_cpp import native
from paceline.engines.memory import SPARE_BYTES, MemoryPlan, Room
from paceline.engines.streaming.disk import WeightFiles, give_back, own_memory
from paceline.engines.streaming.layout import (
    MIN_SLOTS,
    Layout,
    Residency,
    Section,
    UnstreamableError,
    choose_residency,
    least_bytes,
)
from paceline.engines.streaming.ring import Ring
from paceline.sizes import format_bytes, format_memory

# struct ggml_tensor: type and padding, buffer, ne, nb, op, op_params, flags; src, view_src, view_offs, data.
_SOURCES: Final = 152
_MAX_SOURCES: Final = 10
_VIEW_SOURCE: Final = _SOURCES + 8 * _MAX_SOURCES
_DATA: Final = _VIEW_SOURCE + 16

_MADV_DONTNEED: Final = 4

_SLOW_S: Final = 30.0
"""Seconds of a pass from which a model is reported as slow: with few tokens a pass nobody waits for an answer."""

_TRIAL_ROWS: Final = 5
"""Rows of the passes that show whether layers can be streamed; a batch has at least as many."""


@dataclass(slots=True)
class _Weight:
    """A tensor of a layer: the address of its ``ggml_tensor``, and of its data in the mapping of the file."""

    address: int
    mapped: int


class LayerStream:
    """Streams the layers of one model through its passes. Closing it closes the files it reads.

    Attributes:
        callback: for ``llama_context_params.cb_eval``, of every context of the model.
        floor_s: seconds that a narrow pass took when the model was loaded.
    """

    def __init__(self, layout: Layout, files: WeightFiles) -> None:
        self.callback: Any = api.ggml_backend_sched_eval_callback(self._evaluate)
        self._layout = layout
        self._files = files
        self._sections: tuple[Section, ...] = ()
        self._section_of: dict[str, int] = {}
        self._mode: Literal["idle", "noting", "streaming"] = "idle"
        self._weights: dict[str, _Weight] = {}
        # While noting: the number of nodes so far, and the layers' weights that they read, in order.
        self._num_nodes = 0
        self._reads: list[tuple[int, str]] = []
        self._viewed: set[str] = set()
        # Address of the weight that is read last in a section, to the section's number.
        self._last_of: dict[int, int] = {}
        self._fields: list[list[tuple[Any, int]]] = []
        self._streamed: frozenset[int] = frozenset()
        self._first: int | None = None
        self._ring: Ring | None = None
        self._slots: list[int] = []
        self._resident: list[mmap.mmap] = []
        # Whether a pass was begun that has not ended, and the last section it is done with.
        self._is_running = False
        self._ended: int | None = None
        self._failure: BaseException | None = None
        self.floor_s = 0.0

    # --- noting -------------------------------------------------------------------------------------------------------

    def start_noting(self) -> None:
        """Note which weights the passes to come read, instead of streaming anything."""
        self._mode = "noting"
        self._num_nodes = 0
        self._reads.clear()

    def stop_noting(self, path: Path) -> None:
        """Check the reads of the latest pass; raise ``UnstreamableError`` if its layers cannot be streamed."""
        self._mode = "idle"
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not self._sections:
            self._sections = self._layout.sections(_separable(self._reads))
            self._section_of = {name: number for number, each in enumerate(self._sections) for name in each.tensors}
        names = [name for _, name in self._reads]
        # By node and section: a node that reads weights of two sections would need both in their slots.
        order = [(node, self._section_of.get(name, -1)) for node, name in self._reads]
        numbers = [number for _, number in order]
        last_names = dict(zip(numbers, names, strict=True))
        problem = None
        if not order:
            problem = "its passes read no weights by the names in the file"
        elif self._viewed:
            problem = f"{min(self._viewed)} is read by way of a view"
        elif set(numbers) != set(range(len(self._sections))):
            # The ring would read, and wait for, sections that the other passes do not use.
            problem = "not all of its passes read the same weights"
        elif numbers != sorted(numbers) or len(dict(order)) != len(set(order)):
            problem = "its weights are not read in the same order by all passes"
        elif any(names.count(name) > 1 for name in last_names.values()):
            problem = "weights that it is done with last are read more than once"
        if problem is None:
            problem = self._find_misplaced()
        if problem is not None:
            raise UnstreamableError(f"the layers of {path} cannot be streamed: {problem}; run it with `stream=False`")
        self._last_of = {self._weights[name].address: number for number, name in last_names.items()}

    def _find_misplaced(self) -> str | None:
        """Return what speaks against the tensors being where they are taken to be; ``None`` if nothing does."""
        for name, weight in self._weights.items():
            if native.tensor_data(weight.address) != weight.mapped:
                return f"{name} is not laid out as this version of paceline knows it"
        bases = set()
        for name, weight in self._weights.items():
            span = self._layout.layers[name] if name in self._layout.layers else self._layout.others[name]
            # Where a file begins in memory, as this tensor has it; a model of several files has several.
            bases.add((span.file, weight.mapped - span.start))
        if len(bases) != len({file for file, _ in bases}):
            return "its weights are not mapped as they lie in the file"
        if len(self._layout.paths) != len(bases):
            return "some of its files hold none of what is read"
        return None

    # --- streaming ----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        return self._layout.num_bytes

    @property
    def is_streaming(self) -> bool:
        return self._mode == "streaming"

    @property
    def least_bytes(self) -> int:
        """Least memory that the weights can be streamed through."""
        return least_bytes(self._layout)

    @property
    def needed_bytes(self) -> int:
        """Least memory that the sections found can be streamed through."""
        return self._layout.kept.num_bytes + min(MIN_SLOTS, len(self._sections)) * self._slot_bytes

    def start(self, path: Path, room: Room, try_rows: Callable[[int], FloatArray]) -> MemoryPlan | None:
        """Read layers that do not fit while they are used from now on, and check that no row changes.

        ``try_rows`` makes a pass of so many rows, and returns their logits. Returns how the memory is shared out;
        ``None`` where all layers fit after all.

        Warns:
            ModelWarning: passes will be so slow that nobody waits for an answer.
        """
        self.start_noting()
        try_rows(1)
        self.stop_noting(path)
        self.start_noting()
        mapped = try_rows(_TRIAL_ROWS)
        self.stop_noting(path)
        if room.weights_bytes < self.needed_bytes:
            # How much is read at once is known only now, from the passes that were noted.
            raise UnstreamableError(
                f"the layers of {path} cannot be streamed through {format_memory(room.weights_bytes)}: what a pass "
                f"reads at once takes {format_memory(self.needed_bytes)}; give more memory, or run it "
                "with `stream=False`"
            )
        self.arm(self.plan(room.weights_bytes))
        foreseen_s = self.memory_plan(room).pass_s
        if foreseen_s > _SLOW_S:
            warnings.warn(
                f"{path}: {format_bytes(self.pass_bytes)} are read for every pass, which takes "
                f"{foreseen_s:.0f} s from this disk: give it more memory (`memory`), a faster disk, or a smaller "
                "quantisation",
                ModelWarning,
                stacklevel=2,
            )
        for _ in range(2):
            # Twice, so that slots are filled again.
            started_s = time.perf_counter()
            rows = try_rows(_TRIAL_ROWS)
            self.floor_s = time.perf_counter() - started_s
            if not np.array_equal(rows, mapped):
                raise UnstreamableError(
                    f"the layers of {path} cannot be streamed: rows come out otherwise; run it with `stream=False`"
                )
        # Measured once: later reads overlap with passes, and say less of the disk.
        return self.memory_plan(room) if self.is_streaming else None

    def plan(self, memory_bytes: int) -> Residency:
        """Return which sections stay in so much memory, that of the weights alone; at least :attr:`least_bytes`."""
        return choose_residency(self._sections, memory_bytes - self._layout.kept.num_bytes)

    def arm(self, planned: Residency) -> None:
        """Move what stays to memory of its own, and stream the other sections from now on."""
        sections, kept = self._sections, self._layout.kept
        self._fields = [self._locate_fields(section) for section in sections]
        self._keep(kept, self._locate_fields(kept))
        for number in planned.resident:
            self._keep(sections[number], self._fields[number])
        self._give_mapping_back()
        if not planned.streamed:
            return
        self._streamed = frozenset(planned.streamed)
        order = planned.streamed
        self._first = order[0] if order[0] == 0 else None
        self._ring = Ring(self._files, sections, order, slots=planned.slots, slot_bytes=self._slot_bytes)
        self._slots = [_address(self._ring.slot_memory(index)) for index in range(planned.slots)]
        self._mode = "streaming"

    def begin(self) -> None:
        """Make ready for a pass; raise ``EngineError`` where a file was changed or the first section cannot be read."""
        if self._mode != "streaming":
            return
        assert self._ring is not None
        # An interrupt may have come right after the native call; and what could not be read ahead may be read now.
        if self._is_running or self._ring.has_failed:
            self._restart()
        self._is_running = True
        try:
            self._use_first()
        except BaseException:
            self._restart()
            raise

    def end(self) -> None:
        """Note that a pass is over, however it ended.

        Raises ``EngineError`` where it went on without weights that could not be read, or a file was changed meanwhile.
        """
        if self._mode != "streaming":
            return
        failure = self._failure
        if failure is not None or self._ended != len(self._sections) - 1:
            self._restart()
        self._is_running, self._ended = False, None
        if failure is not None:
            raise failure
        # Checked before its rows are read: some of the weights may be those of the old file.
        self._files.check()

    def set_dry(self, is_dry: bool) -> None:
        """See :class:`~paceline.engines.slow_passes.SlowPasses`; the weights of a dry pass are zeros."""
        if self._ring is not None:
            self._ring.set_dry(is_dry)

    @property
    def waited_s(self) -> float:
        return 0.0 if self._ring is None else self._ring.waited_s

    @property
    def pass_share(self) -> float:
        ended = self._ended
        return 0.0 if ended is None else (ended + 1) / len(self._sections)

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    @property
    def pass_bytes(self) -> int:
        return sum(self._sections[number].num_bytes for number in self._streamed)

    def memory_plan(self, room: Room) -> MemoryPlan:
        resident = [each.num_bytes for number, each in enumerate(self._sections) if number not in self._streamed]
        ring_bytes = 0 if self._ring is None else self._ring.num_slots * self._slot_bytes
        kept_bytes = self._layout.kept.num_bytes
        return MemoryPlan(
            total_bytes=room.total_bytes,
            process_bytes=room.process_bytes,
            draft_bytes=room.other.draft.num_bytes,
            prompts_bytes=room.other.prompts_bytes,
            working_bytes=room.working_bytes,
            others_bytes=kept_bytes,
            resident_bytes=sum(resident),
            ring_bytes=ring_bytes,
            spare_bytes=room.weights_bytes - kept_bytes - sum(resident) - ring_bytes + SPARE_BYTES,
            pass_bytes=self.pass_bytes,
            bytes_per_s=self._files.bytes_read / max(self._files.read_s, 1e-9),
            is_direct=self._files.is_direct,
            experts=self._layout.experts,
        )

    @property
    def _slot_bytes(self) -> int:
        return max(section.num_bytes for section in self._sections)

    def close(self) -> None:
        """Stop reading, and free the slots. The model, which points into them, must be freed by then."""
        self._mode = "idle"
        if self._ring is not None:
            self._ring.close()
        self._files.close()
        while self._resident:
            give_back(self._resident.pop())
        # The callback and this stream refer to each other.
        self.callback = None

    def _restart(self) -> None:
        assert self._ring is not None
        self._is_running, self._ended, self._failure = False, None, None
        self._ring.restart()

    def _use_first(self) -> None:
        if self._first is not None:
            self._use(self._first)
        # After the wait: reading from a file that was cut meanwhile would end the process.
        self._files.check()

    def _use(self, number: int) -> None:
        assert self._ring is not None
        _point(self._fields[number], self._slots[self._ring.use(number)])

    def _locate_fields(self, section: Section) -> list[tuple[Any, int]]:
        return [
            (ctypes.c_void_p.from_address(self._weights[name].address + _DATA), offset)
            for name, offset in section.tensors.items()
            if name in self._weights
        ]

    def _keep(self, section: Section, fields: Sequence[tuple[Any, int]]) -> None:
        """Read a section into memory of its own."""
        if not section.num_bytes:
            return
        memory = own_memory(section.num_bytes)
        with memoryview(memory) as view:
            self._files.read(section.extents, view)
        self._resident.append(memory)
        _point(fields, _address(memory))

    def _give_mapping_back(self) -> None:
        """Let go of the pages of the mapping; what of it is still read comes back by itself."""
        for start, end in _mappings(self._layout.paths):
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_DONTNEED)
        self._files.drop_cached()

    # --- the callback -------------------------------------------------------------------------------------------------

    def _evaluate(self, tensor: int, asked: bool, _user_data: int | None) -> bool:
        """Answer llama.cpp, into which no exception may cross."""
        try:
            if self._mode == "noting":
                if asked:
                    self._note(tensor)
                return not asked
            if self._mode != "streaming":
                return not asked
            number = self._ending(tensor)
            if asked:
                if number == 0 and self._ended == len(self._sections) - 1 and self._failure is None:
                    self._use_first()
                return number is not None
            if self._failure is None and number is not None:
                self._move_on(number)
            return self._failure is None
        except BaseException as error:  # an interrupt may arrive in here
            self._failure = error
            return False

    def _note(self, tensor: int) -> None:
        layers, others = self._layout.layers, self._layout.others
        self._num_nodes += 1
        for index in range(_MAX_SOURCES):
            source = ctypes.c_void_p.from_address(tensor + _SOURCES + 8 * index).value
            if not source:
                continue
            name = native.tensor_name(source)
            if name in layers or name in others:
                data = ctypes.c_void_p.from_address(source + _DATA).value
                self._weights[name] = _Weight(source, data or 0)
                if name in layers:
                    self._reads.append((self._num_nodes, name))
            elif viewed := ctypes.c_void_p.from_address(source + _VIEW_SOURCE).value:
                viewed_name = native.tensor_name(viewed)
                if viewed_name in layers:
                    self._viewed.add(viewed_name)

    def _ending(self, tensor: int) -> int | None:
        """Return the section of which a node reads the last weight; ``None`` for other nodes."""
        for source in (ctypes.c_void_p * 2).from_address(tensor + _SOURCES):
            if source in self._last_of:
                return self._last_of[source]
        return None

    def _move_on(self, number: int) -> None:
        """Give back a section's slot, and wait for the section after it."""
        assert self._ring is not None
        self._ended = number
        if number in self._streamed:
            self._ring.done(number)
        if number + 1 in self._streamed:
            self._use(number + 1)


def _separable(reads: Iterable[tuple[int, str]]) -> list[list[str]]:
    """Return weights in the order in which a pass is done with them; weights in use at the same time are together.

    ``reads`` has the numbers of nodes, ascending, and the weights that each reads.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for node, name in reads:
        first.setdefault(name, node)
        last[name] = node
    groups: list[list[str]] = []
    ends = -1
    for name, begins in first.items():
        if begins <= ends:
            groups[-1].append(name)
        else:
            groups.append([name])
        ends = max(ends, last[name])
    return groups


def _point(fields: Sequence[tuple[Any, int]], address: int) -> None:
    for field, offset in fields:
        field.value = address + offset


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


_libc: Final = ctypes.CDLL(None)


def _mappings(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """Return the addresses at which files are mapped."""
    # Names are bytes, which need be no UTF-8; the system escapes the ends of lines in them, and nothing else.
    resolved = {os.fsencode(path.resolve()).replace(b"\n", b"\\012") for path in paths}
    found = []
    for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] in resolved:
            start, _, end = fields[0].partition(b"-")
            found.append((int(start, 16), int(end, 16)))
    return found
