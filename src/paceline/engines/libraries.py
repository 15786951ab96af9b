"""The libraries behind the engines: which build it is, and the devices it could use. No model is opened."""

from __future__ import annotations

import importlib

from paceline.engines.builds import Idle, LlamaBuild, find_idle
from paceline.engines.options import EngineName, ModelOptions, chosen_engine
from paceline.machine import driver_gpus, processor_features


def describe_library(name: EngineName) -> str:
    """Return what an engine's package says of its library: versions and features that the time of a pass depends on.

    Raises:
        CapabilityError: llama.cpp does not load.
    """
    description: str = importlib.import_module(f"paceline.engines.{name}").describe_library()
    return description


def offload_devices(options: ModelOptions) -> list[str]:
    """Return the devices that llama.cpp could put a model's layers on, where it runs the model."""
    if chosen_engine(options) != "llama_cpp":
        return []
    from paceline.engines.llama_cpp import native

    native.initialize()
    return list(native.offload_devices())


def describe_build() -> LlamaBuild:
    """Return what the installed llama.cpp was built with.

    Raises:
        CapabilityError: it does not load.
    """
    from paceline.engines.llama_cpp import native

    native.initialize()
    return native.describe_build()


def idle_parts(options: ModelOptions) -> list[Idle]:
    """Return what of this machine a model does not use because its engine's library was built without it.

    What the options leave idle is no part of it. It takes a few milliseconds where the library is loaded.
    """
    gpus = [] if options.gpu_layers == 0 or options.devices == ("none",) else driver_gpus()
    if chosen_engine(options) == "llama_cpp":
        return list(find_idle(describe_build(), gpus, processor_features()))
    wanted = [gpu for gpu in gpus if {"CUDA", "ROCm"} & {*gpu.interfaces}]
    if not wanted or chosen_engine(options) != "torch_hf":
        return []
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return []
    return [Idle(wanted[0].name, "torch was built for processors alone", "install the build of torch for this GPU")]
