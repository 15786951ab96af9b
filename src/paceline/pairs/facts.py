"""A diagnosis as plain data, for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.models.description import ModelDescription
    from paceline.pairs.examination import Diagnosis
    from paceline.pairs.export import Export
    from paceline.pairs.fitting import Fitting
    from paceline.pairs.measures import Depth, Ratio
    from paceline.vocabularies.relation import TokenDifference


def facts_of(diagnosis: Diagnosis, advice: Sequence[str], exports: Sequence[Export]) -> dict[str, Any]:
    """Return all that was found out about a candidate as plain data."""
    agreement, prediction = diagnosis.agreement, diagnosis.prediction
    return {
        "name": diagnosis.name,
        **model_facts(diagnosis.what),
        "error": diagnosis.error,
        "tokens": None if diagnosis.fitting is None else _fitting(diagnosis.fitting),
        "agreement": None
        if agreement is None
        else {
            "coupled": _ratios(agreement.coupled),
            "one_minus_tv": _ratios(agreement.overlap),
            "same_top": _ratios(agreement.same_top),
        },
        "survival": {kind: [_depth(depth) for depth in depths] for kind, depths in diagnosis.survival.items()},
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


def model_facts(what: ModelDescription) -> dict[str, Any]:
    """Return what a model says of itself, as far as it matters here."""
    return {
        "path": str(what.path),
        "num_bytes": what.num_bytes,
        "num_parameters": what.num_parameters,
        "file_type": what.file_type,
        "architecture": what.architecture,
        "vocabulary_size": what.vocabulary_size,
    }


def _fitting(fitting: Fitting) -> dict[str, Any]:
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
        "examples": [_difference(each) for each in relation.examples],
        "alignment": None
        if alignment is None
        else {
            "one": _ratios(alignment.one),
            "ends": _ratios(alignment.ends),
            "draft_tokens": _ratios(alignment.draft_tokens),
            "left_out": alignment.left_out,
            "texts": alignment.texts,
        },
    }


def _difference(difference: TokenDifference) -> dict[str, Any]:
    spellings = {"target": difference.target, "draft": difference.draft}
    shown = {role: spelling.decode("utf-8", "backslashreplace") for role, spelling in spellings.items()}
    return {"id": difference.token_id, **shown}


def _ratios(ratios: Mapping[str, Ratio]) -> dict[str, Any]:
    return {kind: dataclasses.asdict(ratio) for kind, ratio in ratios.items()}


def _depth(depth: Depth) -> dict[str, Any]:
    return {"depth": depth.depth, "survival": depth.survival, "error": depth.survival_error}
