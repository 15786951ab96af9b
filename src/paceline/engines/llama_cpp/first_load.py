"""The first load of a GGUF file: in a process of its own, as llama.cpp ends its process over some damaged files.

::

    loaded before, by this llama.cpp? ── yes ────────> load
                      no
    are its tokens what they must be? ── no ─────────> ModelFileError
    another process loads it, reads a text, decodes a token (first_load_program.py)
        ended by a signal, or does not end ──────────> ModelFileError, with what llama.cpp said last
        ended by itself ── noted in the cache ───────> load

What is noted is a hash of all that stands before the weights and of llama.cpp's version, so a file costs this once.
Weights are mapped, on the CPU, and nothing is laid out anew. Of many no token is decoded and none is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp
import llama_cpp.llama_cpp as api

from paceline.core.errors import InputError, ModelFileError
from paceline.engines.llama_cpp import first_load_program
from paceline.engines.memory import available_memory
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.models.gguf_checks import check_tokens, is_mtp_file
from paceline.models.gguf_model import GgufModel
from paceline.models.registry import models_folder
from paceline.terminal_text import printable

_MAX_CPU_S: Final = 60
"""Seconds of processor time that the other process may take: a vocabulary takes less than one, a token of the largest
model that is decoded a few.
"""
_MAX_S: Final = 600
"""Seconds after which the other process is ended in any case: reading from a slow disk takes no processor time."""
_MAX_DECODED_BYTES: Final = 4 << 30
"""Most bytes of weights to decode a token with, which reads all of them; with more, only the graph is built."""
_DECODED_SHARE: Final = 0.5
"""Share of the free memory that decoded weights may take."""
_CELLS: Final = 64
_ROWS: Final = 16
_SNAPSHOTS: Final = 2

_LOG_END: Final = 4096
"""Bytes of the log's end in which its last line is looked for."""
_LONGEST_LINE: Final = 200

_FOLDERS: Final = re.compile(r"\S*[/\\]([\w.-]+:\d+: )")
"""Folders before the name of a source file in llama.cpp's log."""
_INTERRUPTED: Final = (-signal.SIGINT, -signal.SIGTERM, *([-signal.SIGHUP] if os.name == "posix" else []))
"""Exit statuses of a process that a user ended, as Ctrl-C does in a terminal."""
_WINDOWS_ABORTED: Final = 3

_WINDOWS_CRASHED: Final = 0xC0000000
"""Least exit status of a process that the system ended."""

_checked: Final[set[tuple[Path, int, int]]] = set()
"""Files that this process has checked, by path, time of change and size."""


def check_first_load(model: GgufModel, libraries: Sequence[ctypes.CDLL]) -> None:
    """Raise ``ModelFileError`` if llama.cpp ends its process over a model, where that is not known yet.

    ``libraries`` are the files in which its functions are found. Where no other process can be started, the tokens
    alone are checked.
    """
    path = model.paths[0]
    if path in (embedded_target(), embedded_draft()):
        return
    status = path.stat()
    this_file = (path.absolute(), status.st_mtime_ns, status.st_size)
    if this_file in _checked:
        return
    note = _note(model)
    if note is None or not note.is_file():
        tokenizes = check_tokens(path, model.header.metadata)
        if _loads(path, _make_job(model, libraries, tokenizes=tokenizes)) and note is not None:
            with contextlib.suppress(OSError):
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()
    _checked.add(this_file)


def _note(model: GgufModel) -> Path | None:
    """Return the file that marks a model as loaded before; ``None`` where none can be written."""
    digest = hashlib.sha256(f"{llama_cpp.__version__} {api.llama_print_system_info()!r}".encode())
    for part, num_bytes in zip(model.paths, model.header_bytes, strict=True):
        with part.open("rb") as file:
            digest.update(file.read(num_bytes))
    try:
        return models_folder().with_name("loaded") / digest.hexdigest()[:32]
    except InputError:
        return None


def _loads(path: Path, told: dict[str, Any]) -> bool:
    """Load a file in another process, by the job ``told``; return whether that process came to an end of its own.

    Raises ``ModelFileError`` where it was ended by a signal.
    """
    if getattr(sys, "frozen", False) or not sys.executable:  # an application that would start itself
        return False
    try:
        ended = subprocess.run(
            # Without site-packages, whose import takes longer than all the rest.
            [sys.executable, "-I", "-S", first_load_program.__file__, json.dumps(told)],
            stdin=subprocess.DEVNULL,
            # Through a pipe, as there may be no room for a file.
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            check=False,
            timeout=_MAX_S,
        )
    except OSError:
        return False
    except subprocess.TimeoutExpired as error:
        raise _refusal(path, f"has not loaded it within {_MAX_S} s", error.stdout or b"") from None
    status = ended.returncode
    if os.name == "nt":
        if status == _WINDOWS_ABORTED or status >= _WINDOWS_CRASHED:
            raise _refusal(path, f"ends its process over it, with status {status:#x}", ended.stdout)
    elif status in _INTERRUPTED:
        raise ModelFileError(f"{path} is not loaded: its first load was interrupted; load it again")
    elif status == -signal.SIGXCPU:
        raise _refusal(path, f"still computes after {_MAX_CPU_S} s", ended.stdout)
    elif status < 0:
        killed = ", as the system does where memory is short" if status == -signal.SIGKILL else ""
        raise _refusal(path, f"ends its process over it, by {signal.Signals(-status).name}{killed}", ended.stdout)
    return status == 0


def _make_job(model: GgufModel, libraries: Sequence[ctypes.CDLL], *, tokenizes: bool) -> dict[str, Any]:
    """Return the job of the other process."""
    has_weights = model.num_parameters > 0
    available_bytes = available_memory()
    fits = available_bytes is None or model.num_bytes <= available_bytes * _DECODED_SHARE
    is_head = is_mtp_file(model.header)
    # A head reads tokens together with states, which the other process has none of.
    decodes = fits and model.num_bytes <= _MAX_DECODED_BYTES and not is_head
    parameters = api.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = False
    # Mapping reads all of a file. Where nothing is decoded no weight is read: that may take minutes, and push out of
    # memory what lies there.
    parameters.load_mode = api.LLAMA_LOAD_MODE_MMAP if decodes else api.LLAMA_LOAD_MODE_NONE
    parameters.no_alloc = not decodes
    parameters.vocab_only = not has_weights
    parameters.load_mtp = is_head
    context = api.llama_context_default_params()
    context.n_ctx = _CELLS
    context.n_batch = context.n_ubatch = _ROWS
    context.n_seq_max = 2
    context.n_rs_seq = _SNAPSHOTS
    context.n_threads = context.n_threads_batch = 1
    context.kv_unified = context.swa_full = True
    if is_head:
        context.ctx_type = api.LLAMA_CONTEXT_TYPE_MTP
        context.n_rs_seq = 0
    context.offload_kqv = context.op_offload = False
    return {
        "path": os.fsencode(model.paths[0]).hex(),
        "libraries": [library._name for library in libraries],
        "most_cpu_s": _MAX_CPU_S,
        "model_parameters": bytes(parameters).hex(),
        "devices_at": api.llama_model_params.devices.offset,
        "context_parameters": bytes(context).hex(),
        "batch_bytes": ctypes.sizeof(api.llama_batch),
        "tokenizes": tokenizes,
        "has_weights": has_weights,
        "decodes": decodes,
    }


def _refusal(path: Path, what: str, log: bytes) -> ModelFileError:
    lines = log[-_LOG_END:].decode("utf-8", errors="replace").strip().splitlines()
    last = _FOLDERS.sub(r"\1", printable(lines[-1].strip())) if lines else ""
    said = f"; it said last: {last[:_LONGEST_LINE]}" if last else ""
    return ModelFileError(
        f"{path} cannot be loaded: llama.cpp {what}{said}; copy or download the file again, or convert the model again"
    )
