"""Plain decoding through paceline against llama.cpp's own llama-bench, on the same file and in turn.

Ratios to plain decoding mean something only if plain is as fast as it can be. llama-bench decodes random tokens from an
empty cache and samples nothing, so what is left between the two is sampling and paceline's own time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Annotated

import typer

import paceline
from benchmarks.machine import machine
from paceline.core.errors import CapabilityError, InputError
from paceline.engines.llama_cpp import native
from paceline.engines.loading import ModelOptions
from paceline.models.cache import resolve

EPILOG = """[bold]Examples[/bold]

python -m benchmarks llama-bench ./llama-bench -m target-1b-q4_0

python -m benchmarks llama-bench ./llama-bench -m big.gguf --temp 0.8
"""


def llama_bench(
    program: Annotated[Path, typer.Argument(help="llama-bench.", metavar="LLAMA-BENCH")],
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file, or a name from paceline models.")],
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of a run.")] = 128,
    runs: Annotated[int, typer.Option("--runs", help="Runs of each, in turn.")] = 9,
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0 decodes greedily.")] = 0.0,
    threads: Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads of both.")] = None,
) -> None:
    """Measure plain decoding against llama.cpp's llama-bench."""
    path = resolve(model)
    threads = threads or native.usable_cores()
    ratios, ours, theirs = [], [], []
    with paceline.load(ModelOptions(path, threads=threads), policy=paceline.NO_SPECULATION) as loaded:
        for run in range(runs):
            before = _llama_bench(program, path, tokens, threads)
            # One more token, as the first comes with the prompt.
            stream = loaded.stream([1], max_tokens=tokens + 1, temperature=temp, seed=run, ignore_end=True)
            arrivals_s = stream.result().stats.arrivals_s
            speed = (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0])
            after = _llama_bench(program, path, tokens, threads)
            ours.append(speed)
            theirs += [before, after]
            ratios.append(2 * speed / (before + after))
    print(
        f"{path.name}, temperature {temp:g}: plain decoding at {statistics.median(ratios):.3f} of llama-bench "
        f"({min(ratios):.3f} to {max(ratios):.3f} in {runs} runs, each between two of llama-bench's); "
        f"{statistics.median(ours):.2f} against {statistics.median(theirs):.2f} t/s"
    )
    print(json.dumps({"machine": machine(), "llama_bench": {"ratios": ratios, "ours": ours, "theirs": theirs}}))


def _llama_bench(program: Path, model: Path, tokens: int, threads: int) -> float:
    """Return tokens per second of one run."""
    command = [
        str(program),
        "-m",
        str(model),
        "-p",
        "0",
        "-n",
        str(tokens),
        "-r",
        "1",
        "-t",
        str(threads),
        "-o",
        "json",
    ]
    try:
        outcome = subprocess.run(command, capture_output=True, check=True)
        return float(json.loads(outcome.stdout)[0]["avg_ts"])
    except FileNotFoundError:
        raise InputError(f"{program} does not exist: give the path of llama-bench") from None
    except (OSError, subprocess.CalledProcessError, ValueError, LookupError) as error:
        raise CapabilityError(f"{program} gave no figure ({error}): give the path of llama-bench") from None
