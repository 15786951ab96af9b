"""``paceline bench``: what speculation gains here, on several kinds of text, against plain and every static setting."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TextColumn

from paceline.cli import exits
from paceline.cli.downloads import locate_pair
from paceline.cli.inflate import LARGE_PRESET, large_target
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.options import (
    OF_THE_DRAFT_MODEL,
    WITHOUT_DRAFT_MODEL,
    in_flags,
    is_set,
    names_draft_model,
    refuse_given,
    with_options,
)
from paceline.cli.outputs import HtmlFile, JsonTo, Outputs, report_console
from paceline.cli.progress import ProgressBar
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.drafters.registry import DRAFTER_NAMES, check_drafter_names
from paceline.engines.base import paced_draft
from paceline.engines.loading import foreseen_context_length, reader_of
from paceline.engines.options import ModelOptions
from paceline.engines.slow_passes import slow_passes
from paceline.engines.threads import usable_cores
from paceline.environment import ModelChoice
from paceline.lab.bench.forecast import QUICK_S, QUICK_WORKLOADS, explain_left_out, fit_settings
from paceline.lab.bench.llama_server import LlamaServers, check_llama_server
from paceline.lab.bench.report import build_report
from paceline.lab.bench.runner import Runner
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.workloads import MIXED, WORKLOAD_NAMES, WORKLOADS, Sizes, check_room, check_workload_names
from paceline.lab.report import print_report, render_page
from paceline.lab.sessions import Engines, wall_engines
from paceline.lab.variants import AUTO, STATIC, VARIANT_NAMES, check_variant_names
from paceline.machine import machine
from paceline.model_pair import managed_pair
from paceline.models.embedded import embedded_draft
from paceline.planning.auto.learned import Learned, load_learned
from paceline.planning.costs.meter import ProfilingBudget
from paceline.planning.costs.profile_cache import KeptProfile, find_or_measure
from paceline.runtime.worker import Worker
from paceline.vocabularies.token_pairs import DraftVocab

EPILOG = """[bold]Examples[/bold]

paceline bench --quick  [dim]# the embedded target at the cost of a 1B model, two minutes[/dim]

paceline bench --quick -m target -md draft  [dim]# the embedded pair as it is, whose passes leave nothing to gain[/dim]

paceline bench -m big.gguf -md small.gguf --json=bench.json --html bench.html

paceline bench -m target-1b-q4_0 -md draft --workloads new-code,hard,mixed --temp 0.8

paceline bench -m big.gguf -md small.gguf --against llama-server=./llama-server

paceline bench -m big.gguf --time-limit 1800  [dim]# no draft model: suffix and lookup[/dim]
"""
"""Examples below the command's help."""

_PIPE_WIDTH = 160
"""Columns of the tables where standard output is no terminal."""
_PROFILING_SHARE = 0.04
"""Share of a time limit that measuring what passes cost may take."""
_PROFILING_S = 30.0
"""Most seconds of measuring what passes cost: three times what a first load takes, as what replay says after long
prompts hangs on what a context adds to passes."""
_QUICK_LAPS = 3
"""Laps of a quick run."""
_QUICK_TYPE = "Q4_0"
"""Type of the large target's weights in a quick run: passes take half as long as in Q8_0, so two minutes hold more."""
_DEFAULTS = BenchSettings(WORKLOAD_NAMES, VARIANT_NAMES, DRAFTER_NAMES)


_what = functools.partial(typer.Option, rich_help_panel="What is measured")


@with_options()
def bench(
    context: typer.Context,
    *,
    models: ModelChoice,
    workloads: Annotated[
        str | None,
        _what("--workloads", help=f"Among {', '.join(WORKLOAD_NAMES)}. [dim]\\[all][/dim]", metavar="NAME[,...]"),
    ] = None,
    variants: Annotated[
        str | None,
        _what(
            "--variants",
            help=f"Compared with plain: among {', '.join(VARIANT_NAMES)}. [dim]\\[all][/dim]",
            metavar="NAME[,...]",
        ),
    ] = None,
    drafters: Annotated[
        str | None,
        _what(
            "--drafters",
            help=f"Among {', '.join(DRAFTER_NAMES)}; each alone and all together. [dim]\\[all there are][/dim]",
            metavar="NAME[,...]",
        ),
    ] = None,
    temp: Annotated[
        float, _what("--temp", "--temperature", help="Sampling temperature; 0 is greedy.")
    ] = _DEFAULTS.temperature,
    repeats: Annotated[
        int, _what("--repeats", help=f"Laps: pairs of runs of each variant and workload; {_QUICK_LAPS} with --quick.")
    ] = _DEFAULTS.laps,
    prompts: Annotated[
        int, _what("--prompts", help="Texts of each workload; more laps use them again.")
    ] = _DEFAULTS.prompts,
    tokens: Annotated[
        int, _what("-n", "--tokens", "--predict", "--n-predict", help="Tokens of an answer.")
    ] = _DEFAULTS.tokens,
    seed: Annotated[
        int, _what("--seed", "-s", help="Random seed of the order of texts, of edits and of sampling.")
    ] = _DEFAULTS.seed,
    remember: Annotated[
        bool,
        _what(
            "--remember",
            help="Let auto start with what earlier runs learned of these models in this setting, as paceline run does; "
            "nothing is added to it.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        _what(
            "--quick",
            help=f"Finish in {QUICK_S:.0f} seconds: what speeds measured first allow, and no other policies; what is "
            "left out is said. Without -m the target is the embedded one at the cost of a "
            f"{LARGE_PRESET.upper()} model in {_QUICK_TYPE}.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        _what(
            "--against",
            help="Run the same files through a llama-server too, tuned likewise; forced workloads are left out.",
            metavar="llama-server=PATH",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        _what(
            "--time-limit",
            help="Finish in this many seconds, with shorter answers, fewer workloads and fewer variants if need be.",
            metavar="SECONDS",
        ),
    ] = None,
    json_to: JsonTo = None,
    html: HtmlFile = None,
) -> None:
    """Measure what speculation gains on this machine: fixed settings and policies against plain decoding.

    Every run of a variant lies between two plain runs of the same prompt, so a machine that becomes slower affects
    both; plain is compared with plain in the same way. Fixed settings are preselected by simulation on recorded drafts.
    Sampled answers are drawn anew for each pair, the same for all variants. Workloads whose names end in -forced make
    the target follow a given text at full cost.
    """
    started_s = time.monotonic()
    if quick and time_limit is not None:
        raise InputError(f"--quick has a time limit of its own, {QUICK_S:.0f} s: leave out --quick or --time-limit")
    limit_s = QUICK_S if quick else time_limit
    if limit_s is not None and not limit_s > 0:
        raise InputError(f"--time-limit {limit_s:g}: give more than 0 seconds")
    if quick and not is_set(context, "repeats"):
        repeats = _QUICK_LAPS
    given = {name for name in ("workloads", "variants", "tokens", "prompts") if is_set(context, name)}
    if is_set(context, "repeats"):
        given.add("laps")
    uses_draft_model = models.named_draft is not None or models.target is None
    # All variants have the same one, though it be drawn.
    seed = SamplingParams(temperature=temp, seed=seed).seed
    settings = BenchSettings(
        workloads=_choose(workloads, QUICK_WORKLOADS if quick else WORKLOAD_NAMES),
        variants=_choose(variants, tuple(name for name in VARIANT_NAMES if not quick or name in (STATIC, AUTO))),
        # Free drafters first, as auto has it; the order decides only whose a token is that several propose.
        drafters=_choose(drafters, ("suffix", "lookup", "draft") if uses_draft_model else ("suffix", "lookup")),
        temperature=temp,
        laps=repeats,
        tokens=tokens,
        prompts=min(prompts, repeats) if "prompts" not in given else prompts,
        num_static=1 if quick else _DEFAULTS.num_static,
        coarse=quick,
        with_server=against is not None,
        seed=seed,
    )
    check_workload_names(settings.workloads)
    check_variant_names(settings.variants)
    if not settings.drafters:
        raise InputError(f"no drafter is named: choose from {', '.join(DRAFTER_NAMES)}")
    check_drafter_names(settings.drafters)
    if remember and AUTO not in settings.variants:
        raise InputError("--remember applies to auto, which is not among --variants: add auto, or leave out --remember")
    if "draft" in settings.drafters and not uses_draft_model:
        raise InputError("drafter 'draft' needs a draft model: name one with -md, or leave it out of --drafters")
    if "draft" not in settings.drafters:
        if names_draft_model(context):
            raise InputError("a draft model is given but 'draft' is not among --drafters: add it, or leave out -md")
        refuse_given(context, dict.fromkeys(OF_THE_DRAFT_MODEL, WITHOUT_DRAFT_MODEL))
    server = None if against is None else _parse_server(against, settings.workloads)
    outputs = Outputs(json_to, html)
    outputs.check()
    named_draft = None
    if "draft" in settings.drafters:
        named_draft = embedded_draft() if models.named_draft is None else models.named_draft
    if quick and models.target is None:
        models = dataclasses.replace(models, target=large_target(_QUICK_TYPE))
        started_s = time.monotonic()  # making it is once for a machine, and may take longer than what is asked for
    target_options, draft_options = locate_pair(models, named_draft)
    if limit_s is None or "tokens" in given:
        # Before the models are loaded and passes are measured; within a time limit answers may become shorter.
        check_room(settings.workloads, Sizes(settings.tokens, foreseen_context_length(target_options)))
    versions = machine(target_options.threads or usable_cores())
    if server is not None:
        versions["llama-server"] = check_llama_server(server, target_options, draft_options)

    def remaining_s() -> float:
        return float("inf") if limit_s is None else limit_s - (time.monotonic() - started_s)

    with (
        # The first interrupt ends loading at its next step, and all else at its next round; what was found is kept.
        hold_interrupts() as interrupted,
        Worker() as worker,
        # All that runs models has to happen in one thread: native code keeps threads for each that calls it.
        worker.entered(managed_pair(target_options, draft_options)) as pair,
        ProgressBar("loading", TextColumn("{task.fields[left]}"), left="") as progress,
    ):
        draft_vocab: DraftVocab = "auto" if draft_options is None else draft_options.draft_vocab
        draft_map = () if draft_options is None else draft_options.draft_map
        open_reader = reader_of(pair.target_options, is_streamed=slow_passes(pair.target) is not None)
        engines = wall_engines(
            pair.target,
            pair.draft,
            worker,
            open_reader,
            stopped=lambda: interrupted.is_set() or remaining_s() <= 0,
            draft_vocab=draft_vocab,
            draft_map=draft_map,
        )
        kept = worker.call(
            lambda: _get_profile(engines, pair.target_options, pair.draft_options, limit_s, interrupted, progress)
        )
        profile, learned = kept.profile, _load_learned(kept) if remember else None
        cut = None
        if limit_s is not None:
            length, left_s = engines.target.capabilities.context_length, remaining_s()
            wanted, settings = settings, fit_settings(settings, profile, length, left_s, given=given)
            cut = explain_left_out(wanted, settings, profile, length, left_s, limit_s - left_s)
        servers = None
        if server is not None:
            context_length = engines.target.capabilities.context_length
            # As the user asked: what was found out here is not llama-server's choice.
            servers = LlamaServers(server, target_options, draft_options, context_length)
            versions["llama-server"] += f", {servers.threads}"
        runner = Runner(
            engines,
            profile,
            settings,
            learned=learned,
            servers=servers,
            machine=versions,
            remaining_s=remaining_s,
            spent_s=0.0 if limit_s is None else limit_s - remaining_s(),
            stopped=interrupted.is_set,
            progress=functools.partial(_tell, progress, remaining_s, time.monotonic()),
        )
        if cut is not None:
            runner.result.notes.append(cut)
        result = runner.run()
        result.notes[:] = map(in_flags, result.notes)
    report = build_report(result)
    outputs.write(
        result.to_json(), lambda: print_report(report_console(_PIPE_WIDTH), report), lambda: render_page(report)
    )
    if result.ended_by == "interrupt":
        raise typer.Exit(exits.INTERRUPTED)
    if not result.measured and not result.predicted:
        raise InputError(
            "no pair was measured: raise the time limit, choose other workloads, or, where answers loop, sample them "
            "(--temp 0.8)"
        )
    if result.found_bug or result.ended_by == "error":
        raise typer.Exit(exits.FAILURE)


def _get_profile(
    engines: Engines,
    target_options: ModelOptions,
    draft_options: ModelOptions | None,
    limit_s: float | None,
    interrupted: threading.Event,
    progress: ProgressBar,
) -> KeptProfile:
    doing = "measuring what passes cost"

    def report(share: float) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        progress.tell(doing, share, 1.0)
        progress.tell_line(doing, new=doing)

    budget_s = _PROFILING_S if limit_s is None else min(_PROFILING_S, _PROFILING_SHARE * limit_s)
    return find_or_measure(
        engines.target,
        target_options,
        paced_draft(engines.draft),
        draft_options,
        budget=ProfilingBudget(budget_s, max_passes=None),
        # A bench in a hurry is content with what was measured before, and leaves no later load with the little that it
        # had time for.
        long_context=budget_s >= _PROFILING_S,
        keep_partial=budget_s >= ProfilingBudget().max_s,
        report=report,
    )


def _load_learned(kept: KeptProfile) -> Learned:
    learned = None if kept.key is None else load_learned(kept.key)
    if learned is None:
        raise InputError(
            "nothing has been learned about these models with these options yet: leave out --remember, or run them "
            "first (paceline run with the same models and options)"
        )
    return learned


def _tell(
    progress: ProgressBar, remaining_s: Callable[[], float], started_s: float, doing: str, done_s: float, total_s: float
) -> None:
    """Say what is measured, and how long the rest will take."""
    total_s = max(total_s, done_s)
    share, left = done_s / total_s if total_s else 0.0, ""
    if done_s > 0:
        # From the pace so far: a forecast of seconds goes by costs that were measured before.
        left_s = (time.monotonic() - started_s) * (total_s - done_s) / done_s
        left = f"about {_format_duration(min(left_s, max(remaining_s(), 0.0)))} left"
    progress.tell(doing, done_s, total_s or None, left=left)
    # A pair's variants may follow each other too quickly for a line each, or take half an hour.
    stage = doing.partition(",")[0]
    progress.tell_line(stage + (f" ({share:.0%} done, {left})" if left else ""), new=(stage, int(10 * share)))


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _choose(names: str | None, default: Sequence[str]) -> list[str]:
    return list(default) if names is None else [name.strip() for name in names.split(",") if name.strip()]


def _parse_server(against: str, workloads: Sequence[str]) -> Path:
    name, _, path = against.partition("=")
    if name != "llama-server" or not path:
        raise InputError(f"--against {against}: write --against llama-server=PATH; no other server is known")
    if all(workload == MIXED or WORKLOADS[workload].forced for workload in workloads):
        raise InputError(
            "--against cannot run forced and mixed workloads, because a server cannot be made to follow a given text: "
            "choose other workloads, or leave it out"
        )
    # As a path: a bare name would be looked for among the system's programs.
    return Path(path).absolute()
