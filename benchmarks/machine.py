"""What ran the measurements."""

from __future__ import annotations

import platform

import llama_cpp
import numpy as np

import paceline


def machine() -> dict[str, str]:
    """Return the versions and the system."""
    return {
        "paceline": paceline.__version__,
        "llama_cpp_python": llama_cpp.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
