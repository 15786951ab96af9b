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

import itertools
import random
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

import paceline
from benchmarks.load.asking import PERCENTILES
from benchmarks.load.laps import Load, load
from benchmarks.reporting import as_line, console, numbers, progress_bar, split, table
from benchmarks.server import PACELINE, Server
from paceline.core.errors import InputError
from paceline.engines.options import ModelOptions
from paceline.lab.bench.workloads import PROMPT_TOKENS
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.models.registry import resolve_model

EPILOG = """[bold]Examples[/bold]

python -m benchmarks serving --quick

python -m benchmarks serving -m target-1b-q8_0 -md draft --clients 1,4,16 --workloads code,prose

python -m benchmarks serving -m target-1b-q4_0 -md draft --temp 0 --llama-server ./llama-server
"""

OFF, AUTO, RUN_OFF, RUN_AUTO, SERVER = "off", "auto", "run off", "run auto", "llama-server"
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
    repeats: Annotated[int, typer.Option("--repeats", help="Laps of each side.", min=1)] = 5,
    requests: Annotated[
        int, typer.Option("--requests", help="Requests of a lap; two of each client at least.", min=1)
    ] = 16,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of an answer.", min=2)] = 96,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of a prompt.", min=2)] = PROMPT_TOKENS,
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
    counts, beside_counts = numbers(clients, "--clients"), numbers(beside, "--beside")
    kinds = split(workloads)
    for kind in kinds:
        if kind not in HELDOUT_KINDS:
            raise InputError(f"--workloads {kind}: choose from {', '.join(HELDOUT_KINDS)}")
    sizes = _Sizes(prompt, tokens, requests, repeats, temp)
    target, draft = resolve_model(model), resolve_model(model_draft)
    found: list[_Series] = []
    with ExitStack() as stack, progress_bar() as bar:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # What is learned stays in the process, so that the next measurement begins like this one.
        flags = ["-m", str(target), "-md", str(draft), "--no-remember", *_room(max(counts), sizes)]
        ours = stack.enter_context(Server.start(flags, folder / "serve.log", program=PACELINE))
        here = None
        if run and 1 in counts:
            options = ModelOptions(target, context_length=sizes.context, model_defaults=False)
            drafting = ModelOptions(draft, context_may_shrink=True)
            here = stack.enter_context(paceline.load(options, draft=drafting, remember=False))
        sides = _Sides(sizes, folder, target, ours, here, llama_server, _settings(draft))
        for kind in kinds:
            tasks = sides.tasks(kind, max(map(sizes.num_requests, counts)))
            for count in bar.track(counts, description=kind):
                beside_it = llama_server is not None and count in beside_counts
                found.append(sides.series(kind, count, tasks, beside=beside_it))
                bar.console.print(f"{kind}, {count} clients: {statistics.median(found[-1].gains):.3f}")
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
    print(as_line("serving", figures))


@dataclass(frozen=True)
class _Sides:
    """Where tasks are answered: our server, this process, and llama-server with any setting."""

    sizes: _Sizes
    folder: Path
    target: Path
    ours: Server
    here: paceline.Model | None
    theirs: Path | None
    settings: Mapping[str, Sequence[str]]

    def lap_there(self, setting: str, bodies: Sequence[Sequence[dict[str, Any]]]) -> Load:
        """Return what clients read of a llama-server with a setting, in a process of its own."""
        assert self.theirs is not None
        flags = ["-m", str(self.target), *self.settings[setting], *_room(len(bodies), self.sizes), "--cache-ram", "0"]
        with Server.start(flags, self.folder / "llama-server.log", program=[str(self.theirs.absolute())]) as server:
            return load(server.port, bodies, _run_in(bodies))

    def lap_here(self, tasks: Sequence[_Task], *, speculate: bool) -> float:
        """Answer all tasks in turn in this process, and return the tokens a second of decoding."""
        assert self.here is not None
        tokens, seconds = 0, 0.0
        for number, task in enumerate([tasks[0], *tasks]):
            answer = self.here.generate(
                task.prompt_ids,
                max_tokens=self.sizes.tokens if number else _RUN_IN_TOKENS,
                ignore_end=True,
                cache_prompt=False,
                speculate=speculate,
                temperature=self.sizes.temp,
                seed=task.seed,
                top_k=int(_SAMPLING["top_k"]),
                top_p=_SAMPLING["top_p"],
                min_p=_SAMPLING["min_p"],
            )
            if number:
                tokens += answer.stats.predicted_tokens - 1
                seconds += answer.stats.decode_s
        return tokens / seconds

    def tasks(self, kind: str, count: int) -> list[_Task]:
        """Return what is asked: the first requests of a lap are the same for any number of clients."""
        texts = heldout(kind)
        random.Random(f"serving {kind}").shuffle(texts)
        found = []
        # Further ones have the same prompts and other draws, so that the mix of texts is the same in longer laps.
        for number in range(count):
            text = texts[number % min(len(texts), self.sizes.requests)]
            said = self.ours.post("/tokenize", {"content": text, "add_special": True})
            found.append(_Task(said["tokens"][: self.sizes.prompt], number + 1))
        return found

    def series(self, kind: str, count: int, tasks: Sequence[_Task], *, beside: bool) -> _Series:
        """Make the laps of a workload with so many clients."""
        series, sizes = _Series(kind, count), self.sizes
        tasks = tasks[: sizes.num_requests(count)]
        plain = [[_body(task, sizes, speculative={"off": True}) for task in tasks[one::count]] for one in range(count)]
        drafted = [[_body(task, sizes) for task in tasks[one::count]] for one in range(count)]
        if beside:
            series.tried = {name: self.lap_there(name, drafted).decode_per_second for name in self.settings}
            series.setting = max(series.tried, key=lambda name: series.tried[name])

        def lap(side: str, bodies: list[list[dict[str, Any]]]) -> None:
            series.loads.setdefault(side, []).append(load(self.ours.port, bodies, _run_in(bodies)))

        for _ in range(sizes.repeats):
            lap(OFF, plain)
            lap(AUTO, drafted)
            if self.here is not None and count == 1:
                for side, speculate in ((RUN_OFF, False), (RUN_AUTO, True)):
                    series.run.setdefault(side, []).append(self.lap_here(tasks, speculate=speculate))
            if beside:
                series.loads.setdefault(SERVER, []).append(self.lap_there(series.setting, drafted))
        lap(OFF, plain)
        return series


def _settings(draft: Path) -> dict[str, Sequence[str]]:
    """Return llama-server's settings that are tried, as flags."""
    found: dict[str, Sequence[str]] = {"plain": (), "ngram-mod": ("--spec-type", "ngram-mod")}
    for length in _DRAFT_LENGTHS:
        flags = ("--spec-type", "draft-simple", "-md", str(draft), "--spec-draft-n-max", str(length))
        found[f"draft-simple {length}"] = flags
    return found


def _room(clients: int, sizes: _Sizes) -> list[str]:
    """Return the flags by which either server has room for so many at once."""
    return ["-np", str(clients), "-c", str(clients * sizes.context)]


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


def _over(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=False)]


def _over_neighbours(between: Sequence[float], around: Sequence[float]) -> list[float]:
    return _over(between, [(before + after) / 2 for before, after in itertools.pairwise(around)])


def _commit() -> str:
    """Return the commit of this working tree; empty outside of one."""
    said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return said.stdout.strip()


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
    columns = ("auto", "off", "auto/off", "least", "most", "off/off", "whole", "step", "prompts")
    speeds, before = table("", "workload", "clients", *columns), dict[str, float]()
    for each in found:
        auto, off = (statistics.median(each.speeds(side)) for side in (AUTO, OFF))
        step = auto / before[each.workload] if each.workload in before else None
        before[each.workload] = auto
        gains = (statistics.median(each.gains), min(each.gains), max(each.gains))
        ratios = (*gains, statistics.median(each.noise), statistics.median(each.whole_gains), step)
        prompts = statistics.median(lap.off_shares.get("prompts", 0.0) for lap in each.loads[AUTO])
        cells = ("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        speeds.add_row(each.workload, str(each.clients), f"{auto:.1f}", f"{off:.1f}", *cells, f"{prompts:.2f}")
    kinds = {"first": "first_token_s", "gap": "gap_s"}
    names = (f"{what} p{100 * share:.0f}" for what in kinds for share in PERCENTILES)
    times = table("", "workload", "clients", "side", *names, "cpu", "same", names=3)
    for each in found:
        for side, laps in each.loads.items():
            figures = [lap.figures() for lap in laps]
            medians = (
                statistics.median(lap[kind][name] for lap in figures)
                for kind in kinds.values()
                for name in figures[0][kind]
            )
            cells = (f"{1e3 * seconds:.0f}" for seconds in medians)
            share = statistics.median(lap["clients_cpu_share"] for lap in figures)
            same = each.same_texts.get(side, "")
            times.add_row(each.workload, str(each.clients), side, *cells, f"{share:.3f}", same)
    for legend, made in ((_SPEEDS, speeds), (_TIMES, times)):
        print(legend)
        console().print(made)
    for each in found:
        where = f"{each.workload}, {each.clients} clients"
        if SERVER in each.loads:
            for side in (AUTO, OFF):
                ratio = _spread(_over(each.speeds(side), each.speeds(SERVER)))
                print(f"{where}: {side} {ratio} of llama-server's best setting, {each.setting}")
            print("  one lap each: " + ", ".join(f"{name} {speed:.1f}" for name, speed in each.tried.items()))
        for side, run in ((AUTO, RUN_AUTO), (OFF, RUN_OFF)):
            if run in each.run:
                print(f"{where}: {side} {_spread(_over(each.speeds(side), each.run[run]))} of paceline run")


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
