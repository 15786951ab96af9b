"""A point of ``paceline plan`` held against servers: the same requests, simulated and then asked of real replicas.

Passes are measured and drafts recorded as the plan does it, and so many servers are started on this machine. What the
simulation's gateway sent to which replica is sent to that server, at the same moments. Prompts are of real text, and
answers have the lengths of the simulation's; what they say is the target's own choice.

What limits the figures: replicas share this machine, which the plan's replicas do not. With ``-t 1`` and a core for
each they disturb each other by their memory alone; the clients, and whatever else runs, take their share. The network
and the gateway, which the plan leaves out, are not there either. HTTP is, which the plan leaves out, too. Where
other work comes or goes between the measurement and the run, times are off by as much.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.load.asking import LLAMA, Asked, Reply, ask_all
from benchmarks.reporting import JsonOption, console, table, write_figures
from benchmarks.server import HOST, Server
from paceline.core.errors import EngineError
from paceline.engines.options import ModelOptions
from paceline.lab.capacity.measuring import Measured, measure
from paceline.lab.capacity.simulate import Outcome, ReplicaSettings, percentiles, simulate
from paceline.lab.capacity.traffic import Arrival, Traffic, make_arrivals
from paceline.lab.samples import heldout_samples
from paceline.lab.sessions import wall_engines
from paceline.model_pair import managed_pair
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.models.registry import resolve_model
from paceline.runtime.worker import Worker

EPILOG = """[bold]Examples[/bold]

python -m benchmarks capacity

python -m benchmarks capacity -m target-0.3b-q4_0 --rate 0.4 --requests 40 --json capacity.json
"""

_SLOTS: Final = 4
_SEED: Final = 11
_CONTEXT: Final = 1024
"""Tokens of the context of a request."""


def capacity(
    target: Annotated[str, typer.Option("-m", "--model", help="Target, a file or a name.")] = "target",
    draft: Annotated[str, typer.Option("-md", "--model-draft", help="Draft model.")] = "draft",
    threads: Annotated[int, typer.Option("-t", "--threads", help="CPU threads of each replica.")] = 1,
    replicas: Annotated[int, typer.Option("--replicas", help="Servers.", min=1)] = 2,
    rate: Annotated[float, typer.Option("--rate", help="Requests a second.")] = 4.0,
    requests: Annotated[int, typer.Option("--requests", help="Requests of each run.", min=2)] = 60,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a prompt.")] = 256,
    prefix_tokens: Annotated[int, typer.Option("--prefix-tokens", help="Tokens of a shared beginning.")] = 192,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of an answer, on average.")] = 48,
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds of measuring.")] = 40.0,
    json_file: JsonOption = None,
) -> None:
    """Hold simulated replicas against real ones: the same requests at the same moments, plainly and with drafts."""
    options = ModelOptions(resolve_model(target), threads=threads, max_sequences=_SLOTS, context_length=_CONTEXT)
    draft_options = dataclasses.replace(options, path=resolve_model(draft))
    loads = {
        # Other texts in each run, so that no server has read them before.
        speculative: Traffic(
            rate, requests, prompt_tokens, 8, prefix_tokens, answer_tokens=tokens, seed=_SEED + speculative
        )
        for speculative in (False, True)
    }
    flags = ["-m", target, "-md", draft, "-t", str(threads), "-np", str(_SLOTS), "-c", str(_CONTEXT * _SLOTS)]
    measured, texts = _measure(options, draft_options, prompt_tokens, budget_s)
    settings = ReplicaSettings(
        measured.costs, measured.recordings, _SLOTS, max_rows=512, token_bytes=measured.token_bytes
    )
    learned = settings.learn()
    found: dict[str, Any] = {}
    made = table(
        "", "decoding", "", "tokens/s a replica", "TTFT p50", "TPOT p50", "gap p50", "gap p99", "read", names=2
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(Server.start([*flags, "--no-remember"], Path(folder) / f"{number}.log"))
            for number in range(replicas)
        ]
        for server in servers:
            # What the planner of a simulated replica has learned from.
            for recording, prompt_ids in zip(measured.recordings, texts.prompts, strict=True):
                server.post("/completion", {"prompt": prompt_ids, "n_predict": len(recording.token_ids), "seed": 1})
        for speculative, traffic in loads.items():
            arrivals = texts.with_prompts(make_arrivals(traffic, measured.recordings), traffic)
            expected = simulate(
                arrivals,
                settings,
                replicas,
                speculative=speculative,
                affinity=True,
                balance=_SLOTS,
                learned=learned,
                seed=_SEED,
            )
            seen = _ask(servers, arrivals, expected.sent_to, speculative=speculative)
            name = "speculative" if speculative else "plain"
            figures = {"simulated": _figures(expected), "real": _figures(seen)}
            found[name] = figures
            for what, of in figures.items():
                made.add_row(name, what, *(f"{value:.3g}" for value in of.values()))
            simulated, real = figures["simulated"], figures["real"]
            ratios = [real[each] / simulated[each] for each in simulated]
            made.add_row(name, "real / simulated", *(f"{ratio:.2f}" for ratio in ratios))
    console().print(made)
    costs = {name: getattr(measured.costs, name) for name in ("pass_factor", "round_own_s", "sampling_s", "prompt_s")}
    write_figures("capacity", {**found, "costs": costs}, json_file)


def _figures(outcome: Outcome) -> dict[str, float]:
    """Return seconds as milliseconds."""
    gaps = percentiles(outcome.gaps_s) or {"p50": 0.0, "p99": 0.0}
    return {
        "tokens_per_s": outcome.tokens_per_s,
        "ttft_ms": 1e3 * statistics.median(outcome.ttft_s),
        "tpot_ms": 1e3 * statistics.median(outcome.tpot_s),
        "gap_ms": 1e3 * gaps["p50"],
        "gap_p99_ms": 1e3 * gaps["p99"],
        "read": outcome.read_tokens / outcome.prompt_tokens,
    }


@dataclasses.dataclass(frozen=True)
class _Texts:
    """Tokens of real text, and the prompts of the recordings."""

    token_ids: Sequence[int]
    prompts: Sequence[Sequence[int]]

    def with_prompts(self, arrivals: Sequence[Arrival], traffic: Traffic) -> list[Arrival]:
        """Return requests whose prompts are of text, and share beginnings as before."""
        chance = random.Random(traffic.seed)

        def some(count: int) -> list[int]:
            place = chance.randrange(len(self.token_ids) - count)
            return list(self.token_ids[place : place + count])

        beginnings = [some(traffic.prefix_tokens) for _ in range(traffic.prefixes)]
        own = traffic.prompt_tokens - traffic.prefix_tokens
        return [dataclasses.replace(each, prompt_ids=[*beginnings[each.prefix], *some(own)]) for each in arrivals]


def _measure(
    options: ModelOptions, draft: ModelOptions, prompt_tokens: int, budget_s: float
) -> tuple[Measured, _Texts]:
    with Worker() as worker, worker.entered(managed_pair(options, draft)) as pair:
        engines = wall_engines(pair.target, pair.draft, worker)
        samples = heldout_samples()
        measured = measure(
            engines,
            pair,
            samples,
            prompt_tokens=prompt_tokens,
            temperature=0.8,
            budget_s=budget_s,
            keep_answers=False,
            seed=1,
            stopped=lambda: False,
            tell=lambda doing, share: None,
        )
        vocabulary = engines.target.vocabulary
        token_ids = [
            token_id for kind in HELDOUT_KINDS for text in heldout(kind) for token_id in vocabulary.tokenize(text)
        ]
        by_name = {sample.name: sample.text for sample in samples}
        prompts = [
            vocabulary.tokenize(by_name[recording.name])[: recording.num_prompt] for recording in measured.recordings
        ]
    return measured, _Texts(token_ids, prompts)


def _ask(
    servers: Sequence[Server],
    arrivals: Sequence[Arrival],
    sent_to: Sequence[int],
    *,
    speculative: bool,
) -> Outcome:
    """Ask real servers what was simulated, and return what came of it."""
    asked = []
    for arrival, index in zip(arrivals, sent_to, strict=True):
        body: Mapping[str, Any] = {
            "prompt": list(arrival.prompt_ids),
            "n_predict": len(arrival.recording.token_ids),
            "temperature": 0.8,
            "seed": 1,
            "ignore_eos": True,
            "speculate": speculative,
            "stream": True,
        }
        asked.append(Asked(f"http://{HOST}:{servers[index].port}", body, arrival.at_s))
    wall_s = asyncio.run(ask_all(LLAMA, asked))
    replies: list[Reply] = [each.reply for each in asked]
    for reply in replies:
        if reply.errors:
            raise EngineError(f"a server did not answer a request: {reply.errors[0]}")
    return Outcome(
        len(servers),
        [reply.arrivals[0][0] - reply.due_s for reply in replies],
        [reply.stream_s / (reply.tokens - 1) for reply in replies if reply.tokens > 1],
        [gap_s for reply in replies for gap_s in reply.gaps_s],
        answer_tokens=sum(reply.tokens for reply in replies),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        read_tokens=sum(reply.prompt_tokens - (reply.cached_tokens or 0) for reply in replies),
        wall_s=wall_s,
        busy=0.0,
    )
