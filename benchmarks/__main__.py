"""Runs the measurements, all or by name, and prints a line for people and one JSON line for each."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import llama_cpp
import numpy as np
import typer

import paceline
from benchmarks import acceptance, lossless, overhead, plain_speed, speed

MEASUREMENTS = {
    "lossless": lossless.measure,
    "acceptance": acceptance.measure,
    "overhead": overhead.measure,
    "plain_speed": plain_speed.measure,
    "speed": speed.measure,
}


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Which to run: {', '.join(MEASUREMENTS)}. All by default.")
    ] = None,
) -> None:
    """Measure paceline on this machine. Each measurement says in its docstring what limits its figure."""
    unknown = [name for name in names or () if name not in MEASUREMENTS]
    if unknown:
        raise typer.BadParameter(f"unknown measurement {unknown[0]}: choose from {', '.join(MEASUREMENTS)}")
    print(json.dumps({"machine": machine()}))
    for name in names or MEASUREMENTS:
        print(f"\n== {name}")
        figures: dict[str, Any] = MEASUREMENTS[name]()
        print(json.dumps({name: figures}))


def machine() -> dict[str, str]:
    """Return what ran the measurements."""
    return {
        "paceline": paceline.__version__,
        "llama_cpp_python": llama_cpp.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


if __name__ == "__main__":
    typer.run(main)
