"""A candidate with all that is said of it: what was found out, what to do, and the flags of other programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.pairs.advice import give_advice
from paceline.pairs.export import Export, Pair, Program, export

if TYPE_CHECKING:
    from paceline.models.description import ModelDescription
    from paceline.pairs.examiner import Diagnosis
    from paceline.pairs.prediction import Prediction


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """A candidate with all that is said of it.

    Attributes:
        diagnosis: what was found out.
        advice: what to do, in sentences.
        exports: flags for other programs.
    """

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
    """Return a candidate with advice, and with the flags of these programs.

    Args:
        diagnosis: of the candidate.
        target: what the target says of itself.
        programs: to write flags for.
        has_devices: whether there is a GPU that layers can be put on.
        draft_on_cpu: the draft was told to run on the CPU all the same.
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
    exports = [export(program, pair) for program in programs]
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
    """Return what puts candidates in order: the fastest first, then those not predicted, by how they line up."""
    diagnosis = report.diagnosis
    if diagnosis.prediction is not None:
        return 0, -diagnosis.prediction.auto.per_second.value
    if diagnosis.fitting is None:
        return 2, 0.0
    alignment = diagnosis.fitting.alignment
    return 1, -(0.0 if alignment is None else alignment.one_share or 0.0)
