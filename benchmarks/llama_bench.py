"""Plain decoding by `paceline run` against llama.cpp's own llama-bench, on the same file and in turn.

Ratios to plain decoding mean something only if plain is as fast as it can be. llama-bench decodes random tokens from an
empty cache that holds no more than these, and samples nothing; paceline is given a cache of the same size, as a larger
one takes longer to read even where little of it is in use. So what is left between the two is sampling and paceline's
own time. Each is measured with fused attention and without, as paceline chooses by what is faster
(docs/architecture.md). Every run is a process of its own on both sides.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.progress import track

from paceline.core.errors import CapabilityError, InputError
from paceline.engines.threads import usable_cores
from paceline.machine import machine
from paceline.models.registry import resolve_model

EPILOG = """[bold]Examples[/bold]

python -m benchmarks llama-bench ./llama-bench -m target-1b-q4_0

python -m benchmarks llama-bench ./llama-bench -m big.gguf --temp 0.8
"""

_FUSED: Final = {"off": "0", "on": "1"}
"""Values of paceline's ``-fa``, and of llama-bench's."""

_CELLS: Final = 256
"""llama.cpp rounds a cache up to a multiple of these."""
_PROMPT_ROOM: Final = 16
"""Tokens that paceline's context is larger by, for its prompt."""


def llama_bench(
    program: Annotated[Path, typer.Argument(help="llama-bench.", metavar="LLAMA-BENCH")],
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file, or a name from paceline models.")],
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of a run.")] = 128,
    runs: Annotated[int, typer.Option("--runs", help="Runs of each, in turn.")] = 9,
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0 decodes greedily.")] = 0.0,
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads of both.")] = None,
) -> None:
    """Measure plain decoding against llama.cpp's llama-bench."""
    if runs < 1 or tokens < 1:
        raise InputError(f"{runs} runs of {tokens} tokens: the least of either is 1")
    if (tokens + _PROMPT_ROOM - 1) // _CELLS != (tokens - 1) // _CELLS:
        raise InputError(
            f"{tokens} tokens with a prompt need a larger cache than without, as llama.cpp rounds up to {_CELLS}: "
            f"give {tokens - tokens % _CELLS + _CELLS // 2}"
        )
    path = resolve_model(model)
    threads = threads or usable_cores()
    theirs = [str(program.absolute()), "-m", str(path), "-p", "0", "-n", str(tokens), "-r", "1", "-t", str(threads)]
    theirs += ["-o", "json"]
    # One more token, as the first comes with the prompt.
    ours = [sys.executable, "-m", "paceline", "run", "-m", str(path), "-p", "a", "-n", str(tokens + 1)]
    ours += ["-c", str(tokens + _PROMPT_ROOM), "-t", str(threads), "--temp", str(temp), "--seed", "0", "--ignore-eos"]
    ours += ["--no-speculation", "--json"]
    speeds: dict[str, list[float]] = {
        f"{who} -fa {fused}": [] for fused in _FUSED for who in ("paceline", "llama-bench")
    }
    ratios: dict[str, list[float]] = {fused: [] for fused in _FUSED}
    for _ in track(range(runs), description="in turn", transient=True):
        for fused, argument in _FUSED.items():
            before = _llama_bench([*theirs, "-fa", argument])
            speed = _paceline([*ours, "-fa", fused])
            after = _llama_bench([*theirs, "-fa", argument])
            speeds[f"paceline -fa {fused}"].append(speed)
            speeds[f"llama-bench -fa {fused}"] += [before, after]
            ratios[fused].append(2 * speed / (before + after))
    for fused, values in ratios.items():
        mine, other = (statistics.median(speeds[f"{who} -fa {fused}"]) for who in ("paceline", "llama-bench"))
        print(
            f"{path.name}, temperature {temp:g}, -fa {fused}: plain decoding at {statistics.median(values):.3f} of "
            f"llama-bench ({min(values):.3f} to {max(values):.3f} in {runs} runs, each between two of llama-bench's); "
            f"{mine:.2f} against {other:.2f} t/s"
        )
    print(json.dumps({"machine": machine(), "llama_bench": {"ratios": ratios, "tokens_per_second": speeds}}))


def _llama_bench(command: list[str]) -> float:
    """Return tokens per second of one run."""
    try:
        return float(_json_of(command)[0]["avg_ts"])
    except FileNotFoundError:
        raise InputError(f"{command[0]} does not exist: give the path of llama-bench") from None
    except (OSError, subprocess.CalledProcessError, ValueError, LookupError, TypeError) as error:
        raise CapabilityError(f"{command[0]} gave no figure ({error}): give the path of llama-bench") from None


def _paceline(command: list[str]) -> float:
    """Return tokens per second of one run."""
    try:
        return float(_json_of(command)["stats"]["predicted_per_second"])
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines() or [str(error)]
        raise CapabilityError(f"paceline run gave no figure: {lines[-1]}") from None


def _json_of(command: list[str]) -> Any:
    """Return what a program prints."""
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
