"""Advice on a diagnosis, in words. A sentence is given only where the measured figures support it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from paceline.lab.intervals import ALL

if TYPE_CHECKING:
    from paceline.lab.doctor.examiner import Diagnosis
    from paceline.models.description import ModelDescription

_CLOSE: Final = 0.65
"""Acceptance of a draft of the same family beyond which further training was seen to gain next to nothing."""
_APART: Final = 0.4
"""Acceptance below which a draft is not yet aligned with its target, so that training on the target's text gains."""
_CHEAP: Final = 0.2
"""Share of a plain round above which the price of a draft's pass decides."""
_CHEAPEST: Final = 0.05
"""Price of a draft's pass, in plain tokens, below which hardly any draft model gets."""
_MANY_BITS: Final = 6.0
"""Bits a weight up to which a smaller quant of the same model is hardly cheaper."""
_OUTPUT_SHARE: Final = 0.4
"""Share of a model's weights that belong to single tokens of the vocabulary, beyond which they decide its price."""
_DEAR_ROWS: Final = 5
"""Rows of the pass by which verifying is called dear."""
_DEAR: Final = 3.0
"""Plain passes that such a pass may take before verifying is called dear."""
_LOOKUP_GAIN: Final = 1.15
"""Gain of lookups in the text beyond which they are mentioned."""
_KIND_GAP: Final = 0.15
"""Difference between the gains of kinds of text beyond which it is mentioned."""


def give_advice(diagnosis: Diagnosis, target: ModelDescription, *, draft_on_cpu: bool = False) -> list[str]:
    """Return what to do, a sentence each; the most important first.

    ``draft_on_cpu``: the draft was told to run on the CPU, where there is a device that the target runs on.
    """
    return list(_iter_advice(diagnosis, target, draft_on_cpu))


def _iter_advice(diagnosis: Diagnosis, target: ModelDescription, draft_on_cpu: bool) -> Iterator[str]:
    prediction, agreement = diagnosis.prediction, diagnosis.agreement
    fitting, draft = diagnosis.fitting, diagnosis.what
    if prediction is None:
        if fitting is not None and not fitting.fits and fitting.alignment is not None:
            yield "choose a draft of the target's family, or none: --drafters suffix,lookup take no model"
        return
    if diagnosis.left_out:
        few = f"; {prediction.tokens} tokens are too few to tell" if prediction.has_too_few_tokens else ""
        yield f"there was no time for {' and '.join(diagnosis.left_out)}{few}: raise --budget-s"
    accepted = None if agreement is None else agreement.coupled[ALL].value
    cost, most = prediction.draft_cost, prediction.break_even
    pays = prediction.pays
    if draft_on_cpu:
        yield "the draft runs on the CPU beside a target on a GPU: leave out -ngld and -devd, or give it layers there"
    same_model = _is_same_model(target, draft)
    bits = _bits_per_weight(target)
    if not pays and same_model and bits is not None and bits < _MANY_BITS:
        yield (
            f"the target has {bits:.1f} bits a weight ({target.file_type}): its own lower quant cannot pay, as it "
            f"reads {draft.num_bytes / target.num_bytes:.0%} of the same bytes for every token it drafts"
        )
    if prediction.has_too_few_tokens:
        if not diagnosis.left_out:
            yield (
                f"the target's answers are too short to tell ({prediction.tokens} tokens): give texts that it has more "
                "to say to (--text), sample them (--temp 0.8), or raise --budget-s"
            )
        return
    if not pays and prediction.gains_by_static:
        yield (
            f"a fixed length is predicted to gain where auto does not, which has to find out first: try it with "
            f"--draft-max {prediction.static.draft_max} and --compare"
        )
    is_hopeless = most is None or most < _CHEAPEST
    if not pays and most is not None and cost > most and not is_hopeless:
        yield (
            f"a token of this draft takes {cost:.2f} times as long as a plain one, and at this agreement {most:.2f} is "
            "where a draft begins to pay: take a smaller one that agrees as often"
        )
        share = _output_share(draft)
        if share is not None and share > _OUTPUT_SHARE:
            yield (
                f"{share:.0%} of the draft's weights are one row for each of its {draft.vocabulary_size:,} tokens: a "
                "draft with fewer tokens would cost that much less (paceline prune --vocab 32k makes one)"
            )
    if not pays and is_hopeless and prediction.static.gain.value < 1.0:
        yield (
            "no draft pays here, however cheap: what a pass takes longer for verifying is more than what comes of "
            "it at this agreement"
        )
    if not pays and diagnosis.profile is not None:
        dear = diagnosis.profile.round_s(_DEAR_ROWS) / diagnosis.profile.round_s(1)
        if dear > _DEAR:
            yield (
                f"a pass that verifies {_DEAR_ROWS - 1} drafts takes {dear:.1f} plain passes on this machine: it is "
                "verifying that is dear" + (", as in a mixture of experts" if target.experts else "")
            )
    if accepted is not None and fitting is not None and not same_model:
        if accepted >= _CLOSE:
            yield f"same tokens, and {accepted:.0%} accepted: distilling will not help much"
        elif accepted < _APART and cost < _CHEAP:
            yield (
                f"{accepted:.0%} accepted from a draft that costs {cost:.2f} of a plain round: it is cheap and says "
                "other things; training it on the target's answers should help: paceline distil"
            )
    if prediction.without_model.gain.value >= _LOOKUP_GAIN:
        yield (
            f"lookups in the text alone gain {prediction.without_model.gain.value:.2f} times on these texts, and take "
            "no memory"
        )
    kinds = prediction.gain_by_kind
    if len(kinds) > 1 and max(kinds.values()) - min(kinds.values()) >= _KIND_GAP:
        best, worst = max(kinds, key=lambda kind: kinds[kind]), min(kinds, key=lambda kind: kinds[kind])
        yield (
            f"it hangs on the text: {kinds[best]:.2f} times on {best}, {kinds[worst]:.2f} on {worst}; give your own "
            "with --text"
        )


def _is_same_model(target: ModelDescription, draft: ModelDescription) -> bool:
    """Return whether both are one model in two types, by the shapes in their headers."""
    shapes = [
        (each.architecture, each.layers, each.width, each.heads, each.kv_heads, each.feed_forward, each.num_parameters)
        for each in (target, draft)
    ]
    return shapes[0] == shapes[1] and None not in shapes[0]


def _bits_per_weight(what: ModelDescription) -> float | None:
    return 8 * what.num_bytes / what.num_parameters if what.num_parameters else None


def _output_share(what: ModelDescription) -> float | None:
    if not (what.vocabulary_size and what.width and what.num_parameters):
        return None
    return min(what.vocabulary_size * what.width / what.num_parameters, 1.0)
