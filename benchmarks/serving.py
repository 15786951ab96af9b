"""``paceline serve`` under load: drafts beside none in the same process, ``paceline run``, and llama-server.

Clients ask at once. Each has prompts of its own, the beginnings of held-out texts, and asks one after the other, the
next as soon as the answer to the last is there. Answers go on past their end, so that all have the same length. Nothing
that was read is used again.

A lap is all requests of all clients. Laps without drafts and with ``auto`` take turns in one process: each request says
itself whether it is drafted for. A lap with drafts has one without before and after it, and is compared with the mean
of both; these two are compared with each other as well, which shows how much of a ratio is noise. llama-server has a
process of its own for each lap, as its n-gram drafts remember what was said, and as many slots as there are clients.
Its best setting is the fastest of those that were tried for one lap each. ``paceline run`` is the same calls in this
process, one after the other. Every lap begins with a request that is not counted, after which both sides have seen that
the cores are theirs.

What is measured:

* Decode speed: tokens of all answers after their first, over the seconds from first tokens to last, times the number
  of clients. It counts what streams gain while they are written. Prompts of other clients that are read meanwhile
  slow it down.
* Whole speed: all tokens over the seconds of the lap, the reading of prompts and the end of the lap included, in which
  fewer and fewer clients are left.
* First token: from the sending of a request. Gap: between two arrivals at a reader. A round that brings several tokens
  is one arrival, so with drafts gaps are longer and fewer; the time of a token is the decode speed's.

What limits the speed is the machine's memory with one client, and its arithmetic with many: there rows of drafts are
paid for in full. Beyond that, every row of a prompt costs as much as a token of an answer, and ``auto`` drafts nothing
in rounds in which a prompt is read. Clients and server share the cores; the table says what share of one the clients
took.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

import paceline
from benchmarks.load_laps import Load, load
from benchmarks.reporting import progress_bar
from benchmarks.server_process import ServerProcess
from paceline.core.errors import InputError
from paceline.engines.options import ModelOptions
from paceline.lab.bench.workloads import PROMPT_TOKENS
from paceline.machine import machine
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.models.registry import resolve_model

EPILOG = """[bold]Examples[/bold]

python -m benchmarks serving --quick

python -m benchmarks serving -m target-1b-q8_0 -md draft --clients 1,4,16 --workloads code,prose

python -m benchmarks serving -m target-1b-q4_0 -md draft --temp 0 --llama-server ./llama-server
"""

OFF, AUTO, RUN_OFF, RUN_AUTO, SERVER = "off", "auto", "run off", "run auto", "llama-server"
_PLAIN: Final = ("plain",)
_NGRAM: Final = ("ngram-mod", "--spec-type", "ngram-mod")
_DRAFT_LENGTHS: Final = range(3, 9)
_MIN_EACH: Final = 2
"""Requests of each client at least, or no prompt would be read beside answers."""
_RUN_IN_TOKENS: Final = 32
_ROOM: Final = 64
"""Tokens of context beyond prompt and answer."""
_SAMPLING: Final = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama-server's and ours, said in case that one of them changes."""


class _Task(NamedTuple):
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True)
class _Sizes:
    """How much is asked.

    Attributes:
        prompt: tokens of each.
        tokens: of each answer.
        requests: of a lap, at least.
        repeats: laps of each side.
        temp: temperature.
    """

    prompt: int
    tokens: int
    requests: int
    repeats: int
    temp: float

    @property
    def context(self) -> int:
        """Tokens of context that one request needs."""
        return self.prompt + self.tokens + _ROOM

    def num_requests(self, clients: int) -> int:
        """Return the requests of a lap."""
        return max(self.requests, _MIN_EACH * clients)


@dataclass
class _Series:
    """Laps of a workload with so many clients.

    Attributes:
        workload: what prompts are of.
        clients: how many there are.
        loads: laps of sides that are asked over HTTP.
        run: tokens a second of decoding of laps in this process.
        setting: llama-server's best one.
        tried: decode tokens a second of llama-server's settings, in one lap each.
    """

    workload: str
    clients: int
    loads: dict[str, list[Load]] = field(default_factory=dict)
    run: dict[str, list[float]] = field(default_factory=dict)
    setting: str = ""
    tried: dict[str, float] = field(default_factory=dict)

    def speeds(self, side: str) -> list[float]:
        """Return decode tokens a second of a side's laps."""
        return self.run[side] if side in self.run else [lap.decode_per_second for lap in self.loads[side]]

    @property
    def gains(self) -> list[float]:
        """Decode speeds of laps with drafts over those around them."""
        return _over_neighbours(self.speeds(AUTO), self.speeds(OFF))

    @property
    def whole_gains(self) -> list[float]:
        """As ``gains``, of whole laps."""
        return _over_neighbours(*([lap.whole_per_second for lap in self.loads[side]] for side in (AUTO, OFF)))

    @property
    def noise(self) -> list[float]:
        """Laps without drafts over the ones before."""
        return _over(self.speeds(OFF)[1:], self.speeds(OFF))

    @property
    def same_texts(self) -> dict[str, str]:
        """How many answers of a lap are as those of the first lap without drafts.

        Rows in passes of other widths are rounded otherwise, and near-ties turn. Who is in a pass depends on the time
        that others took, so a further lap without drafts differs as well, and shows how much of that is rounding.
        """
        plain, again = (lap.texts for lap in self.loads[OFF][:2])
        return {
            side: f"{sum(one == other for one, other in zip(texts, plain, strict=True))} of {len(plain)}"
            for side, texts in ((AUTO, self.loads[AUTO][0].texts), (OFF, again))
        }

    def figures(self) -> dict[str, Any]:
        """Return all that was measured, for JSON."""
        return {
            "workload": self.workload,
            "clients": self.clients,
            "laps": {side: [lap.figures() for lap in laps] for side, laps in self.loads.items()},
            "run": self.run,
            "gain": statistics.median(self.gains),
            "gains": self.gains,
            "whole_gains": self.whole_gains,
            "noise": self.noise,
            "same_texts": self.same_texts,
            "llama_server": {"best": self.setting, "tried": self.tried},
        }


def serving(
    model: Annotated[str, typer.Option("-m", "--model", help="A GGUF file or a name.")] = "target-1b-q4_0",
    model_draft: Annotated[str, typer.Option("-md", "--model-draft", help="A draft model.")] = "draft",
    clients: Annotated[str, typer.Option("--clients", help="Clients at once, a series for each.")] = "1,2,4,8,16",
    workloads: Annotated[
        str, typer.Option("--workloads", help=f"What prompts are of: {', '.join(HELDOUT_KINDS)}.")
    ] = "code,prose,logs",
    temp: Annotated[float, typer.Option("--temp", "--temperature", help="0 decodes greedily.")] = 0.8,
    repeats: Annotated[int, typer.Option("--repeats", help="Laps of each side.")] = 5,
    requests: Annotated[int, typer.Option("--requests", help="Requests of a lap; two of each client at least.")] = 16,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of an answer.")] = 96,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of a prompt.")] = PROMPT_TOKENS,
    llama_server: Annotated[
        Path | None, typer.Option("--llama-server", help="Its best setting is measured beside ours.")
    ] = None,
    beside: Annotated[str, typer.Option("--beside", help="Numbers of clients for llama-server.")] = "1,4",
    run: Annotated[bool, typer.Option("--run/--no-run", help="One client beside the same calls in-process.")] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="One lap of eight requests by 1 and by 4 clients, of code.")
    ] = False,
) -> None:
    """Measure the server under load: drafts beside none, and beside llama-server."""
    if quick:
        clients, workloads, repeats, requests, tokens, prompt = "1,4", "code", 1, 8, 96, 64
    if repeats < 1 or requests < 1 or tokens < 2 or prompt < 2:
        asked = f"{repeats} laps of {requests} requests of {prompt} tokens with answers of {tokens}"
        raise InputError(f"{asked}: the least is 1 of 1 of 2 with 2")
    counts, beside_counts = _numbers(clients, "--clients"), _numbers(beside, "--beside")
    kinds = workloads.split(",")
    for kind in kinds:
        if kind not in HELDOUT_KINDS:
            raise InputError(f"--workloads {kind}: choose from {', '.join(HELDOUT_KINDS)}")
    sizes = _Sizes(prompt, tokens, requests, repeats, temp)
    target, draft = resolve_model(model), resolve_model(model_draft)
    found: list[_Series] = []
    with ExitStack() as stack, progress_bar() as bar:
        words = [sys.executable, "-m", "paceline", "serve"]
        # What is learned stays in the process, so that the next measurement begins like this one.
        flags = ["-md", str(draft), "--no-remember", *_room(max(counts), sizes)]
        ours = ServerProcess(stack, words, target, flags)
        theirs = None if llama_server is None else _LlamaServer(llama_server, target, draft, sizes)
        here = _InProcess(stack, target, draft, sizes) if run and 1 in counts else None
        for kind in kinds:
            tasks = _tasks(ours, kind, sizes, max(map(sizes.num_requests, counts)))
            for count in counts:
                others = (theirs if count in beside_counts else None, here if count == 1 else None)
                doing = bar.add_task(f"{kind}, {count} clients", total=repeats)
                advance = functools.partial(bar.advance, doing)
                series = _measured(ours, *others, kind, count, tasks, sizes, advance)
                found.append(series)
                bar.remove_task(doing)
                bar.console.print(f"{kind}, {count} clients: {statistics.median(series.gains):.3f}")
    _print(target, sizes, found)
    figures = {
        "model": target.name,
        "draft": draft.name,
        "commit": _commit(),
        "temperature": temp,
        "prompt_tokens": prompt,
        "answer_tokens": tokens,
        "series": [series.figures() for series in found],
    }
    print(json.dumps({"machine": machine(), "serving": figures}))


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise InputError(f"{option} {text} is no list of numbers from 1 on, such as 1,4,16")
    return found


def _room(clients: int, sizes: _Sizes) -> list[str]:
    """Return the flags by which either server has room for so many at once."""
    return ["-np", str(clients), "-c", str(clients * sizes.context)]


def _tasks(server: ServerProcess, kind: str, sizes: _Sizes, count: int) -> list[_Task]:
    """Return what is asked: the first requests of a lap are the same for any number of clients."""
    texts = heldout(kind)
    random.Random(f"serving {kind}").shuffle(texts)
    found = []
    # Further ones have the same prompts and other draws, so that the mix of texts is the same in longer laps.
    for number in range(count):
        text = texts[number % min(len(texts), sizes.requests)]
        said = server.post("/tokenize", {"content": text, "add_special": True})
        found.append(_Task(said["tokens"][: sizes.prompt], number + 1))
    return found


def _measured(
    ours: ServerProcess,
    theirs: _LlamaServer | None,
    here: _InProcess | None,
    kind: str,
    count: int,
    tasks: Sequence[_Task],
    sizes: _Sizes,
    advance: Callable[[], None],
) -> _Series:
    """Make the laps of a workload with so many clients."""
    series = _Series(kind, count)
    tasks = tasks[: sizes.num_requests(count)]
    plain = [[_body(task, sizes, speculative={"off": True}) for task in tasks[one::count]] for one in range(count)]
    drafted = [[_body(task, sizes) for task in tasks[one::count]] for one in range(count)]
    if theirs is not None:
        series.tried = {words[0]: theirs.lap(words, drafted).decode_per_second for words in theirs.settings}
        series.setting = max(series.tried, key=lambda name: series.tried[name])

    def lap(side: str, bodies: list[list[dict[str, Any]]]) -> None:
        series.loads.setdefault(side, []).append(load(ours.port, bodies, _run_in(bodies)))

    for _ in range(sizes.repeats):
        lap(OFF, plain)
        lap(AUTO, drafted)
        if here is not None:
            for side, speculate in ((RUN_OFF, False), (RUN_AUTO, True)):
                series.run.setdefault(side, []).append(here.lap(tasks, speculate=speculate))
        if theirs is not None:
            words = next(words for words in theirs.settings if words[0] == series.setting)
            series.loads.setdefault(SERVER, []).append(theirs.lap(words, drafted))
        advance()
    lap(OFF, plain)
    return series


def _body(task: _Task, sizes: _Sizes, **also: Any) -> dict[str, Any]:
    return {
        "prompt": task.prompt_ids,
        "n_predict": sizes.tokens,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
        "temperature": sizes.temp,
        "seed": task.seed,
        **_SAMPLING,
        **also,
    }


def _run_in(bodies: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    return {**bodies[0][0], "n_predict": _RUN_IN_TOKENS}


class _LlamaServer:
    """llama-server with one setting after the other."""

    def __init__(self, program: Path, target: Path, draft: Path, sizes: _Sizes) -> None:
        self._program = program
        self._target = target
        self._sizes = sizes
        self.settings: list[tuple[str, ...]] = [
            _PLAIN,
            _NGRAM,
            *(
                (
                    f"draft-simple {length}",
                    *("--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", str(length)),
                )
                for length in _DRAFT_LENGTHS
            ),
        ]

    def lap(self, words: Sequence[str], bodies: Sequence[Sequence[dict[str, Any]]]) -> Load:
        """Return what clients read of a server with a setting: its name, then its flags."""
        with ExitStack() as stack:
            flags = (*words[1:], *_room(len(bodies), self._sizes), "--cache-ram", "0")
            server = ServerProcess(stack, self._program, self._target, flags)
            return load(server.port, bodies, _run_in(bodies))


class _InProcess:
    """The same model in this process, as ``paceline run`` has it."""

    def __init__(self, stack: ExitStack, target: Path, draft: Path, sizes: _Sizes) -> None:
        options = ModelOptions(target, context_length=sizes.context, model_defaults=False)
        drafting = ModelOptions(draft, context_may_shrink=True)
        self._model = stack.enter_context(paceline.load(options, draft=drafting, remember=False))
        self._sizes = sizes

    def lap(self, tasks: Sequence[_Task], *, speculate: bool) -> float:
        """Answer all tasks in turn, and return the tokens a second of decoding."""
        tokens, seconds = 0, 0.0
        for number, task in enumerate([tasks[0], *tasks]):
            answer = self._model.generate(
                task.prompt_ids,
                max_tokens=self._sizes.tokens if number else _RUN_IN_TOKENS,
                ignore_end=True,
                cache_prompt=False,
                speculate=speculate,
                temperature=self._sizes.temp,
                seed=task.seed,
                top_k=int(_SAMPLING["top_k"]),
                top_p=_SAMPLING["top_p"],
                min_p=_SAMPLING["min_p"],
            )
            if number:
                tokens += answer.stats.predicted_tokens - 1
                seconds += answer.stats.decode_s
        return tokens / seconds


def _over(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=False)]


def _over_neighbours(between: Sequence[float], around: Sequence[float]) -> list[float]:
    return _over(between, [(before + after) / 2 for before, after in itertools.pairwise(around)])


def _commit() -> str:
    """Return the commit of this working tree; empty outside of one."""
    said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip()


_NAMES: Final = ("p50", "p95", "p99")
_SPEEDS: Final = """
auto, off: decode tokens a second, all clients together; auto/off, least, most: of laps and those around them;
off/off: noise; whole: auto/off of whole laps; step: auto over auto with the clients of the line before;
prompts: share of auto's rounds that had no draft because a prompt was read"""
_TIMES: Final = """
first, gap: milliseconds until the first token and between arrivals; cpu: share of a core that the clients took;
same: answers equal to those of the first lap without drafts"""


def _print(target: Path, sizes: _Sizes, found: Sequence[_Series]) -> None:
    print(
        f"{target.name}, temperature {sizes.temp:g}, prompts of {sizes.prompt} tokens, answers of {sizes.tokens}; "
        f"medians of {sizes.repeats} laps"
    )
    print(_SPEEDS)
    _row("workload", "clients", "auto", "off", "auto/off", "least", "most", "off/off", "whole", "step", "prompts")
    before: _Series | None = None
    for each in found:
        auto, gains = statistics.median(each.speeds(AUTO)), each.gains
        step = "-" if before is None or before.workload != each.workload else _ratio(auto, before.speeds(AUTO))
        prompts = statistics.median(lap.off_shares.get("prompts", 0.0) for lap in each.loads[AUTO])
        _row(
            each.workload,
            str(each.clients),
            f"{auto:.1f}",
            f"{statistics.median(each.speeds(OFF)):.1f}",
            *(f"{value:.3f}" for value in (statistics.median(gains), min(gains), max(gains))),
            f"{statistics.median(each.noise):.3f}",
            f"{statistics.median(each.whole_gains):.3f}",
            step,
            f"{prompts:.2f}",
        )
        before = each
    print(_TIMES)
    names = [f"{what} {name}" for what in ("first", "gap") for name in _NAMES]
    _row("workload", "clients", "side", *names, "cpu", "same")
    for each in found:
        for side, laps in each.loads.items():
            figures = [lap.figures() for lap in laps]
            cells = [
                f"{1e3 * statistics.median(lap[what][name] for lap in figures):.0f}"
                for what in ("first_token_s", "gap_s")
                for name in _NAMES
            ]
            share = statistics.median(lap["clients_cpu_share"] for lap in figures)
            _row(each.workload, str(each.clients), side, *cells, f"{share:.3f}", each.same_texts.get(side, ""))
    for each in found:
        _print_beside(each)


def _print_beside(series: _Series) -> None:
    """Print what else was measured with so many clients."""
    where = f"{series.workload}, {series.clients} clients"
    if SERVER in series.loads:
        for side in (AUTO, OFF):
            ratios = _over(series.speeds(side), series.speeds(SERVER))
            print(f"{where}: {side} {_spread(ratios)} of llama-server's best setting, {series.setting}")
        print("  one lap each: " + ", ".join(f"{name} {speed:.1f}" for name, speed in series.tried.items()))
    for side, run in ((AUTO, RUN_AUTO), (OFF, RUN_OFF)):
        if run in series.run:
            print(f"{where}: {side} {_spread(_over(series.speeds(side), series.run[run]))} of paceline run")


def _ratio(value: float, others: Sequence[float]) -> str:
    return f"{value / statistics.median(others):.3f}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _row(*cells: str) -> None:
    print("".join(f"{cell:>13}" if place == 2 else f"{cell:>10}" for place, cell in enumerate(cells)))
