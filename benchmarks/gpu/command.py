"""``python -m benchmarks gpu``: the pack for a machine with a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.gpu.packing import make_pack
from benchmarks.reporting import split
from paceline.atomic_output import check_parent

EPILOG = """[bold]Examples[/bold]

python -m benchmarks gpu -o gpu.pyz  [dim]# here[/dim]

python3 gpu.pyz --seconds 570  [dim]# there: builds, measures, writes lines.jsonl and gpu.json[/dim]

python -m benchmarks gpu --python 3.12 --there cmake,numpy,transformers  [dim]# a smaller pack[/dim]

python3 gpu.pyz --backend cpu --models 1b  [dim]# without a card, to try it[/dim]
"""


def gpu(
    output: Annotated[Path, typer.Option("-o", "--output", help="The pack to make.")] = Path("gpu.pyz"),
    python: Annotated[str, typer.Option("--python", help="Version of the Python there that has torch.")] = "3.12",
    there: Annotated[str, typer.Option("--there", help="Packages that are there already.", metavar="NAME[,...]")] = "",
    all_kernels: Annotated[
        bool, typer.Option("--all-kernels", help="Build those too that the measured models do not use.")
    ] = False,
) -> None:
    """Make a pack for a machine that has nvcc, torch and no network; it builds and measures there.

    The pack has llama.cpp's sources, every package and paceline. A plain Python runs it.
    """
    check_parent(output)
    pack = make_pack(output, python=python, there=split(there), all_kernels=all_kernels)
    print(f"{output}: {pack.size / 1e6:.1f} MB, planner {pack.planner}; run it there with: python3 {output.name}")
    if pack.planner == "interpreted":
        print(f"to have it compiled, put a python{python} with its headers on the PATH here")
