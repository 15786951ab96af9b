"""Reading the weights of a GGUF model into memory, or one line that says why not."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import llama_cpp.llama_cpp as api

from paceline.core.errors import InputError
from paceline.engines import memory
from paceline.engines.huge_pages import MIN_BYTES, HugePages, gives_huge_pages
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.remarks import of_model
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.options import OUTPUT_STATE, ModelOptions
from paceline.models.gguf_model import gguf_bytes


def read_model(
    options: ModelOptions, *, is_streamed: bool = False, may_be_head: bool = False, is_trial: bool = False
) -> tuple[Any, list[Any], list[str]]:
    """Return ``llama_model *``, what must live as long as it, and llama.cpp's remarks on it.

    Of a trial, weights are neither read nor have memory, and neither have caches of its contexts.
    """
    path = Path(options.path)
    file = native.check_model_file(path, may_be_head=may_be_head)
    native.log.verbose |= options.verbose
    native.initialize()
    native.check_first_load(file)
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers = options.gpu_layers
    parameters.use_extra_bufts = options.repack and not is_streamed
    parameters.load_mtp = OUTPUT_STATE in options.hold_states  # of files without such layers it loads none
    parameters.no_alloc = is_trial
    if is_streamed:
        parameters.load_mode = api.LLAMA_LOAD_MODE_MMAP
    elif is_trial or options.own_weights or _may_be_read(options):
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
    pages = None if is_streamed or is_trial or used_devices(options) or not gives_huge_pages() else HugePages()
    with native.log.watch() as lines:
        model = _read_model(path, parameters, pages)
        if not model:
            why = native.reason(lines)
            if options.override_tensors and "regular expression" in why:
                patterns = ", ".join(pattern for pattern, _ in options.override_tensors)
                raise InputError(
                    f"a tensor override among {patterns} (`override_tensors`) is not a regular expression: {why}"
                )
            raise native.model_file_error(path, lines)
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
    if used_devices(options) or not gives_huge_pages():
        return False
    available_bytes = memory.available_memory()
    return available_bytes is not None and MIN_BYTES <= gguf_bytes(Path(options.path)) <= available_bytes // 3


def free_model(model: Any, context: Any, stream: LayerStream | None = None) -> None:
    """Free what there is; the stream last, as the model points into it."""
    if context:
        api.llama_free(context)
    if model:
        api.llama_model_free(model)
    if stream is not None:
        stream.close()
    memory.give_back_freed()


def used_devices(options: ModelOptions) -> tuple[str, ...]:
    """Return the names of the devices that layers go to; empty on the CPU."""
    if options.gpu_layers == 0 or options.devices == ("none",):
        return ()
    return options.devices or tuple(native.default_device_names())
