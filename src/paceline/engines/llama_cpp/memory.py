"""How much memory a GGUF model may have, and how much its keys and values take, before it is loaded."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Final

from paceline.core.errors import CapabilityError
from paceline.engines import memory
from paceline.engines.context_length import DEFAULT_CONTEXT_LENGTH, cell_bytes, fit_context_length
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.weights import used_devices
from paceline.engines.memory import Room
from paceline.engines.options import ModelOptions, memory_bytes
from paceline.engines.streaming.layout import UnstreamableError
from paceline.models.description import ModelDescription, describe
from paceline.models.gguf_model import gguf_bytes
from paceline.sizes import format_memory

_CONTEXT_SHARE: Final = 1 / 3
"""Share of the memory besides the weights that the cache may take where nobody says how long the context is: a draft
model's may take as much, and a third is left for its weights, for scratch memory and for finished requests.
"""

_LEFT_FREE: Final = 0.05
"""Share of the free memory that is left free, where nobody says how much a process may hold."""


def memory_limit(options: ModelOptions) -> int | None:
    """Return the bytes that the process is to keep to: as it was told, or what is free where the weights are more.

    ``None`` is no limit, and no layers are streamed. Raises ``CapabilityError`` for what was never tried with streamed
    layers.
    """
    native.check_model_file(Path(options.path))
    native.initialize()
    if options.stream is False:
        return None
    refused = _why_not_streamed(options)
    if memory_bytes(options) is not None:
        if refused is not None:
            raise CapabilityError(f"{refused} (`memory`)")
        return memory_bytes(options)
    available = memory.available_memory()
    if refused is not None or available is None or gguf_bytes(Path(options.path)) <= available:
        return None
    return available - int(available * _LEFT_FREE) + memory.held_memory()


def settle_context(options: ModelOptions, free_bytes: int | None = None) -> ModelOptions:
    """Return options with a length of the context: where none is asked for, all of its own that there is memory for.

    Requests share it, and have room for :data:`DEFAULT_CONTEXT_LENGTH` tokens each at least. ``free_bytes`` are free
    where the model will lie; ``None`` asks this machine.
    """
    if options.context_length is not None:
        return options
    path = Path(options.path)
    native.check_model_file(path)
    native.initialize()
    about = describe(path)
    requests, is_apart = options.max_sequences, options.exact and options.max_sequences > 1
    if about.context_length is None or options.cells is not None:
        length = min(about.context_length or DEFAULT_CONTEXT_LENGTH, DEFAULT_CONTEXT_LENGTH)
        return dataclasses.replace(options, context_length=length)

    def count_cells(length: int) -> int:
        return requests * length if is_apart else max(length, requests * min(length, DEFAULT_CONTEXT_LENGTH))

    each_bytes = cell_bytes(about, options)
    if free_bytes is None:
        besides_bytes = _memory_besides_weights(about, options)
    else:
        besides_bytes = max(free_bytes - about.num_bytes, 0)
    most_bytes = int(besides_bytes * _CONTEXT_SHARE)
    most_cells = 0 if each_bytes is None else most_bytes // each_bytes
    length = fit_context_length(about.context_length, lambda length: count_cells(length) <= most_cells)
    cells = count_cells(length)
    return dataclasses.replace(options, context_length=length, cells=None if cells == requests * length else cells)


def _memory_besides_weights(about: ModelDescription, options: ModelOptions) -> int:
    """Return the bytes that are free where the cache will lie, once the weights lie there; 0 where that is unknown."""
    if devices := used_devices(options):
        is_whole = options.gpu_layers == -1 or options.gpu_layers > (about.layers or 0)
        return max(native.free_device_memory(devices) - about.num_bytes, 0) if is_whole else 0
    limit_bytes = memory_bytes(options) or memory.available_memory() or 0
    # Where weights are read while they are used, each further token of context takes from the layers that stay.
    return max(limit_bytes - about.num_bytes, 0)


def too_little(options: ModelOptions, room: Room, least_bytes: int) -> UnstreamableError:
    """Return the error for memory that the least of a model's layers do not fit into."""
    besides_bytes = room.total_bytes - room.weights_bytes
    what, ways_out = (
        f"it takes {format_memory(besides_bytes)} besides its layers",
        "a shorter context (`context_length`)",
    )
    if room.other.draft.num_bytes:
        what += f", of which {format_memory(room.other.draft.num_bytes)} are the draft model's"
        ways_out += ", a smaller draft model (`draft`), or none (`drafters=['suffix']`)"
    return UnstreamableError(
        f"{format_memory(room.total_bytes)} of memory (`memory`) are too little for {Path(options.path).name}: {what}, "
        f"and {format_memory(least_bytes)} are the minimum for streaming them; give "
        f"{format_memory(besides_bytes + least_bytes)}, or {ways_out}"
    )


def _why_not_streamed(options: ModelOptions) -> str | None:
    """Return what speaks against streaming layers; ``None`` if nothing does."""
    if sys.platform != "linux":
        return f"weights are streamed on Linux alone, and this is {sys.platform}: leave out how much memory there is"
    if used_devices(options):
        return "layers on a GPU are not streamed: give `gpu_layers=0`, or leave out how much memory there is"
    if options.override_tensors:
        return (
            "tensors placed by hand (`override_tensors`) are not streamed: leave them out, or how much memory there is"
        )
    return None
