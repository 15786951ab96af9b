"""The libraries behind the engines: which build it is, and the devices it could use. No model is opened."""

from __future__ import annotations

import importlib
from pathlib import Path

from paceline.engines.loading import EngineName, ModelOptions, engine_for


def describe_library(name: EngineName) -> str:
    """Return versions and features of an engine's library: all of it that the time of a pass depends on.

    Raises:
        CapabilityError: llama.cpp does not load.
    """
    if name == "llama_cpp":
        # The engine's package says in one line where the library does not load; the binding does not.
        importlib.import_module("paceline.engines.llama_cpp")
        import llama_cpp

        features = llama_cpp.llama_print_system_info().decode("utf-8", errors="replace")
        return f"llama-cpp-python {llama_cpp.__version__}: {features}"
    import torch
    import transformers

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"torch {torch.__version__}, transformers {transformers.__version__}, GPUs {gpus}"


def offload_devices(options: ModelOptions) -> list[str]:
    """Return the devices that llama.cpp could put a model's layers on, where it runs the model."""
    if (options.engine or engine_for(Path(options.path))) != "llama_cpp":
        return []
    from paceline.engines.llama_cpp import native

    native.initialize()
    return list(native.offload_devices())
