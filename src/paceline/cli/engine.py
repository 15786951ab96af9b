"""``paceline engine``: what the installed llama.cpp was built with, what this machine could have, and building it."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli import exits
from paceline.cli.display import error_console
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.outputs import Outputs, json_option, report_console
from paceline.cli.progress import ProgressBar
from paceline.core.errors import CapabilityError, InputError, PacelineError
from paceline.engines import building
from paceline.engines.builds import BACKENDS, WORTH, Idle, LlamaBuild, find_idle
from paceline.engines.libraries import describe_build
from paceline.machine import Gpu, find_gpus, machine, processor_features
from paceline.models.registry import models_folder
from paceline.sizes import format_memory
from paceline.terminal_text import printable_line

EPILOG = """[bold]Examples[/bold]

paceline engine  [dim]# what llama.cpp was built with, and what this machine could have[/dim]

paceline engine --build cuda  [dim]# build it for NVIDIA GPUs; the present build stays until the new one works[/dim]

CMAKE_ARGS="-DGGML_CUDA_FORCE_MMQ=ON" paceline engine --build cuda  [dim]# with settings of your own[/dim]
"""
"""Examples below the command's help."""


def _complete_builds(incomplete: str) -> list[str]:
    return [name for name in building.RECIPES if name.startswith(incomplete)]


def engine(
    build: Annotated[
        str | None,
        typer.Option(
            "--build",
            help="Build llama.cpp for: "
            + ", ".join(f"{name} ({what})" for name, (_, what) in building.RECIPES.items())
            + ".",
            metavar="NAME",
            autocompletion=_complete_builds,
        ),
    ] = None,
    json_to: Annotated[str | None, json_option()] = None,
) -> None:
    """Show what the installed llama.cpp was built with, what this machine could have, and what that is worth.

    With --build, llama.cpp is compiled for this machine. The compiler and toolkit are looked for first. The new build
    replaces the installed one only after it has loaded a small model and computed the same. Otherwise the installed one
    stays, and the end of the log is shown.
    """
    outputs = Outputs(json_to)
    outputs.check()
    if build is not None:
        _build(build, outputs)
        return
    installed, gpus, features = describe_build(), find_gpus(), processor_features()
    idle = list(find_idle(installed, gpus, features))
    facts = {
        "installed": _build_json(installed),
        "machine": {**machine(), "features": sorted(features), "gpus": [dataclasses.asdict(gpu) for gpu in gpus]},
        "idle": [dataclasses.asdict(each) for each in idle],
    }
    outputs.write(facts, lambda: _print(installed, gpus, features, idle))


def _build_json(build: LlamaBuild) -> dict[str, Any]:
    return {**dataclasses.asdict(build), "features": {name: sorted(has) for name, has in build.features.items()}}


def _print(build: LlamaBuild, gpus: Sequence[Gpu], features: frozenset[str], idle: Sequence[Idle]) -> None:
    console = report_console()
    commit = "" if build.commit is None else f" (llama.cpp {build.commit})"
    compilers = f", compiled by GCC {', '.join(build.compilers)}" if build.compilers else ""
    console.print(Text(f"llama-cpp-python {build.version}{commit}{compilers}", "bold"))
    console.print(Text(f"in {build.folder}", "dim"))
    console.print(Text(f"on {machine()['processor']}", "dim"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "built in", "this machine has", "what it is worth, where measured"):
        table.add_column(heading, overflow="fold")
    for row in _rows(build, gpus, features):
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)
    console.print()
    for each in idle:
        console.print(Text(printable_line(str(each)), "yellow"), soft_wrap=True)
    # AMX has a line of its own.
    if unused := sorted(features - build.cpu_features - {"AMX_INT8"}):
        lacks = f"llama.cpp was built without {', '.join(unused)}, which this processor has"
        console.print(Text(f"{lacks}. To use that: paceline engine --build cpu", "yellow"), soft_wrap=True)
    elif not idle:
        console.print(Text("All of this machine that is known to help is in use.", "green"))


def _rows(build: LlamaBuild, gpus: Sequence[Gpu], features: frozenset[str]) -> Iterator[tuple[str, str, str, str]]:
    yield "CPU", " ".join(sorted(build.cpu_features)), " ".join(sorted(features)) or "not known here", ""
    if features:
        has_amx = "AMX_INT8" in features
        yield "AMX", _yes("AMX_INT8" in build.cpu_features), _yes(has_amx), WORTH["AMX_INT8"] if has_amx else ""
    for name in BACKENDS:
        of_it = [
            f"{gpu.name}{f', {format_memory(gpu.memory_bytes)}' if gpu.memory_bytes else ''}"
            for gpu in gpus
            if name in gpu.interfaces
        ]
        there = "; ".join(of_it) or ("any processor" if name == "BLAS" else "no")
        yield (
            name,
            _yes(name in build.backends),
            printable_line(there),
            WORTH.get(name, "not measured") if of_it else "",
        )
    yield "RPC", _yes("RPC" in build.backends), "layers on other machines", ""
    for gpu in gpus:
        if not gpu.interfaces:
            yield "GPU", "", f"{gpu.name}, without a driver", ""


def _yes(has: bool) -> str:
    return "yes" if has else "no"


def _build(name: str, outputs: Outputs) -> None:
    console = error_console()
    plan = building.plan_build(name, find_gpus())
    if plan.missing:
        for line in plan.missing:
            console.print(f"missing: {line}", markup=False)
        raise InputError(f"--build {name} needs {len(plan.missing)} more to be installed first, each named above")
    log = models_folder().with_name("builds") / f"{name}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{log} cannot be written: {error.strerror or error}; set PACELINE_CACHE to another folder"
        ) from None
    console.print(f"building {plan.requirement} for {plan.backend}; log: {log}", style="dim", markup=False)
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-build-") as made:
            before, after, differs = _build_in(plan, Path(made), log)
    except KeyboardInterrupt:
        console.print("interrupted: the installed llama.cpp is as it was", style="dim")
        raise typer.Exit(exits.INTERRUPTED) from None
    except PacelineError as error:
        for line in building.last_lines(log):
            console.print(f"  {printable_line(line)}", style="dim", markup=False)
        raise type(error)(f"{error}; the installed llama.cpp is as it was") from None
    took_s = time.monotonic() - started_s
    facts = {
        "build": name,
        "cmake_args": plan.cmake_args,
        "log": str(log),
        "took_s": took_s,
        "before": None if before is None else _build_json(before),
        "after": _build_json(after),
        "difference": differs,
    }
    outputs.write(facts, lambda: _print_built(after, differs, took_s))


def _build_in(plan: building.BuildPlan, folder: Path, log: Path) -> tuple[LlamaBuild | None, LlamaBuild, float | None]:
    """Build, try and install; return the builds before and after, and by how much they differ."""
    console = error_console()
    needed = shutil.disk_usage(folder).free
    if needed < 2 << 30:
        raise InputError(
            f"{folder} has {format_memory(needed)} free, and a build takes up to 2G: set TMPDIR to another folder"
        )
    with ProgressBar("getting the sources", total=1.0) as progress:

        def tell(share: float | None) -> None:
            doing = "getting the sources, and what builds them" if share is None else "compiling"
            progress.tell(doing, share or 0.0, 1.0)
            progress.tell_line(
                doing if share is None else f"{doing}: {share:.0%}", new=None if share is None else int(10 * share)
            )

        wheel = building.build_wheel(plan, folder / "wheel", log, tell)
    console.print("trying the new build, and the installed one", style="dim")
    try:
        before: building.Trial | None = building.try_build(None)
    except CapabilityError as error:
        console.print(
            f"the installed llama.cpp does not run, so there is nothing to compare with: {error}", markup=False
        )
        before = None
    site = folder / "site"
    building.unpack(wheel, site, log)
    after = building.try_build(site)
    differs = building.check_trial(plan, before, after, site)
    with hold_interrupts():  # the last step is short, and should not be torn
        building.install(wheel, log)
    return None if before is None else before.build, building.try_build(None).build, differs


def _print_built(build: LlamaBuild, differs: float | None, took_s: float) -> None:
    console = report_console()
    console.print(Text(f"llama-cpp-python {build.version} is installed with {', '.join(build.backends)}", "bold"))
    if build.devices:
        console.print(f"devices: {', '.join(build.devices)}", markup=False)
    compared = "" if differs is None else f"; it computes what the old one did (mean difference {differs:.2g} nats)"
    console.print(f"built in {took_s / 60:.1f} min{compared}", markup=False)
    console.print("What passes cost is measured again when a model is next loaded.", style="dim")
