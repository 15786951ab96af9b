"""The program that loads a GGUF file for the first time, in a process of its own (:mod:`.first_load` starts it).

llama.cpp alone and nothing of paceline, so that it has started after some 20 ms. What llama.cpp refuses in words is
left to the load that follows: only how this process ends matters.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

_TEXT = "One text,  1 w\u00f6rd.\n\t\U0001f600\0".encode()

_MAX_TOKENS = 256
"""Tokens that are spelled out."""
_SPARE_CPU_S = 5


def main(told: dict[str, Any]) -> None:
    """Load a file, read a text, and decode one token, by the job that :mod:`.first_load` makes."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # else it waits for llama.cpp
    with contextlib.suppress(ImportError, OSError, ValueError):  # systems without such limits
        import resource

        # At the second limit the system kills, and does not say why.
        resource.setrlimit(resource.RLIMIT_CPU, (told["most_cpu_s"], told["most_cpu_s"] + _SPARE_CPU_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if hasattr(os, "add_dll_directory"):
        os.add_dll_directory(str(Path(told["libraries"][0]).parent))
    libraries = [ctypes.CDLL(name) for name in told["libraries"]]

    def call(name: str, result: Any, *arguments: Any) -> Any:
        function = next(library[name] for library in libraries if hasattr(library, name))
        function.restype = result
        return function(*arguments)

    call("llama_backend_init", None)
    if call("ggml_backend_dev_count", ctypes.c_size_t) == 0:
        call("ggml_backend_load_all", None)
    parameters = _by_value(told["model_parameters"])
    no_devices = (ctypes.c_void_p * 1)()
    address = ctypes.addressof(parameters) + told["devices_at"]
    ctypes.c_void_p.from_address(address).value = ctypes.addressof(no_devices)
    path = ctypes.c_char_p(bytes.fromhex(told["path"]))
    model = ctypes.c_void_p(call("llama_model_load_from_file", ctypes.c_void_p, path, parameters))
    if not model:
        return
    vocabulary = ctypes.c_void_p(call("llama_model_get_vocab", ctypes.c_void_p, model))
    if call("llama_vocab_type", ctypes.c_int, vocabulary):  # 0 is none
        if told["tokenizes"]:
            tokens = (ctypes.c_int32 * _MAX_TOKENS)()
            call("llama_tokenize", ctypes.c_int32, vocabulary, _TEXT, len(_TEXT), tokens, _MAX_TOKENS, True, True)
        piece = ctypes.create_string_buffer(256)
        for token in range(min(call("llama_vocab_n_tokens", ctypes.c_int32, vocabulary), _MAX_TOKENS)):
            call("llama_token_to_piece", ctypes.c_int32, vocabulary, token, piece, len(piece), 0, True)
    if not told["has_weights"] or call("llama_model_has_encoder", ctypes.c_bool, model):
        return
    parameters = _by_value(told["context_parameters"])
    context = ctypes.c_void_p(call("llama_init_from_model", ctypes.c_void_p, model, parameters))
    if context and told["decodes"] and call("llama_get_memory", ctypes.c_void_p, context):
        batch = call("llama_batch_get_one", _kind(told["batch_bytes"]), ctypes.byref(ctypes.c_int32(0)), 1)
        call("llama_decode", ctypes.c_int32, context, batch)


def _kind(num_bytes: int) -> type[ctypes.Structure]:
    """Return a structure that is passed by value, of which the size alone is known."""
    return type("Words", (ctypes.Structure,), {"_fields_": [("words", ctypes.c_uint64 * (num_bytes // 8))]})


def _by_value(content: str) -> ctypes.Structure:
    data = bytes.fromhex(content)
    return _kind(len(data)).from_buffer_copy(data)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
