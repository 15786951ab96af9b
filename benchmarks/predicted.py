"""``python -m benchmarks predicted``: what ``paceline doctor`` predicts of pairs, beside what they then do.

Each pair is examined as the command does it. Then the same models answer the same prompts with other seeds, every
prompt plainly and by ``auto`` in turn, so that a machine that becomes slower does so for both. What limits the
agreement is the number of texts on both sides, and how steady the machine is.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline.atomic_output import atomic_file
from paceline.bench.repetition import is_repetitive
from paceline.bench.sessions import Answer, Engines, Session, wall_engines
from paceline.bench.tasks import ends_early
from paceline.bench.workloads import Task
from paceline.conversion.own_draft import OwnDraft
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.intervals import Estimate, estimate
from paceline.machine import machine
from paceline.model_pair import managed_pair
from paceline.models.embedded import HELDOUT_KINDS
from paceline.models.registry import resolve_model
from paceline.pairs.candidate_report import verdict
from paceline.pairs.examiner import Diagnosis, Examiner
from paceline.pairs.prediction import ALL_DRAFTERS, AUTO_VARIANT
from paceline.pairs.samples import heldout_samples, make_tasks
from paceline.planning.costs.meter import ProfilingBudget
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.worker import Worker

EPILOG = """[bold]Examples[/bold]

python -m benchmarks predicted --pair target-1b-q8_0,draft --pair target,draft

python -m benchmarks predicted --pair big.gguf,small.gguf --pair big.gguf,self --live-s 60 --json predicted.json
"""

_TOKENS = 64
"""Most tokens of a live answer."""
_SEED = 1001
"""Of the first live answer, so that none is one that was predicted of."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A pair, as predicted and as it was.

    Attributes:
        target: what the target was called.
        draft: what the draft was called.
        diagnosis: with the prediction.
        plain: tokens per second of plain answers, live.
        auto: tokens per second of ``auto``'s answers to the same prompts.
        gain: speed of ``auto`` over plain, prompt by prompt.
        per_second: tokens of all of ``auto``'s answers over their seconds.
        plain_per_second: tokens of all plain answers over their seconds.
    """

    target: str
    draft: str
    diagnosis: Diagnosis
    plain: Estimate
    auto: Estimate
    gain: Estimate
    per_second: float
    plain_per_second: float

    def row(self) -> list[str]:
        """Return the pair as cells of a table."""
        prediction = self.diagnosis.prediction
        assert prediction is not None
        auto = prediction.auto.per_second
        return [
            f"{self.target} <- {self.draft}",
            verdict(prediction),
            f"{auto.value:.1f} ({auto.low or auto.value:.1f} to {auto.high or auto.value:.1f})",
            f"{self.per_second:.1f} ({self.auto.low or 0:.1f} to {self.auto.high or 0:.1f})",
            f"{self.off:+.1%}",
            f"{prediction.auto.gain.value:.2f}",
            f"{self.per_second / self.plain_per_second:.2f}",
            f"{self.diagnosis.took_s:.0f}",
        ]

    @property
    def off(self) -> float:
        """How far the prediction is from what was seen, as a share of that."""
        assert self.diagnosis.prediction is not None
        return self.diagnosis.prediction.auto.per_second.value / self.per_second - 1


def predicted(
    pairs: Annotated[
        list[str],
        typer.Option(
            "--pair",
            metavar="TARGET,DRAFT",
            help="Models by path or by name; self is a draft, too. May be given several times.",
        ),
    ],
    temp: Annotated[float, typer.Option("--temp", help="Of all answers.")] = SamplingParams().temperature,
    budget_s: Annotated[float, typer.Option("--budget-s", help="Seconds for the prediction of a pair.")] = 60.0,
    live_s: Annotated[float, typer.Option("--live-s", help="Seconds of live answers of a pair.")] = 60.0,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here.", metavar="FILE")] = None,
) -> None:
    """Predict what draft models gain, then let them draft, and compare."""
    found = []
    for pair in pairs:
        target, comma, draft = pair.partition(",")
        if not comma or not target or not draft:
            raise InputError(f"{pair}: write TARGET,DRAFT")
        print(f"{target} <- {draft}", file=sys.stderr)
        found.append(_compared(target, draft, temp, budget_s, live_s, threads))
    table = Table(box=None, pad_edge=False)
    for column in ("pair", "verdict", "predicted t/s", "live t/s", "off", "predicted gain", "live gain", "took, s"):
        table.add_column(column, justify="left" if column in ("pair", "verdict") else "right")
    for each in found:
        table.add_row(*each.row())
    Console(width=160).print(table)
    if json_file is not None:
        facts = {"machine": machine(), "temperature": temp, "pairs": [_facts(each) for each in found]}
        with atomic_file(json_file) as partial:
            partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _compared(
    target: str, draft: str, temperature: float, budget_s: float, live_s: float, threads: int | None
) -> Compared:
    target_options = ModelOptions(resolve_model(target), threads=threads)
    own = OwnDraft.parse(draft)
    path = resolve_model(draft) if own is None else own.of(resolve_model(target)).make()
    draft_options = DraftOptions(path).beside(target_options)
    examiner = Examiner(target_options, heldout_samples(), temperature=temperature, budget_s=budget_s)
    diagnosis = examiner.examine(draft, draft_options)
    if diagnosis.prediction is None:
        raise InputError(f"{draft}: {diagnosis.error}")
    with Worker() as worker, worker.entered(managed_pair(target_options, draft_options)) as pair:
        engines = wall_engines(pair.target, pair.draft, worker)
        # As kept just now.
        profile = worker.call(
            lambda: find_or_measure(
                engines.target,
                pair.target_options,
                engines.draft,
                pair.draft_options,
                budget=ProfilingBudget(),
            )
        ).profile
        runs = _live(engines, AUTO_VARIANT.build(profile), temperature, live_s)
    plain, auto = [before for before, _ in runs], [after for _, after in runs]
    return Compared(
        target,
        draft,
        diagnosis,
        estimate([answer.per_second for answer in plain]),
        estimate([answer.per_second for answer in auto]),
        estimate([after.per_second / before.per_second for before, after in runs]),
        _pooled(auto),
        _pooled(plain),
    )


def _live(engines: Engines, policy: Any, temperature: float, seconds: float) -> list[tuple[Answer, Answer]]:
    """Answer prompts plainly and by ``auto``, kind after kind in turn, for so many seconds."""
    ends_s = time.monotonic() + seconds
    tasks: Sequence[Task] = make_tasks(
        heldout_samples(),
        engines.target.vocabulary,
        tokens=_TOKENS,
        context_length=engines.target.capabilities.context_length,
        seed=_SEED,
    )
    runs = []
    with Session(engines, [], NO_SPECULATION) as plain, Session(engines, ALL_DRAFTERS, policy) as session:
        for task in tasks:
            before = plain.answer(task, temperature, lambda: False, speculate=False)
            if ends_early(task, before.token_ids) or is_repetitive(before.token_ids):
                continue
            runs.append((before, session.answer(task, temperature, lambda: False)))
            # Whole turns of all kinds, as they differ in what is gained.
            if time.monotonic() > ends_s and len(runs) >= len(HELDOUT_KINDS):
                break
    return runs


def _pooled(answers: Sequence[Answer]) -> float:
    return sum(len(answer.token_ids) - 1 for answer in answers) / sum(answer.seconds for answer in answers)


def _facts(each: Compared) -> dict[str, Any]:
    prediction = each.diagnosis.prediction
    assert prediction is not None
    return {
        "target": each.target,
        "draft": each.draft,
        "prediction": {**dataclasses.asdict(prediction), "pays": prediction.pays},
        "took_s": each.diagnosis.took_s,
        "live": {
            "per_second": each.per_second,
            "plain_per_second": each.plain_per_second,
            **{name: dataclasses.asdict(getattr(each, name)) for name in ("plain", "auto", "gain")},
        },
        "off": each.off,
    }
