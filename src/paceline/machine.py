"""What paceline runs on: versions and hardware, so that figures can be told apart."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, TypeAlias

import paceline
from paceline.core import tree

_PACKAGES = ("llama-cpp-python", "torch", "transformers", "numpy")

_ROOT: Final = Path("/")

_LONGEST_S: Final = 30
"""Seconds that a program that is asked for GPUs may take."""

_FEATURES: Final = {
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "AVX_VNNI": "avx_vnni",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512_vbmi avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "asimd",
    "DOTPROD": "asimddp",
    "FP16_VA": "asimdhp",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
    "SME": "sme",
}
"""Features of processors by llama.cpp's names, and what Linux calls them."""

_MAKERS: Final = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
"""Makers of GPUs by their PCI numbers. Others make what shows a server's console."""


def machine(threads: int | None = None) -> dict[str, str]:
    """Return the versions that are installed, the processor and the system, and how many threads a pass has."""
    facts = {"paceline": paceline.__version__, "planner": "compiled" if is_compiled() else "interpreted"}
    facts["python"] = platform.python_version()
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    facts["system"] = f"{platform.system()} {platform.machine()}"
    facts["processor"] = f"{processor() or 'unknown'}, {os.cpu_count()} cores"
    if threads is not None:
        facts["threads"] = str(threads)
    return facts


def is_compiled() -> bool:
    """Return whether the planner, and the trees it plans with, were compiled when this package was built."""
    return not tree.__file__.endswith(".py")


def processor() -> str:
    """Return the processor's name as its maker gives it, where the system says so."""
    with contextlib.suppress(OSError):
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
        if found:
            return found[1]
    return platform.processor()


def processor_features(root: Path = _ROOT) -> frozenset[str]:
    """Return what the processor can do of what llama.cpp makes use of, by llama.cpp's names; Linux alone says it."""
    try:
        cpuinfo = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = set(found[1].split()) if found else set()
    return frozenset(name for name, spellings in _FEATURES.items() if flags & set(spellings.split()))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        maker: ``NVIDIA``, ``AMD``, ``Intel`` or ``Apple``; another one's name where Vulkan alone knows it.
        memory_bytes: of its own; ``None`` where that is not known, or there is none.
        architecture: what compilers call it, such as ``9.0`` or ``gfx1100``; ``None`` where that is not known.
        interfaces: by what programs compute on it: ``CUDA``, ``ROCm``, ``Vulkan``, ``Metal``. None without a driver.
    """

    name: str
    maker: str
    memory_bytes: int | None = None
    architecture: str | None = None
    interfaces: tuple[str, ...] = ()


_Ask: TypeAlias = Callable[[Sequence[str]], str]


def _ask(command: Sequence[str]) -> str:
    """Return what a program prints; nothing where there is no such program, or it fails."""
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.decode("utf-8", errors="replace") if ended.returncode == 0 else ""


def find_gpus(root: Path = _ROOT, ask: _Ask = _ask) -> list[Gpu]:
    """Return the GPUs by all that tells of them: drivers, ``nvidia-smi``, ``rocminfo``, ``vulkaninfo``, the PCI bus.

    That may take some seconds. Those without a driver are there too, and can compute nothing.
    """
    by_driver = driver_gpus(root)
    found = [
        *(list(_by_nvidia_smi(ask)) or [each for each in by_driver if each.maker == "NVIDIA"]),
        *(list(_by_rocminfo(root, ask)) or [each for each in by_driver if each.maker == "AMD"]),
        *(each for each in by_driver if each.maker == "Apple"),
    ]
    for gpu in _by_vulkaninfo(ask):
        same = [each for each in found if each.maker == gpu.maker and "Vulkan" not in each.interfaces]
        if same:
            place = found.index(next((each for each in same if each.name == gpu.name), same[0]))
            found[place] = dataclasses.replace(found[place], interfaces=(*found[place].interfaces, "Vulkan"))
        else:
            found.append(gpu)
    makers = {each.maker for each in found}
    return found + [each for each in _on_the_bus(root) if each.maker not in makers]


def driver_gpus(root: Path = _ROOT) -> list[Gpu]:
    """Return the GPUs that drivers for CUDA, ROCm and Metal tell of in files, which takes no time to read."""
    found = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+?)\s*$", _text(path), re.MULTILINE)
        found.append(Gpu(model[1] if model else "NVIDIA GPU", "NVIDIA", interfaces=("CUDA",)))
    for node in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*")):
        figures = dict(re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.MULTILINE))
        if int(figures.get("simd_count", 0)) == 0:  # a processor
            continue
        banks = [
            re.search(r"^size_in_bytes (\d+)$", _text(path), re.MULTILINE)
            for path in node.glob("mem_banks/*/properties")
        ]
        num_bytes = sum(int(bank[1]) for bank in banks if bank)
        number = int(figures.get("gfx_target_version", 0))  # 90010 is gfx90a, 110000 gfx1100
        architecture = f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}" if number else None
        name = _text(node / "name").strip() or "GPU"
        found.append(Gpu(f"AMD {name}", "AMD", num_bytes or None, architecture, ("ROCm",)))
    if root == _ROOT and platform.system() == "Darwin" and platform.machine() == "arm64":
        name = _ask(["sysctl", "-n", "machdep.cpu.brand_string"]).strip() or "Apple GPU"
        found.append(Gpu(name, "Apple", interfaces=("Metal",)))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _by_nvidia_smi(ask: _Ask) -> Iterator[Gpu]:
    told = ask(["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"])
    for line in told.splitlines():
        name, memory_mib, architecture = (each.strip() for each in (*line.rsplit(",", 2), "", "")[:3])
        if name:
            num_bytes = int(memory_mib) << 20 if memory_mib.isdigit() else None
            yield Gpu(name, "NVIDIA", num_bytes, architecture or None, ("CUDA",))


def _by_rocminfo(root: Path, ask: _Ask) -> Iterator[Gpu]:
    told = ask(["rocminfo"]) or ask([str(root / "opt/rocm/bin/rocminfo")])
    for agent in re.split(r"^Agent \d+ *$", told, flags=re.MULTILINE)[1:]:
        facts = dict(reversed(re.findall(r"^ +([\w ]+?): +(\S.*?) *$", agent, re.MULTILINE)))  # the first of each
        if facts.get("Device Type") != "GPU":
            continue
        sizes = [int(size) for size in re.findall(r"^ +Size: +(\d+)\(0x\w+\) *KB", agent, re.MULTILINE)]
        name = facts.get("Marketing Name") or "AMD GPU"
        yield Gpu(name, "AMD", max(sizes, default=0) << 10 or None, facts.get("Name"), ("ROCm",))


def _by_vulkaninfo(ask: _Ask) -> Iterator[Gpu]:
    seen: set[str | None] = set()
    for device in re.split(r"^GPU\d+: *$", ask(["vulkaninfo", "--summary"]), flags=re.MULTILINE)[1:]:
        facts = dict(re.findall(r"^\s*(\w+)\s*= (.+?)\s*$", device, re.MULTILINE))
        # Some drivers are listed twice, and one that computes on the processor is of no use here.
        is_seen = (number := facts.get("deviceUUID")) is not None and number in seen
        seen.add(number)
        if not is_seen and facts.get("deviceType", "").endswith(("DISCRETE_GPU", "INTEGRATED_GPU")):
            maker = _MAKERS.get(facts.get("vendorID", "").lower(), "another maker")
            yield Gpu(facts.get("deviceName", "GPU"), maker, interfaces=("Vulkan",))


def _on_the_bus(root: Path) -> Iterator[Gpu]:
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        maker = _MAKERS.get(_text(device / "vendor").strip())
        if maker is not None and _text(device / "class").startswith("0x03"):  # what has to do with displays
            yield Gpu(f"{maker} GPU at PCI {device.name}", maker)
