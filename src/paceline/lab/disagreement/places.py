"""Tokens of a text, and what both models gave each of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.lab.agreement import compare_places, fit_width
from paceline.lab.answers import Place, read_place
from paceline.lab.disagreement.statistics import Divergence, diverge

Cause: TypeAlias = Literal["other top", "too flat", "too sharp", "cannot say"]
"""Why distributions differ: the draft has another likeliest token, the same one but is less or more sure of it, or has
no token for most of what is amiss."""
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
"""Every :data:`Cause`."""

Tops: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens of a distribution with their probabilities, the likeliest first."""

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class ComparedToken:
    """What both models made of one token of a text, after temperature and filters.

    Attributes:
        coupled: the chance that the coupled verifier accepts the draft's first proposal.
        overlap: 1 - TV of both distributions, which is the chance that rejection accepts.
        same_top: whether both have the same most likely token.
        cause: why they differ; ``None`` where they do not.
        target_tops: the five likeliest tokens of the target. When decoding is greedy, before that.
        draft_tops: those of the draft, by the target's ids; none where it has nothing to say.
        divergence: of the rows as they are; ``None`` where these are not of the same tokens.
    """

    token_id: int
    coupled: float
    overlap: float
    same_top: bool
    cause: Cause | None
    target_tops: Tops
    draft_tops: Tops
    divergence: Divergence | None

    @property
    def disagreement(self) -> float:
        """The total variation distance of both distributions, from 0 to 1."""
        return 1.0 - self.overlap


@dataclass(frozen=True, slots=True)
class ComparedText:
    """A text of some kind: what came before, which is not compared, and the tokens that are."""

    kind: str
    name: str
    prompt_ids: Sequence[int]
    tokens: Sequence[ComparedToken]


class TokenComparer:
    """Compares rows of a target and a draft as requests of some temperature read them.

    Args:
        target_vocab_size: tokens of the target; the draft never proposes others.
        unshared_ids: tokens that are other ones to the draft, which it never proposes.
        translated: the draft's rows are of its own tokens put into the target's, so that they are no likelihoods.
    """

    def __init__(
        self, temperature: float, *, target_vocab_size: int, unshared_ids: Sequence[int] = (), translated: bool = False
    ) -> None:
        self._sampler = RowSampler(SamplingParams(temperature=temperature, seed=0))
        # Greedily one token has all of the probability, which shows nothing of the others.
        self._shown_by = self._sampler if temperature > 0 else _unfiltered()
        self._width = target_vocab_size
        self._masked = np.array([i for i in unshared_ids if i < target_vocab_size], dtype=np.int64)
        self._translated = translated

    def compare(self, token_id: int, target_row: FloatArray, draft_row: FloatArray | None) -> ComparedToken:
        """Compare what predicts a token: a row ``[vocab]`` each, of the draft ``None`` where it has nothing to say."""
        target = read_place(self._sampler, target_row)
        target_tops = _tops(read_place(self._shown_by, target_row))
        if draft_row is None:
            return ComparedToken(token_id, 0.0, 0.0, False, "cannot say", target_tops, (), None)
        row = fit_width(draft_row, self._width).copy()
        row[self._masked] = -np.inf
        draft = read_place(self._sampler, row)
        coupled, overlap, same_top = compare_places(target, draft)
        return ComparedToken(
            token_id,
            coupled,
            overlap,
            bool(same_top),
            _find_cause(target, draft, row, overlap, bool(same_top)),
            target_tops,
            _tops(read_place(self._shown_by, row)),
            None if self._translated else diverge(target_row, draft_row, token_id),
        )


@functools.cache
def _unfiltered() -> RowSampler:
    return RowSampler(SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0))


def _tops(place: Place) -> Tops:
    ids, probs = place
    order = np.argsort(-probs, kind="stable")[:_SHOWN]
    return tuple((int(ids[index]), float(probs[index])) for index in order)


def _find_cause(target: Place, draft: Place, draft_row: FloatArray, overlap: float, same_top: bool) -> Cause | None:
    if overlap >= 1.0 - 1e-9:
        return None
    unsayable = float(target[1][draft_row[target[0]] == -np.inf].sum())
    if unsayable > 0.5 * (1.0 - overlap):
        return "cannot say"
    if not same_top:
        return "other top"
    return "too sharp" if draft[1].max() > target[1].max() else "too flat"
