"""Whether two runs that should agree emit different tokens because of rounding or because of a bug.

A pass over five rows is not bit-identical to five passes over one. The differences are tiny where they arise, but they
go into the cache and through quantised activations, so the row a token is drawn from may differ by much more than its
last bits. How much is no matter of opinion: the same tokens fed *without any speculation*, in passes of other widths
and at other places in the cache, show it. A divergence is put down to rounding only if the rows differ no more than
that, and only where two tokens are nearly tied. Anything else is a fault, and is called one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.sampling import RowSampler


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two token sequences differ, and why.

    Attributes:
        index: index into the answers.
        plain_token: what plain decoding emitted.
        speculative_token: what speculative decoding emitted.
        logit_difference: largest absolute difference between the two rows the tokens were drawn from; like the figures
            that follow, ``None`` if they could not be seen.
        rounding: largest difference found, near this position, between plain passes over the same tokens that differ
            in their widths or in where the tokens lie in the cache.
        allowed: largest difference that rounding explains: twice ``rounding``, or the engine's tolerance if that is
            more.
        margin: by how much, in logits, the plain row prefers its own token to the other, noise included; ``None`` if
            one of the rows lacks one of the tokens: the tie is then at the border of a truncation.
        verdict: ``"near-tie"`` or ``"bug"``; ``"unrepeatable"`` if the texts agreed whenever they were made again, and
            ``"not judged"`` if the user wanted no more before it was known.
    """

    index: int
    plain_token: int
    speculative_token: int
    logit_difference: float | None
    rounding: float | None
    allowed: float | None
    margin: float | None
    verdict: Literal["near-tie", "bug", "unrepeatable", "not judged"]

    @classmethod
    def without_rows(
        cls, plain: Sequence[int], speculative: Sequence[int], verdict: Literal["unrepeatable", "not judged"]
    ) -> Divergence:
        """Return the divergence of two different token sequences of which no rows are known."""
        index = first_difference(plain, speculative)
        assert index is not None
        plain_token = plain[index] if index < len(plain) else -1
        speculative_token = speculative[index] if index < len(speculative) else -1
        return cls(index, plain_token, speculative_token, None, None, None, None, verdict)


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Return the first index at which two token sequences differ (one may end there); ``None`` if they are equal."""
    for index, (ours, theirs) in enumerate(zip(plain, speculative, strict=False)):
        if ours != theirs:
            return index
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


def judge_divergence(
    index: int,
    plain_row: FloatArray,
    speculative_row: FloatArray,
    sampler: RowSampler,
    history: Sequence[int],
    *,
    rounding: float,
    tolerance: float,
) -> Divergence:
    """Judge a divergence from the two rows of logits ``[vocab]`` that were seen there.

    It is a near-tie only if the rows differ by no more than rounding explains and that difference can turn the choice:
    the margin is below twice the difference, or a truncation keeps one of the tokens in one row only.

    Args:
        plain_row: the row plain decoding drew from.
        speculative_row: the row speculative decoding drew from.
        sampler: of the request that both answer; it knows how many tokens of ``history`` are the prompt.
        history: all tokens before the diverging one.
        rounding: see :attr:`Divergence.rounding`.
        tolerance: the engine's :attr:`~paceline.engines.base.EngineCapabilities.logit_tolerance`.
    """
    position = len(history)
    plain_token = sampler.emit(plain_row, position, history)
    speculative_token = sampler.emit(speculative_row, position, history)
    difference = float(np.abs(plain_row.astype(np.float64) - speculative_row.astype(np.float64)).max())
    margin = _margin(sampler, plain_row, position, history, plain_token, speculative_token)
    mirrored = _margin(sampler, speculative_row, position, history, speculative_token, plain_token)
    allowed = max(tolerance, 2 * rounding)
    if plain_token == speculative_token:
        turned = False  # both rows choose the same token, so they are not why the runs differ
    else:
        turned = margin is None or mirrored is None or margin < 2 * difference
    return Divergence(
        index=index,
        plain_token=plain_token,
        speculative_token=speculative_token,
        logit_difference=difference,
        rounding=rounding,
        allowed=allowed,
        margin=margin if mirrored is not None else None,
        verdict="near-tie" if turned and difference <= allowed else "bug",
    )


def _margin(
    sampler: RowSampler, row: FloatArray, position: int, history: Sequence[int], chosen: int, other: int
) -> float | None:
    """Return by how much, in logits, ``row`` prefers ``chosen`` to ``other``; ``None`` if one is no candidate."""
    candidates = sampler.candidates(row, history)
    scores = []
    for token_id in (chosen, other):
        index = candidates.find(token_id)
        if index is None:
            return None
        score = float(candidates.logits[index])
        if not sampler.params.greedy:
            noise = sampler.noise.gumbel(position, np.array([token_id]))
            score = (score + float(noise[0])) * sampler.temperature(row, history)
        scores.append(score)
    return scores[0] - scores[1]
