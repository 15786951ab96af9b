"""What a GGUF model and this machine allow of the options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final

import llama_cpp.llama_cpp as api

from paceline.core.errors import CapabilityError, InputError
from paceline.engines import memory
from paceline.engines.context_length import BYTES_OF_BOOKKEEPING, cell_bytes, choose_context_length
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.weights import used_devices
from paceline.engines.options import (
    DEFAULT_BRANCHES,
    OUTPUT_STATE,
    CacheType,
    ModelOptions,
    cache_types,
    check_range,
    has_quantized_cache,
    is_quantized,
    memory_bytes,
)
from paceline.engines.threads import PassThreads
from paceline.models.description import ModelDescription

_INT32_MAX: Final = 2**31 - 1
"""Largest value of llama.cpp's counts, which have 32 bits."""

_SNAPSHOTS: Final = (4, 16)
"""Rows that a recurrent model can step back, least and most; each costs the memory of one more state a sequence."""

# What the states of all sequences may take where more than the least are held: so much, or a share of the weights.
# [A Qwen 3.5 of 9b has 50 MiB of them a row and sequence: 855 MiB for 16 rows, 251 MiB for 4.]
_SNAPSHOT_BYTES: Final = 64 << 20
_SNAPSHOT_SHARE: Final = 1 / 4

_UNIFORM: Final = frozenset(
    ("llama", "mistral3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi2", "phi3")
)
"""Architectures in which every layer keeps keys and values of one shape for every cell, unless the file says how many
heads each layer has.

llama.cpp writes zeros to all of them when it makes the cache, and the system ends a process that writes to more memory
than there is.
"""

_UNFUSED_ATTENTION_BYTES: Final = (512 << 20, 2 << 30)
"""Most scratch memory that attention without the fused kernel may take by default: the first on any machine, and the
second where it is no more than :data:`_UNFUSED_SHARE` of what is free. It is touched as far as texts get.
"""

_UNFUSED_SHARE: Final = 1 / 8
"""Most of the free memory that scores may take."""

_UNFUSED_BATCH: Final = 128
"""Least rows of a pass where more of them would have scores that take too much: a prompt is read about as fast."""

_BATCH: Final = 512
"""Rows of a pass where nobody says how many."""

DRAFT_BATCH: Final = 64
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


@dataclass(frozen=True, slots=True)
class Settings:
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
    # Whether the head for whose sake states are held reads the cache too.
    lends: bool = False
    # Whether the context runs all of the model, or its MTP layer alone.
    context_type: int = api.LLAMA_CONTEXT_TYPE_DEFAULT

    @property
    def native_rows(self) -> int:
        """Most rows of a native call, pads of recurrent models included."""
        return max(self.batch_rows, self.max_ids * (self.snapshots + 1)) if self.recurrent else self.batch_rows

    @property
    def native_cells(self) -> int:
        return self.cells + self.max_ids * self.snapshots if self.recurrent else self.cells

    def with_attention(self, flash_attention: int) -> Settings:
        fused, unfused = self.rows_by_attention
        rows = unfused if flash_attention == api.LLAMA_FLASH_ATTN_TYPE_DISABLED else fused
        return dataclasses.replace(self.with_batch(rows, self.most_outputs), flash_attention=flash_attention)

    def with_batch(self, rows: int, output_rows: int) -> Settings:
        return dataclasses.replace(self, batch_rows=rows, output_rows=min(output_rows, rows))


def check_options(options: ModelOptions, batch_rows: int | None, output_rows: int) -> None:
    """Refuse what this engine does not know, or cannot have."""
    if options.dtype is not None:
        raise CapabilityError(
            f"`dtype` {options.dtype} has no effect on llama_cpp, which runs a GGUF file in the types it was "
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


def choose_settings(
    model: Any, about: ModelDescription, options: ModelOptions, batch_rows: int | None, output_rows: int
) -> Settings:
    """Fit the options to the model."""
    context_length = choose_context_length(
        options.context_length,
        about.context_length,
        model=about.path.name,
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
    devices = used_devices(options)
    type_k, type_v = cache_types(options)
    available = memory.available_memory()
    recurrent = bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))
    # A single sequence never meets old cells of another one, nor of its own unless a tree is deeper than the window.
    window = int(api.llama_model_n_swa(model))
    apart = options.exact and options.max_sequences > 1
    lends = about.architecture == "gemma4" and options.hold_states == (OUTPUT_STATE,)
    # A head that reads the cache is measured in a sequence of its own, beside those of the target.
    sequences = options.max_sequences + (lends and not apart)
    keepers = not recurrent and sequences > 1 and window > 0 and not apart
    branches = DEFAULT_BRANCHES if options.branches is None else options.branches
    if recurrent or options.exact:
        branches = 0
    max_ids = sequences * (2 if keepers else 1) + branches
    if max_ids > native.MAX_SEQUENCE_IDS:
        raise InputError(
            f"{options.max_sequences} sequences and {branches} branches need {max_ids} sequence ids, "
            f"but llama.cpp has {native.MAX_SEQUENCE_IDS}; lower one of them"
        )
    may_be_narrower = batch_rows is None
    batch_rows = min(_BATCH if batch_rows is None else batch_rows, context_length)
    if options.rows_read is not None and not devices:
        batch_rows = min(batch_rows, max(DRAFT_BATCH, options.rows_read))
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
    return Settings(
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
        snapshots=max(0, min(_count_snapshots(about, max_ids), batch_rows - 2)) if options.rollback else 0,
        window=window,
        keepers=keepers,
        apart=apart,
        devices=devices,
        flash_attention=int(flash),
        attention_is_open=options.flash_attention is None and is_unfused,
        rows_by_attention=(fused_rows, unfused_rows),
        most_outputs=output_rows,
        lends=lends,
    )


def check_room(about: ModelDescription, options: ModelOptions, settings: Settings, *, is_trial: bool = False) -> None:
    """Refuse more cells than there is memory for, as far as the header says what one takes.

    Of the cells of a trial only llama.cpp's notes about them have memory.
    """
    cells, each_bytes = settings.cells, BYTES_OF_BOOKKEEPING
    is_uniform = isinstance(about.metadata.get(f"{about.architecture}.attention.head_count_kv", 0), int)
    if not is_trial and not settings.devices and about.architecture in _UNIFORM and is_uniform:
        each_bytes = cell_bytes(about, options) or each_bytes
    available = memory.available_memory()
    if available is not None and cells * each_bytes > available:
        raise InputError(
            f"a context of {cells} tokens needs {cells * each_bytes / 2**30:.1f} GiB or more, but "
            f"{available / 2**30:.1f} GiB are free; take at most {available // each_bytes} tokens "
            "(`context_length`, or `DraftOptions.context_length` for a draft model), over all "
            "sequences (`max_sequences`)"
        )


def _count_snapshots(about: ModelDescription, max_ids: int) -> int:
    """Return how many rows a recurrent model shall be able to step back, by the memory that its states take."""
    least, most = _SNAPSHOTS
    state_bytes = _recurrent_state_bytes(about)
    if state_bytes == 0:
        return most
    most_bytes = max(_SNAPSHOT_BYTES, int(about.num_bytes * _SNAPSHOT_SHARE))
    return max(least, min(most, most_bytes // (state_bytes * max_ids) - 1))


def _recurrent_state_bytes(about: ModelDescription) -> int:
    """Return the bytes of the recurrent states of a sequence, of all layers together, in F32; 0 where they are small.

    Source: ``llama_hparams::n_embd_r`` and ``n_embd_s`` of llama.cpp.
    """

    def said(key: str) -> Any:
        return about.metadata.get(f"{about.architecture}.{key}")

    sizes = [said(f"ssm.{name}") for name in ("state_size", "inner_size", "conv_kernel")]
    if about.layers is None or not all(isinstance(size, int) for size in sizes):
        return 0
    state, inner, kernel = sizes
    heads, interval = said("attention.head_count_kv"), said("full_attention_interval")
    layers = about.layers - (said("nextn_predict_layers") or 0)
    if isinstance(heads, list):
        layers = heads.count(0)
    elif isinstance(interval, int) and interval > 0:
        layers -= layers // interval
    convolved = inner + 2 * (said("ssm.group_count") or 0) * state
    return int(4 * layers * (state * inner + (kernel - 1) * convolved))


def logit_tolerance(model: Any, settings: Settings) -> float:
    """Return the difference that rounding explains between two ways to compute the same row."""
    kind = file_type(model)
    is_quantized_cache = is_quantized(settings.cache_type_k) or is_quantized(settings.cache_type_v)
    # A flipped rounding of a key counts as one of an activation.
    # [F16 weights, 400 tokens in passes of 1 row and of 5 to 64: F16 cache 0.019, Q8_0 0.08, Q4_0 0.31; Q8_0 weights:
    # 0.28 with an F16 cache, and 0 with one in Q8_0 or Q4_0, whose kernel goes row by row.]
    if settings.devices or kind not in _TIGHT_FILE_TYPES or is_quantized_cache:
        return _LOOSE
    if settings.flash_attention != api.LLAMA_FLASH_ATTN_TYPE_DISABLED:
        return _FUSED
    # A recurrent state keeps its rounding errors.
    if (
        kind == api.LLAMA_FTYPE_ALL_F32
        and settings.cache_type_k == settings.cache_type_v == "f32"
        and not settings.recurrent
    ):
        return _EXACT
    return _TIGHT


def file_type(model: Any) -> int:
    return int(api.llama_model_ftype(model)) & ~int(api.LLAMA_FTYPE_GUESSED)
