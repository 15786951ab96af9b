"""The shared libraries behind llama-cpp-python: their log, their devices, and files that do not load."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import llama_cpp
import llama_cpp.llama_cpp as api
import numpy as np
import numpy.typing as npt
from llama_cpp._ctypes_extensions import load_shared_library

from paceline.core.errors import CapabilityError, EngineError, InputError, ModelFileError
from paceline.engines.builds import BACKENDS, LlamaBuild
from paceline.engines.llama_cpp import first_load
from paceline.engines.options import OUTPUT_STATE
from paceline.models.gguf_checks import check_values
from paceline.models.gguf_model import GgufModel, read_gguf_model
from paceline.terminal_text import printable

MAX_SEQUENCE_IDS: Final = 256
"""``LLAMA_MAX_SEQ``: most sequence ids a context can have."""


def describe_library() -> str:
    """Return the binding's version, and what llama.cpp was built with and finds on this processor."""
    features = _system_info()
    # Some say nothing of their features, and passes take other times with them.
    silent = [name for name in backend_names() if name not in ("CPU", "RPC") and f"{name} : " not in features]
    return f"llama-cpp-python {llama_cpp.__version__}: {features}{' '.join(silent)}"


def describe_build() -> LlamaBuild:
    """Return what llama.cpp was built with. The libraries are initialised before."""
    features = {
        name: dict(re.findall(r"(\w+) = ([^|]*?) \|", told))
        for name, told in re.findall(r"(\w+) : ((?:\w+ = [^|]* \| ?)+)", _system_info())
    }
    commit = _find_function(["ggml_commit"], [], ctypes.c_char_p)
    compilers = {version for path in _cpu_libraries() for version in _compilers(path.read_bytes())}
    return LlamaBuild(
        version=llama_cpp.__version__,
        commit=None if commit is None else commit().decode("utf-8", errors="replace"),
        folder=str(Path(llama_cpp.__file__).parent),
        compilers=tuple(sorted(compilers)),
        backends=tuple(backend_names()),
        features=features,
        devices=tuple(device_titles(list(offload_devices()))),
    )


def _system_info() -> str:
    return str(llama_cpp.llama_print_system_info().decode("utf-8", errors="replace"))


def backend_names() -> list[str]:
    """Return the backends that are registered, by the names that their makers give them."""
    names = [
        _registry_name(_registry_get(index)).decode("utf-8", errors="replace") for index in range(_registry_count())
    ]
    return ["Metal" if name == "MTL" else name for name in names]


# --- log --------------------------------------------------------------------------------------------------------------

_LEVEL_WARN, _LEVEL_ERROR, _LEVEL_CONTINUE = 3, 4, 5  # as in ggml.h; the binding has other numbers

_BUFFER_MADE: Final = re.compile(rb"(?<!\S)(\S+) +(\w+) buffer size = *(\d+(?:\.\d+)?) MiB")
"""Matches from the beginning of a word: else the time is quadratic in the length of the file's own texts, which are
logged.
"""

_MAX_LINES: Final = 4096
"""Lines of trouble that are remembered: more than one load writes, which may be some for every layer."""


class NativeLog:
    """The libraries' log: sent to stderr once an engine asked for it, else only the latest warnings and errors.

    llama.cpp has one log callback for the whole process, so there is one of these, and an engine that wants to be
    verbose makes the log of all engines visible.

    Attributes:
        buffers: bytes of the buffers made since the latest :meth:`watch`, by purpose: ``model``, ``KV``, ``compute``,
            ``output``. Mapped files and memory of devices are not counted.
        device_names: names of devices as they begin those of buffers, as :func:`initialize` finds them.
    """

    def __init__(self) -> None:
        self.verbose = False
        self.buffers: dict[str, int] = {}
        self.device_names: tuple[str, ...] = ()
        self._listeners: list[list[str]] = []
        self._trouble: deque[str] = deque(maxlen=_MAX_LINES)
        self._line_is_trouble = False

    def receive(self, level: int, text: bytes | None, _user_data: int | None) -> None:
        """Take one piece of log from native code. Must not raise."""
        if level != _LEVEL_CONTINUE:
            self._line_is_trouble = level in (_LEVEL_WARN, _LEVEL_ERROR)
        if text is None:
            return
        if (made := _BUFFER_MADE.search(text)) is not None:
            where, purpose = (made[group].decode("utf-8", errors="replace") for group in (1, 2))
            if not where.endswith("_Mapped") and not where.startswith(self.device_names):
                self.buffers[purpose] = self.buffers.get(purpose, 0) + int(float(made[3]) * (1 << 20))
        if not (self.verbose or self._line_is_trouble or self._listeners):
            return
        decoded = text.decode("utf-8", errors="replace")
        for heard in self._listeners:
            heard.append(decoded)
        if self._line_is_trouble and decoded.strip():
            self._trouble.append(decoded.strip())
        if self.verbose and sys.stderr is not None:
            # llama.cpp prints the file's metadata as it is.
            sys.stderr.write(printable(decoded))

    @contextmanager
    def watch(self) -> Iterator[deque[str]]:
        """Yield the warnings and errors logged inside the ``with`` block, oldest first."""
        self._trouble.clear()
        self.buffers.clear()
        yield self._trouble

    @contextmanager
    def listen(self) -> Iterator[list[str]]:
        """Yield all pieces logged inside the ``with`` block, whatever they say."""
        heard: list[str] = []
        self._listeners.append(heard)
        try:
            yield heard
        finally:
            self._listeners = [each for each in self._listeners if each is not heard]


log: Final = NativeLog()

# The callback object must live as long as native code may call it, which is until the process ends.
_log_callback: Final = api.llama_log_callback(log.receive)


def initialize() -> None:
    """Take over the native log and register the backends. Repeating it is harmless."""
    api.llama_log_set(_log_callback, ctypes.c_void_p(0))
    api.llama_backend_init()
    if _device_count() == 0:  # a build with loadable backends has none until asked
        _load_all_backends()
    log.device_names = tuple(offload_devices())
    check_build()


def reason(lines: Sequence[str]) -> str:
    """Return the line of a native log that best says why something failed, without its function name."""
    telling = [line for line in lines if "failed to load model" not in line]
    for line in reversed(telling):
        for marker in ("error loading model: ", "failed to initialize the context: ", "failed to quantize: "):
            if marker in line:
                return line.partition(marker)[2]
    # The reader says first what is wrong, and then what it could not do for that reason.
    reader = [line for line in telling if line.startswith("gguf_")]
    for line in [*reader, *reversed(telling)]:
        function, colon, rest = line.partition(": ")
        return rest if colon and " " not in function else line
    return "llama.cpp gave no reason"


# --- builds that crash ------------------------------------------------------------------------------------------------

_DOUBTFUL_GCC: Final = range(11, 14)
"""Major versions that know AMX and of which some releases miscompile its use."""

_MENDED: Final = b"paceline: whole AMX tile configurations"
"""A text of libraries that were compiled with paceline's header for AMX."""

_WIDE_PASS: Final = """
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine, native
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_target
native.check_build = lambda: None
engine = LlamaCppEngine(ModelOptions(embedded_target(), context_length=64, threads=1))
engine.forward([Step(engine.open(), [1] * 32, [COMMITTED_END, *range(31)], [31])])
"""


@functools.cache
def check_build() -> None:
    """Raise ``CapabilityError`` for libraries whose code for AMX was miscompiled: a wide pass would end the process.

    Some GCCs (12.2 is one) take it that configuring AMX tiles reads eight bytes of the configuration, and leave out
    writing the others; see llama.cpp's issue 20824 and pull request 26954. Distributions mend compilers without another
    version, so where the compiler may have been such a one, and no header of paceline's mended it, another process
    makes a wide pass.
    """
    if b"AMX_INT8 = 1" not in api.llama_print_system_info():
        return
    libraries = [path.read_bytes() for path in _cpu_libraries()]
    versions = [version for library in libraries if _MENDED not in library for version in _compilers(library)]
    doubtful = [version for version in versions if int(version.partition(".")[0]) in _DOUBTFUL_GCC]
    if doubtful and _crashes(_WIDE_PASS):
        recipe = next((BACKENDS[name] for name in backend_names() if name in BACKENDS), "cpu")
        raise CapabilityError(
            f"the installed llama.cpp crashes: GCC {doubtful[0]} compiled its AMX code wrongly; "
            f"paceline engine --build {recipe} compiles it rightly, with your CMAKE_ARGS and CXXFLAGS"
        )


def _compilers(library: bytes) -> list[str]:
    """Return the versions of GCC that the parts of a library say they were compiled by."""
    return [found.decode() for found in re.findall(rb"GCC: \([^)\0]*\) (\d+\.\d+)", library)]


def _crashes(program: str) -> bool:
    """Return whether another Python process that runs this is ended by a signal."""
    try:
        ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ended.returncode < 0


def _cpu_libraries() -> list[Path]:
    """Return the loaded files of ggml's kernels for the CPU; none where the system does not say."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [Path(found) for found in sorted(set(re.findall(r"/\S.*ggml-cpu\S*", maps)))]


# --- symbols the binding does not export ------------------------------------------------------------------------------


def _libraries() -> list[ctypes.CDLL]:
    libraries: list[ctypes.CDLL] = [api._lib]
    for name in ("ggml", "ggml-base"):
        try:
            libraries.append(load_shared_library(name, api._base_path))
        except (FileNotFoundError, RuntimeError):  # one library may hold everything
            continue
    return libraries


def _function(name: str, arguments: Sequence[Any], result: Any) -> Any:
    """Return a fresh ctypes function, independent of the binding's own prototype of the same symbol."""
    function = _find_function([name], arguments, result)
    if function is None:
        raise ImportError(f"the installed llama-cpp-python has no {name}; paceline needs version 0.3.36 or later")
    return function


def _find_function(names: Sequence[str], arguments: Sequence[Any], result: Any) -> Any:
    """Return the function that has the first of these names that there is; ``None`` if there is none."""
    for name in names:
        for library in _libraries():
            try:
                function = library[name]
            except AttributeError:
                continue
            function.argtypes = list(arguments)
            function.restype = result
            return function
    return None


get_logits_address: Final = _function("llama_get_logits", [ctypes.c_void_p], ctypes.c_void_p)
"""``llama_get_logits`` as a plain integer: wrapping a typed pointer would cost more than the call."""

quantize_chunk: Final = _function(
    "ggml_quantize_chunk",
    [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p],
    ctypes.c_size_t,
)
"""Tensor type, float32 rows, room for the result, first weight, rows, columns, importance or null: bytes written."""

row_bytes: Final = _function("ggml_row_size", [ctypes.c_int, ctypes.c_int64], ctypes.c_size_t)
"""Bytes that a row of so many weights takes in a tensor type."""

tensor_data: Final = _function("ggml_get_data", [ctypes.c_void_p], ctypes.c_void_p)
"""Address of a tensor's data."""

_tensor_name: Final = _function("ggml_get_name", [ctypes.c_void_p], ctypes.c_char_p)

_registry_count: Final = _function("ggml_backend_reg_count", [], ctypes.c_size_t)
_registry_get: Final = _function("ggml_backend_reg_get", [ctypes.c_size_t], ctypes.c_void_p)
_registry_name: Final = _function("ggml_backend_reg_name", [ctypes.c_void_p], ctypes.c_char_p)

_load_all_backends: Final = _function("ggml_backend_load_all", [], None)
_device_count: Final = _function("ggml_backend_dev_count", [], ctypes.c_size_t)
_device_get: Final = _function("ggml_backend_dev_get", [ctypes.c_size_t], ctypes.c_void_p)
_device_name: Final = _function("ggml_backend_dev_name", [ctypes.c_void_p], ctypes.c_char_p)
_device_description: Final = _function("ggml_backend_dev_description", [ctypes.c_void_p], ctypes.c_char_p)
_device_type: Final = _function("ggml_backend_dev_type", [ctypes.c_void_p], ctypes.c_int)
_device_memory: Final = _function(
    "ggml_backend_dev_memory", [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)], None
)
_device_buffer_type: Final = _function("ggml_backend_dev_buffer_type", [ctypes.c_void_p], ctypes.c_void_p)
_buffer_type_name: Final = _function("ggml_backend_buft_name", [ctypes.c_void_p], ctypes.c_char_p)

_DEVICE_TYPE_CPU, _DEVICE_TYPE_GPU, _DEVICE_TYPE_INTEGRATED_GPU = 0, 1, 2


# llama.cpp does not export what gives states in C, and calls it experimental: names as compilers mangle them.
_set_states: Final = _find_function(
    (
        "llama_set_embeddings_nextn",
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
    ),
    [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool],
    None,
)
_get_states: Final = _find_function(
    (
        "llama_get_embeddings_nextn",
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
    ),
    [ctypes.c_void_p],
    ctypes.c_void_p,
)

_set_layer_input: Final = _find_function(
    (
        "llama_set_embeddings_layer_inp",
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
    ),
    [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool],
    None,
)
_get_layer_input: Final = _find_function(
    (
        "llama_get_embeddings_layer_inp",
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
    ),
    [ctypes.c_void_p, ctypes.c_uint32],
    ctypes.c_void_p,
)

GIVES_STATES: Final = None not in (_set_states, _get_states, _set_layer_input, _get_layer_input)
"""Whether the installed llama.cpp gives the states that heads draft from."""


def hold_states(context: Any, layers: Sequence[int]) -> None:
    """Have a context keep the states of all rows of a pass, of layers by number. To be called before its first pass.

    llama.cpp ends its process over layers that there are not, and of some architectures it gives none.
    """
    for layer in layers:
        if layer == OUTPUT_STATE:
            # Not of its outputs alone, which would leave rows of logits that differ in their last bits.
            _set_states(context, True, False)
        else:
            _set_layer_input(context, layer, True)


def hold_output_states(context: Any) -> None:
    """Have a context keep the states of the outputs of a pass, which for some heads hold something else."""
    _set_states(context, True, True)


def state_rows(context: Any, layer: int, rows: int, width: int) -> npt.NDArray[np.float32]:
    """Return the states ``[rows, width]`` of a layer in the latest pass, in llama.cpp's own memory."""
    address = _get_states(context) if layer == OUTPUT_STATE else _get_layer_input(context, layer)
    if not address:
        raise EngineError("llama.cpp has no states for this pass")
    buffer = memoryview((ctypes.c_float * (rows * width)).from_address(address)).cast("B")
    return np.frombuffer(buffer, dtype=np.float32).reshape(rows, width)


def tensor_name(tensor: int) -> str:
    return str(_tensor_name(tensor).decode("utf-8", errors="replace"))


# --- devices ----------------------------------------------------------------------------------------------------------


def _all_devices() -> list[int]:
    return [_device_get(index) for index in range(_device_count())]


def _name(device: int) -> str:
    return str(_device_name(device).decode("utf-8", errors="replace"))


def offload_devices() -> dict[str, int]:
    """Return the devices that layers can be offloaded to: name to handle, in llama.cpp's order."""
    gpus = (_DEVICE_TYPE_GPU, _DEVICE_TYPE_INTEGRATED_GPU)
    return {_name(device): device for device in _all_devices() if _device_type(device) in gpus}


def device_titles(names: Sequence[str]) -> list[str]:
    """Return devices by name and by what they are, such as ``CUDA0 (NVIDIA H100 80GB HBM3)``."""
    available = offload_devices()
    return [f"{name} ({_device_description(available[name]).decode('utf-8', errors='replace')})" for name in names]


def free_device_memory(names: Sequence[str]) -> int:
    """Return the bytes that are free on devices, over all of them; 0 for those that do not say, or are not there."""
    available = offload_devices()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    free_bytes = 0
    for name in available.keys() & {*names}:
        _device_memory(available[name], ctypes.byref(free), ctypes.byref(total))
        free_bytes += free.value
    return free_bytes


def default_device_names() -> list[str]:
    """Return the devices llama.cpp takes when none are named: discrete GPUs, else integrated ones."""
    devices = _all_devices()
    for wanted in (_DEVICE_TYPE_GPU, _DEVICE_TYPE_INTEGRATED_GPU):
        names = [_name(device) for device in devices if _device_type(device) == wanted]
        if names:
            return names
    return []


def device_array(names: Sequence[str]) -> Any:
    """Return the null-terminated device list for ``llama_model_params.devices``; ``none`` alone means CPU only."""
    available = offload_devices()
    if list(names) == ["none"]:
        names = ()
    for name in names:
        if name not in available:
            raise InputError(
                f"device {name!r} is not available; choose from {', '.join(available) or 'none'} (`devices`)"
            )
    return (ctypes.c_void_p * (len(names) + 1))(*(available[name] for name in names), None)


class _TensorOverride(ctypes.Structure):
    """``struct llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def tensor_override_array(overrides: Sequence[tuple[str, str]]) -> Any:
    """Return the null-terminated list for ``llama_model_params.tensor_buft_overrides``.

    The model keeps a pointer to it, so it must live as long as the model.
    """
    limit = int(api.llama_max_tensor_buft_overrides())
    if len(overrides) >= limit:
        raise InputError(
            f"{len(overrides)} tensor overrides (`override_tensors`) are too many; llama.cpp takes {limit - 1}"
        )
    available: dict[str, int] = {}
    for device in _all_devices():
        buffer_type = _device_buffer_type(device)
        if buffer_type:
            available[_buffer_type_name(buffer_type).decode("utf-8", errors="replace")] = buffer_type
    entries = []
    for pattern, name in overrides:
        if name not in available:
            known = ", ".join(available)
            raise InputError(
                f"buffer type {name!r} of {pattern}={name} (`override_tensors`) is unknown; choose from {known}"
            )
        entries.append(_TensorOverride(pattern.encode(), available[name]))
    return (_TensorOverride * (len(entries) + 1))(*entries)


# --- model files ------------------------------------------------------------------------------------------------------

_LONGEST_REASON: Final = 300
"""Characters of what llama.cpp says that are repeated: it may quote all of a text in the file."""


def check_model_file(path: Path, *, may_be_head: bool = False) -> GgufModel:
    """Return the headers of a whole GGUF model with weights, or of a head; else raise ``ModelFileError``.

    llama.cpp would explain some of that badly, or otherwise than other commands do.
    """
    model = _read_model(path, may_be_head=may_be_head)
    if model.num_parameters == 0:
        raise ModelFileError(f"{path} holds a vocabulary and no weights; give the file of a whole model")
    return model


def _read_model(path: Path, *, may_be_head: bool = False) -> GgufModel:
    model = read_gguf_model(path, may_be_head=may_be_head)
    check_values(path, model.header, may_be_head=may_be_head)
    return model


def check_first_load(model: GgufModel) -> None:
    """Raise ``ModelFileError`` if llama.cpp ends its process over a model. The libraries are initialised before."""
    first_load.check_first_load(model, _libraries())


def load_without_weights(path: Path) -> Any:
    """Return ``llama_model *`` with the vocabulary of a file and nothing else; the caller frees it."""
    initialize()
    check_first_load(_read_model(path))
    parameters = api.llama_model_default_params()
    parameters.vocab_only = True
    with log.watch() as lines:
        model = api.llama_model_load_from_file(os.fsencode(path), parameters)
        if not model:
            raise model_file_error(path, lines)
    return model


def model_file_error(path: Path, lines: Sequence[str]) -> ModelFileError:
    """Turn the log of a failed load into one line with a way out."""
    why = reason(lines)[:_LONGEST_REASON]
    text = " ".join(lines)
    if "unknown model architecture" in why:
        hint = "a newer llama-cpp-python may know it"
    elif "not within the file bounds" in text or "gguf_" in text:
        why = f"it is truncated or damaged ({why})"
        hint = "copy or download it again"
    elif "alloc" in text:
        why = f"too little memory ({why})"
        hint = "take a smaller model or quantisation, or offload fewer layers"
    else:
        hint = "check the file with the tool that made it"
    return ModelFileError(f"{path} cannot be loaded: {why}; {hint}")
