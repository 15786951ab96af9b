"""What a build of llama.cpp leaves idle, and how what it says of itself is read."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from paceline.engines import libraries
from paceline.engines.builds import LlamaBuild, find_idle
from paceline.engines.llama_cpp import native
from paceline.engines.options import ModelOptions
from paceline.machine import Gpu
from paceline.models.embedded import embedded_target

NVIDIA = Gpu("NVIDIA L4", "NVIDIA", 24 << 30, "8.9", ("CUDA", "Vulkan"))
AMD = Gpu("AMD Radeon RX 7900", "AMD", 20 << 30, "gfx1100", ("ROCm",))
APU = Gpu("AMD raven", "AMD", 512 << 20, "gfx902", ("ROCm",))
APPLE = Gpu("Apple M2", "Apple", interfaces=("Metal",))
DRIVERLESS = Gpu("NVIDIA GPU at PCI 0000:01:00.0", "NVIDIA")


def build(*backends: str, features: str = "", devices: tuple[str, ...] = ()) -> LlamaBuild:
    of_cpu = dict.fromkeys(features.split(), "1")
    return LlamaBuild("0.3.36", None, "/there", (), ("CPU", *backends), {"CPU": of_cpu}, devices)


@pytest.mark.parametrize(
    ("gpus", "features", "built", "idle"),
    [
        ([NVIDIA], "AVX2", build(), {"NVIDIA L4": "--build cuda"}),
        ([NVIDIA, NVIDIA, AMD], "", build("RPC"), {"NVIDIA L4": "--build cuda", AMD.name: "--build rocm"}),
        ([APPLE], "", build(), {"Apple M2": "--build metal"}),
        ([NVIDIA], "", build("CUDA"), {"NVIDIA L4": "the driver"}),
        ([NVIDIA], "", build("Vulkan", devices=("Vulkan0 (NVIDIA L4)",)), {}),
        ([APU, DRIVERLESS], "AVX2", build(), {}),
        ([], "AMX_INT8 AVX2", build(features="AVX2"), {"This processor's AMX": "--build cpu"}),
        ([], "AMX_INT8", build(features="AMX_INT8 LLAMAFILE"), {}),
    ],
)
def test_what_lies_idle_is_told_with_what_changes_that(
    gpus: list[Gpu], features: str, built: LlamaBuild, idle: dict[str, str]
) -> None:
    told = list(find_idle(built, gpus, features.split()))
    assert [each.what for each in told] == list(idle)
    assert all(each.way_out.endswith(idle[each.what]) for each in told)


def test_it_is_one_line() -> None:
    (nvidia,) = find_idle(build(), [NVIDIA], ())
    assert str(nvidia).startswith(
        "NVIDIA L4 is idle: llama.cpp was built without CUDA. To use it: paceline engine --build cuda. Measured: "
    )
    (amd,) = find_idle(build(), [AMD], ())
    assert str(amd).endswith("To use it: paceline engine --build rocm")


def test_a_gpu_that_was_hidden_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(find_idle(build("CUDA"), [NVIDIA], ())) == []


def test_a_build_is_what_llama_cpp_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = b"CUDA : ARCHS = 800,900 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX2 = 1 | REPACK = 1 | "
    monkeypatch.setattr("llama_cpp.llama_print_system_info", lambda: said)
    monkeypatch.setattr(native, "backend_names", lambda: ["CUDA", "BLAS", "RPC", "CPU"])
    told = native.describe_build()
    assert told.features["CUDA"] == {"ARCHS": "800,900", "USE_GRAPHS": "1"}
    assert told.cpu_features == {"SSE3", "AVX2", "REPACK"}
    # A backend that says nothing of itself is another library all the same: passes take other times.
    assert native.describe_library().endswith("REPACK = 1 | BLAS")


def test_only_gpus_take_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {1: 0, 2: 3, 3: 1, 4: 2}  # a processor, BLAS, a GPU, one within a processor
    monkeypatch.setattr(native, "_all_devices", lambda: [*types])
    monkeypatch.setattr(native, "_device_type", types.__getitem__)
    monkeypatch.setattr(native, "_name", lambda device: f"device{device}")
    assert native.offload_devices() == {"device3": 3, "device4": 4}


def test_options_that_keep_to_the_processor_leave_no_gpu_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "driver_gpus", lambda: [NVIDIA])
    monkeypatch.setattr(libraries, "processor_features", lambda: frozenset())
    monkeypatch.setattr(libraries, "describe_build", build)
    path = embedded_target()
    assert len(libraries.idle_parts(ModelOptions(path))) == 1
    assert libraries.idle_parts(ModelOptions(path, gpu_layers=0)) == []
    assert libraries.idle_parts(ModelOptions(path, devices=("none",))) == []


@pytest.mark.parametrize(("cuda", "count"), [(None, 1), ("12.9", 0)])
def test_a_torch_for_processors_alone_leaves_a_gpu_idle(
    cuda: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "driver_gpus", lambda: [NVIDIA])
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=cuda, hip=None)))
    assert len(libraries.idle_parts(ModelOptions("folder", engine="torch_hf"))) == count
