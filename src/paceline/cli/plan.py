"""``paceline plan``: how many replicas a load takes, with speculation and without, before any is bought."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import exits
from paceline.cli.display import error_console
from paceline.cli.downloads import locate_pair
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.options import (
    OF_THE_DRAFT_MODEL,
    WITHOUT_DRAFT_MODEL,
    ModelFlags,
    is_set,
    refuse_given,
    with_options,
)
from paceline.cli.outputs import HtmlFile, JsonTo, Outputs, report_console
from paceline.cli.progress import ProgressBar
from paceline.cli.prompt import text_option
from paceline.core.errors import InputError
from paceline.core.fields import rename_options
from paceline.core.params import SamplingParams
from paceline.engines.loading import foreseen_context_length
from paceline.engines.threads import usable_cores
from paceline.environment import ModelChoice
from paceline.lab.capacity.grid import Grid
from paceline.lab.capacity.measuring import measure
from paceline.lab.capacity.report import Targets, build_report, to_json
from paceline.lab.capacity.simulate import ReplicaSettings
from paceline.lab.capacity.traffic import POISSON, Traffic
from paceline.lab.comparison import Stopped
from paceline.lab.report import print_report, render_page
from paceline.lab.samples import file_samples, heldout_samples
from paceline.lab.sessions import wall_engines
from paceline.machine import machine
from paceline.model_pair import managed_pair
from paceline.models.embedded import embedded_draft
from paceline.runtime.worker import Worker
from paceline.server_options import DEFAULT_PARALLEL
from paceline.vocabularies.token_pairs import DraftVocab

EPILOG = """[bold]Examples[/bold]

paceline plan  [dim]# the embedded pair, one request a second[/dim]

paceline plan -m big.gguf -md small.gguf --users 500 --html plan.html

paceline plan -m big.gguf --rate 2 --prompt-tokens 3000 --prefix-tokens 2000 --prefixes 20 -n 300

paceline plan -m big.gguf -md small.gguf -np 8 --replicas 1,2,3,4,6,8 --target-ttft 2 --target-tpot 0.05

paceline plan --rate 8 --json | jq .advice
"""
"""Examples below the command's help."""

_load = functools.partial(typer.Option, rich_help_panel="Load")
_service = functools.partial(typer.Option, rich_help_panel="What is bought")
_what = functools.partial(typer.Option, rich_help_panel="What is measured")
_DEFAULTS = Traffic(1.0)
"""The load where nobody says another."""
_FLAGS = {
    "answer_tokens": "-n",
    **{
        name: "--" + name.replace("_", "-")
        for name in ("rate", "requests", "prompt_tokens", "prefixes", "prefix_tokens", "burstiness")
    },
}
"""What messages about a load call its figures, and what the command line does."""
_BURSTINESS = 0.25
"""Of the bursty load: the times between requests then vary by twice their mean."""
_REPLICAS = "1,2,4,8,16,32,64"
"""Numbers of replicas to simulate where nobody says which."""
_MOST_REPLICAS = 1024
"""Most replicas that can be asked for."""
_ASKS_S = 60.0
"""Seconds after which a user asks again."""
_MIN_BUDGET_S = 5.0
"""Least seconds of measuring that can be asked for."""
_PIPE_WIDTH = 140
"""Columns of the tables where standard output is no terminal."""
_MEASURING = 0.3
"""Share of the progress bar that measuring has."""


@with_options(helps={"max_sequences": f"Requests that a replica answers at once. [{DEFAULT_PARALLEL}]"})
def plan(
    context: typer.Context,
    *,
    models: Annotated[ModelChoice, ModelFlags(also=("max_sequences",), draft_help="Draft model.")],
    rate: Annotated[
        float | None, _load("--rate", help=f"Requests a second, on average. [dim]\\[{_DEFAULTS.rate:g}][/dim]")
    ] = None,
    users: Annotated[
        float | None, _load("--users", help=f"People who ask every {_ASKS_S:g} seconds each, in place of --rate.")
    ] = None,
    prompt_tokens: Annotated[
        int, _load("--prompt-tokens", help="Tokens of a prompt, the beginning that others have too included.")
    ] = _DEFAULTS.prompt_tokens,
    prefixes: Annotated[
        int, _load("--prefixes", help="Different beginnings of prompts, such as system prompts or chats.")
    ] = _DEFAULTS.prefixes,
    prefix_tokens: Annotated[
        int | None,
        _load(
            "--prefix-tokens",
            help="Tokens of a beginning; 0 where prompts share none. [dim]\\[three quarters of a prompt][/dim]",
        ),
    ] = None,
    tokens: Annotated[
        int, _load("-n", "--tokens", "--predict", "--n-predict", help="Tokens of an answer, on average.")
    ] = _DEFAULTS.answer_tokens,
    burstiness: Annotated[
        float,
        _load(
            "--burstiness",
            help="Shape of the gamma distribution of times between requests in the bursty load; "
            f"{POISSON:g} is Poisson, less comes in bursts.",
        ),
    ] = _BURSTINESS,
    requests: Annotated[
        int, _load("--requests", help="Requests of each simulation: more take longer and say more of the p99.")
    ] = _DEFAULTS.requests,
    replicas: Annotated[
        str, _service("--replicas", help="Numbers of replicas to simulate.", metavar="N[,...]")
    ] = _REPLICAS,
    target_ttft: Annotated[
        float, _service("--target-ttft", help="Seconds within which 99 of 100 requests have their first token.")
    ] = 1.0,
    target_tpot: Annotated[
        float, _service("--target-tpot", help="Seconds a token after the first, at most, of 99 of 100 answers.")
    ] = 0.1,
    balance: Annotated[
        int | None,
        _service(
            "--balance-abs-threshold",
            help="Requests that a replica may have more than the least loaded one before affinity gives way, as smg "
            "has it. [dim]\\[-np][/dim]",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        text_option(rich_help_panel="What is measured"),
    ] = None,
    temp: Annotated[
        float, _what("--temp", "--temperature", help="Sampling temperature; 0 is greedy.")
    ] = SamplingParams().temperature,
    seed: Annotated[int, _what("--seed", "-s", help="Random seed of the load and of the target's answers.")] = 1,
    budget_s: Annotated[
        float,
        _what(
            "--budget-s",
            help=f"Seconds to measure before the simulations, {_MIN_BUDGET_S:g} at least; more looks at more text.",
        ),
    ] = 60.0,
    json_to: JsonTo = None,
    html: HtmlFile = None,
) -> None:
    """Estimate how many replicas a load needs, with and without speculation and prefix affinity.

    The cost of passes is measured on this machine, and drafts for answers of the target are recorded. Each number of
    replicas then answers the load in a simulation, with the real queue, batches, prefix cache and planner, behind a
    gateway. Requests arrive independently of each other (Poisson), or in bursts.

    Costs are those of this machine: run this on a machine like those that you plan to use.
    """
    if rate is not None and users is not None:
        raise InputError("--users and --rate both set the load: leave out one of them")
    if users is not None and not 0 < users < math.inf:
        raise InputError(f"--users {users:g}: give a finite number above 0")
    if users is not None:
        rate = users / _ASKS_S
    counts = _parse_replicas(replicas)
    for option, value in (("--target-ttft", target_ttft), ("--target-tpot", target_tpot)):
        if not 0 < value < math.inf:
            raise InputError(f"{option} {value:g}: give a finite number of seconds above 0")
    if not _MIN_BUDGET_S <= budget_s < math.inf:
        raise InputError(f"--budget-s {budget_s:g}: give a finite number of seconds from {_MIN_BUDGET_S:g} on")
    if balance is not None and balance < 0:
        raise InputError(f"--balance-abs-threshold {balance}: give 0 or more")
    # All that is drawn has the same one, though it be drawn itself.
    seed = SamplingParams(temperature=temp, seed=seed).seed
    try:
        poisson = Traffic(
            _DEFAULTS.rate if rate is None else rate,
            requests=requests,
            prompt_tokens=prompt_tokens,
            prefixes=prefixes,
            prefix_tokens=3 * prompt_tokens // 4 if prefix_tokens is None else prefix_tokens,
            answer_tokens=tokens,
            seed=seed,
        )
        loads = {"Poisson": poisson, "bursty": dataclasses.replace(poisson, burstiness=burstiness)}
    except InputError as error:
        raise InputError(rename_options(str(error), lambda name, value: _FLAGS.get(name))) from None
    outputs = Outputs(json_to, html)
    outputs.check()
    samples = heldout_samples() if text is None else file_samples(text)
    if not is_set(context, "max_sequences") and models.settings.max_sequences == 1:
        models = dataclasses.replace(
            models, settings=dataclasses.replace(models.settings, max_sequences=DEFAULT_PARALLEL)
        )
    named_draft = models.named_draft
    if models.target is None and named_draft is None:
        named_draft = embedded_draft()
    if named_draft is None:
        refuse_given(context, dict.fromkeys(OF_THE_DRAFT_MODEL, WITHOUT_DRAFT_MODEL))
    target_options, draft_options = locate_pair(models, named_draft)
    _check_context(poisson, foreseen_context_length(target_options))
    targets = Targets(target_ttft, target_tpot)
    with hold_interrupts() as interrupted, ProgressBar("", total=1.0) as progress:

        def tell(doing: str, share: float) -> None:
            progress.tell(doing, share, 1.0)
            progress.tell_line(doing, new=doing)

        try:
            tell("loading the models", 0.0)
            with Worker() as worker, worker.entered(managed_pair(target_options, draft_options)) as pair:
                draft_vocab: DraftVocab = "auto" if draft_options is None else draft_options.draft_vocab
                engines = wall_engines(
                    pair.target,
                    pair.draft,
                    worker,
                    stopped=interrupted.is_set,
                    draft_vocab=draft_vocab,
                    draft_map=() if draft_options is None else draft_options.draft_map,
                )
                measured = measure(
                    engines,
                    pair,
                    samples,
                    prompt_tokens=prompt_tokens,
                    temperature=temp,
                    budget_s=budget_s,
                    # What a user's own texts lead to is nobody else's.
                    keep_answers=text is None,
                    seed=seed,
                    stopped=interrupted.is_set,
                    tell=lambda doing, share: tell(doing, _MEASURING * share),
                )
                slots, max_rows = target_options.max_sequences, engines.target.capabilities.max_rows
                names = [f"target: {pair.target.description}"]
                names += [] if pair.draft is None else [f"draft: {pair.draft.description}"]
            settings = ReplicaSettings(
                measured.costs, measured.recordings, slots=slots, max_rows=max_rows, token_bytes=measured.token_bytes
            )
            grid = Grid(loads, counts, settings, slots if balance is None else balance, seed)
            simulated, total = 0, len(grid.cells)

            def advance(cell: object) -> None:
                nonlocal simulated
                simulated += 1
                progress.tell(f"simulating, {simulated} of {total}", _MEASURING + 0.7 * simulated / total, 1.0)

            tell("simulating", _MEASURING)
            found = grid.run(usable_cores(), stopped=interrupted.is_set, advance=advance)
        except Stopped:
            error_console().print("interrupted: what was measured is kept", markup=False)
            raise typer.Exit(exits.INTERRUPTED) from None
    versions = machine(target_options.threads or usable_cores())
    report = build_report(found, loads, targets, names=names, slots=slots, machine=versions, left_out=measured.left_out)
    facts: dict[str, Any] = {
        "target": names[0].removeprefix("target: "),
        "draft": names[1].removeprefix("draft: ") if len(names) > 1 else None,
        "slots": slots,
        "balance_abs_threshold": grid.balance,
        "machine": versions,
        **to_json(found, loads, targets),
        "costs": {
            **{name: getattr(measured.costs, name) for name in _COSTS},
            "profile": measured.costs.profile.to_json(),
        },
        "left_out": list(measured.left_out),
    }
    outputs.write(facts, lambda: print_report(report_console(_PIPE_WIDTH), report), lambda: render_page(report))


_COSTS = (
    *("pass_factor", "level_s", "round_own_s", "drafting_own_s", "sampling_s"),
    *("prompt_rows", "prompt_s"),
)
"""Figures of costs beside the profile."""


def _parse_replicas(text: str) -> list[int]:
    """Read numbers of replicas, such as ``1,2,4``, and return them in order."""
    counts = set()
    for part in text.split(","):
        word = part.strip()
        if not word.isdecimal() or not 1 <= int(word) <= _MOST_REPLICAS:
            raise InputError(f"--replicas {text!r}: {word!r} is no number from 1 to {_MOST_REPLICAS}")
        counts.add(int(word))
    return sorted(counts)


def _check_context(traffic: Traffic, context_length: int) -> None:
    longest = traffic.prompt_tokens + math.ceil((1 + traffic.spread) * traffic.answer_tokens)
    if longest > context_length:
        raise InputError(
            f"prompts of {traffic.prompt_tokens} tokens and answers of up to {longest - traffic.prompt_tokens} need a "
            f"context of {longest}, and there are {context_length} (-c): give a larger one, or fewer tokens"
        )
