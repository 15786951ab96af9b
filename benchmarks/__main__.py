"""Runs the measurements, all or by name; some have options."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import typer

from benchmarks import lossless, overhead, planning, soak
from paceline.cli import exits
from paceline.core.errors import InputError, PacelineError
from paceline.machine import machine

MEASUREMENTS: Final = {"lossless": lossless, "overhead": overhead, "planning": planning, "soak": soak}
"""What runs by itself."""

COMMANDS: Final[Mapping[str, str]] = {
    # Needs two models that are not there everywhere.
    "translation": "benchmarks.translation",
    "attack": "benchmarks.attack.command",
    "server-soak": "benchmarks.server_soak.soaking",
    # May have a llama-server beside.
    "structured": "benchmarks.structured",
    "serving": "benchmarks.serving",
    # Of servers that are there already.
    "load": "benchmarks.load.command",
    # Makes what measures elsewhere.
    "gpu": "benchmarks.gpu.command",
    # Needs root, and a disk whose reads can be bounded.
    "streamed-passes": "benchmarks.streamed.passes",
    # Makes network namespaces, which takes root, unless it is told not to.
    "rpc": "benchmarks.rpc.command",
    # Starts servers itself, and takes a core for each.
    "capacity": "benchmarks.capacity",
    # Policies on what was recorded before.
    "record": "benchmarks.record",
    "replay": "benchmarks.replay",
    "planner-ab": "benchmarks.planner_ab.command",
}
"""What has options, by its module; the function has the command's name."""

app = typer.Typer(
    # Several measurements can be named one after the other.
    chain=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _run(name: str) -> None:
    print(f"\n== {name}")
    figures: dict[str, Any] = MEASUREMENTS[name].measure()
    print(json.dumps({"machine": machine(), name: figures}))


def _command(name: str) -> Callable[[], None]:
    return lambda: _run(name)


for _name, _measurement in MEASUREMENTS.items():
    app.command(_name, help=(_measurement.__doc__ or "").partition("\n")[0])(_command(_name))
for _name, _path in COMMANDS.items():
    _module = importlib.import_module(_path)
    app.command(_name, epilog=_module.EPILOG)(getattr(_module, _name.replace("-", "_")))


@app.callback()
def run_all(context: typer.Context) -> None:
    """Measure paceline on this machine: everything, or what is named. Each measurement says what limits its figure."""
    if context.invoked_subcommand is None:
        for name in MEASUREMENTS:
            _run(name)


def main() -> None:
    """Run the command line; errors become one line on stderr and an exit status."""
    try:
        app()
    except PacelineError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        sys.exit(exits.BAD_INPUT if isinstance(error, InputError) else exits.FAILURE)


if __name__ == "__main__":
    main()
