"""Plain decoding beside llama-server as it comes, in turn, on a quiet machine and on a busy one.

What people have today is llama-server without a flag but the model's, so that is what plain decoding has to keep up
with. Both sides keep a process and continue the same text by turns, a window of tokens at a time, so that each window
has two of the other side's around it, after the same text. What limits either is the machine's memory, and on a busy
machine how long threads wait for each other.

Spinning processes stand for whatever else a machine does: each keeps one core busy for as long as a series takes.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Final, Protocol

import typer

import paceline
from benchmarks.progress import progress_bar
from benchmarks.server_process import ServerProcess
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.engines.options import ModelOptions
from paceline.engines.threads import PERIOD_S, usable_cores
from paceline.machine import machine
from paceline.models.embedded import heldout
from paceline.models.registry import resolve_model
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.loop import DecodingLoop

EPILOG = """[bold]Examples[/bold]

python -m benchmarks beside-server ./llama-server -m target-1b-q4_0

python -m benchmarks beside-server ./llama-server -m big.gguf --context 1500 --temp 0.8

python -m benchmarks beside-server ./llama-server -m target-1b-q4_0 --busy 0,1,2 --all-cores
"""

_SETTLE_S: Final = 0.5
"""Spinning processes have started by then, and paceline has looked at the cores."""

_RUN_IN_S: Final = 2 * PERIOD_S
_MAX_GROWTH: Final = 512
"""Tokens by which the context may outgrow what was asked for before the text is begun anew."""

OURS, ALL_CORES, SERVER = "paceline", "paceline -t", "llama-server"


def beside_server(
    program: Annotated[Path, typer.Argument(help="llama-server.", metavar="LLAMA-SERVER")],
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file, or a name from paceline models.")],
    context: Annotated[int, typer.Option("--context", help="Tokens before the first window.")] = 32,
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0 decodes greedily.")] = 0.0,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of a window.")] = 48,
    windows: Annotated[int, typer.Option("--windows", help="Windows of each side.")] = 7,
    busy: Annotated[str, typer.Option("--busy", help="Spinning processes, one series for each number.")] = "0",
    all_cores: Annotated[
        bool, typer.Option("--all-cores", help="Also paceline with a thread for every core, whatever others do.")
    ] = False,
) -> None:
    """Measure plain decoding beside llama-server as it comes."""
    if windows < 1 or tokens < 2 or context < 1:
        raise InputError(f"{windows} windows of {tokens} tokens after {context}: the least is 1 of 2 after 1")
    try:
        series = [int(number) for number in busy.split(",")]
    except ValueError:
        raise InputError(f"--busy {busy} is no list of numbers, such as 0,1,2") from None
    if min(series) < 0:
        raise InputError(f"--busy {busy}: the least is 0")
    path = resolve_model(model)
    speeds: dict[int, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        sides: dict[str, _Side] = {OURS: _Paceline(stack, path, temp, threads=None)}
        if all_cores:
            sides[ALL_CORES] = _Paceline(stack, path, temp, threads=usable_cores())
        sides[SERVER] = _Server(stack, program, path, temp)
        ours = sides[OURS]
        assert isinstance(ours, _Paceline)
        text = ours.text(context)
        for side in sides.values():
            side.begin(text)
            side.window(tokens, ours.token_ids)
        with progress_bar() as bar:
            for spinning in series:
                found = speeds.setdefault(spinning, {name: [] for name in sides})
                with _spinning(spinning):
                    for _ in bar.track(range(windows), description=f"beside {spinning} spinning processes"):
                        for name, side in sides.items():
                            found[name].append(side.window(tokens, ours.token_ids))
    _print(path, temp, context, speeds)
    print(json.dumps({"machine": machine(), "beside_server": {"model": path.name, "speeds": speeds}}))


def _print(path: Path, temp: float, context: int, speeds: dict[int, dict[str, list[float]]]) -> None:
    quiet = speeds.get(0)
    for spinning, found in speeds.items():
        ratios = [ours / theirs for ours, theirs in zip(found[OURS], found[SERVER], strict=True)]
        print(
            f"{path.name}, temperature {temp:g}, {context} tokens of context, beside {spinning} spinning: "
            f"{statistics.median(ratios):.3f} of llama-server ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)})"
        )
        for name, values in found.items():
            share = "" if not quiet else f", {statistics.median(values) / statistics.median(quiet[name]):.2f} of quiet"
            print(f"  {name}: {statistics.median(values):.1f} t/s ({min(values):.1f} to {max(values):.1f}){share}")


class _Side(Protocol):
    """One of those that continue the text."""

    def begin(self, token_ids: Sequence[int]) -> None:
        """Read the text."""
        ...

    def window(self, tokens: int, so_far: Sequence[int]) -> float:
        """Continue by so many tokens, and return how many there were in a second.

        Args:
            tokens: of the window.
            so_far: the text, with what was continued already, for those who do not remember.
        """
        ...


class _Paceline:
    """Plain decoding here: one request, whose rounds are made window by window, in the engine's thread."""

    def __init__(self, stack: ExitStack, path: Path, temperature: float, threads: int | None) -> None:
        options = ModelOptions(path, threads=threads)
        self._model = stack.enter_context(paceline.load(options, policy=NO_SPECULATION))
        self._temperature = temperature
        self.token_ids: Sequence[int] = ()

    def text(self, length: int) -> list[int]:
        """Return held-out text of so many tokens."""
        vocabulary = self._model.target.vocabulary
        token_ids = itertools.chain.from_iterable(vocabulary.tokenize(text) for text in heldout("code") * 50)
        return list(itertools.islice(token_ids, length))

    def begin(self, token_ids: Sequence[int]) -> None:
        self._model.worker.call(lambda: self._begin(token_ids))

    def window(self, tokens: int, so_far: Sequence[int]) -> float:
        return self._model.worker.call(lambda: self._window(tokens))

    def _begin(self, token_ids: Sequence[int]) -> None:
        self._text = list(token_ids)
        most = self._model.target.capabilities.context_length - len(token_ids)
        params, rules = SamplingParams(self._temperature, seed=1), StopRules(most, ignore_end=True)
        self._loop = DecodingLoop(self._model.target, [], NO_SPECULATION)
        self._request = self._loop.add(token_ids, params, rules)
        while not self._request.decoding:
            self._loop.step()
        self.token_ids = list(self._request.token_ids)

    def _window(self, tokens: int) -> float:
        if len(self.token_ids) - len(self._text) > _MAX_GROWTH:
            self._loop.cancel(self._request)
            self._begin(self._text)
        # Until the cores have been looked at without the other side at work.
        give_up_s = time.perf_counter() + _RUN_IN_S
        while time.perf_counter() < give_up_s:
            self._continue(1)
        started_s = time.perf_counter()
        self._continue(tokens)
        return tokens / (time.perf_counter() - started_s)

    def _continue(self, tokens: int) -> None:
        for _ in range(tokens):
            self._loop.step()
            if self._request.finish_reason is not None:
                raise InputError("the context is full: ask for fewer or shorter windows (--windows, -n)")
        self.token_ids = list(self._request.token_ids)


class _Server:
    """llama-server with no flag but those that say what to load and where to listen."""

    def __init__(self, stack: ExitStack, program: Path, path: Path, temperature: float) -> None:
        self._process = ServerProcess(stack, program, path)
        self._temperature = temperature

    def begin(self, token_ids: Sequence[int]) -> None:
        pass

    def window(self, tokens: int, so_far: Sequence[int]) -> float:
        body = {
            "prompt": list(so_far),
            "n_predict": tokens + 1,
            "ignore_eos": True,
            "temperature": self._temperature,
            "seed": 1,
            "return_tokens": True,
        }
        said = self._process.post("/completion", body)
        # It counts the time from the first token on, which comes with the prompt.
        return float((len(said["tokens"]) - 1) / (said["timings"]["predicted_ms"] / 1e3))


@contextmanager
def _spinning(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
