"""What a machine has, by what drivers' files and the tools of makers say: in their forms, with figures of our own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.machine import Gpu, driver_gpus, find_gpus, processor_features

NVIDIA_SMI = """\
NVIDIA GeForce RTX 3060, 12288, 8.6
NVIDIA GH200 480GB, [N/A], 9.0
"""
"""In the form of nvidia-smi 570, asked for these three in CSV."""

ROCMINFO = """\
ROCk module is loaded
=====================
HSA System Attributes
=====================
Runtime Version:         1.14
==========
HSA Agents
==========
*******
Agent 1
*******
  Name:                    AMD Ryzen 5 Processor
  Marketing Name:          AMD Ryzen 5 Processor
  Device Type:             CPU
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: FINE GRAINED
      Size:                    32768000(0x1f40000) KB
*******
Agent 2
*******
  Name:                    gfx1100
  Uuid:                    GPU-0123
  Marketing Name:          AMD Radeon RX 7900
  Vendor Name:             AMD
  Device Type:             GPU
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: COARSE GRAINED
      Size:                    20971520(0x1400000) KB
    Pool 2
      Segment:                 GROUP
      Size:                    64(0x40) KB
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx1100
*** Done ***
"""
"""In the form of ROCm 6."""

VULKANINFO = """\
==========
VULKANINFO
==========

Vulkan Instance Version: 1.3.280

Devices:
========
GPU0:
	apiVersion         = 1.3.278
	vendorID           = {vendor}
	deviceType         = PHYSICAL_DEVICE_TYPE_{kind}
	deviceName         = {name}
	deviceUUID         = 00000000-0100-0000-0000-000000000000
GPU1:
	apiVersion         = 1.3.278
	vendorID           = 0x10005
	deviceType         = PHYSICAL_DEVICE_TYPE_CPU
	deviceName         = llvmpipe (LLVM 17.0.6, 256 bits)
	deviceUUID         = 6d657361-0000-0000-0000-000000000000
GPU2:
	apiVersion         = 1.3.278
	vendorID           = {vendor}
	deviceType         = PHYSICAL_DEVICE_TYPE_{kind}
	deviceName         = {name}
	deviceUUID         = 00000000-0100-0000-0000-000000000000
"""
"""In the form of Vulkan's tools 1.3; drivers are listed twice on some systems."""


def found(root: Path, **told: str) -> list[Gpu]:
    def ask(command: Sequence[str]) -> str:
        return told.get(command[0].replace("-", "_"), "")

    return find_gpus(root, ask)


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_nvidia_smi(tmp_path: Path) -> None:
    assert found(tmp_path, nvidia_smi=NVIDIA_SMI) == [
        Gpu("NVIDIA GeForce RTX 3060", "NVIDIA", 12 << 30, "8.6", ("CUDA",)),
        Gpu("NVIDIA GH200 480GB", "NVIDIA", None, "9.0", ("CUDA",)),
    ]


def test_rocminfo(tmp_path: Path) -> None:
    assert found(tmp_path, rocminfo=ROCMINFO) == [Gpu("AMD Radeon RX 7900", "AMD", 20 << 30, "gfx1100", ("ROCm",))]


def test_vulkan_is_another_way_to_a_gpu_that_is_known_already(tmp_path: Path) -> None:
    vulkan = VULKANINFO.format(vendor="0x1002", kind="DISCRETE_GPU", name="AMD Radeon RX 7900 (RADV NAVI31)")
    (gpu,) = found(tmp_path, rocminfo=ROCMINFO, vulkaninfo=vulkan)
    assert gpu.interfaces == ("ROCm", "Vulkan")
    intel = VULKANINFO.format(vendor="0x8086", kind="INTEGRATED_GPU", name="Intel(R) UHD Graphics")
    assert found(tmp_path, vulkaninfo=intel) == [Gpu("Intel(R) UHD Graphics", "Intel", interfaces=("Vulkan",))]


def test_files_of_drivers_tell_of_gpus_where_no_tool_is_installed(tmp_path: Path) -> None:
    put(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t NVIDIA L4\nIRQ:   \t\t 131\n")
    nodes = "sys/class/kfd/kfd/topology/nodes"
    put(tmp_path, f"{nodes}/0/properties", "cpu_cores_count 16\nsimd_count 0\n")
    put(tmp_path, f"{nodes}/1/properties", "cpu_cores_count 0\nsimd_count 440\ngfx_target_version 90010\n")
    put(tmp_path, f"{nodes}/1/name", "aldebaran\n")
    put(tmp_path, f"{nodes}/1/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {64 << 30}\n")
    gpus = [
        Gpu("NVIDIA L4", "NVIDIA", interfaces=("CUDA",)),
        Gpu("AMD aldebaran", "AMD", 64 << 30, "gfx90a", ("ROCm",)),
    ]
    assert driver_gpus(tmp_path) == gpus
    assert found(tmp_path) == gpus
    # A tool knows more.
    assert [gpu.name for gpu in found(tmp_path, nvidia_smi=NVIDIA_SMI)][-1] == "AMD aldebaran"


def test_a_gpu_without_a_driver_is_found_on_the_bus(tmp_path: Path) -> None:
    for name, kind, vendor in (
        ("00:00.0", "0x060000", "0x8086"),
        ("01:00.0", "0x030200", "0x10de"),
        ("02:00.0", "0x030000", "0x1a03"),
    ):
        put(tmp_path, f"sys/bus/pci/devices/0000:{name}/class", f"{kind}\n")
        put(tmp_path, f"sys/bus/pci/devices/0000:{name}/vendor", f"{vendor}\n")
    assert found(tmp_path) == [Gpu("NVIDIA GPU at PCI 0000:01:00.0", "NVIDIA")]
    assert driver_gpus(tmp_path) == []


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu pni avx2 avx512f amx_int8 amx_tile\n\nprocessor\t: 1\n",
            {"SSE3", "AVX2", "AVX512", "AMX_INT8"},
        ),
        ("processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\n", {"NEON", "DOTPROD", "MATMUL_INT8"}),
        ("", set()),
    ],
)
def test_what_the_processor_can_do(cpuinfo: str, features: set[str], tmp_path: Path) -> None:
    assert processor_features(tmp_path) == set()
    put(tmp_path, "proc/cpuinfo", cpuinfo)
    assert processor_features(tmp_path) == features
