"""What the installed llama.cpp was built with, and what of this machine it therefore leaves idle."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.machine import Gpu

BACKENDS: Final = {"CUDA": "cuda", "ROCm": "rocm", "Vulkan": "vulkan", "Metal": "metal", "BLAS": "blas"}
"""What layers or wide passes can be computed by beside the processor's own code, and the build that has it."""

_HIDING: Final = {"CUDA": "CUDA_VISIBLE_DEVICES", "ROCm": "HIP_VISIBLE_DEVICES", "Vulkan": "GGML_VK_VISIBLE_DEVICES"}
"""Variables that say which GPUs a program may see."""

_OWN_MEMORY_BYTES: Final = 3 << 30
"""Memory of its own from which on an AMD GPU counts as idle: those within processors have less, and gain little."""

WORTH: Final = {
    "AMX_INT8": "plain decoding 2.1 times as fast (1B in Q4_0, two cores of an Intel Xeon)",
    "CUDA": "plain decoding at 320 tokens/s (8B in Q4_0, NVIDIA H100)",
}
"""What parts of a build are worth where that was measured (``amx.json`` and ``h100.json`` in ``docs/results``)."""


@dataclass(frozen=True, slots=True)
class LlamaBuild:
    """A llama.cpp, as it was built.

    Attributes:
        version: of llama-cpp-python.
        commit: of llama.cpp; ``None`` where it does not say.
        folder: where it is installed.
        compilers: versions of GCC that compiled its code for processors.
        backends: by name, such as ``CPU``, ``CUDA`` and ``RPC``.
        features: of each backend that has some, such as ``{"CPU": {"AVX2": "1"}}``.
        devices: those that layers can be put on, with what they are.
    """

    version: str
    commit: str | None
    folder: str
    compilers: tuple[str, ...]
    backends: tuple[str, ...]
    features: Mapping[str, Mapping[str, str]]
    devices: tuple[str, ...]

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> LlamaBuild:
        """Return what :func:`dataclasses.asdict` was written from."""
        lists: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()
        }
        return cls(**lists)

    @property
    def cpu_features(self) -> frozenset[str]:
        return frozenset(name for name, value in self.features.get("CPU", {}).items() if value != "0")


@dataclass(frozen=True, slots=True)
class Idle:
    """A part of this machine that the installed llama.cpp does not use.

    Attributes:
        what: a GPU's name, or the processor's AMX.
        why: what keeps it idle.
        way_out: what changes that.
        worth: what that is worth where it was measured; ``None`` where it was not.
    """

    what: str
    why: str
    way_out: str
    worth: str | None = None

    def __str__(self) -> str:
        measured = "" if self.worth is None else f". Measured: {self.worth}"
        return f"{self.what} is idle: {self.why}. To use it: {self.way_out}{measured}"


def find_idle(build: LlamaBuild, gpus: Iterable[Gpu], features: Iterable[str]) -> Iterator[Idle]:
    """Yield what lies idle: one GPU of each maker, where layers can be put on no device at all, and AMX."""
    for gpu in {gpu.maker: gpu for gpu in gpus}.values() if not build.devices else ():
        wanted = next((name for name in BACKENDS if name in gpu.interfaces), None)
        if wanted is None or (gpu.maker == "AMD" and (gpu.memory_bytes or 0) < _OWN_MEMORY_BYTES):
            continue
        if os.environ.get(_HIDING.get(wanted, ""), "all") in ("", "-1"):  # so it was told
            continue
        if wanted in build.backends:
            yield Idle(gpu.name, f"llama.cpp has {wanted}, but finds no device", "check the driver")
        else:
            recipe = f"paceline engine --build {BACKENDS[wanted]}"
            yield Idle(gpu.name, f"llama.cpp was built without {wanted}", recipe, WORTH.get(wanted))
    if "AMX_INT8" in {*features} - build.cpu_features:
        why, recipe = "llama.cpp was built without it", "paceline engine --build cpu"
        yield Idle("This processor's AMX", why, recipe, WORTH["AMX_INT8"])
