"""The report on a candidate: its diagnosis, advice, and the flags of other programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.lab.doctor.advice import give_advice
from paceline.lab.doctor.export import Export, Pair, Program, export

if TYPE_CHECKING:
    from paceline.lab.doctor.examiner import Diagnosis
    from paceline.lab.doctor.prediction import Prediction
    from paceline.models.description import ModelDescription


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """A candidate with its diagnosis, advice in sentences, and flags for other programs."""

    diagnosis: Diagnosis
    advice: Sequence[str]
    exports: Sequence[Export]


def build_report(
    diagnosis: Diagnosis,
    target: ModelDescription,
    programs: Sequence[Program],
    *,
    has_devices: bool = False,
    draft_on_cpu: bool = False,
) -> CandidateReport:
    """Return the report on a candidate, with the flags of ``programs``.

    ``has_devices``: there is a GPU that layers can be put on. ``draft_on_cpu``: the draft was told to run on the CPU
    all the same.
    """
    static = None if diagnosis.prediction is None else diagnosis.prediction.static
    pair = Pair(
        target,
        diagnosis.what,
        None if diagnosis.fitting is None else diagnosis.fitting.relation,
        None if static is None else static.draft_max,
        0.0 if static is None or static.p_min is None else static.p_min,
        has_devices,
    )
    advice = give_advice(diagnosis, target, draft_on_cpu=draft_on_cpu)
    if diagnosis.is_head and programs:
        advice.append(
            "a head has other flags in each program, which are not written here: see the program's own manual"
        )
    exports = [] if diagnosis.is_head else [export(program, pair) for program in programs]
    if static is not None and static.gain.value < 1.0:
        slower = f"predicted {static.gain.value:.2f} of plain's speed with this draft length: leave the draft model out"
        exports = [dataclasses.replace(each, notes=(slower, *each.notes)) for each in exports]
    return CandidateReport(diagnosis, advice, exports)


def verdict(prediction: Prediction) -> str:
    """Say whether a draft model pays."""
    if prediction.has_too_few_tokens:
        return "too few tokens to tell"
    return {True: "pays", False: "does not pay", None: "too close to call"}[prediction.pays]


def ranking_key(report: CandidateReport) -> tuple[int, float]:
    """Return the key of a candidate's rank: the fastest first, then those without prediction, by their alignment."""
    diagnosis = report.diagnosis
    if diagnosis.prediction is not None:
        return 0, -diagnosis.prediction.auto.tokens_per_s.value
    if diagnosis.fitting is None:
        return 2, 0.0
    alignment = diagnosis.fitting.alignment
    return 1, -(0.0 if alignment is None else alignment.one_share or 0.0)
