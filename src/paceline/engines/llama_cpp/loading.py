"""Loading a GGUF model: the model and its context, or one line that says why not."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import llama_cpp.llama_cpp as api
from gguf.constants import GGMLQuantizationType

from paceline.core.errors import CapabilityError, InputError
from paceline.engines.base import EngineCapabilities
from paceline.engines.context_length import (
    BYTES_OF_BOOKKEEPING,
    DEFAULT_CONTEXT_LENGTH,
    cell_bytes,
    choose_context_length,
    fit_context_length,
)
from paceline.engines.huge_pages import MIN_BYTES, HugePages, gives_huge_pages
from paceline.engines.limits import check_range
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.remarks import of_context, of_model, warn
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.memory import (
    Footprint,
    Room,
    available_memory,
    give_back_freed,
    held_memory,
)
from paceline.engines.options import (
    DEFAULT_BRANCHES,
    CacheType,
    ModelOptions,
    cache_types,
    has_quantized_cache,
    is_quantized,
    memory_bytes,
)
from paceline.engines.streaming.disk import WeightFiles
from paceline.engines.streaming.layout import UnstreamableError, read_gguf_layout
from paceline.engines.threads import PassThreads
from paceline.models.description import ModelDescription, describe
from paceline.models.gguf_model import gguf_bytes
from paceline.sizes import format_memory

_INT32_MAX: Final = 2**31 - 1
"""Largest value of llama.cpp's counts, which have 32 bits."""
_RECURRENT_SNAPSHOTS: Final = 16
"""Rows a recurrent model can step back; each costs the memory of one more state a sequence."""

_UNIFORM: Final = frozenset(
    ("llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi2", "phi3")
)
"""Architectures in which every layer keeps keys and values of one shape for every cell."""

_UNFUSED_ATTENTION_BYTES: Final = (512 << 20, 2 << 30)
"""Most scratch memory that attention without the fused kernel may take by default: the first on any machine, and the
second where it is no more than :data:`_UNFUSED_SHARE` of what is free. It is touched as far as texts get.
"""

_UNFUSED_SHARE: Final = 1 / 8
"""Most of the free memory that scores may take."""

_UNFUSED_BATCH: Final = 128
"""Least rows of a pass where more of them would have scores that take too much: a prompt is read about as fast."""

_CONTEXT_SHARE: Final = 1 / 3
"""Share of the memory besides the weights that the cache may take where nobody says how long the context is: a draft
model's may take as much, and a third is left for its weights, for scratch memory and for finished requests.
"""

_LEFT_FREE: Final = 0.05
"""Share of the free memory that is left free, where nobody says how much a process may hold."""

_SCRATCH_SHARE: Final = 1 / 32
"""Share of what a process may hold that is for the scratch memory of its widest passes.

Where layers are streamed a prompt is read in as few passes as may be, but what these take cannot go to layers.
"""
_BATCH: Final = 512
"""Rows of a pass where nobody says how many."""
_MIN_BATCH: Final = 128
"""Least rows of a pass where layers are streamed."""
_MAX_BATCH: Final = 2048
"""Most rows of a pass where layers are streamed."""

_DRAFT_BATCH: Final = 64
"""Rows of a pass of a model that only drafts, on a CPU.

Computing so many takes far longer than reading the weights, so a prompt is read about as fast as in wider passes, and
the scratch memory of attention grows with rows times cells. [Time of a prompt over that with 256 rows, one thread of a
busy EPYC: a 1b in Q4_0 0.97 and in Q2_K 1.04, SmolLM2-135M in Q2_K 1.05.]
"""

# Largest logit difference between two ways to the same row, measured over random trees, forks and rejections. Quantised
# weights multiply quantised activations, so a difference in the last bit that flips one rounding grows to some 0.05; an
# F16 cache rounds keys and values likewise. With neither there is nothing to flip.
# [Largest found on the CPU without flash attention, two pairs of models: F32 with an F32 cache 3e-6; with an F16 cache
# F32 1.1e-3, F16 7e-4, Q8_0 0.051, Q4_0 0.007, Q4_K_M 0.008; with flash attention and trees: F16 0.003, Q8_0 and Q4_0
# 0.019, Q4_K_M 0.020.]
_EXACT: Final = 1e-4
_TIGHT: Final = 0.002
_FUSED: Final = 0.01
_LOOSE: Final = 0.06
_TIGHT_FILE_TYPES: Final = frozenset({api.LLAMA_FTYPE_ALL_F32, api.LLAMA_FTYPE_MOSTLY_F16, api.LLAMA_FTYPE_MOSTLY_BF16})


@dataclass(slots=True)
class LoadedModel:
    """A model and its context in native memory, which :meth:`free` gives back.

    Attributes:
        settings: what the model and the machine allow of the options.
        context: ``llama_context *``; ``None`` if another one could not be made in its place.
        sequence_ids: how many native sequence ids there are.
        branches: how many of them tree branches may take.
        window: tokens that the layers with sliding windows look back; 0 without such layers.
        keepers: every sequence needs a second id that keeps its old cells from being overwritten.
        recurrent: rolling back is bounded, and only possible within the latest pass.
        on_devices: some layers may be on a GPU.
        threads: how many threads passes run on.
        keep_alive: memory that the model points into.
        stream: of its layers; ``None`` where no layers are streamed.
        room: memory for the weights, where layers are streamed.
        footprint: memory of the process that loading it took.
    """

    options: ModelOptions
    settings: _Settings
    model: Any
    context: Any
    capabilities: EngineCapabilities
    description: str
    sequence_ids: int
    branches: int
    window: int
    keepers: bool
    recurrent: bool
    on_devices: bool
    threads: PassThreads
    keep_alive: list[Any]
    stream: LayerStream | None
    room: Room | None
    footprint: Footprint

    @property
    def fused_attention(self) -> bool | None:
        """Whether attention is one fused kernel; ``None`` where that is fixed by the user or left to llama.cpp."""
        if not self.settings.attention_is_open:
            return None
        return bool(self.settings.flash_attention == api.LLAMA_FLASH_ATTN_TYPE_ENABLED)

    def fuse_attention(self, fused: bool) -> None:
        """Make another context in place of this one, with attention fused or not. All that is cached is lost.

        Raises ``InputError`` where there is no memory for it; the model can only be freed then.
        """
        kind = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if fused else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.settings = self.settings.with_attention(int(kind))
        # Freed before the other is made, as there may be no memory for both.
        context, self.context = self.context, None
        api.llama_free(context)
        self.context, _ = _create_context(self.model, self.options, self.settings, self.stream)
        self.capabilities = dataclasses.replace(
            self.capabilities,
            logit_tolerance=_tolerance(self.model, self.settings),
            max_rows=self.settings.batch_rows,
            max_outputs=self.settings.output_rows,
        )

    def free(self) -> None:
        """Free the native memory. To be called once."""
        free_model(self.model, self.context, self.stream)


def load_model(options: ModelOptions, *, batch_rows: int | None = None, output_rows: int = 256) -> LoadedModel:
    """Load the model and make a context for it.

    Args:
        options: what to load and how.
        batch_rows: most rows of one pass; ``None`` for 512, or where layers are streamed, which every pass waits for,
            as many as a small share of the memory allows.
        output_rows: most rows of one pass whose logits can be asked for; memory for them is reserved.

    Raises:
        ModelFileError: the file is missing, damaged, of another format, or refused by llama.cpp.
        CapabilityError: the model is of a kind that cannot be used here.
        InputError: a setting does not fit this model or this machine.

    Warns:
        ModelWarning: llama.cpp warned of something that changes the text.
    """
    _check(options, batch_rows, output_rows)
    path = Path(options.path)
    file = native.check_model_file(path)
    options = settle_context(options)
    native.log.verbose |= options.verbose
    native.initialize()
    native.check_first_load(file)
    limit_bytes = memory_limit(options)
    is_counted = limit_bytes is not None or options.own_weights
    if is_counted:
        give_back_freed()
    held_bytes = held_memory()
    stream = room = None
    if limit_bytes is not None:
        layout = read_gguf_layout(path)
        stream = LayerStream(layout, WeightFiles(layout.paths))
    context = model = None
    try:
        model, keep_alive, remarks = read_model(options, is_streamed=stream is not None)
        made_bytes = sum(native.log.buffers.values())
        _check_kind(model)
        settings = _settings(model, options, batch_rows, output_rows)
        if stream is not None and limit_bytes is not None:
            # Finding out which attention is faster would take too many slow passes.
            settings = dataclasses.replace(settings, attention_is_open=False)
            if batch_rows is None:
                settings = _fit_batch(model, options, settings, int(limit_bytes * _SCRATCH_SHARE), output_rows)
        context, more = _create_context(model, options, settings, stream)
        if api.llama_n_rs_seq(context) and not settings.recurrent:
            # llama.cpp calls it neither recurrent nor hybrid, and still it steps back like these.
            settings = dataclasses.replace(settings, recurrent=True)
            api.llama_free(context)
            context = None
            context, more = _create_context(model, options, settings, stream)
        scratch_bytes = native.log.buffers.get("compute", 0)
        made_bytes += sum(native.log.buffers.values())
        if is_counted:
            # Buffers that weights were read through are not part of it.
            give_back_freed()
        # Scratch memory is not written to before a wide pass. Memory that was freed before may be used again without
        # the process growing, so the buffers that llama.cpp reports are the least.
        grown_bytes = held_memory() - held_bytes + (0 if settings.devices else scratch_bytes)
        taken_bytes = max(grown_bytes, made_bytes)
        if stream is not None and limit_bytes is not None:
            # The draft model is part of what is held.
            process_bytes = max(held_bytes - options.other_memory.draft.held_bytes, 0)
            room = Room(limit_bytes, process_bytes, options.other_memory, taken_bytes)
            if room.weights_bytes < stream.least_bytes:
                raise _too_little(options, room, stream.least_bytes)
        warn(path, [*remarks, *more])  # inside the try, as a warning may be an error
        if not api.llama_get_memory(context) or not api.llama_get_causal_attn(context):
            raise CapabilityError(
                f"{options.path} is an embedding model and writes no text: serve it (paceline serve), open it by "
                "load_embedder(), or give a language model"
            )
        snapshots, recurrent = int(api.llama_n_rs_seq(context)), settings.recurrent
        if recurrent and snapshots == 0 and options.rollback:
            raise CapabilityError(
                f"{options.path} is a recurrent model that cannot roll back rejected drafts; "
                "decode it without speculation (`policy=NO_SPECULATION`)"
            )
    except BaseException:
        free_model(model, context, stream)
        raise
    if stream is not None and room is not None and stream.num_bytes <= room.weights_bytes:
        # Where all of it fits it may be laid out for the fastest kernels, and cached by the system.
        free_model(model, context, stream)
        whole = dataclasses.replace(options, memory=None, stream=False)
        return load_model(whole, batch_rows=batch_rows, output_rows=output_rows)
    branches = 0 if recurrent else settings.branches
    return LoadedModel(
        options=options,
        settings=settings,
        model=model,
        context=context,
        capabilities=EngineCapabilities(
            context_length=settings.context_length,
            max_rows=settings.batch_rows,
            max_outputs=settings.output_rows,
            max_sequences=options.max_sequences,
            # A recurrent state takes the same room however many tokens it has seen.
            cells=None if api.llama_model_is_recurrent(model) or settings.apart else settings.cells,
            trees=branches > 0,
            max_rollback=snapshots if recurrent else None,
            hidden_states=False,
            logit_tolerance=_tolerance(model, settings),
            shares_passes=not settings.apart,
        ),
        description=_describe(model, options, settings),
        sequence_ids=settings.max_ids,
        branches=branches,
        window=settings.window,
        keepers=settings.keepers and not recurrent,
        recurrent=recurrent,
        on_devices=bool(settings.devices),
        threads=settings.threads,
        keep_alive=keep_alive,
        stream=stream,
        room=room,
        footprint=Footprint(taken_bytes, min(scratch_bytes, taken_bytes)),
    )


def free_model(model: Any, context: Any, stream: LayerStream | None = None) -> None:
    """Free what there is; the stream last, as the model points into it."""
    if context:
        api.llama_free(context)
    if model:
        api.llama_model_free(model)
    if stream is not None:
        stream.close()
    give_back_freed()


@contextmanager
def open_vocabulary(path: Path) -> Iterator[GgufVocabulary]:
    """Load a file's vocabulary without its weights, for as long as the block runs."""
    native.check_model_file(path)
    model = native.load_without_weights(path)
    vocabulary = GgufVocabulary(model)
    try:
        yield vocabulary
    finally:
        vocabulary.invalidate()
        api.llama_model_free(model)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the model and the machine allow of the options."""

    context_length: int
    cells: int
    batch_rows: int
    output_rows: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    branches: int
    max_ids: int
    threads: PassThreads
    recurrent: bool
    snapshots: int
    window: int
    keepers: bool
    # Whether each sequence has a cache of its own: its cells are then in the order of its tokens.
    apart: bool
    devices: tuple[str, ...]
    flash_attention: int
    attention_is_open: bool
    # Rows of a pass with fused attention and without, and most of them whose logits can be asked for.
    rows_by_attention: tuple[int, int]
    most_outputs: int

    @property
    def native_rows(self) -> int:
        """Most rows of a native call, pads of recurrent models included."""
        return max(self.batch_rows, self.max_ids * (self.snapshots + 1)) if self.recurrent else self.batch_rows

    @property
    def native_cells(self) -> int:
        return self.cells + self.max_ids * self.snapshots if self.recurrent else self.cells

    def with_attention(self, flash_attention: int) -> _Settings:
        fused, unfused = self.rows_by_attention
        rows = unfused if flash_attention == api.LLAMA_FLASH_ATTN_TYPE_DISABLED else fused
        return dataclasses.replace(self.with_batch(rows, self.most_outputs), flash_attention=flash_attention)

    def with_batch(self, rows: int, output_rows: int) -> _Settings:
        return dataclasses.replace(self, batch_rows=rows, output_rows=min(output_rows, rows))


def read_model(options: ModelOptions, *, is_streamed: bool = False) -> tuple[Any, list[Any], list[str]]:
    """Return ``llama_model *``, what must live as long as it, and llama.cpp's remarks on it."""
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers = options.gpu_layers
    parameters.use_extra_bufts = options.repack and not is_streamed
    if is_streamed:
        parameters.load_mode = api.LLAMA_LOAD_MODE_MMAP
    elif options.own_weights or _may_be_read(options):
        parameters.load_mode = api.LLAMA_LOAD_MODE_NONE  # weights are read into memory
    keep_alive: list[Any] = []
    if options.devices:
        devices = native.device_array(options.devices)
        parameters.devices = ctypes.cast(devices, ctypes.c_void_p)
        keep_alive.append(devices)
    if options.override_tensors:
        overrides = native.tensor_override_array(options.override_tensors)
        parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        keep_alive.append(overrides)
    pages = None if is_streamed or _devices(options) or not gives_huge_pages() else HugePages()
    with native.log.watch() as lines:
        model = _read_model(Path(options.path), parameters, pages)
        if not model:
            why = native.reason(lines)
            if options.override_tensors and "regular expression" in why:
                patterns = ", ".join(pattern for pattern, _ in options.override_tensors)
                raise InputError(
                    f"a tensor override among {patterns} (`override_tensors`) is no regular expression: {why}"
                )
            raise native.model_file_error(Path(options.path), lines)
        return model, keep_alive, of_model(lines)


def _read_model(path: Path, parameters: Any, pages: HugePages | None) -> Any:
    """Return ``llama_model *``, which is null where llama.cpp refuses the file."""
    if pages is None:
        return api.llama_model_load_from_file(os.fsencode(path), parameters)
    errors: list[BaseException] = []
    is_first = True

    def progress(_share: float, _data: Any) -> bool:
        nonlocal is_first
        if is_first:
            # Called before each tensor is read. At the first call all buffers are allocated and not written to yet.
            is_first = False
            try:
                pages.take()
            except BaseException as error:
                errors.append(error)
        return not errors

    parameters.progress_callback = api.llama_progress_callback(progress)
    with _interrupts_kept_in(errors):
        model = api.llama_model_load_from_file(os.fsencode(path), parameters)
    if errors:
        if model:
            api.llama_model_free(model)
        raise errors[0]
    pages.take_rest()
    return model


@contextmanager
def _interrupts_kept_in(errors: list[BaseException]) -> Iterator[None]:
    """Keep what an interrupt raises in a list: raised in a callback of native code it would be lost."""
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def keep(number: int, frame: FrameType | None) -> None:
        try:
            previous(number, frame)
        except BaseException as error:
            errors.append(error)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _may_be_read(options: ModelOptions) -> bool:
    """Whether weights are read into memory, for its huge pages, instead of mapped.

    Memory of the process cannot give way as a mapped file can, and a cache of keys and values comes on top: so three
    times the file must be free.
    """
    if _devices(options) or not gives_huge_pages():
        return False
    available_bytes = available_memory()
    return available_bytes is not None and MIN_BYTES <= gguf_bytes(Path(options.path)) <= available_bytes // 3


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
    available = available_memory()
    if refused is not None or available is None or gguf_bytes(Path(options.path)) <= available:
        return None
    return available - int(available * _LEFT_FREE) + held_memory()


def settle_context(options: ModelOptions) -> ModelOptions:
    """Return options with a length of the context: where none is asked for, all of its own that there is memory for.

    Requests share it, and have room for :data:`DEFAULT_CONTEXT_LENGTH` tokens each at least.
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
    most_cells = (
        0 if each_bytes is None else int(_memory_besides_weights(about, options) * _CONTEXT_SHARE) // each_bytes
    )
    length = fit_context_length(about.context_length, lambda length: count_cells(length) <= most_cells)
    cells = count_cells(length)
    return dataclasses.replace(options, context_length=length, cells=None if cells == requests * length else cells)


def _memory_besides_weights(about: ModelDescription, options: ModelOptions) -> int:
    """Return the bytes that are free where the cache will lie, once the weights lie there; 0 where that is unknown."""
    if devices := _devices(options):
        is_whole = options.gpu_layers == -1 or options.gpu_layers > (about.layers or 0)
        return max(native.free_device_memory(devices) - about.num_bytes, 0) if is_whole else 0
    limit_bytes = memory_bytes(options) or available_memory() or 0
    # Where weights are read while they are used, each further token of context takes from the layers that stay.
    return max(limit_bytes - about.num_bytes, 0)


def _too_little(options: ModelOptions, room: Room, least_bytes: int) -> UnstreamableError:
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
        f"and {format_memory(least_bytes)} are the least to stream them through; give "
        f"{format_memory(besides_bytes + least_bytes)}, or {ways_out}"
    )


def _why_not_streamed(options: ModelOptions) -> str | None:
    """Return what speaks against streaming layers; ``None`` if nothing does."""
    if sys.platform != "linux":
        return f"weights are streamed on Linux alone, and this is {sys.platform}: leave out how much memory there is"
    if _devices(options):
        return "layers on a GPU are not streamed: give `gpu_layers=0`, or leave out how much memory there is"
    if options.override_tensors:
        return (
            "tensors placed by hand (`override_tensors`) are not streamed: leave them out, or how much memory there is"
        )
    return None


def _check(options: ModelOptions, batch_rows: int | None, output_rows: int) -> None:
    """Refuse what this engine does not know, or cannot have."""
    if options.dtype is not None:
        raise CapabilityError(
            f"`dtype` {options.dtype} means nothing to llama_cpp, which runs a GGUF file in the types it was "
            "written in: leave it out"
        )
    for name, value, lowest, highest in (
        ("max_sequences", options.max_sequences, 1, native.MAX_SEQUENCE_IDS),
        ("branches", options.branches, 0, native.MAX_SEQUENCE_IDS - 1),
        ("batch_rows", batch_rows, 1, 1 << 16),
        ("output_rows", output_rows, 1, 1 << 16),
    ):
        check_range(name, value, lowest, highest)
    if options.exact and options.flash_attention is False:
        raise InputError("exact texts (`exact`) need fused attention: leave out `flash_attention=False`")
    if options.exact and cache_types(options) in (("f16", "f16"), ("f32", "f32")):
        raise InputError(
            "exact texts (`exact`) need keys and values of different types, or none that fused attention has a kernel "
            f"of its own for: leave out `cache_type_v={options.cache_type_v}`"
        )
    if options.exact and options.max_sequences > 1 and options.cells is not None:
        raise InputError(
            f"exact texts (`exact`) of {options.max_sequences} requests at once need a cache for each, so they cannot "
            f"share {options.cells} cells: leave out the cells (`kv_unified=True` of a server)"
        )


def _check_kind(model: Any) -> None:
    if api.llama_model_has_encoder(model) or not api.llama_model_has_decoder(model):
        raise CapabilityError("encoder models are not supported; use a decoder-only language model")
    if api.llama_model_is_diffusion(model):
        raise CapabilityError("diffusion models do not decode token by token; use an autoregressive model")


def _settings(model: Any, options: ModelOptions, batch_rows: int | None, output_rows: int) -> _Settings:
    """Fit the options to the model."""
    context_length = choose_context_length(
        options.context_length,
        int(api.llama_model_n_ctx_train(model)) or None,
        model=Path(options.path).name,
        may_shrink=options.context_may_shrink,
    )
    whole = context_length * options.max_sequences
    cells = whole if options.cells is None else options.cells
    if options.context_may_shrink:
        # No more than all sequences can use of a draft model that was made for less.
        cells = min(cells, whole)
    if cells < context_length:
        raise InputError(f"cells is {cells}, but one context is {context_length}; raise it or shorten the context")
    if cells > _INT32_MAX:
        raise InputError(f"{cells} cache cells are over {_INT32_MAX}; take a shorter context or fewer sequences")
    devices = _devices(options)
    type_k, type_v = cache_types(options)
    each_bytes = _least_cell_bytes(options)
    available = available_memory()
    if available is not None and cells * each_bytes > available:
        raise InputError(
            f"a context of {cells} tokens needs {cells * each_bytes / 2**30:.1f} GiB or more, but "
            f"{available / 2**30:.1f} GiB are free; take at most {available // each_bytes} tokens "
            "(`context_length`, or `DraftOptions.context_length` for a draft model), over all "
            "sequences (`max_sequences`)"
        )
    recurrent = bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))
    # A single sequence never meets old cells of another one, nor of its own unless a tree is deeper than the window.
    window = int(api.llama_model_n_swa(model))
    apart = options.exact and options.max_sequences > 1
    keepers = not recurrent and options.max_sequences > 1 and window > 0 and not apart
    branches = DEFAULT_BRANCHES if options.branches is None else options.branches
    if recurrent or options.exact:
        branches = 0
    max_ids = options.max_sequences * (2 if keepers else 1) + branches
    if max_ids > native.MAX_SEQUENCE_IDS:
        raise InputError(
            f"{options.max_sequences} sequences and {branches} branches need {max_ids} sequence ids, "
            f"but llama.cpp has {native.MAX_SEQUENCE_IDS}; lower one of them"
        )
    may_be_narrower = batch_rows is None
    batch_rows = min(_BATCH if batch_rows is None else batch_rows, context_length)
    if options.rows_read is not None and not devices:
        batch_rows = min(batch_rows, max(_DRAFT_BATCH, options.rows_read))
        output_rows = min(output_rows, options.rows_read)
    unfused_rows = batch_rows
    unfused_bytes = 4 * int(api.llama_model_n_head(model)) * cells
    least_bytes, most_bytes = _UNFUSED_ATTENTION_BYTES
    share_bytes = int((memory_bytes(options) or available or 0) * _UNFUSED_SHARE)
    most_bytes = max(least_bytes, min(most_bytes, share_bytes))
    while may_be_narrower and unfused_rows >= 2 * _UNFUSED_BATCH and unfused_rows * unfused_bytes > most_bytes:
        unfused_rows //= 2
    # Attention sums over the cache in one order and precision however many rows a pass has by the fused kernel, row by
    # row, which llama.cpp takes on the CPU where keys and values are of different types, so that values are BF16. There
    # are no branches, as they permute the cells, and several sequences have a cache each. Whether the weights' kernels
    # are like that is for check_exact() to see.
    # [SmolLM2-135M, the first 700 tokens on 2 cores, time with it over time without, 1, 4, 8 and 16 rows: Q8_0 0.92,
    # 0.97, 1.06, 1.14, Q4_0 0.94, 0.88, 1.05, 1.15.]
    if options.exact:
        flash = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
    elif options.flash_attention is not None:
        flash = api.LLAMA_FLASH_ATTN_TYPE_ENABLED if options.flash_attention else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    elif has_quantized_cache(options) and not devices:
        flash = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
    elif devices or unfused_rows * unfused_bytes > most_bytes:
        flash = api.LLAMA_FLASH_ATTN_TYPE_AUTO
    else:
        # May be changed once the model is loaded (LoadedModel.fuse_attention), by what passes cost: the fused kernel
        # makes passes of one row faster, and passes that verify drafts slower over long contexts. It sums in half
        # precision in the order of the cells, which trees permute.
        # [Two cores, time with it over time without, after 120, 400 and 1,400 tokens: SmolLM2-135M in Q4_1 0.95, 0.96,
        # 0.85 for one row and 0.98, 1.08, 1.02 for eight; a 1b in Q4_0 0.94, 0.92, 0.97 for one row and 1.19 for eight
        # after 1,400; in Q8_0 0.95 and 0.93 for one row and 1.16 and 1.21 for eight after 400 and 1,400.]
        flash = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    is_unfused = flash == api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    batch_rows, fused_rows = unfused_rows if is_unfused else batch_rows, batch_rows
    return _Settings(
        context_length=context_length,
        cells=cells,
        batch_rows=batch_rows,
        output_rows=min(output_rows, batch_rows),
        cache_type_k=type_k,
        cache_type_v=type_v,
        branches=branches,
        max_ids=max_ids,
        threads=PassThreads(options.threads, options.threads_batch),
        recurrent=recurrent,
        # The rows that leave snapshots, and the state before them, must fit one batch.
        snapshots=max(0, min(_RECURRENT_SNAPSHOTS, batch_rows - 2)) if options.rollback else 0,
        window=window,
        keepers=keepers,
        apart=apart,
        devices=devices,
        flash_attention=int(flash),
        attention_is_open=options.flash_attention is None and is_unfused,
        rows_by_attention=(fused_rows, unfused_rows),
        most_outputs=output_rows,
    )


def _fit_batch(
    model: Any, options: ModelOptions, settings: _Settings, scratch_bytes: int, output_rows: int
) -> _Settings:
    """Return settings with passes as wide as so much scratch memory allows, a power of two."""
    context, _ = _create_context(model, options, settings, None)
    api.llama_free(context)
    # Some of it does not depend on the width, so this is the most that a row takes.
    row_bytes = native.log.buffers.get("compute", 0) / settings.native_rows
    if not row_bytes:
        return settings
    rows = _MAX_BATCH
    while rows > _MIN_BATCH and rows * row_bytes > scratch_bytes:
        rows //= 2
    return settings.with_batch(min(rows, settings.context_length), output_rows)


def _least_cell_bytes(options: ModelOptions) -> int:
    """Return what a cell takes at least.

    llama.cpp writes zeros to all keys and values when it makes the cache, and the system ends a process that writes to
    more memory than there is. Of other architectures than :data:`_UNIFORM`, and where layers differ, their size is not
    foreseen.
    """
    about = describe(Path(options.path))
    is_uniform = isinstance(about.metadata.get(f"{about.architecture}.attention.head_count_kv", 0), int)
    foreseen = cell_bytes(about, options) if about.architecture in _UNIFORM and is_uniform else None
    return BYTES_OF_BOOKKEEPING if foreseen is None or _devices(options) else foreseen


def _metadata(model: Any, key: str) -> str | None:
    """Return a value of the file's metadata as text; of a list, llama.cpp's spelling."""
    buffer = ctypes.create_string_buffer(128)
    length = api.llama_model_meta_val_str(model, key.encode("utf-8", "surrogateescape"), buffer, len(buffer))
    return buffer.value.decode("utf-8", errors="replace") if length >= 0 else None


def _tolerance(model: Any, settings: _Settings) -> float:
    """Return the difference that rounding explains between two ways to compute the same row."""
    file_type = _file_type(model)
    is_quantized_cache = is_quantized(settings.cache_type_k) or is_quantized(settings.cache_type_v)
    # A flipped rounding of a key counts as one of an activation.
    # [F16 weights, 400 tokens in passes of 1 row and of 5 to 64: F16 cache 0.019, Q8_0 0.08, Q4_0 0.31; Q8_0 weights:
    # 0.28 with an F16 cache, and 0 with one in Q8_0 or Q4_0, whose kernel goes row by row.]
    if settings.devices or file_type not in _TIGHT_FILE_TYPES or is_quantized_cache:
        return _LOOSE
    if settings.flash_attention != api.LLAMA_FLASH_ATTN_TYPE_DISABLED:
        return _FUSED
    # A recurrent state keeps its rounding errors.
    if (
        file_type == api.LLAMA_FTYPE_ALL_F32
        and settings.cache_type_k == settings.cache_type_v == "f32"
        and not settings.recurrent
    ):
        return _EXACT
    return _TIGHT


def _create_context(
    model: Any, options: ModelOptions, settings: _Settings, stream: LayerStream | None
) -> tuple[Any, list[str]]:
    """Return ``llama_context *``, and llama.cpp's remarks on it."""
    parameters = api.llama_context_default_params()
    parameters.n_ctx = settings.native_cells
    parameters.n_batch = parameters.n_ubatch = settings.native_rows
    parameters.n_seq_max = settings.max_ids
    # llama.cpp reserves an output row for every sequence id, and aborts where that is more than the most outputs.
    parameters.n_outputs_max = max(settings.output_rows, settings.max_ids)
    parameters.n_threads, parameters.n_threads_batch = settings.threads.most
    parameters.flash_attn_type = settings.flash_attention
    parameters.type_k, parameters.type_v = (
        GGMLQuantizationType[each.upper()] for each in (settings.cache_type_k, settings.cache_type_v)
    )
    parameters.kv_unified = not settings.apart
    parameters.swa_full = True  # else cells that leave the window are gone, and rejected drafts have made them leave
    parameters.no_perf = False
    if stream is not None:
        parameters.cb_eval = stream.callback
    parameters.n_rs_seq = settings.snapshots  # ignored by models that keep all cells
    with native.log.watch() as lines:
        context = api.llama_init_from_model(model, parameters)
        if not context:
            why = native.reason(lines)
            way_out = "ask for a shorter context or fewer sequences"
            if "cache type" in why or "V cache" in why:
                way_out = "take other types of keys and values (`cache_type_k`, `cache_type_v`)"
            raise InputError(
                f"a context of {settings.cells} tokens for {options.path} cannot be created: {why}; {way_out}"
            )
        return context, of_context(lines)


def _describe(model: Any, options: ModelOptions, settings: _Settings) -> str:
    architecture = _metadata(model, "general.architecture") or ""
    weights = api.llama_ftype_name(_file_type(model)).decode("utf-8", errors="replace")
    parameters = float(api.llama_model_n_params(model))
    for unit in ("", "K", "M", "B", "T"):  # noqa: B007
        if parameters < 1000:
            break
        parameters /= 1000
    kind = f"{architecture}, {parameters:.3g}{unit} parameters, {weights}"
    where = ", ".join(native.device_titles(settings.devices)) or f"CPU, {settings.threads.most[0]} threads"
    type_k, type_v = settings.cache_type_k, settings.cache_type_v
    # What is kept of costs is kept under this description.
    is_usual = (type_k, type_v) == ("f16", "bf16" if options.exact else "f16")
    types = "" if is_usual else f", keys in {type_k}, values in {type_v}"
    return f"{Path(options.path).name} ({kind}) on {where}{', exact' if options.exact else ''}{types}"


def _devices(options: ModelOptions) -> tuple[str, ...]:
    """Return the names of the devices that layers go to; empty on the CPU."""
    if options.gpu_layers == 0 or options.devices == ("none",):
        return ()
    return options.devices or tuple(native.default_device_names())


def _file_type(model: Any) -> int:
    return int(api.llama_model_ftype(model)) & ~int(api.LLAMA_FTYPE_GUESSED)
