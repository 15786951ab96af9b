"""The libraries behind the engines: which build it is, and the devices it could use. No model is opened."""

from __future__ import annotations

import importlib

from paceline.engines.options import EngineName, ModelOptions, chosen_engine


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
