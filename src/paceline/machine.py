"""What paceline runs on: versions and hardware, so that figures can be told apart."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import paceline
from paceline.core import tree

_PACKAGES = ("llama-cpp-python", "torch", "transformers", "numpy")


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
