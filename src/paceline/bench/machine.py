"""What ran a bench: versions and hardware, so that figures can be told apart."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import paceline

_PACKAGES = ("llama-cpp-python", "torch", "transformers", "numpy")


def machine() -> dict[str, str]:
    """Return the versions that are installed, the processor and the system."""
    facts = {"paceline": paceline.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[package] = version(package)
    facts["system"] = f"{platform.system()} {platform.machine()}"
    facts["processor"] = _processor()
    return facts


def _processor() -> str:
    name = platform.processor()
    with contextlib.suppress(OSError):
        found = re.search(
            r"^model name\s*:\s*(.+)$",
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"),
            re.MULTILINE,
        )
        name = found[1] if found else name
    return f"{name or 'unknown'}, {os.cpu_count()} cores"
