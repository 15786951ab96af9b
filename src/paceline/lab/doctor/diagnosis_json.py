"""A diagnosis as plain data, for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.lab.doctor.examiner import Diagnosis
    from paceline.lab.doctor.export import Export
    from paceline.lab.doctor.measures import Depth
    from paceline.lab.doctor.vocabulary_fit import VocabularyFit
    from paceline.lab.intervals import Ratio
    from paceline.models.description import ModelDescription
    from paceline.vocabularies.relation import TokenDifference


def diagnosis_json(diagnosis: Diagnosis, advice: Sequence[str], exports: Sequence[Export]) -> dict[str, Any]:
    agreement, prediction = diagnosis.agreement, diagnosis.prediction
    return {
        "name": diagnosis.name,
        **model_json(diagnosis.what),
        "error": diagnosis.error,
        "tokens": None if diagnosis.fitting is None else _fit_json(diagnosis.fitting),
        "agreement": None
        if agreement is None
        else {
            "coupled": _ratios_json(agreement.coupled),
            "one_minus_tv": _ratios_json(agreement.overlap),
            "same_top": _ratios_json(agreement.same_top),
        },
        "survival": {kind: [_depth_json(depth) for depth in depths] for kind, depths in diagnosis.survival.items()},
        "prediction": None
        if prediction is None
        else {
            **dataclasses.asdict(prediction),
            "lengths": [{"draft_max": length, "gain": gain} for length, gain in prediction.lengths],
            "pays": prediction.pays,
        },
        "profile": None if diagnosis.profile is None else diagnosis.profile.to_json(),
        "advice": list(advice),
        "exports": [dataclasses.asdict(each) for each in exports],
        "took_s": diagnosis.took_s,
    }


def model_json(what: ModelDescription) -> dict[str, Any]:
    """Return what matters here of a model's description."""
    return {
        "path": str(what.path),
        "num_bytes": what.num_bytes,
        "num_parameters": what.num_parameters,
        "file_type": what.file_type,
        "architecture": what.architecture,
        "vocabulary_size": what.vocabulary_size,
    }


def _fit_json(fitting: VocabularyFit) -> dict[str, Any]:
    relation, alignment = fitting.relation, fitting.alignment
    return {
        "fit": relation.fit,
        "words": fitting.words,
        "refusal": fitting.refusal,
        "warnings": list(fitting.warnings),
        "num_same": relation.num_same,
        "num_differing": relation.num_differing,
        "num_unused": relation.num_unused,
        "num_target_only": relation.num_target_only,
        "num_draft_only": relation.num_draft_only,
        "examples": [_difference_json(each) for each in relation.examples],
        "alignment": None
        if alignment is None
        else {
            "one": _ratios_json(alignment.one),
            "ends": _ratios_json(alignment.ends),
            "draft_tokens": _ratios_json(alignment.draft_tokens),
            "left_out": alignment.left_out,
            "texts": alignment.texts,
        },
    }


def _difference_json(difference: TokenDifference) -> dict[str, Any]:
    spellings = {"target": difference.target, "draft": difference.draft}
    shown = {role: spelling.decode("utf-8", "backslashreplace") for role, spelling in spellings.items()}
    return {"id": difference.token_id, **shown}


def _ratios_json(ratios: Mapping[str, Ratio]) -> dict[str, Any]:
    return {kind: dataclasses.asdict(ratio) for kind, ratio in ratios.items()}


def _depth_json(depth: Depth) -> dict[str, Any]:
    return {"depth": depth.depth, "survival": depth.survival, "error": depth.survival_error}
