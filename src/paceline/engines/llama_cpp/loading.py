"""Loading a GGUF model: the model and its context, or one line that says why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api
from gguf.constants import GGMLQuantizationType

from paceline.core.errors import CapabilityError, InputError
from paceline.engines.base import EngineCapabilities
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.memory import memory_limit, settle_context, too_little
from paceline.engines.llama_cpp.remarks import of_context, warn
from paceline.engines.llama_cpp.settings import (
    Settings,
    check_options,
    check_room,
    choose_settings,
    file_type,
    logit_tolerance,
)
from paceline.engines.llama_cpp.states import BlockForm, check_states
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.llama_cpp.vocabulary import GgufVocabulary
from paceline.engines.llama_cpp.weights import free_model, read_model
from paceline.engines.memory import Footprint, MemoryNeed, Room, give_back_freed, held_memory
from paceline.engines.options import ModelOptions
from paceline.engines.streaming.disk import WeightFiles
from paceline.engines.streaming.layout import read_gguf_layout
from paceline.models.description import describe

_SCRATCH_SHARE: Final = 1 / 32
"""Share of what a process may hold that is for the scratch memory of its widest passes.

Where layers are streamed a prompt is read in as few passes as may be, but what these take cannot go to layers.
"""

_MIN_BATCH: Final = 128
"""Least rows of a pass where layers are streamed."""
_MAX_BATCH: Final = 2048
"""Most rows of a pass where layers are streamed."""

_OUTPUT_ROWS: Final = 256
"""Most rows of a pass whose logits can be asked for."""

_CACHE_SIZE: Final = re.compile(r" size = *(\d+\.\d+) MiB \(")
_COMPUTE_SIZE: Final = re.compile(r"(\S+) +compute buffer size = *(\d+\.\d+) MiB")


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A model and its context in native memory, which :meth:`free` gives back.

    Attributes:
        settings: what the model and the machine allow of the options.
        context: ``llama_context *``; ``None`` if another one could not be made in its place.
        keep_alive: memory that the model points into.
        stream: of its layers; ``None`` where no layers are streamed.
        room: memory for the weights, where layers are streamed.
        footprint: memory of the process that loading it took.
        encodes: of a head whether an encoder fuses the states that it is given.
        reads_cache: of a head whether it has no cache, and reads that of its target.
        block: of a head how it is asked for a block of tokens; ``None`` for all others.
        lender: of a head its target, of whose model and context it may use parts.
        heads: its heads, for which it stays in memory.
        is_freed: nobody but heads needs it any more.
    """

    options: ModelOptions
    settings: Settings
    model: Any
    context: Any
    capabilities: EngineCapabilities
    description: str
    keep_alive: list[Any]
    stream: LayerStream | None
    room: Room | None
    footprint: Footprint
    encodes: bool = False
    reads_cache: bool = False
    block: BlockForm | None = None
    lender: LoadedModel | None = None
    heads: list[LoadedModel] = field(default_factory=list)
    is_freed: bool = False

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
        self.context, _ = create_context(self.model, self.options, self.settings, self.stream)
        self.capabilities = dataclasses.replace(
            self.capabilities,
            logit_tolerance=logit_tolerance(self.model, self.settings),
            max_rows=self.settings.batch_rows,
            max_outputs=self.settings.output_rows,
        )

    def free(self) -> None:
        """Free the native memory, once no head needs it either. To be called once."""
        self.is_freed = True
        self._free_unused()

    def _free_unused(self) -> None:
        if not self.is_freed or self.heads:
            return
        lender = self.lender
        is_lent = lender is not None and lender.model is self.model
        free_model(None if is_lent else self.model, self.context, self.stream)
        if lender is not None:
            lender.heads.remove(self)
            lender._free_unused()


def load_model(options: ModelOptions, *, batch_rows: int | None = None, output_rows: int = _OUTPUT_ROWS) -> LoadedModel:
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
    check_options(options, batch_rows, output_rows)
    path = Path(options.path)
    if options.hold_states:
        check_states(path, options.hold_states)
    options = settle_context(options)
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
        about = describe(path)
        settings = choose_settings(model, about, options, batch_rows, output_rows)
        check_room(about, options, settings)
        if stream is not None and limit_bytes is not None:
            # Finding out which attention is faster would take too many slow passes.
            settings = dataclasses.replace(settings, attention_is_open=False)
            if batch_rows is None:
                settings = _fit_batch(model, options, settings, int(limit_bytes * _SCRATCH_SHARE), output_rows)
        context, more = create_context(model, options, settings, stream)
        if _steps_back(context, settings):
            settings = dataclasses.replace(settings, recurrent=True, keepers=False, branches=0)
            api.llama_free(context)
            context = None
            context, more = create_context(model, options, settings, stream)
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
                raise too_little(options, room, stream.least_bytes)
        warn(path, [*remarks, *more])  # inside the try, as a warning may be an error
        _check_writes(context, options)
        snapshots = int(api.llama_n_rs_seq(context))
        if settings.recurrent and snapshots == 0 and options.rollback:
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
            trees=settings.branches > 0,
            max_rollback=snapshots if settings.recurrent else None,
            logit_tolerance=logit_tolerance(model, settings),
            shares_passes=not settings.apart,
            state_width=len(options.hold_states) * int(api.llama_model_n_embd_out(model)),
        ),
        description=describe_loaded(model, about.architecture, options, settings),
        keep_alive=keep_alive,
        stream=stream,
        room=room,
        footprint=Footprint(taken_bytes, min(scratch_bytes, taken_bytes)),
    )


def foresee_memory(options: ModelOptions) -> MemoryNeed:
    """Return what :func:`load_model` would take, by llama.cpp's own sums; no weights are read, no cache is allocated.

    Attention counts as :func:`load_model` has it at first: :meth:`LoadedModel.fuse_attention` may need less afterwards.
    Which part goes to devices is by number of layers. Raises as :func:`load_model` does, but for too little memory.
    """
    check_options(options, None, _OUTPUT_ROWS)
    options = settle_context(options)
    give_back_freed()
    held_bytes = held_memory()
    context = model = None
    try:
        model, _keep_alive, _ = read_model(options, is_trial=True)
        _check_kind(model)
        about = describe(Path(options.path))
        settings = choose_settings(model, about, options, None, _OUTPUT_ROWS)
        check_room(about, options, settings, is_trial=True)
        with native.log.listen() as said:
            context, _ = create_context(model, options, settings, None)
        if _steps_back(context, settings):
            settings = dataclasses.replace(settings, recurrent=True, keepers=False, branches=0)
            api.llama_free(context)
            context = None
            with native.log.listen() as said:
                context, _ = create_context(model, options, settings, None)
        _check_writes(context, options)
        weights_bytes = int(api.llama_model_size(model))
        # Logits have memory once a pass has more of them, and so have scores of attention in half precision, which the
        # kernels without flash attention multiply by values.
        later_bytes = 4 * int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))) * settings.output_rows
        if settings.flash_attention == api.LLAMA_FLASH_ATTN_TYPE_DISABLED:
            later_bytes += 2 * int(api.llama_model_n_head(model)) * settings.cells * settings.native_rows
        # States of recurrent models are allocated even so.
        other_bytes = held_memory() - held_bytes - native.log.buffers.get("RS", 0)
    finally:
        free_model(model, context)
    cache_bytes = sum(_from_mib(found[1]) for line in said if (found := _CACHE_SIZE.search(line)))
    scratch = [(found[1], _from_mib(found[2])) for line in said if (found := _COMPUTE_SIZE.search(line))]
    device_bytes = 0
    if settings.devices:
        num_layers = (about.layers or 0) + 1  # and the output
        share = 1.0 if options.gpu_layers == -1 else min(options.gpu_layers / num_layers, 1.0)
        on_devices = [num_bytes for where, num_bytes in scratch if where.startswith(settings.devices)]
        device_bytes = int((weights_bytes + cache_bytes) * share) + sum(on_devices)
    return MemoryNeed(
        context_length=settings.context_length,
        cells=settings.cells,
        weights_bytes=weights_bytes,
        cache_bytes=cache_bytes,
        compute_bytes=sum(num_bytes for _, num_bytes in scratch) + later_bytes,
        other_bytes=max(other_bytes, 0),
        device_bytes=device_bytes,
        devices=settings.devices,
    )


def _from_mib(text: str) -> int:
    return int(float(text) * (1 << 20))


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


def _check_kind(model: Any) -> None:
    if api.llama_model_has_encoder(model) or not api.llama_model_has_decoder(model):
        raise CapabilityError("encoder models are not supported; use a decoder-only language model")
    if api.llama_model_is_diffusion(model):
        raise CapabilityError("diffusion models do not decode token by token; use an autoregressive model")


def _steps_back(context: Any, settings: Settings) -> bool:
    """Whether a model steps back like recurrent ones, though llama.cpp calls it neither recurrent nor hybrid."""
    return bool(api.llama_n_rs_seq(context)) and not settings.recurrent


def _check_writes(context: Any, options: ModelOptions) -> None:
    if not api.llama_get_memory(context) or not api.llama_get_causal_attn(context):
        raise CapabilityError(
            f"{options.path} is an embedding model and writes no text: serve it (paceline serve), open it by "
            "load_embedder(), or give a language model"
        )


def _fit_batch(model: Any, options: ModelOptions, settings: Settings, scratch_bytes: int, output_rows: int) -> Settings:
    """Return settings with passes as wide as so much scratch memory allows, a power of two."""
    context, _ = create_context(model, options, settings, None)
    api.llama_free(context)
    # Some of it does not depend on the width, so this is the most that a row takes.
    row_bytes = native.log.buffers.get("compute", 0) / settings.native_rows
    if not row_bytes:
        return settings
    rows = _MAX_BATCH
    while rows > _MIN_BATCH and rows * row_bytes > scratch_bytes:
        rows //= 2
    return settings.with_batch(min(rows, settings.context_length), output_rows)


def create_context(
    model: Any, options: ModelOptions, settings: Settings, stream: LayerStream | None, lender: Any = None
) -> tuple[Any, list[str]]:
    """Return ``llama_context *``, and llama.cpp's remarks on it; ``lender`` is a context that it may use parts of."""
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
    if stream is not None:
        parameters.cb_eval = stream.callback
    parameters.n_rs_seq = settings.snapshots  # ignored by models that keep all cells
    parameters.ctx_type = settings.context_type
    if lender is not None:
        parameters.ctx_other = lender
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
        if options.hold_states:
            native.hold_states(context, options.hold_states)
        return context, of_context(lines)


def describe_loaded(model: Any, architecture: object, options: ModelOptions, settings: Settings) -> str:
    """Return the model, its quantisation and where it runs, in a few words for people."""
    weights = api.llama_ftype_name(file_type(model)).decode("utf-8", errors="replace")
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
