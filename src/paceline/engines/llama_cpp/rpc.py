"""llama.cpp's RPC: layers on devices of other machines, and serving this machine's devices to others.

The library ends its process where the other side is gone, of another version, or says what it does not understand. So
all of this is for processes that nobody minds losing, but for :func:`has_rpc` and :func:`library_versions`.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import llama_cpp

from paceline.core.errors import CapabilityError, EngineError, InputError
from paceline.engines.llama_cpp import native
from paceline.engines.memory import available_memory

_registry_by_name: Final = native._function("ggml_backend_reg_by_name", [ctypes.c_char_p], ctypes.c_void_p)
_registry_function: Final = native._function(
    "ggml_backend_reg_get_proc_address", [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
)
_registry_device_count: Final = native._function("ggml_backend_reg_dev_count", [ctypes.c_void_p], ctypes.c_size_t)
_registry_device: Final = native._function(
    "ggml_backend_reg_dev_get", [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_void_p
)
_register: Final = native._function("ggml_backend_register", [ctypes.c_void_p], None)
_ggml_version: Final = native._function("ggml_version", [], ctypes.c_char_p)

# Not CDLL("libggml-rpc.so"): wheels hold copies of libraries where there were links, each with a registry of its own.
_AddServer: Final = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)
_StartServer: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device that can be served, and its memory."""

    name: str
    description: str
    free_bytes: int
    total_bytes: int


def has_rpc() -> bool:
    """Return whether the library was built with RPC."""
    return _find("ggml_backend_rpc_start_server") is not None


def check_rpc() -> None:
    """Raise ``CapabilityError`` where the library was built without RPC."""
    if not has_rpc():
        raise CapabilityError(
            f"llama-cpp-python {llama_cpp.__version__} was built without RPC: build it again with "
            f'CMAKE_ARGS="-DGGML_RPC=on" {sys.executable} -m pip install --force-reinstall --no-deps --no-cache-dir '
            f"llama-cpp-python=={llama_cpp.__version__} (what make installs has it)"
        )


def library_versions() -> dict[str, str]:
    """Return the versions that both ends have to have in common, by what they are versions of."""
    return {
        "llama-cpp-python": llama_cpp.__version__,
        "ggml": (_ggml_version() or b"unknown").decode("ascii", errors="replace"),
    }


def add_workers(endpoints: Sequence[str]) -> tuple[str, ...]:
    """Connect to workers, each ``"host:port"``, and return the names of the devices that came, in order.

    To be called in a process of its own: the library ends it where a worker does not answer.
    """
    native.initialize()
    check_rpc()
    add_server = _AddServer(_find("ggml_backend_rpc_add_server"))
    names: list[str] = []
    for endpoint in endpoints:
        registry = add_server(endpoint.encode())
        if not registry:
            raise EngineError(f"the RPC worker at {endpoint} serves no device")
        _register(registry)
        devices = [_registry_device(registry, index) for index in range(_registry_device_count(registry))]
        names.extend(native._name(device) for device in devices)
    native.log.device_names = tuple(native.offload_devices())
    return tuple(names)


def choose_devices(names: Sequence[str]) -> tuple[str, ...]:
    """Return the devices to serve: those named, else llama.cpp's choice of GPUs, else the CPU.

    Raises ``InputError`` for a name that there is not.
    """
    available = [native._name(device) for device in native._all_devices()]
    for name in names:
        if name not in available:
            raise InputError(f"device {name!r} is not available; choose from {', '.join(available)} (`devices`)")
    return tuple(names) or tuple(native.default_device_names()) or ("CPU",)


def device_memory(names: Sequence[str]) -> tuple[DeviceMemory, ...]:
    """Return how much memory devices have, and how much of it is free."""
    found = []
    for device in _handles(names):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        native._device_memory(device, ctypes.byref(free), ctypes.byref(total))
        is_cpu = native._device_type(device) == native._DEVICE_TYPE_CPU
        description = native._device_description(device).decode("utf-8", errors="replace").strip()
        # Of a CPU llama.cpp says that all is free.
        available = available_memory() if is_cpu else None
        free_bytes = free.value if available is None else min(available, total.value)
        found.append(DeviceMemory(native._name(device), description, free_bytes, total.value))
    return tuple(found)


def serve(endpoint: str, threads: int, device_names: Sequence[str], cache_dir: Path | None) -> None:
    """Serve devices to one client after the other. Returns only where it cannot listen there.

    To be called in a process of its own: the library may end it, and frees what a client holds when that has gone.
    """
    check_rpc()
    devices = _handles(device_names)
    _StartServer(_find("ggml_backend_rpc_start_server"))(
        endpoint.encode(),
        None if cache_dir is None else os.fsencode(cache_dir),
        threads,
        len(devices),
        ctypes.cast((ctypes.c_void_p * len(devices))(*devices), ctypes.c_void_p),
    )


def _handles(names: Sequence[str]) -> list[int]:
    by_name = {native._name(device): device for device in native._all_devices()}
    return [by_name[name] for name in names]


def _find(name: str) -> Any:
    registry = _registry_by_name(b"RPC")
    return _registry_function(registry, name.encode()) if registry else None
