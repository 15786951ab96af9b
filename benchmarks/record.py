"""``python -m benchmarks record``: what every drafter would propose in an answer, for replays.

It needs the models once: for each token of each answer as many passes of the draft as it records levels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.reporting import ThreadsOption, progress_bar, split
from paceline.api import load
from paceline.atomic_output import check_parent
from paceline.cli.options import refuse_given
from paceline.core.errors import InputError
from paceline.drafters.registry import DRAFTER_NAMES, check_drafter_names
from paceline.engines.base import Engine
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.lab.bench.results import WorkloadResult
from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.tasks import TaskFinder
from paceline.lab.bench.workloads import MIXED, WORKLOADS, check_workload_names
from paceline.lab.replaying import recorder
from paceline.lab.replaying.recording import RECORDED_DEPTH, RECORDED_SIBLINGS, Recording, save_recordings
from paceline.lab.sessions import wall_engines
from paceline.lab.variants import AUTO
from paceline.models.embedded import HELDOUT_KINDS, embedded_draft, embedded_target, heldout
from paceline.models.registry import resolve_model
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.worker import Worker

EPILOG = """[bold]Examples[/bold]

python -m benchmarks record --output pair.npz

python -m benchmarks record --output code.npz --kinds code --prompts 4 --tokens 64 --temperature 0.8

python -m benchmarks record --output big.npz --target big.gguf --draft small.gguf --drafters draft,suffix

python -m benchmarks record --output bench.npz --workloads all --prompts 5 --temperature 0.8
"""

_OF_KINDS = ("kinds", "prompt_characters", "depth", "siblings")
"""Parameters that say something of texts of a kind; the bench's tasks have theirs."""


def record(
    context: typer.Context,
    output: Annotated[Path, typer.Option("--output", help="File of recordings to write (.npz).", metavar="FILE")],
    target: Annotated[str | None, typer.Option("--target", help="By path or name. \\[the embedded one]")] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="By path or name. \\[the embedded one]")] = None,
    drafters: Annotated[
        str, typer.Option("--drafters", help=f"Among {', '.join(DRAFTER_NAMES)}.", metavar="NAME[,...]")
    ] = "suffix,lookup,draft",
    kinds: Annotated[
        str, typer.Option("--kinds", help=f"Among {', '.join(HELDOUT_KINDS)}.", metavar="NAME[,...]")
    ] = ",".join(HELDOUT_KINDS),
    workloads: Annotated[
        str | None,
        typer.Option(
            "--workloads",
            help=f"Instead of kinds, tasks of paceline bench: all, or among {', '.join(WORKLOADS)}.",
            metavar="NAME[,...]",
        ),
    ] = None,
    prompts: Annotated[int, typer.Option("--prompts", help="Texts of each kind or workload.", min=1)] = 10,
    prompt_characters: Annotated[int, typer.Option("--prompt-characters", help="Of each text.", min=1)] = 600,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of an answer.", min=1)] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    depth: Annotated[int, typer.Option("--depth", help="Deepest drafts to record.")] = RECORDED_DEPTH,
    siblings: Annotated[int, typer.Option("--siblings", help="Proposals for a position.")] = RECORDED_SIBLINGS,
    threads: ThreadsOption = None,
) -> None:
    """Record what every drafter would propose at every position of answers to held-out text."""
    names = split(drafters)
    check_drafter_names(names)
    if "draft" in names and target is not None and draft is None:
        raise InputError("--target without --draft: name one with its vocabulary, or --drafters suffix,lookup")
    check_parent(output)
    paths = [embedded_target(), embedded_draft()]
    paths = [resolve_model(name) if name else path for name, path in zip((target, draft), paths, strict=True)]
    of_target = ModelOptions(paths[0], threads=threads, model_defaults=False)
    of_draft = ModelOptions(paths[1], threads=threads) if "draft" in names else None
    if workloads is not None:
        refuse_given(context, dict.fromkeys(_OF_KINDS, "has no effect with --workloads: leave out one of them"))
        chosen = list(WORKLOADS) if workloads == "all" else split(workloads)
        check_workload_names(chosen)
        if MIXED in chosen:
            raise InputError(f"--workloads {MIXED}: it is made of the others' tasks; leave it out")
        settings = BenchSettings(
            chosen, (AUTO,), names, temperature=temperature, tokens=tokens, prompts=prompts, laps=prompts
        )
        found, total = _record_tasks(settings, of_target, of_draft), len(chosen) * prompts
    else:
        texts = [(kind, n, text) for kind in split(kinds) for n, text in enumerate(heldout(kind)[:prompts], 1)]

        def recorded() -> Iterator[Recording]:
            with load(of_target, draft=of_draft, drafters=names, policy=FixedPolicy(depth)) as model:
                for index, (kind, number, text) in enumerate(texts):
                    yield recorder.record(
                        model,
                        text[:prompt_characters],
                        name=f"{kind} {number}",
                        depth=depth,
                        siblings=siblings,
                        max_tokens=tokens,
                        temperature=temperature,
                        seed=index,
                    )

        found, total = recorded(), len(texts)
    with progress_bar() as progress:
        recordings = list(progress.track(found, total=total, description="recording"))
    save_recordings(output, recordings)
    num_tokens = sum(len(recording.token_ids) for recording in recordings)
    print(f"{len(recordings)} recordings of {num_tokens} tokens, {output.stat().st_size / 1e6:.1f} MB: {output}")


def _record_tasks(settings: BenchSettings, target: ModelOptions, draft: ModelOptions | None) -> Iterator[Recording]:
    """Yield answers to the tasks of the bench."""
    with Worker() as worker, ExitStack() as opened:

        def open_here(options: ModelOptions) -> Engine:
            engine = worker.call(lambda: open_engine(options))
            opened.callback(worker.call, engine.close)
            return engine

        engines = wall_engines(open_here(target), None if draft is None else open_here(draft), worker)
        finder = TaskFinder(engines, settings)
        for name in settings.workloads:
            workload = WORKLOADS[name]
            for prepared in finder.find(WorkloadResult(name, workload.about, workload.forced)):
                yield prepared.recording
