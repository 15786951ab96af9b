"""Opening an engine by name, or by what the model file looks like. Engines are imported only here, and only then.

What can be refused before a model is loaded, which may take minutes, is refused by its header and vocabulary alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.core.errors import CapabilityError, ContextLengthError, InputError, ModelWarning
from paceline.core.vocabulary import Vocabulary
from paceline.engines.base import EmbeddingEngine, Engine, Pooling
from paceline.engines.context_length import cell_bytes, choose_context_length
from paceline.engines.exactness import check_exact
from paceline.engines.memory import MemoryNeed
from paceline.engines.options import (
    ENGINE_NAMES,
    LOCAL,
    OUTPUT_STATE,
    ModelOptions,
    chosen_engine,
    has_quantized_cache,
)
from paceline.models.description import describe
from paceline.models.gguf_checks import is_head_file
from paceline.models.gguf_header import read_gguf_header
from paceline.models.weight_files import ASSISTANT, head_kind

_MAX_SPECIAL_TOKENS: Final = 8
"""Tokens that a tokenizer may put around a text, or take for the space that it puts before it."""


def open_engine(options: ModelOptions) -> Engine:
    """Load a model; refuses options that mean nothing to its engine, or cannot be had with this model.

    Warns with ``ModelWarning`` where weights are more than what is free, and layers cannot be streamed.
    """
    name = chosen_engine(options)
    if options.rpc and name != "llama_cpp":
        raise CapabilityError(f"{name} puts no layers on other machines (`rpc`): give a GGUF file, or leave it out")
    if name == "llama_cpp":
        engine = _open_over_rpc(options) if options.rpc else _open_llama_cpp(options)
        if options.exact:
            try:
                check_exact(engine)
            except BaseException:
                engine.close()
                raise
        return engine
    if name == "torch_hf":
        from paceline.engines.torch_hf import TorchHFEngine

        return TorchHFEngine(options)
    raise _unknown_engine(name)


def has_head(options: ModelOptions) -> bool:
    """Return whether a model's own files have a head, an MTP layer, that can draft here."""
    path = Path(options.path)
    if chosen_engine(options) == "torch_hf":
        from paceline.engines.torch_hf.head_files import has_mtp_layer

        return path.is_dir() and has_mtp_layer(path)
    from paceline.engines.llama_cpp.states import own_head

    return own_head(path) is not None


def is_head(options: ModelOptions) -> bool:
    """Return whether a file or folder holds a head alone, without the model that it drafts for."""
    path = Path(options.path)
    return is_head_file(read_gguf_header(path)) if path.is_file() else head_kind(path) is not None


def head_names(target: ModelOptions | None = None) -> tuple[str, ...]:
    """Return parts of the names of heads' files that draft for a target, or for any, the best kind first."""
    if target is not None and chosen_engine(target) != "llama_cpp":
        return ()
    from paceline.engines.llama_cpp.states import head_names

    return head_names(None if target is None else Path(target.path))


def states_read(target: ModelOptions, head: Path | None) -> tuple[int, ...]:
    """Return the states that a head reads, as ``ModelOptions.hold_states`` has them; ``None`` is the target's own."""
    if head is None:
        return (OUTPUT_STATE,)
    path = Path(target.path)
    name = chosen_engine(target)
    if head.is_dir() != (name == "torch_hf"):
        form = "a head in a GGUF file" if head.is_dir() else "the folder of a head"
        raise CapabilityError(f"{head} is no head for {path.name} under {name}: give {form}, or another draft model")
    if name == "torch_hf":
        if head_kind(head) == ASSISTANT:
            return (OUTPUT_STATE,)
        from paceline.engines.torch_hf.head_files import read_eagle

        about = describe(path)
        return read_eagle(head, num_layers=about.layers, width=about.width).layers
    from paceline.engines.llama_cpp.states import read_head

    return read_head(head).layers


def open_head(target: Engine, options: ModelOptions, path: Path | None) -> Engine:
    """Return the head that drafts for a target, which holds states, in a file of its own or the target's.

    ``options`` are what the target was loaded with. Raises as each engine's own heads do.
    """
    if chosen_engine(options) == "torch_hf":
        from paceline.engines.torch_hf import TorchAssistant, TorchHead, TorchHFEngine

        assert isinstance(target, TorchHFEngine)
        if path is not None and head_kind(path) == ASSISTANT:
            return TorchAssistant(target, path)
        return TorchHead(target, path)
    from paceline.engines.llama_cpp import LlamaCppEngine
    from paceline.engines.llama_cpp import open_head as open_llama_cpp_head

    assert isinstance(target, LlamaCppEngine)
    return open_llama_cpp_head(target, path)


def open_embedder(options: ModelOptions, pooling: Pooling | None = None) -> EmbeddingEngine:
    """Load a model to turn texts into vectors; ``None`` is the pooling that it was made for.

    Raises:
        CapabilityError: the model is no GGUF file.
        InputError: it has no such pooling, or the options do not fit it.
    """
    if chosen_engine(options) != "llama_cpp":
        raise CapabilityError(f"{options.path}: texts are embedded by llama.cpp alone; give a GGUF file")
    from paceline.engines.llama_cpp.embedder import LlamaCppEmbedder

    return LlamaCppEmbedder(options, pooling)


def memory_limit(options: ModelOptions) -> int | None:
    """Return the bytes that the process is to keep to: as it was told, or what is free where the weights are more.

    ``None`` is no limit, and no layers are streamed.
    """
    if chosen_engine(options) != "llama_cpp" or options.rpc:
        return None
    from paceline.engines.llama_cpp.memory import memory_limit

    return memory_limit(options)


def settle_context(options: ModelOptions) -> ModelOptions:
    """Return options with the context that a model gets where none is asked for; see there for each engine."""
    if options.context_length is not None or chosen_engine(options) != "llama_cpp":
        return options
    from paceline.engines.llama_cpp.memory import settle_context

    if not options.rpc:
        return settle_context(options)
    from paceline.engines.rpc.workers import check_workers

    return settle_context(options, sum(worker.free_bytes for worker in check_workers(options.rpc)))


def foreseen_context_length(options: ModelOptions) -> int:
    """Return the context that a model will be given, by its header alone."""
    path = Path(options.path)
    options = settle_context(options)
    return choose_context_length(
        options.context_length,
        describe(path).context_length,
        model=path.name,
        may_shrink=options.context_may_shrink,
    )


def foreseen_bytes(options: ModelOptions) -> int:
    """Return about what a model takes, by its header alone: its weights, and its cache where the context is said."""
    path = Path(options.path)
    if is_head(options):
        return describe(path, may_be_head=True).num_bytes  # its cache is of a layer, or there is none
    about = describe(path)
    cells = options.cells or options.max_sequences * (options.context_length or 0)
    return about.num_bytes + cells * (cell_bytes(about, options) or 0)


def foresee_memory(options: ModelOptions) -> MemoryNeed:
    """Return what a model will take once it is loaded, without loading its weights.

    Under ``llama_cpp`` these are llama.cpp's own sums, under ``torch_hf`` what the header says.

    Raises:
        InputError: the options do not fit the model, or it is none that writes text.
    """
    if chosen_engine(options) == "llama_cpp":
        from paceline.engines.llama_cpp.loading import foresee_memory

        return foresee_memory(options)
    about = describe(Path(options.path))
    length = foreseen_context_length(options)
    cells = options.cells or length * options.max_sequences
    weight_bytes = 2 if options.dtype in ("float16", "bfloat16") else 4
    return MemoryNeed(
        context_length=length,
        cells=cells,
        weights_bytes=about.num_bytes if about.num_parameters is None else about.num_parameters * weight_bytes,
        cache_bytes=cells * (cell_bytes(about, options) or 0),
    )


def free_device_memory(names: Sequence[str]) -> int | None:
    """Return the bytes that are free on devices of llama.cpp, over all of them; ``None`` where there are none."""
    if not names:
        return None
    from paceline.engines.llama_cpp import native

    return native.free_device_memory(names)


def check_prompt(options: ModelOptions, prompt: str) -> None:
    """Refuse a prompt that is too long for a model, before the model is loaded.

    No token but special ones is less than a byte, so only a prompt of about as many bytes as the context has tokens
    must be counted.
    """
    most_tokens = len(prompt.encode("utf-8", "surrogatepass")) + _MAX_SPECIAL_TOKENS
    if options.context_length is not None and most_tokens < options.context_length:
        return
    context_length = foreseen_context_length(options)
    if most_tokens < context_length:
        return
    with open_vocabulary(options) as vocabulary:
        num_tokens = len(vocabulary.tokenize(prompt))
    if num_tokens >= context_length:
        trained = describe(Path(options.path)).context_length
        raise ContextLengthError.of_prompt(num_tokens, context_length, trained=trained)


@contextmanager
def open_vocabulary(options: ModelOptions) -> Iterator[Vocabulary]:
    """Load a model's vocabulary without its weights, for as long as the block runs."""
    path = Path(options.path)
    name = chosen_engine(options)
    if name == "llama_cpp":
        from paceline.engines.llama_cpp.loading import open_vocabulary

        with open_vocabulary(path) as vocabulary:
            yield vocabulary
    elif name == "torch_hf":
        from paceline.engines.torch_hf import load_vocabulary

        yield load_vocabulary(path, verbose=options.verbose)
    else:
        raise _unknown_engine(name)


def reader_of(options: ModelOptions, *, is_streamed: bool) -> Callable[[int], Engine]:
    """Return what loads a model once more, to read a text of so many tokens with another sequence beside it.

    For layers that are streamed there is no memory twice: the file is left to the system, with the same kernels.
    """

    def open_reader(num_tokens: int) -> Engine:
        own = dataclasses.replace(options, context_length=num_tokens, max_sequences=2, cells=None, branches=0)
        if is_streamed:
            own = dataclasses.replace(own, memory=None, stream=False, repack=False)
        return open_engine(own)

    return open_reader


def _unknown_engine(name: str) -> InputError:
    return InputError(f"unknown engine {name}: choose one of {', '.join(ENGINE_NAMES)}")


def _open_over_rpc(options: ModelOptions) -> Engine:
    from paceline.engines.rpc.engine import RpcEngine
    from paceline.engines.rpc.failover import FailoverEngine

    if options.flash_attention is None:
        # llama.cpp would fuse attention, as on a GPU, and texts were not those of this machine.
        options = dataclasses.replace(options, flash_attention=has_quantized_cache(options))
    engine = RpcEngine(options)
    if not options.rpc_fallback:
        return engine
    elsewhere = () if options.rpc_fallback == LOCAL else options.rpc_fallback
    # Devices of workers have names of their own.
    fallback = dataclasses.replace(options, rpc=elsewhere, rpc_fallback=(), devices=(), stream=False)
    return FailoverEngine(engine, lambda: open_engine(fallback))


def _open_llama_cpp(options: ModelOptions) -> Engine:
    from paceline.engines.llama_cpp import LlamaCppEngine
    from paceline.engines.streaming.layout import UnstreamableError

    try:
        return LlamaCppEngine(options)
    except UnstreamableError as error:
        if options.memory is not None:
            raise
        # Nobody asked for it, but whoever waits for the disk is to know why.
        warnings.warn(
            f"layers are not streamed, and the file is left to the system: {error}",
            ModelWarning,
            stacklevel=2,
        )
        return LlamaCppEngine(dataclasses.replace(options, stream=False))
